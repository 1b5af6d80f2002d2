"""The state of a call, from what the SDK raises when it is asked for its result."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import Any, Final

from diloco_cloud.executor import Reason, ReplicaStatus
from diloco_cloud.executors.modal.container import RESULT_KEY, TimeSliceOver
from diloco_cloud.executors.modal.sdk import first_line, is_denied, is_transport

#: What Modal says of a container that was ended for its memory, in lower case.
_OUT_OF_MEMORY: Final = ("out of memory", "oom", "memory limit")


@dataclass(frozen=True)
class Look:
    """What is known of a call now.

    Attributes:
        result: what its function returned; of our function, what the entrypoint did.
    """

    status: ReplicaStatus
    result: Any = None


def look(sdk: Any, client: Any, call_id: str) -> Look:
    """Ask for a call's result, without waiting for it.

    Args:
        sdk: the module ``modal``.
        client: of the SDK.
        call_id: "fc-…".
    """
    call = sdk.FunctionCall.from_id(call_id, client=client)
    try:
        returned = call.get(timeout=0)
    except Exception as error:
        return _raised(sdk, call, error)
    return _returned(returned)


def _returned(value: Any) -> Look:
    if not isinstance(value, dict) or RESULT_KEY not in value:
        return Look(ReplicaStatus("succeeded", exit_code=0), value)
    code = value.get("exit_code")
    if code == 0:
        return Look(ReplicaStatus("succeeded", exit_code=0), value.get("result"))
    reason: Reason = value.get("reason") or "exit_code"
    message = value.get("error") or _exit_message(code)
    return Look(ReplicaStatus("failed", exit_code=code, reason=reason, message=message))


def _exit_message(code: object) -> str:
    if isinstance(code, int) and code < 0:
        hint = " (perhaps out of memory)" if code == -9 else ""
        return f"killed by signal {-code}{hint}"
    return f"exited with code {code}"


def _raised(sdk: Any, call: Any, error: Exception) -> Look:
    """Everything but a result arrives as an exception: ours, the SDK's or the remote function's.

    A remote exception is raised here as if it were local, and may be of any class: a builtin
    TimeoutError, with which the SDK says "not yet", or one of the SDK's own. So an error that
    could be either is decided by the call's recorded status.
    """
    kinds = sdk.exception
    if isinstance(error, kinds.FunctionTimeoutError):
        return _failed("timeout", error, "ran past Modal's time limit")
    if isinstance(error, TimeSliceOver):
        return _failed("timeout", error, "has used up all its time slices")
    if isinstance(error, kinds.OutputExpiredError):
        return _failed("lost", error, "Modal no longer has its result")
    if isinstance(error, kinds.NotFoundError):
        return _failed("lost", error, "Modal does not know this call")
    if isinstance(error, kinds.InternalFailure):
        return _failed("preempted", error, "Modal has lost its container")
    if isinstance(error, kinds.DeserializationError):
        message = f"its result cannot be read: {first_line(error)}"
        return Look(ReplicaStatus("succeeded", exit_code=0, message=message))
    waiting = isinstance(error, builtins.TimeoutError)
    if waiting or is_denied(error) or is_transport(error) or type(error) is kinds.RemoteError:
        return _by_record(sdk, call, error, waiting=waiting)
    return _failed(_reason(error), error, "")


def _by_record(sdk: Any, call: Any, error: Exception, *, waiting: bool) -> Look:
    """The state of a call as Modal has recorded it, which lags behind."""
    try:
        info = _input(call)
    except Exception:
        # Its result could be asked for, and is not there: that much is known.
        return Look(ReplicaStatus("running")) if waiting else _unknown(error)
    states = sdk.types.InputStatus
    status = states.PENDING if info is None else info.status
    if status == states.PENDING:
        if not waiting:
            return _unknown(error)
        return Look(ReplicaStatus("running" if info is not None and info.task_id else "pending"))
    try:
        return _returned(call.get(timeout=0))  # it has ended between the two questions
    except Exception as again:
        return _ended(states(status).name, again)


def _ended(status: str, error: Exception) -> Look:
    """The state of a call that has ended, by its recorded status and what asking for it raised."""
    if status == "TERMINATED":
        return Look(ReplicaStatus("cancelled", reason="cancelled", message="Modal has ended it"))
    if status == "TIMEOUT":
        return _failed("timeout", error, "ran past Modal's time limit")
    if status == "SUCCESS":
        return _unknown(error)
    if any(words in str(error).lower() for words in _OUT_OF_MEMORY):
        return _failed("out_of_memory", error, "")
    if status == "INIT_FAILURE":
        return _failed("exit_code", error, "its container did not start")
    return _failed(_reason(error), error, "")


def _input(call: Any) -> Any:
    """The one input of a call; None while Modal has no record of it yet."""
    for info in call.get_call_graph():
        if info.function_call_id == call.object_id:
            return info
    return None


def _reason(error: Exception) -> Reason:
    names = {kind.__name__ for kind in type(error).__mro__}
    memory = not names.isdisjoint(("MemoryError", "OutOfMemoryError"))
    return "out_of_memory" if memory else "exit_code"


def _failed(reason: Reason, error: Exception, what: str) -> Look:
    said = first_line(error) if str(error).strip() else ""
    message = ": ".join(part for part in (what or type(error).__name__, said) if part)
    return Look(ReplicaStatus("failed", reason=reason, message=message))


def _unknown(error: Exception) -> Look:
    return Look(ReplicaStatus("unknown", message=f"Modal cannot be asked: {first_line(error)}"))
