"""Names of training jobs, and the handles that find them again."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace
from typing import Final

from diloco_cloud.executor import LaunchOptions, ReplicaHandle
from diloco_cloud.executors.sagemaker.limits import check_name

BACKEND_NAME: Final = "sagemaker"
#: Characters that "-r000-a000-0000" adds to the name of a launch.
_SUFFIX: Final = 15
_JOB: Final = re.compile(r"(?P<launch>.+)-r(?P<rank>\d+)-a(?P<attempt>\d+)(?:-[0-9a-f]{4})?")


@dataclass(frozen=True)
class Job:
    """One life of one rank: a training job, whose name says which.

    Attributes:
        name: of the training job; unique in an account and region, for ever.
        launch: the ``LaunchOptions.name`` it was launched as.
        region: of AWS.
        account: of AWS; "" where it is not known.
    """

    name: str
    launch: str
    region: str
    account: str = ""

    @classmethod
    def named(cls, launch: str, rank: int, attempt: int, region: str) -> Job:
        """The job of one life."""
        return cls(f"{launch}-r{rank}-a{attempt}", launch, region)

    @classmethod
    def of(cls, handle: ReplicaHandle) -> Job | None:
        """The job that a handle is of; None if it is not one of this backend."""
        values = handle.metadata
        known = {name: values.get(name) for name in ("name", "launch", "region", "account")}
        if handle.backend_name != BACKEND_NAME or not all(
            isinstance(value, str) for value in known.values()
        ):
            return None
        return cls(**known) if known["name"] and known["region"] else None  # type: ignore[arg-type]

    def renamed(self) -> Job:
        """The same life, under a name that no other job has."""
        return replace(self, name=f"{self.name}-{secrets.token_hex(2)}")

    def handle(self, *, arn: str = "", has_secrets: bool = False) -> ReplicaHandle:
        """What finds this job again, from any process.

        Args:
            arn: of the job.
            has_secrets: whether secrets were kept for its launch.
        """
        rank, attempt = self.life()
        return ReplicaHandle(
            rank=rank,
            backend_name=BACKEND_NAME,
            metadata={
                "name": self.name,
                "launch": self.launch,
                "region": self.region,
                "account": account_of(arn) or self.account,
                "attempt": attempt,
                "has_secrets": has_secrets,
            },
        )

    def life(self) -> tuple[int, int]:
        """(rank, attempt)."""
        found = _JOB.fullmatch(self.name)
        return (int(found["rank"]), int(found["attempt"])) if found else (0, 0)


def is_of_launch(name: str, launch: str) -> bool:
    """Whether a training job of this name was launched as ``launch``."""
    found = _JOB.fullmatch(name)
    return found is not None and found["launch"] == launch


def launch_name(options: LaunchOptions) -> str:
    """What the jobs of a launch are named after.

    A launch that was given no name gets one that nobody else has.

    Raises:
        ConfigError: SageMaker does not take such names.
    """
    name = options.name
    if name == LaunchOptions().name:
        name = f"{name}-{secrets.token_hex(4)}"
    check_name(name, suffix=_SUFFIX)
    return name


def account_of(arn: str) -> str:
    """The account in "arn:aws:service:region:account:…", else ""."""
    parts = arn.split(":", 5)
    return parts[4] if len(parts) == 6 else ""
