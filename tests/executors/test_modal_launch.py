"""Launching on Modal: one App per run, all replicas or none, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import modal
import pytest
from fakes.modal_cloud import FakeModal
from grpclib import Status
from modal_fixtures import modal_cloud, modal_executor, modal_server
from modal_proto import api_pb2

from diloco_cloud.errors import LaunchError, UsageError
from diloco_cloud.executor import LaunchOptions, ReplicaHandle
from diloco_cloud.executors.modal import ModalExecutor

__all__ = ["modal_cloud", "modal_executor", "modal_server"]

MakeExecutor = Callable[..., ModalExecutor]
SLEEP = "diloco_cloud.testing.programs:sleep"
STOPPED = api_pb2.APP_STATE_STOPPED
TERMINATED = api_pb2.GenericResult.GENERIC_STATUS_TERMINATED


@pytest.fixture(autouse=True)
def no_machines(modal_cloud: FakeModal) -> None:
    """Nothing here needs a container: all calls wait for one."""
    modal_cloud.hold(new_calls=True)


def _launch(executor: ModalExecutor, n_replicas: int = 1, **options: Any) -> list[ReplicaHandle]:
    given = LaunchOptions(name="run-1", **options)
    return executor.launch_replicas(n_replicas, SLEEP, {}, options=given)


def test_launch_and_restart_share_one_app_and_one_function(
    modal_cloud: FakeModal, modal_executor: MakeExecutor
) -> None:
    first = _launch(modal_executor(), 3)
    again = _launch(modal_executor(), 1, ranks=[1], world_size=3, attempt=1)
    (app,) = modal_cloud.world.apps.values()
    assert (app.name, app.tags["diloco-run"]) == ("diloco-run-1", "run-1")
    assert app.tags["diloco-deployed"].isdecimal()
    assert list(app.function_ids) == ["replica"]
    assert {call.function.function_id for call in modal_cloud.calls()} == {
        app.function_ids["replica"]
    }
    ids = [handle.metadata["call"] for handle in (*first, *again)]
    assert ids == [call.call_id for call in modal_cloud.calls()]


def test_what_was_asked_for_is_what_modal_gets(
    modal_cloud: FakeModal, modal_executor: MakeExecutor
) -> None:
    modal_cloud.world.named_secrets["wandb"] = {"WANDB": "1"}
    executor = modal_executor(
        gpu="H100,A100-80GB:2",
        cpu=2.0,
        memory=2048,
        region=["us-east"],
        cloud="gcp",
        modal_secrets="wandb",
        image="ghcr.io/me/replica:1",
    )
    executor.launch_replicas(1, SLEEP, {}, timeout=100_000)
    (call,) = modal_cloud.calls()
    definition = call.function.definition
    assert call.function.gpus == ["H100:1", "A100-80GB:2"]
    assert definition.resources.milli_cpu == 2000
    assert definition.resources.memory_mb == 2048
    assert list(definition.scheduler_placement.regions) == ["us-east"]
    assert definition.cloud_provider_str == "gcp"
    assert definition.timeout_secs == 86_400
    assert definition.retry_policy.retries == 1
    assert definition.single_use_containers
    assert [modal_cloud.world.secrets[one] for one in definition.secret_ids] == [{"WANDB": "1"}]
    image = modal_cloud.world.images[definition.image_id]
    assert "FROM ghcr.io/me/replica:1" in "\n".join(image.dockerfile_commands)


def test_default_image_installs_the_pinned_requirements(
    modal_cloud: FakeModal, modal_executor: MakeExecutor
) -> None:
    _launch(modal_executor())
    commands = "\n".join(
        line for image in modal_cloud.world.images.values() for line in image.dockerfile_commands
    )
    assert "pip install" in commands
    assert "torch==" in commands
    (call,) = modal_cloud.calls()
    mounted = [modal_cloud.world.mounts[one] for one in call.function.definition.mount_ids]
    names = {name for files in mounted for name in files}
    assert "/root/diloco_cloud/replica_entrypoint.py" in names
    assert "/root/diloco_cloud/executors/modal/container.py" in names
    assert not any("/tests/" in name for name in names)


def test_given_image_object_gets_the_users_modules(
    modal_cloud: FakeModal,
    modal_executor: MakeExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "my_trainer.py").write_text("def train(**_): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    image = modal.Image.debian_slim().apt_install("git")
    _launch(modal_executor(image=image, modules=["my_trainer"]))
    (call,) = modal_cloud.calls()
    mounted = [modal_cloud.world.mounts[one] for one in call.function.definition.mount_ids]
    assert "/root/my_trainer.py" in {name for files in mounted for name in files}


def test_failed_call_takes_the_others_and_the_app_with_it(
    modal_cloud: FakeModal, modal_executor: MakeExecutor
) -> None:
    status = Status.RESOURCE_EXHAUSTED
    modal_cloud.fail("FunctionMap", skip=2, status=status, message="input limit reached")
    with pytest.raises(LaunchError, match="could not start replica 2: input limit") as caught:
        _launch(modal_executor(), 4)
    assert "limit of the workspace" in str(caught.value.fix)
    assert [call.status for call in modal_cloud.calls()] == [TERMINATED] * 2
    (app,) = modal_cloud.world.apps.values()
    assert app.state == STOPPED


def test_failed_restart_leaves_the_app_to_the_others(
    modal_cloud: FakeModal, modal_executor: MakeExecutor
) -> None:
    executor = modal_executor()
    _launch(executor, 2)
    modal_cloud.fail("FunctionMap", status=Status.RESOURCE_EXHAUSTED)
    with pytest.raises(LaunchError):
        _launch(executor, 1, ranks=[1], world_size=2, attempt=1)
    (app,) = modal_cloud.world.apps.values()
    assert app.is_deployed
    assert [call.result for call in modal_cloud.calls()] == [None, None]


def test_lost_reply_makes_no_second_call(
    modal_cloud: FakeModal, modal_executor: MakeExecutor
) -> None:
    modal_cloud.fail("FunctionMap", times=2, after=True)
    (handle,) = _launch(modal_executor())
    assert [call.call_id for call in modal_cloud.calls()] == [handle.metadata["call"]]
    assert modal_cloud.count("FunctionMap") == 3


def test_call_whose_replies_are_all_lost_is_ended_with_its_app(
    modal_cloud: FakeModal, modal_executor: MakeExecutor
) -> None:
    modal_cloud.fail("FunctionMap", times=99, skip=1, after=True)
    with pytest.raises(LaunchError):
        _launch(modal_executor(), 2)
    assert [call.status for call in modal_cloud.calls()] == [TERMINATED] * 2


def test_app_is_stopped_only_when_nothing_is_left_in_it(
    modal_cloud: FakeModal, modal_executor: MakeExecutor
) -> None:
    executor = modal_executor()
    handles = _launch(executor, 2)
    (app,) = modal_cloud.world.apps.values()
    executor.cancel(handles[0])
    executor.collect(handles[:1])
    executor.release("run-1")
    executor.forget(handles[0])
    assert app.is_deployed
    executor.cancel(handles[1])
    modal_executor().release("run-1")
    assert app.state == STOPPED
    executor.release("run-1")  # and once more
    assert modal_cloud.count("AppStop") == 1


def test_calls_that_wait_are_hidden_only_from_who_has_no_handle_of_them(
    modal_cloud: FakeModal, modal_executor: MakeExecutor
) -> None:
    """One replica of a run that goes on is cancelled: the others must not be taken for orphans."""
    handles = _launch(modal_executor(), 3)
    executor = modal_executor(sleep=lambda seconds: None)
    with pytest.raises(LaunchError, match="3 calls wait for a machine in diloco-run-1"):
        executor.recover("run-1")
    for handle in handles:
        executor.poll(handle)
    assert executor.recover("run-1") == []
    modal_executor().release("run-1")  # by who had looked at the run before this launch
    (app,) = modal_cloud.world.apps.values()
    app.tags["diloco-deployed"] = "0"
    executor.release("run-1")  # by who could not ask for them, as Modal started them again
    assert [call.result for call in modal_cloud.calls()] == [None] * 3


def test_app_is_not_stopped_under_a_call_that_runs(
    modal_cloud: FakeModal, modal_executor: MakeExecutor
) -> None:
    modal_cloud.hold(new_calls=False)
    executor = modal_executor()
    (handle,) = _launch(executor)
    modal_cloud.until(lambda: executor.poll(handle) == "running")
    (app,) = modal_cloud.world.apps.values()
    app.tags["diloco-deployed"] = "0"
    executor.release("run-1")
    assert app.is_deployed


def test_run_can_be_started_again_after_its_app_was_stopped(
    modal_cloud: FakeModal, modal_executor: MakeExecutor
) -> None:
    executor = modal_executor()
    (handle,) = _launch(executor)
    executor.cancel(handle)
    executor.collect([handle])
    (again,) = _launch(executor, attempt=1)
    assert executor.poll(handle) == "cancelled"
    assert executor.poll(again) == "pending"
    assert [app.state for app in modal_cloud.world.apps.values()] == [
        STOPPED,
        api_pb2.APP_STATE_DEPLOYED,
    ]


def test_secret_is_in_no_request_but_its_own(
    modal_cloud: FakeModal, modal_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "canary-5f1c")
    _launch(modal_executor(), secrets=["MY_SECRET"])
    carriers = {name for name, body in modal_cloud.requests if b"canary-5f1c" in body}
    assert carriers == {"SecretGetOrCreate"}
    assert {"MY_SECRET": "canary-5f1c"} in modal_cloud.world.secrets.values()


def test_secret_is_in_no_error(
    modal_cloud: FakeModal, modal_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "canary-5f1c")
    modal_cloud.fail("SecretGetOrCreate", status=Status.INVALID_ARGUMENT, message="bad secret")
    with pytest.raises(UsageError) as caught:
        _launch(modal_executor(), secrets=["MY_SECRET"])
    chain: BaseException | None = caught.value
    while chain is not None:
        assert "canary" not in repr(chain)
        assert "canary" not in str(chain)
        chain = chain.__cause__ or chain.__context__


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "GPU": ({"gpu": "TPU-V9"}, "TPU-V9", "modal.com/docs/guide/gpu"),
    "region": ({"region": "nowhere"}, "nowhere", "region"),
    "secret": ({"modal_secrets": ["nothing"]}, "nothing", "modal secret create"),
    "environment": ({"environment": "nobody"}, "nobody", "modal environment list"),
    "function": ({"function": "my-app/replica"}, "my-app", "modal deploy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_modal_refuses_starts_nothing(
    modal_cloud: FakeModal, modal_executor: MakeExecutor, case: str
) -> None:
    settings, says, fix = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        _launch(modal_executor(**settings))
    assert says in caught.value.message
    assert fix in str(caught.value.fix)
    assert modal_cloud.calls() == []
    assert not any(app.is_deployed for app in modal_cloud.world.apps.values())


@pytest.mark.parametrize("case", ["secret", "function"])
def test_check_launch_finds_it_before_anything_is_made(
    modal_cloud: FakeModal, modal_executor: MakeExecutor, case: str
) -> None:
    settings, says, _ = REFUSED[case]
    with pytest.raises(UsageError, match=says):
        modal_executor(**settings).check_launch(1, SLEEP, {})
    assert modal_cloud.world.apps == {}
    modal_executor().check_launch(1, SLEEP, {})
    assert modal_cloud.count("AppCreate") == 0


def test_rejected_token_says_how_to_get_one(
    modal_cloud: FakeModal, modal_executor: MakeExecutor
) -> None:
    modal_cloud.expire_token()
    executor = modal_executor()
    for ask in (executor.check_launch, executor.launch_replicas):
        with pytest.raises(UsageError, match="does not know who is asking") as caught:
            ask(1, SLEEP, {})
        assert "modal token new" in str(caught.value.fix)


def test_absent_token_is_told_without_a_request(
    modal_cloud: FakeModal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MODAL_TOKEN_ID")
    monkeypatch.delenv("MODAL_TOKEN_SECRET")
    with pytest.raises(UsageError, match="Token missing"):
        ModalExecutor().launch_replicas(1, SLEEP, {})
    assert modal_cloud.requests == []


def test_image_that_cannot_be_built_fails_the_launch(
    modal_cloud: FakeModal, modal_executor: MakeExecutor
) -> None:
    modal_cloud.control.image_error = "pip: no matching distribution"
    with pytest.raises(LaunchError, match="image could not be built"):
        _launch(modal_executor())
    assert modal_cloud.calls() == []
