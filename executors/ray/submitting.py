"""Submitting one job, so that a reply that is lost costs nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Final

from diloco_cloud.errors import ConfigError, DilocoError, LaunchError
from diloco_cloud.executors.ray.api import JobsApi, RefusedError, UnreachableError
from diloco_cloud.executors.ray.submission import Submission

logger = logging.getLogger(__name__)

#: Tries, and seconds before the second; each one after waits twice as long.
_TRIES: Final = 4
_PAUSE_S: Final = 1.0
#: Ray's answer to an id that it has: 400 in the agent, 500 by the time it gets here.
_TAKEN: Final = "already exists"


def submit(
    api: JobsApi,
    submission: Submission,
    secrets: Mapping[str, str],
    *,
    sleep: Callable[[float], None],
) -> None:
    """Submit a job, unless it is there already.

    Args:
        api: of the cluster.
        submission: the job.
        secrets: for its file.
        sleep: waits that many seconds.

    Raises:
        UsageError: Ray refuses the job.
        LaunchError: Ray does not answer.
    """
    if submission.secrets_file is not None:
        _write_private(submission.secrets_file, json.dumps(dict(secrets)))
    failure: UnreachableError | None = None
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
            _withdraw(submission)
            raise _refusal(error) from None
    _withdraw(submission)
    raise LaunchError(
        f"Ray did not take a job: {failure}",
        fix="Check --backend-arg address=, and that the cluster runs.",
    )


def _write_private(path: str, text: str) -> None:
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise LaunchError(
            f"the secrets cannot be written: {error}",
            fix="Set --backend-arg secrets_dir= to a directory of yours that the nodes see.",
        ) from None


def _withdraw(submission: Submission) -> None:
    if submission.secrets_file is not None:
        with contextlib.suppress(OSError):
            os.unlink(submission.secrets_file)


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
