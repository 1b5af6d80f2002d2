"""A fleet: what is on which backend, from flags, variables and tables to the spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_executor import ScriptedExecutor

from diloco_cloud.errors import ConfigError, UsageError
from diloco_cloud.run import RunSpec, Side, launch
from diloco_cloud.run.by_backend import parse_replicas
from diloco_cloud.run.config import resolve

STORE = {"store": "s3://bucket/runs"}
FLEET = {**STORE, "replicas": {"scripted": 2, "local": 3}}


@pytest.fixture(autouse=True)
def _installed(scripted: ScriptedExecutor) -> None:
    """The scripted backend is there to be chosen."""


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


# -- the spec --------------------------------------------------------------------------------------


def test_ranks_are_handed_out_in_the_fleets_order() -> None:
    spec = RunSpec(run_id="a-1", fleet=[Side("modal", 2), Side("hf-jobs", 1), Side("ray")])
    assert (spec.replicas, spec.backend) == (3, "modal")
    assert spec.ranks_by_backend == {"modal": range(2), "hf-jobs": range(2, 3)}
    assert [spec.backend_of(rank) for rank in range(4)] == ["modal", "modal", "hf-jobs", "modal"]
    chosen = RunSpec(run_id="a-1", backend="hf-jobs", fleet=spec.fleet)
    assert (chosen.backend, chosen.backend_of(0), chosen.backend_of(9)) == (
        "hf-jobs",
        "modal",
        "hf-jobs",
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 4}, "replicas is 4, and the fleet has 3"),  # the default, and yet given
        ({"backend": "local"}, "the backend local was chosen, and the replicas are on modal"),
    ],
)
def test_spec_that_contradicts_its_fleet_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunSpec(run_id="a-1", fleet=[Side("modal", 3)], **settings)


def test_launch_takes_no_variable_that_looks_like_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        launch(RunSpec(run_id="a-1", env={"HF_TOKEN": "hf_x"}), tmp_path / "store")
    assert "HF_TOKEN looks like a secret" in caught.value.message
    fleet = [Side("modal", 1, env={"S3_SECRET": "x"})]
    with pytest.raises(ConfigError) as caught:
        launch(RunSpec(run_id="a-1", fleet=fleet), tmp_path / "store")
    assert not (tmp_path / "store").exists()
    assert caught.value.fix == "Pass it with --secret modal:S3_SECRET."


def test_spec_without_a_fleet_is_what_it_was_before_there_were_any() -> None:
    spec = RunSpec(run_id="a-1", backend="modal", replicas=3, gpu="A100")
    assert "fleet" not in spec.to_json()
    assert spec.ranks_by_backend == {"modal": range(3)}
    assert (spec.on("modal").gpu, spec.on("ray").gpu) == ("A100", "A100")


def test_fleet_survives_its_json_with_its_order() -> None:
    fleet = [Side("slurm", 1, "a100:1", {"A": "b"}, ("S=T",)), Side("modal", 2)]
    spec = RunSpec(run_id="a-1", fleet=fleet)
    stored = json.loads(json.dumps(spec.to_json(), sort_keys=True))
    again = RunSpec.from_json(stored)
    assert (again, again.digest) == (spec, spec.digest)
    assert list(again.ranks_by_backend) == ["slurm", "modal"]
    stored["fleet"][0]["colour"] = "red"
    with pytest.raises(ConfigError, match="unknown settings: colour"):
        RunSpec.from_json(stored)


def test_side_replaces_what_is_everybodys_by_name() -> None:
    spec = RunSpec(
        run_id="a-1",
        fleet=[Side("modal", 1, env={"X": "m", "S": "plain"}, secrets=("T=MODAL_T", "Y"))],
        gpu="T4",
        env={"X": "all", "Y": "all", "Z": "all"},
        secrets=("S", "T", "U"),
        signed=True,
    )
    side = spec.on("modal")
    assert (side.gpu, side.env) == ("T4", {"X": "m", "S": "plain", "Z": "all"})
    assert side.secrets == ("U", "T=MODAL_T", "Y", "DILOCO_RUN_KEY")
    assert spec.on("ray").secrets == ("S", "T", "U", "DILOCO_RUN_KEY")
    keyed = RunSpec(run_id="a-1", secrets=("DILOCO_RUN_KEY=OUR_KEY",), signed=True)
    assert keyed.on("local").secrets == ("DILOCO_RUN_KEY=OUR_KEY",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fleet": [Side("modal", 1), Side("modal", 2)]}, "the fleet has modal twice"),
        ({"fleet": [Side("modal", 2)], "replicas": 3}, "replicas is 3, and the fleet has 2"),
        ({"fleet": [Side("ray", 2)], "backend": "modal"}, "the replicas are on ray"),
        ({"fleet": [Side("ray", 2)], "quorum": 3}, "quorum 3 is more than the 2 replicas"),
        ({"secrets": ("hf_the-token-itself",)}, "is no name of a variable"),
    ],
)
def test_spec_refuses_a_fleet_that_contradicts_itself(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        RunSpec(run_id="a-1", **settings)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "the-token" not in str(caught.value)


@pytest.mark.parametrize("replicas", [-1, 1.5, True, "2"])
def test_side_refuses_what_is_no_number_of_replicas(replicas: object) -> None:
    with pytest.raises(ConfigError, match="replicas on modal"):
        Side("modal", replicas)  # type: ignore[arg-type]


# -- words -----------------------------------------------------------------------------------------


def test_parse_replicas_takes_a_number_or_numbers_by_backend() -> None:
    assert parse_replicas("4") == 4
    assert list(parse_replicas("modal=2, hf-jobs=3").items()) == [("modal", 2), ("hf-jobs", 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "replicas is 'x'\n  Write a number, or BACKEND=NUMBER"),
        ("modal=", "Write a number, or BACKEND=NUMBER"),
        ("=2", "Write a number, or BACKEND=NUMBER"),
        ("modal=2,3", "Write a number, or BACKEND=NUMBER"),
        ("modal=2,hf-jobs", "Write a number, or BACKEND=NUMBER"),
        ("2,modal=2", "Write a number, or BACKEND=NUMBER"),
        ("modal=two", "Write a number, or BACKEND=NUMBER"),
        ("modal=0", "replicas on modal is 0\n  It must be at least 1"),
        ("modal=2,hf-jobs=-1", "replicas on hf-jobs is -1"),
        ("modal=2,modal=2", "replicas names modal twice"),
    ],
)
def test_parse_replicas_refuses_the_rest(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_replicas(text)
    assert message in str(caught.value)


def test_words_that_name_a_backend_are_its_own() -> None:
    flags = {
        **FLEET,
        "gpu": "scripted=H100,A100-80GB:2,local=none",  # the first has a list
        "env": {"X": "1", "scripted:X": "2", "local:URL": "http://h:8333/a=b"},
        "secrets": ("HF_TOKEN", "scripted:KEY=THEIR_KEY", "ALL=OURS"),
    }
    spec = resolve(flags, environ={}).spec
    assert (spec.gpu, spec.env, spec.secrets) == (None, {"X": "1"}, ("HF_TOKEN", "ALL=OURS"))
    assert spec.fleet == (
        Side("scripted", 2, "H100,A100-80GB:2", {"X": "2"}, ("KEY=THEIR_KEY",)),
        Side("local", 3, "none", {"URL": "http://h:8333/a=b"}),
    )


def test_variables_may_name_backends_too() -> None:
    environ = {
        "DILOCO_REPLICAS": "scripted=1,local=2",
        "DILOCO_GPU": "scripted=T4",
        "DILOCO_SECRETS": "A,local:B=C",
    }
    spec = resolve(STORE, environ=environ).spec
    assert spec.fleet == (Side("scripted", 1, "T4"), Side("local", 2, secrets=("B=C",)))


def test_tables_hold_all_that_is_a_backends_own(tmp_path: Path) -> None:
    text = """
        secrets = ["HF_TOKEN"]
        [backend.scripted]
        replicas = 2
        gpu = "A100"
        region = "us"
        secrets = ["KEY=THEIR_KEY"]
        env = { URL = "https://theirs" }
        [backend.local]
        replicas = 1
    """
    spec = resolve(STORE, environ={}, file=_file(tmp_path, text)).spec
    theirs = Side("scripted", 2, "A100", {"URL": "https://theirs"}, ("KEY=THEIR_KEY",))
    assert spec.fleet == (theirs, Side("local", 1))
    assert spec.backend_args == {"scripted": {"region": "us"}, "local": {}}
    assert spec.on("local").secrets == ("HF_TOKEN",)


def test_flag_for_all_beats_a_table_and_one_for_a_backend_only_its_own(tmp_path: Path) -> None:
    text = (
        '[backend.scripted]\nreplicas = 2\ngpu = "A100"\nenv = { X = "1", Y = "1" }\n'
        'secrets = ["K=L"]\n[backend.local]\nreplicas = 1\ngpu = "T4"\n'
    )
    file = _file(tmp_path, text)
    flags = {**STORE, "gpu": "local=L4", "env": {"X": "2"}, "secrets": ("scripted:K=M",)}
    spec = resolve(flags, environ={}, file=file).spec
    assert spec.on("scripted") == Side("scripted", 2, "A100", {"X": "2", "Y": "1"}, ("K=M",))
    assert spec.on("local").gpu == "L4"
    assert resolve({**STORE, "gpu": "H100"}, environ={}, file=file).spec.on("local").gpu == "H100"
    other = resolve({**STORE, "replicas": {"local": 1, "scripted": 1}}, environ={}, file=file).spec
    assert list(other.ranks_by_backend) == ["local", "scripted"]


def test_number_takes_the_place_of_a_fleet(tmp_path: Path) -> None:
    file = _file(tmp_path, "replicas = { scripted = 2, local = 1 }\n")
    spec = resolve({**STORE, "replicas": 4, "backend": "scripted"}, environ={}, file=file).spec
    assert (spec.ranks_by_backend, spec.fleet) == ({"scripted": range(4)}, ())
    with pytest.raises(ConfigError, match="the backend ray was chosen, and the replicas are on sc"):
        resolve({**STORE, "backend": "ray"}, environ={}, file=file)


def test_fleet_of_one_is_a_run_on_one_backend(tmp_path: Path) -> None:
    spec = resolve({**STORE, "replicas": {"scripted": 2}}, environ={}).spec
    assert (spec.backend, spec.replicas, spec.fleet) == ("scripted", 2, ())
    file = _file(tmp_path, '[backend.scripted]\nreplicas = 2\ngpu = "A100"\n')
    spec = resolve(STORE, environ={}, file=file).spec
    assert (spec.backend, spec.replicas, spec.on("scripted").gpu) == ("scripted", 2, "A100")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"replicas": {"scripted": 1, "lokal": 1}}, "Did you mean 'local'?"),
        ({"replicas": {"scripted": 1, "local": 1}, "backend": "ray"}, "the backend ray was chosen"),
        ({"replicas": {"scripted": 1, "local": 1}, "backend": "local"}, ""),
        ({"gpu": "scriptd=T4"}, "Did you mean 'scripted'?"),
        ({"gpu": "T4,scripted=T4"}, "Write a GPU, or BACKEND=GPU"),
        ({"gpu": "scripted=T4,scripted=T4"}, "gpu names scripted twice"),
        ({"env": {"scriptd:A": "1"}}, "Did you mean 'scripted'?"),
        ({"env": {"scripted:HF_TOKEN": "x"}}, "Pass it with --secret scripted:HF_TOKEN."),
        ({"secrets": ("scriptd:A",)}, "Did you mean 'scripted'?"),
        ({"secrets": ("scripted:A=b-c",)}, "is no name of a variable"),
        (
            {"replicas": {"scripted": 1, "local": 1}, "backend_args": {"": {"region": "us"}}},
            "Write --backend-arg scripted.region=",
        ),
    ],
)
def test_flags_that_cannot_work_are_refused(flags: dict[str, object], message: str) -> None:
    if not message:  # reducers and replicas to come go to the one that was chosen
        assert resolve({**STORE, **flags}, environ={}).spec.backend == "local"
        return
    with pytest.raises(UsageError) as caught:
        resolve({**STORE, **flags}, environ={})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replicas = 2\n[backend.scripted]\nreplicas = 1\n", "replicas is given, and replicas of"),
        ("[backend.scripted]\nreplicas = 0\n", "replicas on scripted is 0"),
        ('[backend.scripted]\nreplicas = "2"\n', "replicas on scripted is '2'"),
        ("replicas = {}\n", "replicas is empty"),
        ('[backend.scripted]\nsecrets = "A"\n', "secrets of scripted is 'A'"),
        ("[backend.scripted]\nenv = 1\n", "env of scripted is 1"),
        ("[backend.scripted.env]\nX = 1\n", "backend.scripted.env.X is 1"),
        ("[backend.scripted]\nreplicas = 1\n[backend.lokal]\ngpu = 'x'\n", "Did you mean 'local'"),
        ("gpu = { scripted = 1 }\n", "gpu of scripted is 1"),
        ("secrets = [1]\n", "secrets is [1]"),
        ('[[fleet]]\nbackend = "scripted"\n', "unknown key: fleet"),
    ],
)
def test_files_that_cannot_work_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(STORE, environ={}, file=_file(tmp_path, text))
    assert message in str(caught.value)


def test_fleet_needs_a_store_that_all_reach() -> None:
    with pytest.raises(ConfigError, match="runs on scripted need a store"):
        resolve({"replicas": {"local": 1, "scripted": 1}}, environ={})


def test_sides_of_a_signed_run_have_one_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, letter in (("KEY_A", "a"), ("KEY_B", "b")):
        monkeypatch.setenv(name, 32 * letter)
    sides = [
        Side("scripted", 1, secrets=("DILOCO_RUN_KEY=KEY_A",)),
        Side("local", 1, secrets=("DILOCO_RUN_KEY=KEY_B",)),
    ]
    with pytest.raises(ConfigError, match="scripted and local get different values of DILOCO_RUN"):
        launch(RunSpec(run_id="a-1", signed=True, fleet=sides), (tmp_path / "store").as_uri())
    assert not (tmp_path / "store").exists()
