"""``sbatch``, ``squeue``, ``scancel``, ``scontrol`` and ``sinfo`` without a cluster.

They print what Slurm 22.05.8 prints, recorded from it, and run jobs for real: each task of an array
is a batch script in a process group of its own, in the environment that ``--export=NONE`` gives,
with a keeper that does what slurmstepd does.

Executed by path, with the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from slurm_state import (
    ENDED,
    ROOT,
    change,
    locked,
    login_environment,
    path_of,
    save,
    selected,
    settings,
    tasks,
)

DOWN = "Unable to contact slurm controller (connect failure)"
STEP = str(Path(__file__).with_name("slurm_step.py"))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def complain(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def sbatch(argv: list[str], script: str) -> int:
    parser = argparse.ArgumentParser(prog="sbatch", add_help=False, exit_on_error=False)
    for name in ("parsable", "requeue", "no-requeue", "test-only"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in (
        *("job-name", "comment", "array", "nodes", "ntasks", "export", "open-mode", "output"),
        *("time", "signal", "partition", "account", "qos", "gres", "cpus-per-task", "mem", "chdir"),
        "constraint",
    ):
        parser.add_argument(f"--{name}")
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        complain(f"sbatch: unrecognized option '{unknown[0]}'")
        complain('Try "sbatch --help" for more information')
        return 1
    refused = refusal(options)
    if refused is not None:
        failed = (
            "allocation failure"
            if options.test_only
            else ("sbatch: error: Batch job submission failed")
        )
        complain(f"{failed}: {refused}")
        return 1
    if options.test_only:
        complain(
            "sbatch: Job 7 to start at 2026-11-20T14:25:14 using 1 processors on nodes vm "
            "in partition long"
        )
        return 0
    array = submit(options, script)
    how = settings()
    if how["lose_reply"]:
        (ROOT / "settings.json").write_text(
            json.dumps({**how, "lose_reply": how["lose_reply"] - 1})
        )
        complain(
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
        )
        return 1
    say(array)
    return 0


def refusal(options: argparse.Namespace) -> str | None:
    how = settings()
    if options.partition and options.partition not in dict(how["partitions"]):
        complain(f"sbatch: error: invalid partition specified: {options.partition}")
        return "Invalid partition name specified"
    if max(ranks_of(options.array)) >= how["max_array"]:
        return "Invalid job array specification"
    if options.account == "nobodys":
        return "Invalid account or account/partition combination specified"
    if options.gres:
        _, *rest = options.gres.split(":")
        kind = rest[0] if not rest[0].isdigit() else "a100"
        if how["gpus"].get(kind, 0) < int(rest[-1]):
            return "Requested node configuration is not available"
    return None


def submit(options: argparse.Namespace, script: str) -> str:
    with locked():
        last = max((int(t["array"]) for t in tasks()), default=0)
        counter = ROOT / "last"
        number = max(last, int(counter.read_text()) if counter.exists() else 0) + 1
        counter.write_text(str(number))
        job = ROOT / f"{number}.sh"
        job.write_text(script)
        job.chmod(0o700)
        for rank in ranks_of(options.array):
            save(
                {
                    "array": str(number),
                    "task": rank,
                    "name": options.job_name,
                    "comment": options.comment or "(null)",
                    "state": "PENDING",
                    "reason": "None",
                    "code": 0,
                    "restarts": 0,
                    "node": "",
                    "wish": None,
                    "output": options.output,
                    "script": str(job),
                    "cwd": options.chdir or os.getcwd(),
                    "requeue": not options.no_requeue,
                    "limit_s": 60 * int(options.time),
                }
            )
    for rank in ranks_of(options.array):
        subprocess.Popen(
            [sys.executable, "-I", STEP, str(number), str(rank)],
            env=login_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return str(number)


def ranks_of(text: str) -> list[int]:
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


FIELDS = {
    "ArrayJobID": "array",
    "ArrayTaskID": "task",
    "State": "state",
    "exit_code": "code",
    "RestartCnt": "restarts",
    "NodeList": "node",
    "Name": "name",
    "Comment": "comment",
    "Reason": "reason",
}


def squeue(argv: list[str], script: str) -> int:
    parser = argparse.ArgumentParser(prog="squeue", add_help=False)
    for name in ("noheader", "array", "me"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("states", "jobs", "name", "Format"):
        parser.add_argument(f"--{name}")
    options = parser.parse_args(argv)
    found = tasks()
    if options.jobs is not None:
        found = selected([options.jobs])
        if not found and "," not in options.jobs:
            complain("slurm_load_jobs error: Invalid job id specified")
            return 1
    if options.name is not None:
        found = [t for t in found if t["name"] in options.name.split(",")]
    if options.states != "all":
        found = [t for t in found if t["state"] not in ENDED]
    columns = [re.fullmatch(r"(\w+):\.(\d+)(\D?)", word) for word in options.Format.split(",")]
    for task in found:
        line = ""
        for match in columns:
            assert match is not None, options.Format
            if match[1] not in FIELDS:
                complain(f"squeue: error: Invalid job format specification: {match[1]}")
                return 1
            width = int(match[2])
            line += str(task[FIELDS[match[1]]])[:width].rjust(width) + match[3]
        say(line)
    return 0


def scancel(argv: list[str], script: str) -> int:
    names = [word.partition("=")[2] for word in argv if word.startswith("--name=")]
    words = [word for word in argv if not word.startswith("-")]
    chosen = selected(words) if words else [t for t in tasks() if t["name"] in names]
    for task in chosen:
        if task["state"] not in ENDED:
            change(task["array"], task["task"], wish="cancel")
    return 0


def scontrol(argv: list[str], script: str) -> int:
    if argv[:2] == ["show", "config"]:
        how = settings()
        say("Configuration data as of 2026-11-20T14:25:15")
        say(f"KillWait                = {how['kill_wait']} sec")
        say(f"MaxArraySize            = {how['max_array']}")
        say("MinJobAge               = 300 sec")
        return 0
    assert argv[0] == "requeue", argv
    for task in selected(argv[1:]):
        change(task["array"], task["task"], wish="requeue")
    return 0


def sinfo(argv: list[str], script: str) -> int:
    how = settings()
    gpus = ",".join(f"gpu:{kind}:{count}" for kind, count in how["gpus"].items()) or "(null)"
    for index, (name, limit) in enumerate(how["partitions"]):
        say(f"{name}{'*' if index == 0 else ''}|{limit}|{gpus}")
    return 0


# -- what only tests do ----------------------------------------------------------------------------


def fake(argv: list[str]) -> None:
    if argv[0] == "fake-end":
        for task in selected([argv[1]]):
            change(task["array"], task["task"], wish=argv[2])
    elif argv[0] == "fake-forget":
        for task in tasks():
            if task["state"] in ENDED:
                path_of(task["array"], task["task"]).unlink()
    else:  # fake-stop
        for task in tasks():
            change(task["array"], task["task"], wish="KILLED")
        deadline = time.monotonic() + 20
        while any(t["state"] not in (*ENDED, "KILLED") for t in tasks()):
            assert time.monotonic() < deadline, tasks()
            time.sleep(0.05)


def main() -> int:
    name, *argv = sys.argv[1:]
    if name.startswith("fake-"):
        fake([name, *argv])
        return 0
    script = sys.stdin.read() if name == "sbatch" else ""
    with locked(), (ROOT / "requests.jsonl").open("a") as file:
        file.write(json.dumps({"argv": [name, *argv], "stdin": script}) + "\n")
    if settings()["down"]:
        complain(
            {
                "sbatch": "sbatch: error: Batch job submission failed: ",
                "squeue": "slurm_load_jobs error: ",
            }.get(name, f"{name}: error: ")
            + DOWN
        )
        return 1
    commands = {"sbatch": sbatch, "squeue": squeue, "scancel": scancel, "scontrol": scontrol}
    return {**commands, "sinfo": sinfo}[name](argv, script)


if __name__ == "__main__":
    sys.exit(main())
