"""The Modal backend: one deployed App per run, one function in it, one call per replica."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from diloco_cloud.collecting import collect_replicas, one_by_one
from diloco_cloud.errors import DilocoError
from diloco_cloud.executor import (
    Entrypoint,
    InstalledExtras,
    LaunchOptions,
    ReplicaHandle,
    ReplicaResult,
    ReplicaStatus,
)
from diloco_cloud.executors.modal import app as apps
from diloco_cloud.executors.modal import logs, recovery, sdk
from diloco_cloud.executors.modal.calls import Look, look
from diloco_cloud.executors.modal.plan import ModalPlan, app_name, plan_launch
from diloco_cloud.executors.modal.session import Session
from diloco_cloud.executors.modal.settings import (
    DEFAULT_EXTRAS,
    ModalSettings,
    check_own_function,
)
from diloco_cloud.launch_request import LaunchRequest, check_launch

if TYPE_CHECKING:
    import modal

logger = logging.getLogger(__name__)

BACKEND_NAME: Final = "modal"
_NO_OPTIONS: Final = LaunchOptions()


class ModalExecutor:
    """Runs replicas as calls of a Modal function, which need no launcher once they are made.

    Credentials are the SDK's: ``MODAL_TOKEN_ID`` and ``MODAL_TOKEN_SECRET``, or ``~/.modal.toml``.

    Args:
        image: of a registry, with this package installed, or a ``modal.Image``; default: Debian
            with this package as it is here, and its requirements.
        gpu: "H100", "H100:8", or several in order of preference; a launch's own goes before it.
        cpu: cores, which may be a fraction.
        memory: MiB.
        region: "us-east", or several.
        cloud: "aws", "gcp", "oci", "azure" or "auto".
        modules: of the user's own, to be mounted besides the trainer's.
        extras: of this package, for the default image.
        modal_secrets: names of Secrets that are kept at Modal.
        environment: of Modal's; default: the SDK's.
        startup_timeout: seconds a container may take to start, the image's transfer included.
        function: "app/function" that is deployed, or a ``modal.Function``, to be called instead of
            one of ours, with ``rank`` and ``job``; see :func:`.container.run_replica`.
        request_timeout_s: seconds after which a request to Modal has failed.
        client: of the SDK; default: the one of its environment.
        clock: seconds from any origin, for ``collect``.
        sleep: waits that many seconds.

    Raises:
        MissingDependencyError: the SDK is not installed.
        ConfigError: a setting that cannot work.
    """

    backend_name: str = BACKEND_NAME
    supports_inter_replica_network: bool = False

    def __init__(
        self,
        *,
        image: str | modal.Image | None = None,
        gpu: str | Sequence[str] | None = None,
        cpu: float | None = None,
        memory: int | None = None,
        region: str | Sequence[str] | None = None,
        cloud: str | None = None,
        modules: str | Sequence[str] = (),
        extras: str | Sequence[str] = DEFAULT_EXTRAS,
        modal_secrets: str | Sequence[str] = (),
        environment: str | None = None,
        startup_timeout: int = 1800,
        function: str | modal.Function[Any, Any, Any] | None = None,
        request_timeout_s: float = 20.0,
        client: modal.Client | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        sdk.require()
        self._settings = ModalSettings.check(
            image=image,
            gpu=gpu,
            cpu=cpu,
            memory=memory,
            region=region,
            cloud=cloud,
            modules=modules,
            extras=extras,
            modal_secrets=modal_secrets,
            startup_timeout=startup_timeout,
            function=function,
        )
        self._session = Session(client, environment, request_timeout_s)
        self._clock = clock
        self._sleep = sleep
        self._deploying = threading.Lock()
        #: By App, ids of calls that somebody had a handle of.
        self._seen: dict[str, set[str]] = {}

    # -- launching -----------------------------------------------------------------------------

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float = 3600,
        options: LaunchOptions = _NO_OPTIONS,
    ) -> list[ReplicaHandle]:
        """Start the replicas; see :meth:`ServerlessExecutor.launch_replicas`.

        A ``timeout`` beyond Modal's 24 hours is cut into slices: a replica hands over at the end of
        each, and Modal starts it again.
        """
        request = check_launch(n_replicas, entrypoint, entrypoint_args, options, timeout=timeout)
        plan = self._plan(request, options.name, gpu, timeout)
        # Of two that deploy the same App at once, each might make one of that name.
        with self._deploying:
            return self._call_all(self._place(plan, request), plan, request, options)

    def preview_launch(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float = 3600,
        options: LaunchOptions = _NO_OPTIONS,
    ) -> list[dict[str, Any]]:
        """The deployment and the calls; see :class:`diloco_cloud.executor.PreviewsLaunch`."""
        request = check_launch(n_replicas, entrypoint, entrypoint_args, options, timeout=timeout)
        return self._plan(request, options.name, gpu, timeout).requests()

    def installed_extras(self) -> InstalledExtras | None:
        """Those of the image that is made; see :class:`diloco_cloud.executor.InstallsPackage`."""
        return self._settings.installed_extras()

    def check_launch(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float = 3600,
        options: LaunchOptions = _NO_OPTIONS,
    ) -> None:
        """Ask for the credentials, the Secrets and the function that a launch would use.

        See :class:`diloco_cloud.executor.ChecksLaunch`. Modal checks a GPU, a region and an image
        when the function is made, which is before anything runs.
        """
        request = check_launch(n_replicas, entrypoint, entrypoint_args, options, timeout=timeout)
        plan = self._plan(request, options.name, gpu, timeout)
        session = self._session
        if self._settings.function is not None:
            session.ask(lambda: apps.own_function(session, self._settings), "find the function")
            return
        session.ask(lambda: session.app(plan.app), "be asked for the App")
        for name in plan.modal_secrets:
            secret = session.secret(name)
            session.ask(secret.hydrate, f"find the Secret {name!r}")

    def _plan(
        self, request: LaunchRequest, name: str, gpu: str | None, timeout: float
    ) -> ModalPlan:
        if self._settings.function is not None:
            check_own_function(request, gpu)
        return plan_launch(request, self._settings, name=name, gpu=gpu, timeout=timeout)

    def _place(self, plan: ModalPlan, request: LaunchRequest) -> apps.Place:
        own = self._settings.function is not None
        try:
            if own:
                return apps.own_function(self._session, self._settings)
            return apps.deploy(self._session, plan, self._settings, request.secrets)
        except DilocoError:
            raise
        except Exception as error:
            doing = "find the function" if own else "deploy the replicas' function"
            failure = sdk.translated(error, doing, request.secrets.values())
            cause = None if request.secrets else error
        # Out of the handler: the SDK's error and its frames hold the secrets, if there are any.
        raise failure from cause

    def _call_all(
        self, place: apps.Place, plan: ModalPlan, request: LaunchRequest, options: LaunchOptions
    ) -> list[ReplicaHandle]:
        """Make the calls, all or none."""
        handles: list[ReplicaHandle] = []
        try:
            for arguments in plan.calls:
                rank = arguments["rank"]
                try:
                    call_id = place.spawn(arguments)
                except Exception as error:
                    raise sdk.translated(error, f"start replica {rank}") from error
                handles.append(_handle(rank, request.attempt, place.name, call_id))
                if options.on_launched is not None:
                    options.on_launched(handles[-1])
        except BaseException:
            self._roll_back(place, handles)
            raise
        return handles

    def _roll_back(self, place: apps.Place, handles: Sequence[ReplicaHandle]) -> None:
        """End what was started; never raises. There is nothing yet to hand over."""
        for handle in handles:
            call = self._session.call(handle.metadata["call"])
            cancel = functools.partial(call.cancel, terminate_containers=True)
            self._session.try_to(cancel, f"cancel replica {handle.rank}")
        if place.app is not None and place.is_new:  # also what was started and not heard of
            self._session.try_to(
                lambda: place.app.stop(client=self._session.client), f"stop {place.name}"
            )

    # -- replicas ------------------------------------------------------------------------------

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """The replica's state now; "unknown" while Modal does not answer."""
        return self._look(handle).status

    def _look(self, handle: ReplicaHandle) -> Look:
        call_id = self._call_id(handle)
        if call_id is None:
            message = f"not a handle of the {BACKEND_NAME} backend"
            return Look(ReplicaStatus("failed", reason="lost", message=message))
        session = self._session
        try:
            return sdk.bounded(
                lambda: look(session.modal, session.client, call_id), session.patience_s
            )
        except Exception as error:  # a question that failed says nothing about the replica
            message = f"Modal cannot be asked: {sdk.first_line(error)}"
            return Look(ReplicaStatus("unknown", message=message))

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """The last ``n_lines`` lines of stdout and stderr; "" where Modal does not tell."""
        call_id = self._call_id(handle)
        if call_id is None:
            return ""
        found = self._session.try_to(
            lambda: logs.tail(self._session.call(call_id), n_lines),
            f"read the log of replica {handle.rank}",
        )
        return found or ""

    def follow_logs(
        self, handle: ReplicaHandle, *, since: float | None = None, interval: float = 2.0
    ) -> Iterator[str]:
        """What the replica prints, as it comes, until it has ended and all of it is told.

        Its state decides when that is, never the log. Goes on when Modal could not be reached.

        Args:
            handle: of the replica.
            since: seconds since the epoch; default: the beginning.
            interval: seconds between two looks.
        """
        call_id = self._call_id(handle)
        if call_id is None:
            return
        follower = logs.LogFollower(self._session.call(call_id), since)
        while True:
            ended = self.poll(handle).is_terminal
            new = self._session.try_to(
                lambda: list(follower.read_new()), f"read the log of replica {handle.rank}"
            )
            yield from new or ()
            if ended and new is not None:
                return
            self._sleep(interval)

    def cancel(self, handle: ReplicaHandle) -> None:
        """Ask the replica to stop, with time to hand over its work; returns at once.

        Raises:
            LaunchError: Modal could not be told.
            UsageError: it does not allow it.
        """
        call_id = self._call_id(handle)
        if call_id is None:
            return
        session = self._session

        def cancel() -> None:
            with contextlib.suppress(session.modal.exception.NotFoundError):
                session.call(call_id).cancel()

        session.ask(cancel, f"cancel replica {handle.rank}", requests=3)

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None
    ) -> list[ReplicaResult]:
        """Wait for the replicas; see :meth:`ServerlessExecutor.collect`.

        Stops their App once nothing is left to be done in it.
        """
        results = collect_replicas(
            handles,
            one_by_one(self.poll),
            timeout=timeout,
            result=lambda handle: self._look(handle).result,
            clock=self._clock,
            sleep=self._sleep,
        )
        if all(result["status"].is_terminal for result in results):
            for app in {handle.metadata.get("app") for handle in handles}:
                self._stop_if_idle(app)
        return results

    # -- runs ----------------------------------------------------------------------------------

    def recover(self, name: str) -> list[ReplicaHandle]:
        """Handles of the replicas that were launched as ``name``, while their App is not stopped.

        Raises:
            LaunchError: Modal cannot be asked, or does not tell of a call that waits for a machine
                and that this executor has had no handle of.
            UsageError: it does not allow it.
        """
        if self._settings.function is not None:  # which anybody may call
            logger.warning("calls of a function of your own are found by their handles alone")
            return []
        app = app_name(name)
        known = frozenset(self._seen.get(app, ()))
        found = self._session.ask(
            lambda: recovery.find_calls(self._session, app, self._sleep, known),
            f"say what runs in {app}",
            requests=3,
        )
        if found.hidden:
            failure = recovery.hidden_calls(found.hidden, app)
            if not found.strangers:
                raise failure
            logger.warning("%s", failure)  # the others are to be ended all the same
        elif not found.calls and not known:
            logger.warning(recovery.NOTHING_THERE, app, self._session.environment_text)
        return [_handle(rank, attempt, app, call_id) for rank, attempt, call_id in found.calls]

    def release(self, name: str) -> None:
        """Stop the App of a run that has ended; one that still does something is left alone.

        An App without calls costs nothing. Stopping it also ends what nobody knows of.
        """
        if self._settings.function is None:
            session, app = self._session, app_name(name)
            known = frozenset(self._seen.get(app, ()))
            session.try_to(lambda: apps.stop_if_over(session, app, known), f"stop {app}")

    def forget(self, handle: ReplicaHandle) -> None:
        """Stop the App of a replica that has ended; Modal itself deletes what it has kept."""
        self._stop_if_idle(handle.metadata.get("app"))

    def _call_id(self, handle: ReplicaHandle) -> str | None:
        """The call of a handle; None if this executor did not make the handle."""
        call_id, app = handle.metadata.get("call"), handle.metadata.get("app")
        if handle.backend_name != BACKEND_NAME or not isinstance(call_id, str):
            return None
        if isinstance(app, str):
            self._seen.setdefault(app, set()).add(call_id)
        return call_id

    def _stop_if_idle(self, app: object) -> None:
        if isinstance(app, str):
            session = self._session
            session.try_to(lambda: apps.stop_if_idle(session, app), f"stop {app}")


def _handle(rank: int, attempt: int, app: str | None, call_id: str) -> ReplicaHandle:
    metadata = {"call": call_id, "app": app, "attempt": attempt}
    return ReplicaHandle(rank, BACKEND_NAME, metadata)
