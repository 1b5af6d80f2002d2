"""Settings from flags, environment, file and defaults; names and durations."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from diloco_cloud.errors import ConfigError, UsageError
from diloco_cloud.run import RunSpec, new_run_id
from diloco_cloud.run.config import parse_set, read_env_file, resolve
from diloco_cloud.run.durations import format_duration, parse_duration
from diloco_cloud.run.spec_checks import RUN_ID


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_resolve_prefers_flag_to_variable_to_file_to_default(tmp_path: Path) -> None:
    file = _file(tmp_path, 'replicas = 2\nrounds = 2\nseed = 2\nname = "filed"\n')
    environ = {"DILOCO_ROUNDS": "3", "DILOCO_SEED": "3", "DILOCO_ATTEMPT": "9", "PATH": ""}
    spec = resolve({"seed": 4, "fragments": None}, environ=environ, file=file).spec
    assert (spec.replicas, spec.rounds, spec.seed, spec.fragments) == (2, 3, 4, 1)
    assert spec.run_id.startswith("filed-")


def test_resolve_merges_tables_and_adds_secrets(tmp_path: Path) -> None:
    text = 'secrets = ["A"]\n[trainer_args]\nlr = 1.0\nsteps = 5\n[env]\nX = "1"\nY = "1"\n'
    environ = {"DILOCO_TRAINER_ARGS": '{"steps": 6}', "A": "", "B": ""}
    flags = {"trainer_args": {"layers": 2}, "env": {"Y": "2"}, "secrets": ("B",)}
    spec = resolve(flags, environ=environ, file=_file(tmp_path, text)).spec
    assert spec.trainer_args == {"lr": 1.0, "steps": 6, "layers": 2}
    assert spec.env == {"X": "1", "Y": "2"}
    assert spec.secrets == ("A", "B")


def test_resolve_parses_durations(tmp_path: Path) -> None:
    file = _file(tmp_path, 'timeout = "2h"\nround_timeout = 90\njoin_timeout = "10m"\n')
    spec = resolve({}, environ={}, file=file).spec
    assert (spec.timeout, spec.round_timeout, spec.join_timeout) == (7200, 90.0, 600.0)


def test_resolve_takes_the_settings_of_fault_tolerance(tmp_path: Path) -> None:
    text = 'quorum = 2\ngrace = "30s"\nheartbeat = "1m"\noutlier_norm = "off"\nsigned = true\n'
    text += 'hang_timeout = "2h"\n'
    spec = resolve({}, environ={}, file=_file(tmp_path, text)).spec
    assert (spec.quorum, spec.grace, spec.heartbeat) == (2, 30.0, 60.0)
    assert (spec.outlier_norm, spec.signed) == (None, True)
    assert spec.hang_timeout == 7200.0
    assert spec.on(spec.backend).secret_names == ("DILOCO_RUN_KEY",)
    environ = {
        "DILOCO_GRACE": "1m",
        "DILOCO_QUORUM": "3",
        "DILOCO_MAX_RESTARTS": "0",
        "DILOCO_CHECKPOINT_INNER": "true",
        "DILOCO_OUTLIER_NORM": "4.5",
        "DILOCO_RUN_KEY": "a secret, and no setting",
    }
    spec = resolve({}, environ=environ).spec
    assert (spec.quorum, spec.grace, spec.max_restarts) == (3, 60.0, 0)
    assert (spec.checkpoint_inner, spec.outlier_norm) == (True, 4.5)
    assert resolve({}, environ={"DILOCO_OUTLIER_NORM": "off"}).spec.outlier_norm is None
    assert resolve({}, environ={"DILOCO_HANG_TIMEOUT": "off"}).spec.hang_timeout is None
    with pytest.raises(ConfigError, match=r"DILOCO_SIGNED is 'maybe'\n.*true or false"):
        resolve({}, environ={"DILOCO_SIGNED": "maybe"})


def test_resolve_puts_local_runs_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve({}, environ={}).store_uri == str(tmp_path / "runs")
    assert resolve({"store": "x"}, environ={}).store_uri == str(tmp_path / "x")
    assert resolve({"store": "s3://b/x"}, environ={}).store_uri == "s3://b/x"
    with pytest.raises(ConfigError, match="cannot reach memory://x"):
        resolve({"store": "memory://x"}, environ={})


def test_resolve_finds_the_weights_to_begin_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def begins_with(text: str) -> str | None:
        return resolve({"init_from": text}, environ={}).spec.init_from

    assert begins_with("w.safetensors") == str(tmp_path / "w.safetensors")
    assert begins_with("runs/a-1") == f"{tmp_path}/runs/a-1/result/"
    assert begins_with("s3://b/a-1/") == "s3://b/a-1/result/"
    assert resolve({}, environ={}).spec.init_from is None


@pytest.mark.usefixtures("scripted")
def test_resolve_on_other_backends_needs_a_store() -> None:
    with pytest.raises(ConfigError, match="runs on scripted need a store"):
        resolve({"backend": "scripted"}, environ={})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sync-every = 5", "unknown key: sync-every\n  Did you mean sync_every"),
        ("replica = 5", "unknown key: replica\n  Did you mean replicas"),
        ("zzz = 5", "unknown key: zzz\n  Known keys: backend"),
        ("replicas = ", "is not TOML"),
        ("replicas = 0", "replicas is 0\n  It must be at least 1"),
        ('replicas = "4"', "replicas is '4'"),
        ("backend = 4", "backend is 4\n  It must be a text"),
        ('timeout = "soon"', "'soon' is not a length of time"),
        ("trainer_args = 3", "trainer_args is 3\n  It must be a table"),
        ("[env]\nX = 1", "env.X is 1"),
        ('[env]\nHF_TOKEN = "x"', "HF_TOKEN looks like a secret"),
        ('secrets = "A"', "secrets is 'A'"),
        ('name = "My run"', "cannot be a run's name"),
        ('run_id = "X"', "'X' cannot be a run id"),
        ('trainer = "train"', "does not name a trainer"),
        ('trainer = "train.py"', "is a path"),
        (
            'trainer = "./train.py:fit"',
            "is a path, and a trainer is named by its module\n  Write t",
        ),
        ('trainer = "a/b.py:fit"', "Write a.b:fit."),
        ('trainer = "/a/b.py:fit"', "Write b:fit, and launch from /a."),
        ('replicas = "two"', "replicas is 'two'\n  It must be a whole number."),
        ("replicas = 2.5", "It must be a whole number."),
        ("seed = true", "seed is True\n  It must be a whole number."),
        ('rounds = "all"', "It must be a whole number."),
        ('outer_lr = "high"', "It must be a number."),
        ("nesterov = 1", "It must be true or false."),
        ("quorum = 5", "quorum 5 is more than the 4 replicas"),
        ("outlier_norm = 1", "It must be above 1"),
        ("outlier_norm = 0", "It must be above 1"),
        ("max_restarts = -1", "max_restarts is -1\n  It must be at least 0"),
        ('grace = "soon"', "'soon' is not a length of time"),
        ('store = "s3:/bucket"', "a slash is missing"),
        ('backend = "nimbus"', "there is no backend 'nimbus'"),  # not: needs a store
    ],
)
def test_resolve_refuses_what_cannot_work(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve({}, environ={}, file=_file(tmp_path, text))
    assert message in str(caught.value)


def test_resolve_refuses_a_variable_that_is_no_number() -> None:
    with pytest.raises(ConfigError, match="DILOCO_REPLICAS is 'four'"):
        resolve({}, environ={"DILOCO_REPLICAS": "four"})


def test_resolve_leaves_the_variables_of_others_alone() -> None:
    environ = {"DILOCO_HOME": "", "DILOCO_ATTEMPT": "1", "DILOCO_ENV": "", "DILOCO_FLAVOUR": "x"}
    assert resolve({}, environ=environ).spec.env == {}


def test_resolve_of_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        resolve({}, environ={}, file=tmp_path / "none.toml")


def test_env_that_only_resembles_a_secret_passes() -> None:
    flags = {"env": {"TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "x"}}
    assert resolve(flags, environ={}).spec.env["TOKENIZERS_PARALLELISM"] == "false"


def test_parse_set_takes_json_else_text() -> None:
    texts = ["lr=3e-4", "layers=2", "name=small", "sizes=[1, 2]", "flag=true", "eq=a=b"]
    assert parse_set(texts) == {
        "lr": 3e-4,
        "layers": 2,
        "name": "small",
        "sizes": [1, 2],
        "flag": True,
        "eq": "a=b",
    }
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_set(["oops"])


def test_read_env_file_skips_comments(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("# a comment\n\nA=1\n  B = x=y\n")
    assert read_env_file(path) == {"A": "1", "B": " x=y"}


def test_new_run_id_is_a_run_id_and_repeatable_with_a_seed() -> None:
    first = new_run_id("demo", rng=random.Random(7))
    assert first == new_run_id("demo", rng=random.Random(7))
    assert RUN_ID.fullmatch(first)
    assert re.fullmatch(r"demo-[a-z0-9]{5}", first)
    assert RUN_ID.fullmatch(new_run_id("a" * 34))


@pytest.mark.parametrize("name", ["", "Demo", "1st", "a" * 35, "a_b"])
def test_new_run_id_refuses_a_name_providers_would(name: str) -> None:
    with pytest.raises(ConfigError):
        new_run_id(name)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("30s", 30.0), ("10m", 600.0), ("2h", 7200.0), ("1d", 86_400.0), ("1.5h", 5400)],
)
def test_parse_duration_reads_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "10 minutes", "-5", "1h30m"])
def test_parse_duration_refuses_the_rest(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a length of time"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59, "59s"), (200, "3m 20s"), (7500, "2h 5m"), (100_800, "1d 4h"), (3600, "1h")],
)
def test_format_duration_uses_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_spec_tells_which_settings_of_the_trainer_were_changed() -> None:
    spec = RunSpec(run_id="a-1", rounds=3, fragments=1, replicas=2, nesterov=False)
    assert spec.changed_trainer_settings == {"rounds": 3, "nesterov": False}


def test_spec_survives_its_json() -> None:
    spec = RunSpec(run_id="a-1", trainer_args={"x": [1]}, env={"A": "b"}, secrets=("S",))
    again = RunSpec.from_json(spec.to_json())
    assert again == spec
    assert again.digest == spec.digest
    with pytest.raises(ConfigError, match="unknown settings: future"):
        RunSpec.from_json({**spec.to_json(), "future": 1})
