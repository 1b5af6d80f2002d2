"""The contract of ``launch_replicas``: what is started, what it is told, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco_cloud.errors import UsageError
from diloco_cloud.executor import (
    TERM_GRACE_ENV,
    LaunchOptions,
    PreviewsLaunch,
    ReplicaHandle,
    Script,
    ServerlessExecutor,
)
from diloco_cloud.testing.contract_base import ContractBase
from diloco_cloud.testing.fleet import PROGRAMS, Fleet

IDENTITY = ("REPLICA_RANK", "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "DILOCO_ATTEMPT")
#: What command lines, shells and templates are known to damage.
ARGUMENTS: dict[str, Any] = {
    "text": "a  b\t'c' \"d\" \\e $HOME `f` %g {h} ünïcode 🙂 +algorithm.diloco.rendezvous",
    "lines": "first\nsecond\n",
    "blank": " ",
    "empty": "",
    "number": 1.5,
    "big": 2**53,
    "nothing": None,
    "yes": True,
    "nested": {"list": [1, [2, {"three": []}]], "uri": "s3://bucket/a?b=c&d"},
    "long": "x" * 2000 + " " + "y" * 2000,
}
BAD_REQUESTS: dict[str, tuple[int, Any, dict[str, Any], dict[str, Any]]] = {
    "no replicas": (0, f"{PROGRAMS}:sleep", {}, {}),
    "half a replica": (1.5, f"{PROGRAMS}:sleep", {}, {}),  # type: ignore[dict-item]
    "no such module": (1, "diloco_cloud.testing.nothing:sleep", {}, {}),
    "no such function": (1, f"{PROGRAMS}:nothing", {}, {}),
    "a path": (1, "programs/main.py", {}, {}),
    "no such script": (1, Script("/no/such/script.py"), {}, {}),
    "not a function": (1, 7, {}, {}),
    "not JSON": (1, f"{PROGRAMS}:tell", {"value": {1, 2}}, {}),
    "no argument's name": (1, f"{PROGRAMS}:tell", {"not a name": 1}, {}),
    "no variable's name": (1, f"{PROGRAMS}:tell", {"rank_env": "not a name"}, {}),
    "no time": (1, f"{PROGRAMS}:sleep", {}, {"timeout": 0}),
    "negative time": (1, f"{PROGRAMS}:sleep", {}, {"timeout": -1}),
    "a rank twice": (2, f"{PROGRAMS}:sleep", {}, {"ranks": [1, 1]}),
    "a rank too many": (1, f"{PROGRAMS}:sleep", {}, {"ranks": [3], "world_size": 3}),
    "somebody else's variable": (1, f"{PROGRAMS}:sleep", {}, {"env": {"REPLICA_RANK": "5"}}),
    "a secret nobody has": (1, f"{PROGRAMS}:sleep", {}, {"secrets": ["CONTRACT_SUITE_ABSENT"]}),
}


class LaunchingContract(ContractBase):
    """``launch_replicas`` and ``preview_launch``."""

    def test_executor_has_all_that_the_protocol_asks(self, executor: ServerlessExecutor) -> None:
        assert isinstance(executor, ServerlessExecutor)
        assert isinstance(executor.backend_name, str)
        assert executor.backend_name
        assert isinstance(executor.supports_inter_replica_network, bool)

    def test_launch_returns_a_handle_per_rank_in_order(self, fleet: Fleet) -> None:
        handles = fleet.launch("sleep", 3)
        assert [handle.rank for handle in handles] == [0, 1, 2]
        assert {handle.backend_name for handle in handles} == {fleet.executor.backend_name}
        assert len({json.dumps(handle.metadata, sort_keys=True) for handle in handles}) == 3

    def test_each_replica_is_told_who_it_is(self, fleet: Fleet) -> None:
        handles = fleet.launch("identify", 3, names=[*IDENTITY, TERM_GRACE_ENV])
        for rank, handle in enumerate(handles):
            told = fleet.told(handle)
            assert [told[name] for name in IDENTITY] == [str(rank), str(rank), "3", "0"]
            assert float(told[TERM_GRACE_ENV]) >= 0

    def test_one_rank_of_a_run_can_be_started_again(self, fleet: Fleet) -> None:
        options = LaunchOptions(ranks=[2], world_size=5, attempt=4)
        (handle,) = fleet.launch("identify", options=options, names=list(IDENTITY))
        assert handle.rank == 2
        told = fleet.told(handle)
        assert [told[name] for name in IDENTITY] == ["2", "2", "5", "4"]

    def test_ranks_are_launched_in_the_order_given(self, fleet: Fleet) -> None:
        options = LaunchOptions(ranks=[3, 1], world_size=4)
        handles = fleet.launch("identify", 2, options=options, names=["REPLICA_RANK"])
        assert [handle.rank for handle in handles] == [3, 1]
        assert [fleet.told(handle)["REPLICA_RANK"] for handle in handles] == ["3", "1"]

    def test_rank_variable_can_be_renamed(self, fleet: Fleet) -> None:
        names = ["MY_RANK", "DILOCO_RANK_ENV"]
        handles = fleet.launch("identify", 2, rank_env="MY_RANK", names=names)
        told = [fleet.told(handle) for handle in handles]
        assert [values["MY_RANK"] for values in told] == ["0", "1"]
        assert {values["DILOCO_RANK_ENV"] for values in told} == {"MY_RANK"}

    def test_arguments_arrive_as_they_were_given(self, fleet: Fleet) -> None:
        (handle,) = fleet.launch("tell", **ARGUMENTS)
        assert fleet.told(handle) == ARGUMENTS

    @pytest.mark.parametrize("entrypoint", [PROGRAMS, f"{PROGRAMS}:main", f"{PROGRAMS}.main"])
    def test_entrypoint_can_be_named_in_three_ways(self, fleet: Fleet, entrypoint: str) -> None:
        (handle,) = fleet.launch_entrypoint(entrypoint, {"a": 1})
        assert fleet.told(handle) == {"main": {"a": 1}}

    def test_variables_of_the_user_arrive(self, fleet: Fleet) -> None:
        env = {"CONTRACT_PLAIN": "1", "CONTRACT_ODD": "a b='c' \"d\" $HOME ünïcode"}
        options = LaunchOptions(env=env)
        (handle,) = fleet.launch("identify", options=options, names=list(env))
        assert fleet.told(handle) == env

    def test_on_launched_hears_of_each_replica_in_order(self, fleet: Fleet) -> None:
        heard: list[ReplicaHandle] = []
        handles = fleet.launch("tell", 3, options=LaunchOptions(on_launched=heard.append))
        assert heard == handles

    def test_failing_on_launched_leaves_nothing_running(self, fleet: Fleet) -> None:
        def refuse(handle: ReplicaHandle) -> None:
            if handle.rank == 1:
                raise FileNotFoundError("the record cannot be written")

        with pytest.raises(FileNotFoundError, match="the record"):
            fleet.launch("sleep", 3, options=LaunchOptions(on_launched=refuse))
        assert [handle.rank for handle in fleet.handles][:2] == [0, 1]
        for handle in fleet.handles:
            fleet.reaches(handle, "cancelled")

    @pytest.mark.parametrize("case", BAD_REQUESTS)
    def test_bad_request_starts_nothing(self, fleet: Fleet, case: str) -> None:
        n_replicas, entrypoint, arguments, options = BAD_REQUESTS[case]
        given = dict(options)
        timeout = given.pop("timeout", None)
        with pytest.raises(UsageError) as caught:
            fleet.launch_entrypoint(
                entrypoint,
                arguments,
                n_replicas,
                timeout=timeout,
                options=LaunchOptions(**given),
            )
        assert caught.value.fix
        assert fleet.handles == []

    def test_preview_is_json_and_starts_nothing(self, executor: ServerlessExecutor) -> None:
        if not isinstance(executor, PreviewsLaunch):
            pytest.skip("this executor has no preview_launch")
        heard: list[ReplicaHandle] = []
        requests = executor.preview_launch(
            2,
            f"{PROGRAMS}:sleep",
            {},
            gpu=self.gpu,
            timeout=600,
            options=LaunchOptions(name="contract-preview", on_launched=heard.append),
        )
        assert requests
        assert json.loads(json.dumps(requests)) == requests
        assert heard == []
