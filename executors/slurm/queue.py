"""What squeue says, asked once for all the replicas that somebody wants to know of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, TypeAlias

from diloco_cloud.executors.slurm.commands import CommandError, Output, Run
from diloco_cloud.executors.slurm.states import Job

_FIELDS: Final = (
    *("ArrayJobID", "ArrayTaskID", "State", "exit_code", "RestartCnt", "NodeList"),
    *("Name", "Comment", "Reason"),
)
#: 200 characters each: without a number squeue cuts them at 20.
_FORMAT: Final = ",".join(f"{name}:.200|" for name in _FIELDS)
#: What squeue says of a single job that it does not know. Of several, it leaves it out.
_UNKNOWN_JOB: Final = "Invalid job id"

#: Job array and task.
Task: TypeAlias = tuple[str, int]


def ask(run: Run, *selection: str) -> dict[Task, Job]:
    """Tasks of job arrays, ended ones too where Slurm still has them.

    Args:
        run: runs a command.
        selection: options of squeue.

    Raises:
        CommandError: it did not answer.
    """
    argv = ["squeue", "--noheader", "--array", "--states=all", f"--Format={_FORMAT}", *selection]
    done = run(argv, "")
    if done.code != 0 and _UNKNOWN_JOB in done.err:
        return {}
    if done.code != 0:
        raise CommandError(f"squeue: {done.complaint}")
    return _parse(done)


def _parse(done: Output) -> dict[Task, Job]:
    jobs = {}
    for line in done.out.splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) < len(_FIELDS) or not words[1].isdigit():
            continue  # not a task of an array
        array, task, state, code, restarts, node, name, comment, reason = words[: len(_FIELDS)]
        jobs[array, int(task)] = Job(
            name=name,
            comment=comment,
            state=state,
            reason=reason,
            wait_status=int(code) if code.isdigit() else 0,
            restarts=int(restarts) if restarts.isdigit() else 0,
            node="" if node == "(null)" else node,
        )
    return jobs


@dataclass
class Queue:
    """Looks jobs up; threads that ask at the same time share one answer.

    Args:
        run: runs a command.
        clock: seconds from any origin.
        refresh_s: seconds for which an answer is good: the polls of one look at a run share it.
    """

    run: Run
    clock: Callable[[], float] = time.monotonic
    refresh_s: float = 1.0
    _lock: Lock = field(default_factory=Lock)
    _watched: set[str] = field(default_factory=set)
    _seen: Mapping[Task, Job] = field(default_factory=dict)
    _asked: frozenset[str] = frozenset()
    _asked_at: float = float("-inf")
    _failure: str | None = None

    def look(self, array: str, task: int) -> Job | None:
        """A job by its array and task; None if Slurm does not know it.

        Raises:
            CommandError: it cannot be asked.
        """
        with self._lock:
            self._watched.add(array)
            fresh = self.clock() - self._asked_at < self.refresh_s
            if not fresh or array not in self._asked:
                self._refresh()
            if self._failure is not None:
                raise CommandError(self._failure)
            job = self._seen.get((array, task))
            if job is None or job.has_ended:
                self._watched.discard(array)  # until somebody asks again
            return job

    def forget_answer(self) -> None:
        """Ask again at the next look: something was just done that changes the answer."""
        with self._lock:
            self._asked_at = float("-inf")

    def _refresh(self) -> None:
        self._asked = frozenset(self._watched)
        self._failure = None
        try:
            self._seen = ask(self.run, f"--jobs={','.join(sorted(self._asked))}")
        except CommandError as error:
            self._failure = str(error)
        self._asked_at = self.clock()
