"""A run on Modal from launch to result, with one replica killed on the way and one preempted."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_runs import (
    CANARY,
    CANARY_NAME,
    DEADLINE_S,
    ROUNDS,
    RUN_ID,
    Terminal,
    check_result,
    in_a_round,
    launch_words,
    stored,
    until,
)
from fakes.modal_cloud import FakeModal
from modal_fixtures import modal_cloud, modal_executor, modal_server
from modal_proto import api_pb2
from servers import S3Server

from diloco_cloud.errors import LaunchError
from diloco_cloud.executors.modal import ModalExecutor
from diloco_cloud.executors.modal.app import DEPLOYED_TAG
from diloco_cloud.run import Run
from diloco_cloud.store import open_store

__all__ = ["modal_cloud", "modal_executor", "modal_server"]

TERMINATED = api_pb2.GenericResult.GENERIC_STATUS_TERMINATED
SUCCESS = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS


@pytest.mark.timeout(600)
def test_run_is_carried_from_launch_to_result(
    modal_cloud: FakeModal,
    s3_env: S3Server,
    s3_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CANARY_NAME, CANARY)
    settings = {"cpu": 0.5, "region": ["us-east"]}
    words = launch_words("modal", settings, s3_env, s3_uri, rounds=ROUNDS)
    words += ["--gpu", "H100,A100-80GB", "--quorum", "3"]
    here, elsewhere = Terminal(tmp_path), Terminal(Path("/"))

    code, preview, err = here.call(*words, "--dry-run")
    assert code == 0, err
    assert len(json.loads(preview)["provider_requests"]) == 1 + 3
    assert modal_cloud.requests == []
    code, out, err = here.call(*words)
    assert (code, out) == (0, f"{RUN_ID}\n"), err
    calls = modal_cloud.calls()
    assert calls[0].function.gpus == ["H100:1", "A100-80GB:1"]
    where = (RUN_ID, "--store", s3_uri)
    follower = elsewhere.start("logs", "-f", *where)
    supervisor = elsewhere.start("supervise", *where)
    try:
        until(lambda: in_a_round(s3_uri, [0, 1, 2]), "a round of all three")
        run = open_store(f"{s3_uri}/{RUN_ID}")
        beat = json.loads(run.get("alive/0002.json"))
        os.kill(beat["pid"], signal.SIGKILL)  # for its supervisor to start again
        modal_cloud.preempt(calls[1])  # for Modal to do so
        status = json.loads(elsewhere.call("status", *where, "--json")[1])
        assert status["state"] in ("running", "pending")

        out, err = follower.communicate(timeout=DEADLINE_S)
        assert supervisor.wait(timeout=60) == 0
    finally:
        follower.kill()
        supervisor.kill()
        supervisor.communicate()
    assert follower.returncode == 0, err
    assert elsewhere.call("wait", *where)[:2] == (0, "SUCCEEDED\n")
    for rank in range(3):
        assert f"replica/{rank} finished" in out
    check_result(s3_uri, {0: 0, 1: 1, 2: 1})
    assert [call.starts for call in modal_cloud.calls()] == [1, 2, 1, 1]
    (app,) = modal_cloud.world.apps.values()
    assert app.state == api_pb2.APP_STATE_STOPPED
    assert RUN_ID in elsewhere.call("ls", "--store", s3_uri)[1]

    _check_canary(modal_cloud, preview, out, stored(s3_uri))
    assert elsewhere.call("down", *where, "--yes")[0] == 0


def _check_canary(cloud: FakeModal, preview: str, logs: str, objects: bytes) -> None:
    """The secret went by Modal's Secrets, and no other way."""
    carriers = {name for name, body in cloud.requests if CANARY.encode() in body}
    assert carriers == {"SecretGetOrCreate"}
    assert CANARY not in preview + logs
    assert CANARY not in "".join(entry.text for entry in cloud.world.logs)
    assert CANARY.encode() not in objects


def test_cancel_finds_what_a_killed_launcher_could_not_record(
    modal_cloud: FakeModal,
    s3_env: S3Server,
    s3_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher dies when Modal has made the third of its four calls, and nobody knows."""
    monkeypatch.setenv(CANARY_NAME, CANARY)
    here = Terminal(tmp_path)
    _kill_launcher_after_third_call(modal_cloud, here, s3_env, s3_uri)
    code, out, err = here.call("cancel", RUN_ID, "--store", s3_uri)
    assert code == 0, out + err
    until(lambda: all(call.result is not None for call in modal_cloud.calls()), "the end of all")
    # A replica that comes up meanwhile sees by itself that it was cancelled, and its call returns.
    assert {call.status for call in modal_cloud.calls()} <= {TERMINATED, SUCCESS}
    assert Run.open(s3_uri, RUN_ID).status().state == "cancelled"


def test_call_of_a_killed_launcher_that_waits_for_a_machine_is_not_passed_over(
    modal_cloud: FakeModal,
    modal_executor: Callable[..., ModalExecutor],
    s3_env: S3Server,
    s3_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody can find the third call by its id: `cancel` says so, and the App's end is its own."""
    monkeypatch.setenv(CANARY_NAME, CANARY)
    modal_cloud.hold(new_calls=True)
    _kill_launcher_after_third_call(modal_cloud, Terminal(tmp_path), s3_env, s3_uri)
    executor = modal_executor(cpu=0.5, sleep=lambda seconds: None)
    run = Run.open(s3_uri, RUN_ID, executor=executor)
    with pytest.raises(LaunchError, match="1 call waits for a machine") as caught:
        run.cancel()
    (app,) = modal_cloud.world.apps.values()
    assert f"modal app stop {app.name}" in str(caught.value.fix)
    assert [call.status for call in modal_cloud.calls()] == [TERMINATED, TERMINATED, 0]
    assert run.status().is_terminal
    assert app.is_deployed  # a launch of a moment ago might have made the call
    app.tags[DEPLOYED_TAG] = str(int(app.tags[DEPLOYED_TAG]) - 600)
    run.status()
    assert app.state == api_pb2.APP_STATE_STOPPED
    assert {call.status for call in modal_cloud.calls()} == {TERMINATED}


def _kill_launcher_after_third_call(
    cloud: FakeModal, here: Terminal, server: S3Server, store: str
) -> None:
    words = launch_words("modal", {"cpu": 0.5}, server, store, rounds=1000)
    words[words.index("3")] = "4"
    launcher = here.start(*words)
    cloud.stall("FunctionMap", skip=2)
    try:
        until(lambda: len(cloud.calls()) == 3, "the third call")
        recorded = open_store(f"{store}/{RUN_ID}/replicas")
        until(lambda: len(_handles(recorded.list(""))) == 2, "two handles")
    finally:
        launcher.kill()
        launcher.communicate()
    cloud.servicer.faults.clear()


def _handles(found: object) -> list[str]:
    keys = [info.key for info in found]  # type: ignore[attr-defined]
    return [key for key in keys if key.endswith("0000.json")]
