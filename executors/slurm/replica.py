"""A replica's handle on Slurm: which task of which job array it is, and its directory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from diloco_cloud.executor import ReplicaHandle
from diloco_cloud.executors.slurm.submission import Submission

BACKEND_NAME: Final = "slurm"


@dataclass(frozen=True)
class SlurmReplica:
    """Where a replica is.

    Attributes:
        job: id of the job array.
        task: its number there, which is its rank.
        job_name: of the array; Slurm uses ids again.
        directory: on the cluster's shared disk.
    """

    job: str
    task: int
    job_name: str
    directory: str

    @classmethod
    def of(cls, handle: ReplicaHandle) -> SlurmReplica | None:
        """The replica of a handle, or None if this executor did not make the handle."""
        try:
            return cls(**handle.metadata) if handle.backend_name == BACKEND_NAME else None
        except TypeError:
            return None

    @classmethod
    def submitted(cls, submission: Submission, job: str, rank: int) -> SlurmReplica:
        """The replica of a rank, once Slurm has taken the submission."""
        return cls(job, rank, submission.job_name, submission.directory(rank))

    def handle(self) -> ReplicaHandle:
        return ReplicaHandle(self.task, BACKEND_NAME, asdict(self))

    @property
    def task_id(self) -> str:
        """As Slurm's commands name it."""
        return f"{self.job}_{self.task}"
