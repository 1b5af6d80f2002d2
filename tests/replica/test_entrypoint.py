"""The replica's program, in this process: what it is told, and what it leaves in the prefix."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from replica_process import ReplicaProcess, python_path

from diloco_cloud import keys, replica_entrypoint
from diloco_cloud.errors import ConfigError
from diloco_cloud.replica_entrypoint import main
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.store import open_store

HERE = "trainers_for_tests"

Launch = Callable[..., str]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.syspath_prepend(str(request.path.parent))
    monkeypatch.setenv("REPLICA_RANK", "0")
    monkeypatch.delenv("DILOCO_ATTEMPT", raising=False)
    monkeypatch.setenv("DILOCO_RENDEZVOUS_URI", "")  # main() sets it; this takes that back


@pytest.fixture
def uri() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def launched(uri: str) -> Launch:
    """Write a run's spec as a launcher does, and return its hash."""

    def write(function: str, **settings: Any) -> str:
        settings = {"replicas": 1, "trainer_args": {}} | settings
        spec = RunSpec(run_id="run", trainer=f"{HERE}:{function}", **settings)
        record = {"hash": spec.digest, "spec": spec.to_json()}
        open_store(uri).create(keys.RUN, json.dumps(record).encode())
        return spec.digest

    return write


def read(uri: str, key: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(open_store(uri).get(key))
    return values


def logged(uri: str) -> list[dict[str, Any]]:
    store = open_store(uri)
    chunks = [store.get(info.key).decode() for info in store.list("logs/0000.0000/")]
    return [json.loads(line) for line in "".join(chunks).splitlines()]


def test_main_calls_the_trainer_and_returns_its_result(uri: str) -> None:
    assert main(uri, 2, HERE, "echo", {"lr": 0.1}) == {
        "rank": 0,
        "world_size": 2,
        "step": 0,
        "lr": 0.1,
    }


def test_main_without_a_rank_is_a_runtime_error(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPLICA_RANK")
    with pytest.raises(RuntimeError, match="REPLICA_RANK"):
        main(uri, 2, HERE, "echo")


def test_main_with_a_rank_outside_the_world_is_a_value_error(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICA_RANK", "2")
    with pytest.raises(ValueError, match=r"outside \[0, 2\)"):
        main(uri, 2, HERE, "echo")


def test_main_needs_a_spec_or_a_trainer(uri: str) -> None:
    with pytest.raises(ConfigError, match="spec hash, or a world size and a trainer"):
        main(uri)


def test_trainer_learns_the_rendezvous_from_the_environment(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_RENDEZVOUS_URI", "stale")
    main(uri, 1, HERE, "echo")
    assert replica_entrypoint.os.environ["DILOCO_RENDEZVOUS_URI"] == uri


def test_launched_replica_reads_everything_from_the_spec(uri: str, launched: Launch) -> None:
    digest = launched("narrow", sync_every=30, trainer_args={"own": "x"})
    assert main(uri, spec_hash=digest) == [0, 1, 30, "x"]


def test_trainer_args_win_over_the_settings_of_the_run(uri: str, launched: Launch) -> None:
    digest = launched("echo", sync_every=30, trainer_args={"sync_every": 7})
    assert main(uri, spec_hash=digest)["sync_every"] == 7


def test_another_spec_than_the_launched_one_is_refused(uri: str, launched: Launch) -> None:
    launched("echo")
    with pytest.raises(ConfigError, match="not the one this replica was launched for"):
        main(uri, spec_hash="0" * 32)
    with pytest.raises(ConfigError, match="holds no run"):
        main(uri + "/elsewhere", spec_hash="0" * 32)


def test_success_is_recorded_with_the_result(uri: str, launched: Launch) -> None:
    main(uri, spec_hash=launched("average"))
    outcome = read(uri, keys.outcome(0, 0))
    assert (outcome["state"], outcome["exit_code"], outcome["result"]) == ("succeeded", 0, 0.0)
    assert outcome["error"] is None
    beat = read(uri, keys.alive(0))
    assert (beat["state"], beat["round"], beat["tokens"]) == ("succeeded", 1, 5)
    assert "torch" in beat["versions"]
    figures = read(uri, keys.metrics(0, 0, 0))
    assert (figures["participants"], figures["accuracy"], figures["loss"]) == (1, 0.25, 0.5)
    assert figures["bytes_sent"] > 0
    assert figures["seconds_blocked"] > 0


def test_failure_is_recorded_and_raised(uri: str, launched: Launch) -> None:
    with pytest.raises(ValueError, match="exploded"):
        main(uri, spec_hash=launched("crash"))
    outcome = read(uri, keys.outcome(0, 0))
    assert (outcome["state"], outcome["exit_code"]) == ("failed", 1)
    assert outcome["error"] == "ValueError: the model exploded"
    assert "trainers_for_tests.py" in outcome["traceback"]


@pytest.mark.parametrize(
    ("function", "reason", "restartable"),
    [("crash", "exit_code", False), ("exhausted", "out_of_memory", False), ("cut_off", None, True)],
)
def test_failure_says_whether_another_life_may_help(
    uri: str, launched: Launch, function: str, reason: str | None, restartable: bool
) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011
        main(uri, spec_hash=launched(function))
    outcome = read(uri, keys.outcome(0, 0))
    assert outcome["reason"] == (reason or "exit_code")
    assert outcome["restartable"] is restartable


def test_usage_error_of_a_trainer_is_logged_without_a_traceback(uri: str, launched: Launch) -> None:
    with pytest.raises(ConfigError):
        main(uri, spec_hash=launched("misused"))
    assert "in misused" in read(uri, keys.outcome(0, 0))["traceback"]
    (line,) = (line for line in logged(uri) if line["level"] == "ERROR")
    assert line["message"] == "failed: no data there\n  Name another folder."
    assert "traceback" not in line


@pytest.mark.parametrize("code", [None, 0])
def test_trainer_that_exits_with_0_has_succeeded(
    uri: str, launched: Launch, code: int | None
) -> None:
    assert main(uri, spec_hash=launched("leave", trainer_args={"code": code})) is None
    outcome = read(uri, keys.outcome(0, 0))
    assert (outcome["state"], outcome["exit_code"], outcome["error"]) == ("succeeded", 0, None)
    assert read(uri, keys.alive(0))["state"] == "succeeded"


@pytest.mark.parametrize(
    ("code", "exit_code", "error"),
    [(3, 3, "SystemExit: 3"), (-1, 255, "SystemExit: -1"), ("no data", 1, "SystemExit: no data")],
)
def test_trainer_that_exits_otherwise_has_failed(
    uri: str, launched: Launch, code: int | str, exit_code: int, error: str
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(uri, spec_hash=launched("leave", trainer_args={"code": code}))
    assert raised.value.code == code
    outcome = read(uri, keys.outcome(0, 0))
    assert (outcome["state"], outcome["exit_code"]) == ("failed", exit_code)
    assert outcome["error"] == error


def test_result_that_json_cannot_hold_is_still_a_success(uri: str, launched: Launch) -> None:
    main(uri, spec_hash=launched("odd_result"))
    outcome = read(uri, keys.outcome(0, 0))
    assert (outcome["state"], outcome["result"]) == ("succeeded", "<Unspeakable>")


def test_attempts_leave_records_of_their_own(
    uri: str, launched: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = launched("echo")
    main(uri, spec_hash=digest)
    monkeypatch.setenv("DILOCO_ATTEMPT", "1")
    main(uri, spec_hash=digest)
    assert read(uri, keys.outcome(0, 0))["attempt"] == 0
    assert read(uri, keys.outcome(0, 1))["attempt"] == 1


@pytest.mark.filterwarnings("default:careful")
def test_everything_said_becomes_json_lines_in_the_prefix(
    uri: str, launched: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, level = sys.stdout, logging.getLogger().level
    main(uri, spec_hash=launched("talk"))
    assert sys.stdout is out
    assert logging.getLogger().level == level
    lines = logged(uri)
    said = {(line["logger"], line["level"]): line["message"] for line in lines}
    assert said["stdout", "INFO"] == "printed"
    assert said["mine", "INFO"] == "logged line"
    assert "careful" in said["py.warnings", "WARNING"]
    assert all(line["rank"] == 0 and line["ts"] > 0 for line in lines)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines


def test_manager_averages_between_two_entrypoints(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trainers_for_tests

    from diloco_cloud.replica.identity import Identity
    from diloco_cloud.replica.trainer import run_trainer

    def run(rank: int) -> Any:
        manager = replica_entrypoint._manager(uri, Identity(rank, 0), 2)
        return run_trainer(trainers_for_tests.average, manager, rank, 2, {})

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [0.5, 0.5]


def test_signed_run_needs_its_key_at_once(
    uri: str, launched: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DILOCO_RUN_KEY", raising=False)
    with pytest.raises(ConfigError, match="DILOCO_RUN_KEY is not set"):
        main(uri, spec_hash=launched("echo", signed=True))
    outcome = read(uri, keys.outcome(0, 0))
    assert (outcome["state"], outcome["restartable"]) == ("failed", False)
    assert not open_store(uri).list(keys.ROUNDS)


def test_key_is_read_once_and_appears_nowhere(
    uri: str, launched: Launch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DILOCO_RUN_KEY", "very-secret")
    seen = main(uri, spec_hash=launched("environment", signed=True))
    assert "REPLICA_RANK" in seen
    assert "DILOCO_RUN_KEY" not in seen
    store = open_store(uri)
    everything = b"".join(store.get(info.key) for info in store.list(""))
    assert b"very-secret" not in everything
    assert "very-secret" not in "".join(capfd.readouterr())


def test_heartbeat_follows_the_spec(uri: str, launched: Launch) -> None:
    main(uri, spec_hash=launched("wait_for_beats", heartbeat=0.05, trainer_args={"beats": 4}))


def test_command_line_parses_what_executors_send() -> None:
    flags = ["--rendezvous", "s3://b/run", "--world-size", "4", "--trainer-module", "a.b"]
    flags += ["--trainer-fn", "fit", "--trainer-kwargs-json", '{"lr": 1}']
    args = replica_entrypoint._parser().parse_args(flags)
    assert (args.rendezvous_uri, args.world_size, args.trainer_fn) == ("s3://b/run", 4, "fit")
    assert (args.trainer_module, args.trainer_kwargs_json) == ("a.b", {"lr": 1})


def command(tmp_path: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "diloco_cloud.replica_entrypoint", *flags],
        env={**os.environ, "PYTHONPATH": python_path(), **environ},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_command_trains_and_exits_0(tmp_path: Path) -> None:
    flags = ["--rendezvous-uri", str(tmp_path / "run"), "--world-size", "1"]
    done = command(tmp_path, *flags, "--trainer-module", HERE, "--trainer-fn", "average")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run/rounds/00000000.0/commit").exists()


@pytest.mark.parametrize(
    ("flags", "environ", "code", "message"),
    [
        ([], {}, 2, "DILOCO_RENDEZVOUS_URI is needed"),
        (["--rendezvous-uri", "x"], {}, 1, "Pass --spec-hash, or --world-size"),
        (["--rendezvous-uri", "x", "--spec-hash", "0"], {}, 1, "holds no run"),
        (
            ["--rendezvous-uri", "x", "--world-size", "2", "--trainer-module", "m"],
            {"REPLICA_RANK": "2"},
            1,
            "outside [0, 2)",
        ),
    ],
)
def test_command_reports_mistakes_without_a_traceback(
    tmp_path: Path, flags: list[str], environ: dict[str, str], code: int, message: str
) -> None:
    done = command(tmp_path, *flags, **environ)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("function", "args", "code", "message"),
    [
        ("crash", {}, 1, "the model exploded"),
        ("misused", {}, 1, "no data there"),
        ("leave", {"code": "no such data"}, 1, "no such data"),
        ("leave", {"code": 3}, 3, "SystemExit: 3"),
    ],
)
def test_command_of_a_launched_replica_says_once_why_it_failed(
    tmp_path: Path, function: str, args: dict[str, Any], code: int, message: str
) -> None:
    replica = ReplicaProcess(tmp_path, function, trainer_args=args, stdout=subprocess.PIPE)
    try:
        out, err = replica.process.communicate(timeout=120)
    finally:
        replica.close()
    assert (replica.process.returncode, err) == (code, "")
    lines = [json.loads(line) for line in out.splitlines()]
    (line,) = (line for line in lines if line["level"] == "ERROR")
    assert message in line["message"] + line.get("traceback", "")
