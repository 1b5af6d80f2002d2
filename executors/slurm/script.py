"""The batch script of a replica: starts it, stands by it, and writes down how it ended.

Slurm keeps a job that has ended for ``MinJobAge``, five minutes as it comes, and without an
accounting database nobody can be asked after that. So each replica's directory, on a disk that the
cluster and its login nodes share, has what it takes to tell how it ended:

    <directory>/<name>/<rank>.<attempt>-<token>/
        log.txt     stdout and stderr; a life that Slurm requeued goes on at its end
        job         id of the job array; written when the replica starts
        exit        how it ended, as JSON; written at its end, deleted when it is started again
        cancel      that somebody asked for its end
        secrets     assignments; readable by the user alone, gone when they are not needed any more
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Final

from diloco_cloud.secrets import Secret, revealed

# Slurm sends SIGTERM to every process of the job: when it is cancelled, preempted or requeued, and
# at its time limit. The replica has then got its own, so the script does not pass it on (a second
# one would tell the replica not to take its time). SIGUSR1 is ours, by `--signal=B:` to the script
# alone: time is running out.
_SCRIPT: Final = """\
#!/bin/sh
# A replica of a diloco-cloud run.
{setup}
rank=$SLURM_ARRAY_TASK_ID
directory={directory}
rm -f "$directory/exit"
echo "$SLURM_ARRAY_JOB_ID" > "$directory/job"
{exports}
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-${{SLURM_CPUS_ON_NODE:-1}}}}"
if [ -e "$directory/secrets" ]; then . "$directory/secrets"; fi

# after SECONDS SIGNAL PROCESS: a timer, which SIGTERM ends at once with all that is its own. Not
# every cluster kills what a script leaves behind, and a signal must never meet another process.
after() {{
    nap=
    trap '[ -z "$nap" ] || kill "$nap" 2>/dev/null; exit' TERM
    sleep "$1" &
    nap=$!
    wait "$nap" && kill "-$2" "$3" 2>/dev/null
}}
timers=
stopped=
out_of_time() {{
    [ -z "$stopped" ] || return
    stopped=timeout
    kill -TERM "$replica"
    after {grace} KILL "$replica" &
    timers="$timers $!"
}}
trap 'stopped=${{stopped:-terminated}}' TERM
trap out_of_time USR1

{command} &
replica=$!
after {timeout} USR1 $$ &
timers="$timers $!"
while :; do
    wait "$replica"
    code=$?
    kill -0 "$replica" 2>/dev/null || break
done
kill $timers 2>/dev/null

printf '{{"exit_code": %d, "stopped": "%s"}}\\n' "$code" "$stopped" > "$directory/exit.new"
mv "$directory/exit.new" "$directory/exit"
# It may be started again only after it was terminated, and not cancelled.
if [ "$stopped" != terminated ] || [ -e "$directory/cancel" ]; then
    rm -f "$directory/secrets"
fi
if [ "$stopped" = timeout ] && [ "$code" = 0 ]; then code=143; fi
exit "$code"
"""


def batch_script(
    command: Sequence[str],
    *,
    directory: str,
    common: Mapping[str, str],
    ranked: Sequence[str],
    timeout: float,
    grace: float,
    setup: str = "",
) -> str:
    """The script that all replicas of a launch run.

    Args:
        command: what a replica executes.
        directory: of the replica, as a word of shell that may use ``$rank``.
        common: variables of all replicas.
        ranked: names of the variables that hold the rank.
        timeout: seconds a replica may run.
        grace: seconds between SIGTERM and SIGKILL.
        setup: shell lines that come first, such as ``module load cuda``.
    """
    exports = [f"export {name}={shlex.quote(value)}" for name, value in common.items()]
    exports += [f'export {name}="$rank"' for name in ranked]
    return _SCRIPT.format(
        setup=setup.strip(),
        directory=directory,
        exports="\n".join(exports),
        command=shlex.join(command),
        timeout=f"{timeout:g}",
        grace=f"{grace:g}",
    )


def secret_assignments(secrets: Mapping[str, Secret]) -> str:
    """The text of a replica's ``secrets`` file; "" for none. To be called where it is written."""
    pairs = revealed(secrets).items()
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in pairs)
