"""What the hub knows of a run's jobs, asked for once for all its replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from diloco_cloud.errors import UsageError
from diloco_cloud.executor import ReplicaHandle, ReplicaStatus
from diloco_cloud.executors.hf_jobs.hub import Hub, HubRefused, HubUnreachable, JobUnknown
from diloco_cloud.executors.hf_jobs.job_request import ATTEMPT_LABEL, RANK_LABEL, RUN_LABEL
from diloco_cloud.executors.hf_jobs.stages import status_of

BACKEND_NAME: Final = "hf-jobs"


@dataclass(frozen=True)
class Job:
    """What a handle says.

    Attributes:
        job_id: the hub's.
        namespace: whose it is.
        run: under which it was launched.
        timeout: seconds it was given.
        url: of its page, for people.
    """

    job_id: str
    namespace: str
    run: str
    timeout: int | None = None
    url: str = ""

    @classmethod
    def of(cls, handle: ReplicaHandle) -> Job | None:
        """The job of a handle, or None if this executor did not make it."""
        try:
            return cls(**handle.metadata) if handle.backend_name == BACKEND_NAME else None
        except TypeError:
            return None

    def handle(self, rank: int) -> ReplicaHandle:
        return ReplicaHandle(rank, BACKEND_NAME, dict(vars(self)))


def handle_of(info: Any, namespace: str, run: str, timeout: int | None = None) -> ReplicaHandle:
    """The handle of a job that the hub has told of."""
    job = Job(info.id, namespace, run, timeout, info.url)
    return job.handle(int(info.labels[RANK_LABEL]))


def is_replica(info: Any) -> bool:
    """Whether a job has the labels of a replica; somebody may have copied one's half."""
    labels: Mapping[str, str] = info.labels or {}
    return labels.get(RANK_LABEL, "").isdigit() and labels.get(ATTEMPT_LABEL, "").isdigit()


@dataclass
class _Listing:
    """One answer about a run."""

    at: float
    jobs: dict[str, Any] = field(default_factory=dict)
    trouble: str | None = None


class Jobs:
    """States of jobs, at most ``refresh_s`` old, in as few requests as there are runs.

    Args:
        hub: asked.
        refresh_s: seconds for which an answer is good.
        clock: seconds from any origin.
    """

    def __init__(
        self, hub: Callable[[], Hub], refresh_s: float, clock: Callable[[], float]
    ) -> None:
        self._hub = hub
        self._refresh_s = refresh_s
        self._clock = clock
        self._lock = threading.Lock()
        self._asking: dict[tuple[str, str], threading.Lock] = {}
        self._listings: dict[tuple[str, str], _Listing] = {}
        self._final: dict[str, ReplicaStatus] = {}

    def status(self, job: Job) -> ReplicaStatus:
        """The state of a job; never raises for a failure of the hub."""
        if job.job_id in self._final:
            return self._final[job.job_id]
        listing = self._listing(job.namespace, job.run)
        if listing.trouble is not None:
            return ReplicaStatus("unknown", message=listing.trouble)
        info = listing.jobs.get(job.job_id)
        status = self._inspect(job) if info is None else status_of(info, timeout_s=job.timeout)
        if status.is_terminal:
            self._final[job.job_id] = status
        return status

    def namespaces(self, run: str) -> list[str]:
        """Whose the jobs of a run are that have been asked for here."""
        with self._lock:
            return sorted({namespace for namespace, name in self._asking if name == run})

    def forget_answers(self) -> None:
        """Ask again next time: something was done that changes the answer."""
        with self._lock:
            self._listings.clear()

    def _listing(self, namespace: str, run: str) -> _Listing:
        """A fresh answer about a run; of several threads at once, one asks for all."""
        key = (namespace, run)
        with self._lock:
            asking = self._asking.setdefault(key, threading.Lock())
        with asking:
            with self._lock:
                known = self._listings.get(key)
            if known is not None and self._clock() - known.at < self._refresh_s:
                return known
            found = self._ask(namespace, run)
            with self._lock:
                self._listings[key] = found
            return found

    def _ask(self, namespace: str, run: str) -> _Listing:
        asked_at = self._clock()
        try:
            jobs = self._hub().find(namespace, {RUN_LABEL: run})
        except (HubUnreachable, HubRefused, UsageError) as error:
            return _Listing(self._clock(), trouble=str(error).split("\n", 1)[0])
        return _Listing(asked_at, {info.id: info for info in jobs})

    def _inspect(self, job: Job) -> ReplicaStatus:
        """One that no listing shows: it may have lost its labels, or is too new or too old."""
        try:
            info = self._hub().inspect(job.namespace, job.job_id)
        except JobUnknown:
            return ReplicaStatus("failed", reason="lost", message="the hub knows no such job")
        except (HubUnreachable, HubRefused, UsageError) as error:
            return ReplicaStatus("unknown", message=str(error).split("\n", 1)[0])
        return status_of(info, timeout_s=job.timeout)
