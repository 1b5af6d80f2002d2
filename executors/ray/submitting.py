"""Submitting one job, so that a reply that is lost costs nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from diloco_cloud.errors import ConfigError, DilocoError, LaunchError
from diloco_cloud.executors.ray.api import JobsApi, RefusedError, UnreachableError
from diloco_cloud.executors.ray.submission import Submission
from diloco_cloud.secrets import Secret, revealed

logger = logging.getLogger(__name__)

#: Tries, and seconds before the second; each one after waits twice as long.
_TRIES: Final = 4
_PAUSE_S: Final = 1.0
#: Ray's answer to an id that it has: 400 in the agent, 500 by the time it gets here.
_TAKEN: Final = "already exists"
#: Its answer, with 500 too, while none of its nodes has an agent, as at the cluster's start.
_TOO_SOON: Final = "No available agent"


def submit(
    api: JobsApi,
    submission: Submission,
    secrets: Mapping[str, Secret],
    *,
    sleep: Callable[[float], None],
) -> None:
    """Submit a job, unless it is there already.

    Args:
        api: of the cluster.
        submission: the job.
        secrets: revealed in its file.
        sleep: waits that many seconds.

    Raises:
        UsageError: Ray refuses the job.
        LaunchError: Ray does not answer.
    """
    if submission.secrets_file is not None:
        _write_private(submission.secrets_file, secrets)
    failure: UnreachableError | RefusedError | None = None
    for attempt in range(_TRIES):
        if attempt:
            sleep(_PAUSE_S * 2 ** (attempt - 1))
        try:
            api.submit(submission.body)
            return
        except UnreachableError as error:
            # It may have been taken all the same; if so, its id is by the next try.
            failure = error
            logger.info("%s; trying again", error)
        except RefusedError as error:
            if _TAKEN in error.text:
                return
            if _TOO_SOON not in error.text:
                withdraw(submission.secrets_file)
                raise _refusal(error) from None
            failure = error
            logger.info("%s; trying again", _TOO_SOON)
    withdraw(submission.secrets_file)
    raise not_asked(failure)


def not_asked(error: Exception | None) -> LaunchError:
    """The error for a cluster that does not answer."""
    return LaunchError(
        f"Ray did not take a job: {error}",
        fix="Check --backend-arg address=, and that the cluster runs.",
    )


def _write_private(path: str, secrets: Mapping[str, Secret]) -> None:
    """Write a file that only this user can read, whoever else may write to its directory."""
    directory, name = os.path.split(path)
    part: str | None = None
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        # Not under its own name, which others could guess, and make a file of theirs first.
        descriptor, part = tempfile.mkstemp(prefix=f".{name}.", dir=directory)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(revealed(secrets)))
        os.replace(part, path)
        return
    except OSError as error:
        failure = LaunchError(
            f"the secrets cannot be written: {error}",
            fix="Set --backend-arg secrets_dir= to a directory of yours that the nodes see.",
        )
    withdraw(part)
    raise failure


def withdraw(secrets_file: str | None) -> None:
    """Delete a file of secrets, if it is there: nobody will take it any more."""
    if secrets_file is not None:
        with contextlib.suppress(OSError):
            os.unlink(secrets_file)


@dataclass(frozen=True)
class LeftSecrets:
    """A file of secrets that nobody has taken.

    Attributes:
        submission_id: of the job that it is for.
        age_s: seconds since it was written.
    """

    path: str
    submission_id: str
    age_s: float


def left_secrets(directory: str | None, name: str) -> list[LeftSecrets]:
    """Files of secrets of a launch, those included that were not written to their end.

    Args:
        directory: where they are; None, or one that this machine does not have: nowhere.
        name: of the launch.
    """
    of_launch = re.compile(rf"\.?({re.escape(name)}\.r\d+\.a\d+\.[0-9a-f]{{8}})(?:\.\w+)?")
    left: list[LeftSecrets] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory) if directory is not None else ():
            match = of_launch.fullmatch(entry.name)
            if match is not None:
                with contextlib.suppress(OSError):  # it was taken meanwhile
                    age_s = time.time() - entry.stat().st_mtime
                    left.append(LeftSecrets(entry.path, match[1], age_s))
    return left


def _refusal(error: RefusedError) -> DilocoError:
    if error.status in (401, 403):
        return ConfigError(
            f"Ray does not let us in: {error}",
            fix="Put a token in RAY_AUTH_TOKEN, or headers in RAY_JOB_HEADERS.",
        )
    if error.status == 404:
        return ConfigError(
            "there is no Ray Jobs API at that address",
            fix="Set --backend-arg address= to the dashboard, such as http://head:8265.",
        )
    return LaunchError(f"Ray refuses a job: {error}", fix="Nothing of it was started.")
