"""Settings of backends: from flags, variables and tables to the executor, in any process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_executor import ScriptedExecutor

from diloco_cloud import keys
from diloco_cloud.errors import ConfigError, UnknownBackendError
from diloco_cloud.executor import LaunchOptions
from diloco_cloud.run import Run, RunSpec, launch
from diloco_cloud.run.config import parse_backend_args, parse_set, resolve
from diloco_cloud.run.intents import Start, announce

MakeRun = Callable[..., Run]
STORE = {"store": "s3://bucket/runs"}


@pytest.fixture(autouse=True)
def _installed(scripted: ScriptedExecutor) -> None:
    """The scripted backend is there to be chosen."""


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_flags_belong_to_the_chosen_backend_or_to_a_named_one() -> None:
    texts = ["region=us", "local.cpu_threads=2", 'scripted.tags=["a"]', "local.state_dir=/x.y"]
    found = parse_backend_args(parse_set(texts, "--backend-arg"))
    assert found == {
        "": {"region": "us"},
        "local": {"cpu_threads": 2, "state_dir": "/x.y"},
        "scripted": {"tags": ["a"]},
    }


def test_only_table_chooses_the_backend(tmp_path: Path) -> None:
    file = _file(tmp_path, '[backend.scripted]\nregion = "us"\n')
    spec = resolve(STORE, environ={}, file=file).spec
    assert (spec.backend, spec.backend_args) == ("scripted", {"scripted": {"region": "us"}})
    other = resolve({**STORE, "backend": "local"}, environ={}, file=file).spec
    assert (other.backend, other.backend_args) == ("local", spec.backend_args)


def test_flag_beats_variable_beats_table(tmp_path: Path) -> None:
    file = _file(tmp_path, "[backend.scripted]\na = 1\nb = 1\nc = 1\n")
    environ = {"DILOCO_BACKEND_ARGS": json.dumps({"scripted": {"b": 2, "c": 2}})}
    flags = {**STORE, "backend_args": {"": {"c": 3}}}
    spec = resolve(flags, environ=environ, file=file).spec
    assert spec.backend_args == {"scripted": {"a": 1, "b": 2, "c": 3}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[backend.local]\n[backend.scripted]\n", "no backend was chosen\n  Add --backend local"),
        ("[backend.scirpted]\na = 1\n", "Did you mean 'scripted'?"),
        ("[backend]\nregion = 1\n", "backend.region is 1\n  It must be a table"),
        ('[backend.scripted]\napi_key = "x"\n', "looks like a secret"),
        ("[backend.scripted]\nsince = 2026-01-01\n", "are not JSON"),
    ],
)
def test_tables_that_cannot_work_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((ConfigError, UnknownBackendError)) as caught:
        resolve(STORE, environ={}, file=_file(tmp_path, text))
    assert message in str(caught.value)


def test_settings_reach_the_executor_of_every_process(
    make_run: MakeRun, store_uri: str, scripted: ScriptedExecutor
) -> None:
    make_run(backend_args={"scripted": {"region": "us"}})
    request = json.loads((scripted.directory / "0.0.json").read_text())["request"]
    assert request["region"] == "us"
    assert Run.open(store_uri, "run-1").executor.region == "us"  # type: ignore[attr-defined]


def test_unknown_setting_is_refused_before_anything_is_written(
    trainer: str, store_uri: str
) -> None:
    args = {"scripted": {"regoin": "us"}}
    spec = RunSpec(run_id="run-1", backend="scripted", trainer=trainer, backend_args=args)
    with pytest.raises(ConfigError, match="has no setting 'regoin'"):
        launch(spec, store_uri)
    assert not Path(store_uri).exists()


def test_what_the_backend_refuses_leaves_no_run_behind(trainer: str, store_uri: str) -> None:
    args = {"scripted": {"region": "moon"}}
    spec = RunSpec(run_id="run-1", backend="scripted", trainer=trainer, backend_args=args)
    with pytest.raises(ConfigError, match="no region moon"):
        launch(spec, store_uri)
    assert not (Path(store_uri) / "run-1" / keys.RUN).exists()


def test_cancel_ends_what_a_dead_launcher_had_not_recorded(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run()
    run.cancel([1])
    start = Start(ranks=[1], attempt=1, backend="scripted", world_size=2, by="supervisor")
    announce(run.store, start, at=0.0)
    options = LaunchOptions(name="run-1", ranks=[1], world_size=2, attempt=1)
    (handle,) = scripted.launch_replicas(1, "x", {}, options=options)  # and the launcher dies
    run.cancel([1])
    assert scripted.poll(handle) == "cancelled"
    assert run.status().replicas[0].state == "running"
