"""``launch``: what it prints where, how it ends, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from scripted_executor import ScriptedExecutor

Call = Callable[..., Result]

SCRIPTED = ("launch", "--backend", "scripted", "--trainer", "toy_trainer:train", "--yes")


@pytest.fixture(autouse=True)
def _here(scripted: ScriptedExecutor, trainer: str) -> None:
    """Every test launches from a fresh directory, with the scripted backend installed."""


def test_launch_detached_prints_the_id_and_what_to_type_next(call: Call, store_uri: str) -> None:
    result = call(*SCRIPTED, "--store", store_uri, "--name", "demo", "-d")
    assert result.exit_code == 0
    run_id = result.stdout.strip()
    assert re.fullmatch(r"demo-[a-z0-9]{5}", run_id)
    for command in ("logs -f", "status", "cancel"):
        assert f"diloco-cloud {command} {run_id} --store {store_uri}" in result.stderr


def test_launch_quiet_prints_the_id_only(call: Call, store_uri: str) -> None:
    result = call(*SCRIPTED, "--store", store_uri, "--run-id", "run-1", "-d", "-q")
    assert (result.stdout, result.stderr) == ("run-1\n", "")


def test_launch_json_prints_one_document(call: Call, store_uri: str) -> None:
    result = call(*SCRIPTED, "--store", store_uri, "--run-id", "run-1", "-d", "--json")
    values = json.loads(result.stdout)
    assert (values["run_id"], values["state"]) == ("run-1", "running")
    assert values["store"] == Path(store_uri).as_uri()


@pytest.mark.parametrize(
    ("fate", "exit_code"),
    [
        ({"state": "succeeded", "exit_code": 0}, 0),
        ({"state": "failed", "exit_code": 9, "reason": "exit_code", "output": "last line"}, 100),
        ({"state": "cancelled", "reason": "cancelled"}, 103),
    ],
)
def test_launch_attached_ends_with_the_runs_exit_code(
    call: Call,
    store_uri: str,
    scripted: ScriptedExecutor,
    fate: dict[str, object],
    exit_code: int,
) -> None:
    scripted.decide(**fate)
    result = call(*SCRIPTED, "--store", store_uri, "--run-id", "run-1")
    assert result.exit_code == exit_code
    assert result.stdout == "run-1\n"
    assert str(fate["state"]).upper() in result.stderr
    assert ("last line" in result.stderr) == (exit_code == 100)


def test_launch_takes_settings_from_file_and_flags(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'backend = "scripted"\ntrainer = "toy_trainer:train"\nstore = "{tmp_path}/s"\n'
        'replicas = 3\ntimeout = "2h"\n[trainer_args]\nsteps = 4\n'
    )
    flags = ("--replicas", "2", "--set", "lr=0.5", "--env", "A=b=c", "--dry-run")
    result = call("launch", str(file), *flags)
    spec = json.loads(result.stdout)["spec"]
    assert (spec["replicas"], spec["timeout"]) == (2, 7200)
    assert spec["trainer_args"] == {"steps": 4, "lr": 0.5}
    assert spec["env"] == {"A": "b=c"}


def test_launch_dry_run_prints_the_request_and_writes_nothing(
    call: Call, store_uri: str, scripted: ScriptedExecutor
) -> None:
    result = call(*SCRIPTED, "--store", store_uri, "--run-id", "run-1", "--dry-run")
    values = json.loads(result.stdout)
    assert values["request"]["entrypoint"] == "diloco_cloud.replica_entrypoint"
    assert values["request"]["entrypoint_args"] == {
        "rendezvous_uri": f"{store_uri}/run-1",
        "spec_hash": values["hash"],
    }
    assert not Path(store_uri).exists()
    assert list(scripted.directory.iterdir()) == []


def test_launch_dry_run_warns_of_a_gpu_that_changes_nothing(call: Call) -> None:
    result = call("launch", "--gpu", "H100", "--dry-run")
    assert "gpu H100 has no effect" in result.stderr
    assert json.loads(result.stdout)["spec"]["gpu"] == "H100"


def test_launch_on_an_absent_backend_asks_nothing_else(call: Call) -> None:
    result = call("launch", "--backend", "nimbus")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: there is no backend 'nimbus'\n  Installed: ")
    assert "Did you mean" not in result.stderr


def test_launch_counts_one_replica(call: Call, store_uri: str) -> None:
    result = call(*SCRIPTED, "--store", store_uri, "--replicas", "1", "-d")
    assert "1 replica is launched on scripted." in result.stderr


def test_launch_on_a_backend_that_bills_asks_first(call: Call, store_uri: str) -> None:
    result = call(*SCRIPTED[:-1], "--store", store_uri)
    assert result.exit_code == 2
    assert (
        "Launch 4 replicas on scripted? Nobody is there to answer.\n  Add --yes." in result.stderr
    )
    assert not Path(store_uri).exists()


BAD_INPUT = {
    "no replicas": (("--replicas", "0"), "replicas is 0\n  It must be at least 1."),
    "not a number": (("--replicas", "x"), "Invalid value for '--replicas'"),
    "unknown backend": (("--backend", "scriptd"), "Did you mean 'scripted'?"),
    "no effect": (("--fragments", "5"), "fragments is 5, which would have no effect"),
    "a path": (("--trainer", "toy_trainer.py:train"), "Write toy_trainer:train."),
    "one slash": (("--store", "s3:/bucket"), "Write s3://bucket"),
    "no such file": (("none.toml",), "cannot read none.toml"),
    "bad key": (("bad.toml",), "unknown key: replica\n  Did you mean replicas?"),
    "no such module": (("--trainer", "nope:train"), "there is no module 'nope'"),
    "no such function": (("--trainer", "toy_trainer:trian"), "Did you mean toy_trainer:train?"),
    "no such argument": (("--set", "step=1"), "Did you mean 'steps'?"),
    "not JSON": (("--trainer-args", "steps=1"), "--trainer-args is not JSON"),
    "not an object": (("--trainer-args", "[1]"), "--trainer-args is not a JSON object"),
    "not an assignment": (("--env", "HF_TOKEN"), "Write KEY=VALUE."),
    "secret in env": (("--env", "HF_TOKEN=x"), "Pass it with --secret HF_TOKEN."),
    "secret without value": (("--secret", "UNSET_TOKEN"), "UNSET_TOKEN is not set in this"),
    "bad duration": (("--timeout", "soon"), "'soon' is not a length of time"),
    "bad name": (("--name", "My Run"), "cannot be a run's name"),
    "unknown option": (("--replica", "4"), "No such option"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_launch_refuses_bad_input_before_anything_is_written(
    call: Call, store_uri: str, scripted: ScriptedExecutor, case: str
) -> None:
    Path("bad.toml").write_text("replica = 4\n")
    arguments, message = BAD_INPUT[case]
    result = call(*SCRIPTED, "--store", store_uri, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not Path(store_uri).exists()
    assert list(scripted.directory.iterdir()) == []


def test_launch_with_a_taken_id_is_refused(call: Call, store_uri: str) -> None:
    arguments = (*SCRIPTED, "--store", store_uri, "--run-id", "run-1", "-d")
    assert call(*arguments).exit_code == 0
    result = call(*arguments)
    assert result.exit_code == 2
    assert "the run id 'run-1' is taken" in result.stderr


@pytest.mark.parametrize(
    ("store", "message"),
    [("/proc/nowhere", "/proc/nowhere"), ("nope://bucket/x", "nope"), ("occupied", "occupied")],
)
def test_launch_into_a_store_that_cannot_be_written(
    call: Call, scripted: ScriptedExecutor, store: str, message: str
) -> None:
    Path("occupied").write_text("a file where a directory should be")
    result = call(*SCRIPTED, "--store", store, "-d")
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert list(scripted.directory.iterdir()) == []


def test_launch_that_the_backend_refuses_exits_1(
    call: Call, store_uri: str, scripted: ScriptedExecutor
) -> None:
    (scripted.directory / "refuse.1").touch()
    result = call(*SCRIPTED, "--store", store_uri, "--run-id", "run-1", "-d")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: run-1 was not launched: backend 'scripted' failed to start the replicas: "
        "out of capacity\n"
        "  What had been started on scripted was cancelled. Nothing of run-1 is left.\n"
    )
    assert call("ls", "--store", store_uri, "-q").stdout == ""


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("nope://bucket/x", "no store knows the scheme nope://"),
        ("faults+nope://bucket/x?seed=1", "no store knows the scheme nope://"),
        ("s3://bucket/x?key=1", "carries credentials or a query"),
        ("hf://datasets/me/data", "cannot be a store"),
    ],
)
def test_dry_run_and_launch_refuse_a_store_alike(call: Call, store: str, message: str) -> None:
    for last in ("--dry-run", "-d"):
        result = call(*SCRIPTED, "--store", store, last)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    arguments = ("--to", "kubernetes", "--image", "i", "--trainer", "toy_trainer:train")
    result = call("export", *arguments, "--store", store, "--dry-run")
    assert (result.exit_code, message in result.stderr) == (2, True)
