"""A run on several backends, as the command line takes and shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from scripted_executor import ElsewhereExecutor, ScriptedExecutor

Call = Callable[..., Result]

TRAINER = ("--trainer", "toy_trainer:train", "--run-id", "run-1")
FLEET = ("launch", "--replicas", "scripted=2,elsewhere=1", *TRAINER)


@pytest.fixture
def store_uri(tmp_path: Path) -> str:
    """A directory that all backends mount, as its URI says."""
    return (tmp_path / "store").as_uri()


@pytest.fixture(autouse=True)
def elsewhere(scripted: ScriptedExecutor, trainer: str) -> ElsewhereExecutor:
    """The other backend; every test launches from a fresh directory."""
    return ElsewhereExecutor()


def test_launch_asks_about_every_side(call: Call, store_uri: str) -> None:
    result = call(*FLEET, "--store", store_uri)
    assert result.exit_code == 2
    assert "Launch 3 replicas on scripted (2) and elsewhere (1)? Nobody is there" in result.stderr
    assert not Path(store_uri.removeprefix("file://")).exists()


def test_dry_run_shows_each_side_under_its_backends_name(call: Call, store_uri: str) -> None:
    words = ("--gpu", "elsewhere=T4", "--env", "scripted:A=1", "--reducers", "1", "--dry-run")
    result = call(*FLEET, "--store", store_uri, *words)
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    ours, theirs = plan["sides"].values()
    assert list(plan["sides"]) == ["scripted", "elsewhere"]
    assert [ours["request"]["options"]["ranks"], theirs["request"]["options"]["ranks"]] == [
        [0, 1],
        [2],
    ]
    assert (ours["request"]["gpu"], theirs["request"]["gpu"]) == (None, "T4")
    assert (ours["request"]["options"]["env"], theirs["request"]["options"]["env"]) == (
        {"A": "1"},
        {},
    )
    assert [len(ours["provider_requests"]), len(theirs["provider_requests"])] == [2, 1]
    assert "reducers_request" in ours
    assert "request" not in plan


def test_status_ls_and_resume_know_the_sides(
    call: Call, store_uri: str, scripted: ScriptedExecutor, elsewhere: ElsewhereExecutor
) -> None:
    result = call(*FLEET, "--store", store_uri, "-d", "-y")
    assert "3 replicas are launched on scripted (2) and elsewhere (1)." in result.stderr
    status = call("status", "run-1", "--store", store_uri)
    assert [word in status.stdout for word in ("backend", "scripted", "elsewhere")] == [True] * 3
    assert "scripted+elsewhere" in call("ls", "--store", store_uri).stdout
    (listed,) = json.loads(call("ls", "--store", store_uri, "--json").stdout)
    assert listed["backends"] == ["scripted", "elsewhere"]
    assert [view["backend"] for view in listed["replicas"]] == ["scripted", "scripted", "elsewhere"]
    scripted.set(1, state="failed", exit_code=1)
    grown = ("resume", "run-1", "--store", store_uri, "--replicas", "scripted=1,elsewhere=3")
    assert "Started replicas 1, 3 of run-1." in call(*grown).stderr
    assert (1, 1) in elsewhere.launched


def test_launch_notes_settings_of_a_backend_that_has_no_replica(call: Call, store_uri: str) -> None:
    words = ("--backend", "scripted", "--gpu", "elsewhere=T4", "--dry-run", "--store", store_uri)
    result = call("launch", *TRAINER, *words)
    assert "Note: no replica is on elsewhere: only `resume` can use its settings." in result.stderr
    assert json.loads(result.stdout)["request"]["gpu"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--replicas", "scripted=2,"), "Write a number, or BACKEND=NUMBER"),
        (("--replicas", "scripted=0,elsewhere=1"), "replicas on scripted is 0"),
        (("--replicas", "scripted=1,scripted=1"), "replicas names scripted twice"),
        (("--replicas", "scripted=1,elswhere=1"), "Did you mean 'elsewhere'?"),
        (("--backend", "local"), "the backend local was chosen, and the replicas are on scripted"),
        (("--secret", "elsewhere:KEY=NOT_SET_HERE"), "elsewhere: the variable given after KEY="),
        (("--store", "some/where"), "cannot meet in"),
        (("--backend-arg", "region=us"), "Write --backend-arg scripted.region="),
        (("--backend-arg", "elsewhere.region=moon"), "elsewhere: there is no region moon"),
    ],
)
def test_launch_refuses_a_fleet_before_anything_is_written(
    call: Call,
    store_uri: str,
    scripted: ScriptedExecutor,
    elsewhere: ElsewhereExecutor,
    words: tuple[str, ...],
    message: str,
) -> None:
    result = call(*FLEET, "--store", store_uri, "-d", "-y", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert (scripted.launched, elsewhere.launched) == ([], [])
    assert not list(Path(store_uri.removeprefix("file://")).glob("run-1/*"))


def test_export_refuses_a_fleet(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('store = "s3://b/r"\nreplicas = { scripted = 1, elsewhere = 1 }\n')
    words = ("export", str(file), "--to", "kubernetes", "--image", "i", "--dry-run")
    result = call(*words)
    assert result.exit_code == 2
    assert "kubernetes starts all replicas of a run, and these are on several" in result.stderr
    assert call(*words, "--replicas", "2").exit_code == 0
