"""Modal's SDK: loaded when it is first needed, and its errors in this package's words."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from diloco_cloud.errors import (
    ConfigError,
    DilocoError,
    LaunchError,
    MissingDependencyError,
    UsageError,
)
from diloco_cloud.secrets import Secret, redacted

T = TypeVar("T")

#: What an unreachable server, a throttled or a failed request raises, by the name of its class.
TRANSPORT: Final = frozenset(
    {
        *("ConnectionError", "ServiceError", "InternalError", "ResourceExhaustedError"),
        *("ClientClosed", "RetryTimeoutError", "UnimplementedError", "DataLossError"),
    }
)


def require() -> None:
    """Raise ``MissingDependencyError`` unless the SDK is installed; loads nothing."""
    if importlib.util.find_spec("modal") is None:
        raise MissingDependencyError(
            "the backend 'modal' needs the package modal, which is not installed",
            fix="pip install 'diloco-cloud[modal]'",
        )


def load() -> Any:
    """The module ``modal``, which takes a second to load the first time."""
    require()
    return importlib.import_module("modal")


class NotInTime(Exception):
    """A call of the SDK has not returned in the time it was given."""


def bounded(call: Callable[[], T], seconds: float) -> T:
    """What ``call`` returns, if it does within so many seconds.

    The SDK tries for a minute to reach a server that is not there; whoever polls cannot wait.

    Raises:
        NotInTime: it goes on, and what comes of it is lost.
        BaseException: what ``call`` raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again where it is waited for
            errors.append(error)

    thread = threading.Thread(target=work, name="modal-call", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise NotInTime(f"Modal has not answered within {seconds:g} s")
    return results[0]


def is_transport(error: BaseException) -> bool:
    """Whether an error says nothing about what was asked for, only that Modal did not answer."""
    kinds = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("modal")}
    return isinstance(error, NotInTime) or not kinds.isdisjoint(TRANSPORT)


def is_denied(error: BaseException) -> bool:
    """Whether an error is about credentials."""
    return _modal_name(error) in ("AuthError", "PermissionDeniedError")


def translated(error: Exception, doing: str, secrets: Iterable[Secret] = ()) -> DilocoError:
    """An SDK's error in words of ours.

    Args:
        error: whatever the SDK raised.
        doing: completes "Modal could not …".
        secrets: that were sent; Modal may quote what it does not like.
    """
    name, text = _modal_name(error), first_line(error, secrets)
    if name == "AuthError":
        return UsageError(
            f"Modal does not know who is asking: {text}",
            fix="Run `modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET.",
        )
    if name == "PermissionDeniedError":
        return UsageError(
            f"Modal does not allow it: {text}",
            fix="Use a token of a workspace that may, or another environment.",
        )
    if name in ("InvalidError", "ConflictError"):
        return ConfigError(f"Modal refuses the request: {text}", fix=_fix_of(text))
    if name == "NotFoundError":
        return UsageError(f"Modal could not {doing}: {text}", fix=_fix_of(text))
    if name == "ExecutionError" and "hydrated" in text:
        return UsageError(
            "the function is not deployed, so that it cannot be called", fix=_FIXES["function"]
        )
    if name == "ExecutionError" and "was modified" in text:
        return LaunchError(f"a file changed while it was sent: {text}", fix="Launch again.")
    if name == "ModuleNotMountable":
        return ConfigError(
            f"a module cannot be sent to Modal: {text}",
            fix="Name modules of pure Python; install others in an image of your own.",
        )
    if name == "ImageBuildError":
        return LaunchError(
            f"the image could not be built: {text}",
            fix="Modal's page of the App has the build's log.",
        )
    if name == "ResourceExhaustedError":
        return LaunchError(
            f"Modal could not {doing}: {text}",
            fix="A limit of the workspace is reached: end something, or have it raised.",
        )
    return LaunchError(f"Modal could not {doing}: {text}")


def first_line(error: BaseException, secrets: Iterable[Secret] = ()) -> str:
    """What an error says, in one line, without values of secrets; its class if it says nothing."""
    lines = redacted(str(error), secrets).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _fix_of(text: str) -> str:
    """What to do about a refusal, by what it is about."""
    about = text.lower()
    for word, fix in _FIXES.items():
        if word in about:
            return fix
    return "Change the setting that it names."


_FIXES: Final = {
    "gpu": "Choose another GPU: https://modal.com/docs/guide/gpu lists them.",
    "secret": "Create it: `modal secret create NAME KEY=VALUE`.",
    "region": "Choose another region: https://modal.com/docs/guide/region-selection.",
    "function": "Deploy the App first: `modal deploy FILE`.",
    "image": "Check the image's name, and that Modal may pull it.",
    "environment": "Name one of `modal environment list`.",
}


def _modal_name(error: BaseException) -> str:
    """The nearest of Modal's own classes that an error belongs to; "" if it is another's."""
    for kind in type(error).__mro__:
        if kind.__module__.startswith("modal"):
            return kind.__name__
    return ""
