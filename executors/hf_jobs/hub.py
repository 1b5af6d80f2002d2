"""The hub's client: bounded in time, retried where that is safe, with errors that help."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from diloco_cloud.errors import ConfigError, LaunchError, MissingDependencyError, UsageError
from diloco_cloud.secrets import Secret, redacted, revealed

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Seconds before each further try.
_PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0)


class HubUnreachable(Exception):
    """The hub did not answer, or asked to come back later: nothing is known."""


class HubRefused(Exception):
    """The hub answered with an error that repeating the request does not change.

    Attributes:
        status: of the HTTP response.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class JobUnknown(HubRefused):
    """There is no such job, or it is not ours to see."""


class Hub:
    """Jobs of one hub, by the credentials of this machine.

    Args:
        endpoint: default ``$HF_ENDPOINT``, else huggingface.co.
        sleep: waits for so many seconds.
        request_timeout_s: after which a request has failed; the client itself would wait for ever.

    Raises:
        MissingDependencyError: huggingface_hub is not installed.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        request_timeout_s: float = 30.0,
    ) -> None:
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            raise MissingDependencyError(
                "the backend hf-jobs needs huggingface_hub, which is not installed",
                fix="pip install 'diloco-cloud[hf]'",
            ) from error
        self._api = HfApi(endpoint=endpoint or os.environ.get("HF_ENDPOINT"))
        self._sleep = sleep
        self._timeout_s = request_timeout_s
        self._account: Mapping[str, Any] | None = None

    def account(self) -> Mapping[str, Any]:
        """Who the token belongs to; asked once.

        Raises:
            ConfigError: there is no token, or the hub does not accept it.
            HubUnreachable: it does not answer.
        """
        if self._account is None:
            self._account = self._retried(lambda: self._api.whoami(cache=True))
        return self._account

    def hardware(self) -> list[str]:
        """The names that a job's ``flavor`` may have now."""
        return [one.name for one in self._retried(self._api.list_jobs_hardware)]

    def create(self, namespace: str, arguments: Mapping[str, Any]) -> Any:
        """Start a job; never repeated here, as a job may have been started all the same.

        Args:
            namespace: whose it is.
            arguments: see ``JobRequest.arguments``; its secrets are revealed here.
        """
        secrets: Mapping[str, Secret] = arguments["secrets"] or {}

        def run_job() -> Any:
            values = revealed(secrets) or None
            return self._api.run_job(namespace=namespace, **{**arguments, "secrets": values})

        return self._call(run_job, secrets.values())

    def inspect(self, namespace: str, job_id: str) -> Any:
        """One job.

        Raises:
            JobUnknown: there is none of that id.
        """
        return self._call(lambda: self._api.inspect_job(job_id=job_id, namespace=namespace))

    def find(self, namespace: str, labels: Mapping[str, str]) -> list[Any]:
        """All jobs that carry these labels, ended ones too."""
        return self._call(lambda: self._list(namespace, labels))

    def find_surely(self, namespace: str, labels: Mapping[str, str]) -> list[Any]:
        """The same, tried again where the hub does not answer."""
        return self._retried(lambda: self._list(namespace, labels))

    def cancel(self, namespace: str, job_id: str) -> None:
        """Cancel a job; tried again where the hub does not answer."""
        self._retried(lambda: self._api.cancel_job(job_id=job_id, namespace=namespace))

    def logs(self, namespace: str, job_id: str, tail: int) -> Iterable[str]:
        """An iterator over the lines that the job has written; blocks for seconds."""
        return self._api.fetch_job_logs(job_id=job_id, namespace=namespace, tail=tail)

    def _list(self, namespace: str, labels: Mapping[str, str]) -> list[Any]:
        """As ``HfApi.list_jobs``, which would try for half a minute before it fails."""
        from huggingface_hub import JobInfo

        api, utils = self._api, importlib.import_module("huggingface_hub.utils")
        headers = utils.build_hf_headers(token=api.token)
        url: str | None = f"{api.endpoint}/api/jobs/{namespace}"
        params: Any = [("label", f"{key}={value}") for key, value in labels.items()]
        jobs: list[Any] = []
        while url is not None:
            reply = utils.get_session().get(
                url, params=params, headers=headers, timeout=self._timeout_s, follow_redirects=True
            )
            utils.hf_raise_for_status(reply)
            for job in reply.json():
                status = job["status"]  # why the hub itself cancelled it is nowhere in a JobInfo
                status["message"] = status.get("message") or status.get("cancelReason")
                jobs.append(JobInfo(**job, endpoint=api.endpoint))
            url, params = reply.links.get("next", {}).get("url"), None  # which has the parameters
        return jobs

    # -- how requests are sent ------------------------------------------------------------------

    def _retried(self, request: Callable[[], _T]) -> _T:
        """Send a request that may be repeated."""
        for pause in _PAUSES_S:
            try:
                return self._call(request)
            except HubUnreachable as error:
                logger.info("%s; trying again in %g s", error, pause)
                self._sleep(pause)
        return self._call(request)

    def _call(self, request: Callable[[], _T], secrets: Iterable[Secret] = ()) -> _T:
        try:
            return bounded(request, self._timeout_s)
        except (HubUnreachable, UsageError):
            raise
        except Exception as error:
            failure = _translated(error, secrets)
        # Out of the handler, without a trace of the SDK's own, which holds the request.
        raise failure


def bounded(call: Callable[[], _T], seconds: float) -> _T:
    """What ``call`` returns or raises, unless it takes too long.

    It goes on in a thread of its own then, as nothing can stop it.

    Raises:
        HubUnreachable: it took longer.
    """
    outcome: list[tuple[_T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="hf-jobs", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise HubUnreachable(f"the hub did not answer within {seconds:g} seconds")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _translated(error: Exception, secrets: Iterable[Secret]) -> Exception:
    """One of ours for what huggingface_hub and its HTTP client raise.

    Args:
        error: theirs.
        secrets: whose values the hub may quote.
    """
    from huggingface_hub.errors import HfHubHTTPError, JobNotFoundError, LocalTokenNotFoundError

    if isinstance(error, LocalTokenNotFoundError):
        return ConfigError(
            "there is no token for the Hugging Face Hub on this machine",
            fix="Set HF_TOKEN, or run `hf auth login`.",
        )
    if not isinstance(error, HfHubHTTPError):
        return HubUnreachable(f"the hub cannot be reached ({type(error).__name__})")
    status = error.response.status_code if error.response is not None else 0
    text = redacted(error.server_message or str(error), secrets)
    text = text.strip().split("\n", 1)[0][:300]
    if isinstance(error, JobNotFoundError):
        return JobUnknown(text, 404)
    if status == 401:
        return ConfigError(
            "the Hugging Face Hub does not accept the token",
            fix="It may have expired: set HF_TOKEN to a new one, or run `hf auth login`.",
        )
    if status == 429 or status >= 500 or status == 0:
        return HubUnreachable(f"the hub answers {status}: {text}")
    return HubRefused(text, status)


def refusal(error: HubRefused, namespace: str, hardware: str) -> LaunchError:
    """What a launcher is told when the hub refuses a job."""
    fixes = {
        402: f"Add credits to {namespace}: https://huggingface.co/settings/billing.",
        403: f"Use a token that may write jobs of {namespace}; jobs need a paid plan or credits.",
        404: f"Check the namespace {namespace}.",
    }
    return LaunchError(
        f"the hub refuses a job on {hardware} in {namespace} ({error.status}): {error}",
        fix=fixes.get(error.status, "Correct what the hub complains about."),
    )
