from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from diloco_cloud.entrypoints import Function
from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import Entrypoint, LaunchOptions, Script
from diloco_cloud.launch_request import LaunchRequest, check_launch
from diloco_cloud.secrets import Secret


def check(
    n_replicas: Any = 2,
    entrypoint: Entrypoint = "json:dumps",
    arguments: Mapping[str, Any] | None = None,
    timeout: float = 60,
    **options: Any,
) -> LaunchRequest:
    return check_launch(
        n_replicas,
        entrypoint,
        arguments or {},
        LaunchOptions(**options),
        timeout=timeout,
        callables=True,
    )


def test_defaults_are_all_ranks_of_the_run() -> None:
    request = check(3, arguments={"obj": (1, 2)})
    assert request.target == Function("json", "dumps")
    assert (request.ranks, request.world_size, request.rank_env) == ((0, 1, 2), 3, "REPLICA_RANK")
    assert request.arguments == {"obj": [1, 2]}  # as JSON delivers it
    assert request.environment(2) == {
        "REPLICA_RANK": "2",
        "DILOCO_RANK_ENV": "REPLICA_RANK",
        "REPLICA_GROUP_ID": "2",
        "NUM_REPLICA_GROUPS": "3",
        "DILOCO_ATTEMPT": "0",
    }


def test_rank_env_is_consumed() -> None:
    request = check(arguments={"obj": 1, "rank_env": "ME"})
    assert request.arguments == {"obj": 1}
    assert request.environment(1)["ME"] == "1"
    assert request.environment(1)["DILOCO_RANK_ENV"] == "ME"


def test_world_size_is_supplied_to_the_replica_entrypoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stand-in, so that the test says nothing about the program itself.
    (tmp_path / "replica_program.py").write_text("def main(world_size=None): pass")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("diloco_cloud.launch_request.REPLICA_ENTRYPOINT", "replica_program")
    for entrypoint in ("replica_program", "replica_program:main", "replica_program.main"):
        assert check(2, entrypoint).arguments == {"world_size": 2}
        assert check(1, entrypoint, ranks=[3], world_size=4).arguments == {"world_size": 4}
        assert check(2, entrypoint, {"world_size": 7}).arguments == {"world_size": 7}
    from replica_program import main

    assert check(2, main).arguments == {"world_size": 2}


def test_no_other_function_is_supplied_with_a_world_size() -> None:
    assert check(2).arguments == {}


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"n_replicas": 0}, "n_replicas is 0"),
        ({"n_replicas": True}, "n_replicas is True"),
        ({"n_replicas": "2"}, "n_replicas is '2'"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"ranks": [0]}, "are not 2 different ranks"),
        ({"ranks": [1, 1]}, "are not 2 different ranks"),
        ({"ranks": [1, 2]}, "rank 2 is outside"),
        ({"ranks": [-1, 0]}, "rank -1 is outside"),
        ({"world_size": 1}, "rank 1 is outside"),
        ({"arguments": {"rank_env": "A=B"}}, "rank_env is 'A=B'"),
        ({"arguments": {"rank_env": 3}}, "rank_env is 3"),
        ({"arguments": {"a-b": 1}}, "the key 'a-b'"),
        ({"arguments": {"obj": {1}}}, "not JSON"),
        ({"env": {"REPLICA_RANK": "1"}}, "env sets REPLICA_RANK"),
        ({"env": {"ME": "1"}, "arguments": {"rank_env": "ME"}}, "env sets ME"),
        ({"secrets": ["TEST_NO_SUCH_SECRET"]}, "secret TEST_NO_SUCH_SECRET is not set"),
        ({"secrets": ["A=TEST_NO_SUCH_SECRET"]}, "the variable given after A= is not set"),
        ({"secrets": ["A-B"]}, "no name of a variable"),
        ({"secrets": ["REPLICA_RANK=PATH"]}, "secrets sets REPLICA_RANK"),
        ({"secrets": ["ME=PATH"], "arguments": {"rank_env": "ME"}}, "secrets sets ME"),
        ({"secrets": ["PATH"], "env": {"PATH": "x"}}, "PATH is in env and a secret"),
        ({"entrypoint": Script(__file__), "arguments": {"x": 1}}, "no keyword arguments"),
        ({"entrypoint": Path.cwd, "arguments": {"x": 1}}, "cannot be called"),
    ],
)
def test_wrong_request_is_refused_with_a_fix(request_: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(**request_)
    assert words in caught.value.message
    assert caught.value.fix


def test_secrets_are_kept_apart_and_out_of_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_TOKEN", "t0psecret")
    request = check(secrets=["TEST_TOKEN"], env={"A": "B"})
    assert request.secrets == {"TEST_TOKEN": Secret("TEST_TOKEN", "t0psecret")}
    assert request.environment(0)["A"] == "B"
    assert "TEST_TOKEN" not in request.environment(0)
    assert "t0psecret" not in repr(request)
