"""``supervise``, ``launch`` that supervises, ``resume`` with another size, and what they print."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import Result
from replica_writer import ReplicaWriter
from scripted_executor import ScriptedExecutor

from diloco_cloud import keys
from diloco_cloud.cli import progress
from diloco_cloud.run import Run

Call = Callable[..., Result]
MakeRun = Callable[..., Run]

KILLED = {"state": "failed", "exit_code": -9, "message": "killed by SIGKILL"}
DONE = {"state": "succeeded", "exit_code": 0}
SCRIPTED = ("launch", "--backend", "scripted", "--trainer", "toy_trainer:train", "--yes")


@pytest.fixture(autouse=True)
def _here(scripted: ScriptedExecutor, trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a fresh directory, with the scripted backend; looks follow one another at once."""
    monkeypatch.setattr(progress, "interval", lambda _run: 0.01)


def test_supervise_prints_a_line_per_event_and_the_end(
    call: Call, make_run: MakeRun, store_uri: str, scripted: ScriptedExecutor
) -> None:
    run = make_run()
    scripted.set(0, **DONE)
    scripted.set(1, **KILLED)
    scripted.decide(1, **DONE)
    result = call("supervise", run.run_id, "--store", store_uri)
    assert result.exit_code == 0
    *lines, end = result.stdout.splitlines()
    assert [line[10:] for line in lines] == [
        "replica 1 ended: exit code -9: killed by SIGKILL; restart 1 of 3 in a row",
        "replica 1 is started again, as attempt 1",
    ]
    assert end == "SUCCEEDED"


def test_supervise_json_prints_a_document_per_line(
    call: Call, make_run: MakeRun, store_uri: str, scripted: ScriptedExecutor
) -> None:
    run = make_run()
    scripted.set(0, **DONE)
    scripted.set(1, **KILLED)
    scripted.decide(1, **KILLED)
    where = (run.run_id, "--store", store_uri)
    result = call("supervise", *where, "--max-restarts", "1", "--json")
    assert result.exit_code == 100
    *events, end = map(json.loads, result.stdout.splitlines())
    assert [(one["event"], one["rank"], one["attempt"]) for one in events] == [
        ("died", 1, 0),
        ("restarted", 1, 1),
        ("given_up", 1, 1),
    ]
    assert end["state"] == "failed"
    reason = "1 restart in a row, none of which got into a round"
    assert end["replicas"][1]["given_up"] == reason
    shown = call("status", *where).stdout
    assert "1 (attempt 1)" in shown
    assert f"not started again: {reason}" in " ".join(shown.split())


def test_supervise_of_a_run_that_has_ended_tells_so(
    call: Call, make_run: MakeRun, store_uri: str, scripted: ScriptedExecutor
) -> None:
    run = make_run()
    run.cancel()
    result = call("supervise", run.run_id, "--store", store_uri)
    assert (result.exit_code, result.stdout) == (103, "CANCELLED\n")


def test_launch_attached_starts_again_what_dies(
    call: Call, store_uri: str, scripted: ScriptedExecutor
) -> None:
    scripted.decide(**DONE)
    scripted.decide(1, 0, **KILLED)
    result = call(*SCRIPTED, "--store", store_uri, "--run-id", "run-1", "--replicas", "2")
    assert (result.exit_code, result.stdout) == (0, "run-1\n")
    assert "replica 1 is started again, as attempt 1" in result.stderr
    assert scripted.launched == [(0, 0), (1, 0), (1, 1)]


def test_launch_that_may_restart_nothing_does_not(
    call: Call, store_uri: str, scripted: ScriptedExecutor
) -> None:
    scripted.decide(**KILLED)
    arguments = ("--store", store_uri, "--max-restarts", "0", "--replicas", "1")
    result = call(*SCRIPTED, *arguments)
    assert result.exit_code == 100
    assert scripted.launched == [(0, 0)]
    assert "supervise" not in call(*SCRIPTED, *arguments, "-d").stderr


def test_launch_detached_says_how_to_supervise(
    call: Call, store_uri: str, scripted: ScriptedExecutor
) -> None:
    result = call(*SCRIPTED, "--store", store_uri, "--run-id", "run-1", "-d")
    assert f"diloco-cloud supervise run-1 --store {store_uri}" in result.stderr


def test_resume_changes_the_number_of_replicas(
    call: Call, make_run: MakeRun, store_uri: str, scripted: ScriptedExecutor
) -> None:
    where = (make_run().run_id, "--store", store_uri)
    assert "Started replica 2 of run-1." in call("resume", *where, "--replicas", "3").stderr
    refused = call("resume", *where, "--replicas", "2")
    assert refused.exit_code == 2
    assert "diloco-cloud cancel run-1 --replica 2" in refused.stderr
    call("cancel", *where, "--replica", "2")
    shrunk = call("resume", *where, "--replicas", "2")
    assert "run-1 has 2 replicas now; there was none to start." in shrunk.stderr
    shown = call("status", *where).stdout
    assert "retired" in shown
    assert "0 of 2 replicas are alive." in shown
    unknown = call("resume", *where, "--replicas", "3", "--backend", "nimbus")
    assert (unknown.exit_code, "no backend 'nimbus'" in unknown.stderr) == (2, True)


def test_status_shows_who_is_averaged_and_who_was_left_out(
    call: Call, make_run: MakeRun, store_uri: str, scripted: ScriptedExecutor
) -> None:
    run = make_run(replicas=3)
    for rank in range(2):
        ReplicaWriter(run.store, rank).beat()
    commit = {
        "round": 4,
        "decision": "commit",
        "contributors": [{"rank": 0, "attempt": 0}],
        "excluded": [{"rank": 1, "attempt": 0, "reason": "has NaN or infinite values"}],
        "ledger": [{"rank": 0, "merged": 123456}],
    }
    run.store.create(keys.commit(4, 0), json.dumps(commit).encode())
    shown = call("status", run.run_id, "--store", store_uri).stdout
    assert "2 of 3 replicas are alive." in shown
    assert "In the last round, 1 of 3 replicas were averaged." in shown
    assert "Round 4 left out replica 1: has NaN or infinite values" in shown
    row = next(line for line in shown.splitlines() if line.startswith("0 "))
    assert "123,456" in row
    assert "100%" in row


def test_launch_of_a_signed_run_needs_a_key(
    call: Call, store_uri: str, scripted: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*SCRIPTED, "--store", store_uri, "--replicas", "1", "--signed", "-d", "-q")
    monkeypatch.delenv("DILOCO_RUN_KEY", raising=False)
    refused = call(*arguments)
    assert refused.exit_code == 2
    assert "DILOCO_RUN_KEY has no value here" in refused.stderr
    monkeypatch.setenv("DILOCO_RUN_KEY", "fifteen bytes !")
    refused = call(*arguments)
    assert (refused.exit_code, "shorter than 16 bytes" in refused.stderr) == (2, True)
    monkeypatch.setenv("DILOCO_RUN_KEY", "sixteen bytes !!")
    assert call(*arguments).exit_code == 0
    request = json.loads((scripted.directory / "0.0.json").read_text())["request"]
    assert request["secrets"] == ["DILOCO_RUN_KEY"]
    texts = (path.read_bytes() for path in scripted.directory.parent.rglob("*") if path.is_file())
    assert not any(b"sixteen bytes" in text for text in texts)


def test_launch_takes_the_settings_of_fault_tolerance(call: Call) -> None:
    flags = "--quorum 2 --grace 1m --heartbeat 2s --max-restarts 7 --checkpoint-inner"
    result = call(*SCRIPTED, "--store", "s", *flags.split(), "--outlier-norm", "off", "--dry-run")
    spec = json.loads(result.stdout)["spec"]
    assert (spec["quorum"], spec["grace"], spec["heartbeat"]) == (2, 60.0, 2.0)
    assert (spec["max_restarts"], spec["checkpoint_inner"]) == (7, True)
    assert spec["outlier_norm"] is None
    assert spec["join_timeout"] == 600.0
    refused = call(*SCRIPTED, "--store", "s", "--outlier-norm", "none", "--dry-run")
    assert (refused.exit_code, 'neither a number nor "off"' in refused.stderr) == (2, True)
