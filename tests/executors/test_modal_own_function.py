"""A function that the user has decorated and deployed, instead of one of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.modal_cloud import FakeModal
from modal_fixtures import modal_cloud, modal_executor, modal_server

from diloco_cloud.errors import UsageError
from diloco_cloud.executors.modal import ModalExecutor

__all__ = ["modal_cloud", "modal_executor", "modal_server"]

MakeExecutor = Callable[..., ModalExecutor]
PROGRAMS = "diloco_cloud.testing.programs"


@pytest.fixture
def deployed(modal_cloud: FakeModal, monkeypatch: pytest.MonkeyPatch) -> FakeModal:
    """The user's App, deployed as `modal deploy` does it."""
    import modal

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import modal_functions
    from fakes.modal_cloud import TOKEN

    with modal.Client.from_credentials(*TOKEN) as client:
        modal_functions.app.deploy(client=client)
    return modal_cloud


def test_each_call_gets_its_rank_and_the_arguments(
    deployed: FakeModal, modal_executor: MakeExecutor
) -> None:
    executor = modal_executor(function="my-app/replica")
    handles = executor.launch_replicas(2, f"{PROGRAMS}:tell", {"a": 1})
    results = executor.collect(handles, timeout=80)
    assert [result["result"] for result in results] == [
        {"rank": 0, "arguments": {"a": 1}},
        {"rank": 1, "arguments": {"a": 1}},
    ]
    assert deployed.calls()[0].function.gpus == ["H100:4"]


def test_users_app_is_never_stopped(
    deployed: FakeModal, modal_executor: MakeExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    executor = modal_executor(function="my-app/replica")
    deployed.hold(new_calls=True)
    (handle,) = executor.launch_replicas(1, f"{PROGRAMS}:tell", {"a": 1})
    executor.cancel(handle)
    executor.collect([handle], timeout=60)
    executor.forget(handle)
    executor.release("diloco")
    assert executor.recover("diloco") == []
    assert "found by their handles alone" in caplog.text
    assert deployed.count("AppStop") == 0
    assert [app.is_deployed for app in deployed.world.apps.values()] == [True]


def test_it_can_run_a_replica_as_ours_does(
    deployed: FakeModal, modal_executor: MakeExecutor
) -> None:
    executor = modal_executor(function="my-app/replica")
    handles = executor.launch_replicas(1, f"{PROGRAMS}:main", {})
    (result,) = executor.collect(handles, timeout=80)
    assert result["result"] == {"main": {}}
    assert executor.stream_logs(handles[0]).startswith("contract-suite:")


@pytest.mark.parametrize("error", ["TimeoutError", "ConnectionError"])
def test_its_own_exception_is_not_taken_for_the_sdks(
    deployed: FakeModal, modal_executor: MakeExecutor, error: str
) -> None:
    executor = modal_executor(function="my-app/replica")
    handles = executor.launch_replicas(1, f"{PROGRAMS}:tell", {"raises": error})
    (result,) = executor.collect(handles, timeout=80)
    assert (result["status"], result["status"].reason) == ("failed", "exit_code")
    assert error in result["error"]


def test_function_object_must_be_deployed(
    modal_cloud: FakeModal, modal_executor: MakeExecutor
) -> None:
    import modal

    app = modal.App("other", include_source=False)
    function = app.function(name="f")(_replica)
    with pytest.raises(UsageError, match="not deployed") as caught:
        modal_executor(function=function).launch_replicas(1, f"{PROGRAMS}:tell", {})
    assert "modal deploy" in str(caught.value.fix)


def _replica(rank: int, job: object) -> None:
    raise AssertionError("nobody calls this")
