"""Starting jobs: each exactly once, whatever becomes of the replies."""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from diloco_cloud.errors import ConfigError, LaunchError
from diloco_cloud.executor import ReplicaHandle
from diloco_cloud.executors.hf_jobs.hub import Hub, HubRefused, HubUnreachable, refusal
from diloco_cloud.executors.hf_jobs.job_request import LAUNCH_LABEL, RANK_LABEL, JobRequest
from diloco_cloud.executors.hf_jobs.jobs import Job

logger = logging.getLogger(__name__)

#: Seconds before each further try to start a job.
_PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0)


def check_account(hub: Hub, namespace: str | None, hardware: str) -> str:
    """The namespace that jobs will run in; all that can be known before the first of them.

    Raises:
        ConfigError: the token, the namespace or the hardware is of no use.
        LaunchError: the hub cannot be asked.
    """
    try:
        account = hub.account()
        offered = hub.hardware()
    except HubUnreachable as error:
        raise LaunchError(str(error), fix="Try again later.") from None
    except HubRefused as error:
        raise LaunchError(f"the hub refuses to answer: {error}") from None
    own = str(account["name"])
    names = [own, *(str(org["name"]) for org in account.get("orgs", ()))]
    if namespace is not None and namespace not in names:
        near = difflib.get_close_matches(namespace, names, n=1)
        guess = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"the token of {own} has no namespace {namespace}",
            fix=f"{guess}It has {', '.join(names)}.",
        )
    token = account.get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        raise ConfigError(
            f"the token {token.get('displayName', '')!r} may only read, and starts no jobs",
            fix="Make one that may write: https://huggingface.co/settings/tokens.",
        )
    if hardware not in offered:
        near = difflib.get_close_matches(hardware, offered, n=1)
        guess = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"the hub has no hardware {hardware!r}", fix=f"{guess}It has {', '.join(offered)}."
        )
    return namespace or own


class Launch:
    """The jobs of one call of ``launch_replicas``.

    Args:
        hub: starts them.
        namespace: whose they are.
        launch_id: on all of them, and on no others.
        run: under which they are launched.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        hub: Hub,
        namespace: str,
        launch_id: str,
        run: str,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._hub = hub
        self._namespace = namespace
        self._launch_id = launch_id
        self._run = run
        self._sleep = sleep
        self._uncertain = False
        self.handles: list[ReplicaHandle] = []

    def start(self, request: JobRequest) -> ReplicaHandle:
        """Start one job; a reply that gets lost does not start it twice.

        Raises:
            LaunchError: the hub refused it, or did not answer often enough.
        """
        for pause in (*_PAUSES_S, None):
            try:
                info = self._hub.create(self._namespace, request.arguments())
                break
            except HubRefused as error:
                raise refusal(error, self._namespace, request.flavor) from None
            except HubUnreachable as error:
                self._uncertain = True
                if pause is None:
                    raise LaunchError(
                        f"replica {request.rank} could not be started: {error}",
                        fix="Try again later.",
                    ) from None
                logger.info("replica %d: %s; looking whether it was started", request.rank, error)
                self._sleep(pause)
                found = self._find(request)
                if found is not None:
                    info = found
                    break
        job = Job(info.id, self._namespace, self._run, request.timeout, info.url)
        handle = job.handle(request.rank)
        self.handles.append(handle)
        return handle

    def cancel_doubles(self) -> None:
        """Cancel what was started by a request that seemed lost when it was repeated.

        One that stays, since the hub does not answer, costs money and does no harm: two processes
        of one attempt become two lives, of which the run takes the later.
        """
        if not self._uncertain:
            return
        kept = {handle.metadata["job_id"] for handle in self.handles}
        try:
            self._cancel([info.id for info in self._all() if info.id not in kept])
        except HubUnreachable as error:
            logger.warning("%s; a replica of %s may run twice", error, self._run)

    def roll_back(self) -> None:
        """Cancel everything that was started, also what nobody was told of; never raises."""
        known = [job.job_id for handle in self.handles if (job := Job.of(handle)) is not None]
        try:
            # The listing also has the job whose reply was on its way when this was interrupted.
            known += [info.id for info in self._all() if info.id not in known]
        except Exception as error:
            logger.error("jobs of a failed launch could not be looked for: %s", error)
        self._cancel(known)

    def _find(self, request: JobRequest) -> Any | None:
        try:
            jobs = self._all()
        except HubUnreachable:
            return None
        rank = str(request.rank)
        return next((info for info in jobs if info.labels.get(RANK_LABEL) == rank), None)

    def _all(self) -> list[Any]:
        return self._hub.find_surely(self._namespace, {LAUNCH_LABEL: self._launch_id})

    def _cancel(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            try:
                self._hub.cancel(self._namespace, job_id)
            except Exception as error:
                logger.error("job %s could not be cancelled: %s", job_id, error)
