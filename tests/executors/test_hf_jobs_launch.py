"""Launching through a hub that refuses, throttles, loses replies and hangs; and what follows."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes.hf_hub import PAGE, FakeHub
from hf_jobs_fixtures import PROGRAMS, hub, make
from local_processes import wait_until

from diloco_cloud.errors import ConfigError, LaunchError, UsageError
from diloco_cloud.executor import LaunchOptions, ReplicaHandle
from diloco_cloud.executors.hf_jobs import HFJobsExecutor

__all__ = ["hub", "make"]

Make = Callable[..., HFJobsExecutor]
CREATE = r"/api/jobs/tester$"
LIST = r"/api/jobs/tester\?"
SECRET = "canary-1c99-in-the-mine"


def _launch(executor: HFJobsExecutor, n: int = 3, **options: object) -> list[ReplicaHandle]:
    given = LaunchOptions(name="run-1", **options)  # type: ignore[arg-type]
    return executor.launch_replicas(n, f"{PROGRAMS}:sleep", {}, options=given)


@pytest.mark.parametrize("kind", ["lose", "drop", 429, 500, 503])
def test_request_that_goes_wrong_starts_a_replica_once(
    hub: FakeHub, make: Make, kind: str | int
) -> None:
    hub.fault("POST", CREATE, kind, times=2)
    handles = _launch(make())
    assert [handle.rank for handle in handles] == [0, 1, 2]
    assert [job.spec["labels"]["diloco-rank"] for job in hub.jobs] == ["0", "1", "2"]
    assert [handle.metadata["job_id"] for handle in handles] == [job.id for job in hub.jobs]


def test_request_that_hangs_is_given_up(hub: FakeHub, make: Make) -> None:
    hub.fault("POST", CREATE, "hang")
    assert len(_launch(make(request_timeout_s=3.0), 1)) == len(hub.jobs) == 1


def test_replica_started_twice_is_cancelled_once(hub: FakeHub, make: Make) -> None:
    """The reply is lost, and nobody answers when the launcher looks what has become of it."""
    hub.fault("POST", CREATE, "lose")
    hub.fault("GET", LIST, "drop", times=5)
    (handle,) = _launch(make(), 1)
    double, kept = hub.jobs
    assert handle.metadata["job_id"] == kept.id
    assert (double.stage, kept.spec["labels"]) == ("CANCELED", double.spec["labels"])
    assert kept.stage != "CANCELED"


def test_launch_stands_where_doubles_cannot_be_looked_for(
    hub: FakeHub, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fault("POST", CREATE, 503)
    hub.fault("GET", LIST, 503, times=99)
    (handle,) = _launch(make(), 1)
    assert [job.id for job in hub.jobs] == [handle.metadata["job_id"]]
    assert "may run twice" in caplog.text


def test_hub_that_never_answers_leaves_nothing_running(hub: FakeHub, make: Make) -> None:
    started: list[ReplicaHandle] = []
    executor = make()

    def then_no_more(handle: ReplicaHandle) -> None:
        started.append(handle)
        if handle.rank == 1:
            hub.fault("POST", CREATE, "lose", times=1)
            hub.fault("POST", CREATE, 503, times=99)
            hub.fault("GET", LIST, 503, times=25)

    with pytest.raises(LaunchError, match="replica 2 could not be started"):
        _launch(executor, on_launched=then_no_more)
    assert len(started) == 2
    assert [job.stage for job in hub.jobs] == ["CANCELED"] * 3


@pytest.mark.parametrize(
    ("status", "fix"), [(402, "Add credits"), (403, "paid plan"), (404, "namespace tester")]
)
def test_refusal_says_what_to_do_and_rolls_back(
    hub: FakeHub, make: Make, status: int, fix: str
) -> None:
    def refuse_next(handle: ReplicaHandle) -> None:
        hub.fault("POST", CREATE, status)

    with pytest.raises(LaunchError) as caught:
        _launch(make(), on_launched=refuse_next)
    assert f"({status})" in caught.value.message
    assert fix in (caught.value.fix or "")
    assert [job.stage for job in hub.jobs] == ["CANCELED"]


def test_interrupted_launch_leaves_nothing_running(hub: FakeHub, make: Make) -> None:
    def interrupt(handle: ReplicaHandle) -> None:
        if handle.rank == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _launch(make(), on_launched=interrupt)
    assert [job.stage for job in hub.jobs] == ["CANCELED", "CANCELED"]


@pytest.mark.parametrize(
    ("settings", "gpu", "message", "fix"),
    [
        ({}, "h100", "no hardware 'h100'", "Did you mean h200?"),
        ({"hardware": "a100"}, None, "no hardware 'a100'", "cpu-basic"),
        ({"namespace": "our-taem"}, None, "no namespace our-taem", "Did you mean our-team?"),
    ],
)
def test_what_the_account_lacks_is_said_before_anything_is_started(
    hub: FakeHub, make: Make, settings: dict[str, str], gpu: str | None, message: str, fix: str
) -> None:
    executor = make(**settings)
    for method in (executor.check_launch, executor.launch_replicas):
        with pytest.raises(ConfigError) as caught:
            method(2, f"{PROGRAMS}:sleep", {}, gpu=gpu)
        assert message in caught.value.message
        assert fix in (caught.value.fix or "")
    assert hub.jobs == []


def test_organisations_may_own_jobs(hub: FakeHub, make: Make) -> None:
    (handle,) = _launch(make(namespace="our-team"), 1)
    assert (handle.metadata["namespace"], hub.jobs[0].namespace) == ("our-team", "our-team")


def test_token_that_is_absent_expired_or_weak_is_named(
    hub: FakeHub, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.state.tokens[hub.token] = "read"
    with pytest.raises(ConfigError, match="may only read"):
        _launch(make())
    hub.expire_tokens()
    with pytest.raises(ConfigError, match="does not accept the token") as caught:
        _launch(make())
    assert "hf auth login" in (caught.value.fix or "")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
    with pytest.raises(ConfigError, match="no token"):
        _launch(make())
    assert hub.jobs == []


def test_hub_that_is_down_is_no_fault_of_the_request(hub: FakeHub, make: Make) -> None:
    with hub.outage(), pytest.raises(LaunchError) as caught:
        _launch(make())
    assert not isinstance(caught.value, UsageError)


def test_expired_token_makes_states_unknown(hub: FakeHub, make: Make) -> None:
    executor = make()
    (handle,) = _launch(executor, 1)
    hub.expire_tokens()
    wait_until(lambda: executor.poll(handle) == "unknown")
    assert "does not accept the token" in executor.poll(handle).message


def test_states_of_all_replicas_take_one_listing(hub: FakeHub, make: Make) -> None:
    executor = make(refresh_s=3600.0)
    handles = _launch(executor, 4)
    before = len(hub.requests)
    with ThreadPoolExecutor(8) as pool:
        states = list(pool.map(executor.poll, handles * 2))
    assert set(states) <= {"pending", "running"}
    asked = [request.path for request in hub.requests[before:]]
    assert len(asked) == -(-4 // PAGE)  # its pages
    assert "label=diloco-run%3Drun-1" in asked[0]


def test_queued_job_is_pending_and_can_be_cancelled(hub: FakeHub, make: Make) -> None:
    hub.queue()
    executor = make()
    first, second = _launch(executor, 2)
    assert executor.poll(first) == "pending"
    assert executor.stream_logs(first, n_lines=0) == ""
    executor.cancel(first)
    wait_until(lambda: executor.poll(first) == "cancelled")
    hub.queue(on=False)
    wait_until(lambda: executor.poll(second) == "running")
    assert hub.job_of(0).process is None


def test_hubs_own_restart_is_the_same_job(hub: FakeHub, make: Make) -> None:
    executor = make(attempts=2)
    handles = executor.launch_replicas(1, f"{PROGRAMS}:fail", {"message": "boom"})
    (result,) = executor.collect(handles, timeout=60)
    assert (result["status"], result["exit_code"]) == ("failed", 1)
    assert executor.stream_logs(handles[0]).count("ValueError: boom") == 2
    assert len(hub.jobs) == 1


def test_ends_that_no_program_chose_are_told_apart(hub: FakeHub, make: Make) -> None:
    executor = make()
    killed, evicted, unpaid = _launch(executor)
    for handle in (killed, evicted, unpaid):
        wait_until(lambda handle=handle: executor.poll(handle) == "running")
    hub.job_of(0).kill()
    hub.job_of(1).fail("The node was evicted")
    hub.job_of(2).cancel("NO_CREDITS")
    results = executor.collect([killed, evicted, unpaid], timeout=60)
    statuses = [result["status"] for result in results]
    assert [(s, s.exit_code, s.reason) for s in statuses] == [
        ("failed", 137, "out_of_memory"),
        ("failed", None, "preempted"),
        ("failed", None, "no_capacity"),
    ]


def test_job_without_labels_is_asked_for_by_its_id(hub: FakeHub, make: Make) -> None:
    executor = make()
    (handle,) = _launch(executor, 1)
    hub.jobs[0].spec["labels"] = {}
    wait_until(lambda: executor.poll(handle) == "running")
    hub.state.jobs.clear()
    wait_until(lambda: executor.poll(handle).reason == "lost")


def test_cancel_is_tried_again_and_its_failure_is_told(hub: FakeHub, make: Make) -> None:
    executor = make()
    (handle,) = _launch(executor, 1)
    hub.fault("POST", "/cancel$", 503, times=2)
    executor.cancel(handle)
    assert hub.jobs[0].stage == "CANCELED"
    (other,) = _launch(executor, 1, attempt=1)
    hub.fault("POST", "/cancel$", 503, times=99)
    with pytest.raises(LaunchError, match="replica 0 could not be cancelled") as caught:
        executor.cancel(other)
    assert other.metadata["url"] in (caught.value.fix or "")


def test_secret_is_in_the_secrets_of_the_request_only(
    hub: FakeHub, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    executor = make()
    (handle,) = _launch(executor, 1, secrets=["MY_TOKEN"])
    executor.poll(handle)
    executor.cancel(handle)
    holding = [request for request in hub.requests if SECRET in request.body + request.path]
    assert [request.path for request in holding] == ["/api/jobs/tester"]
    assert hub.jobs[0].spec["secrets"] == {"MY_TOKEN": SECRET}
    body = holding[0].body
    assert body.count(SECRET) == 1
    assert SECRET not in str(hub.jobs[0].to_json())


def test_error_of_the_hub_never_repeats_a_secret(
    hub: FakeHub, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub may quote what it does not like."""
    monkeypatch.setenv("MY_TOKEN", SECRET)
    monkeypatch.setattr(hub, "create", _quote)
    with pytest.raises(LaunchError) as caught:
        _launch(make(), 1, secrets=["MY_TOKEN"])
    assert "422" in str(caught.value)
    chain: BaseException | None = caught.value
    while chain is not None:
        assert SECRET not in repr(chain)
        chain = chain.__cause__


def test_recovery_looks_where_the_others_of_the_run_are(
    hub: FakeHub, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The machine that cancels a run may have another token than the one that launched it."""
    first, _ = _launch(make(namespace="our-team"), 2)
    elsewhere = make()
    assert elsewhere.recover("run-1") == []
    assert "tester, who owns the token here, has no jobs of run-1" in caplog.text
    assert "set HF_TOKEN to that one (or `hf auth login`), and try again" in caplog.text
    caplog.clear()
    elsewhere.poll(first)  # as whoever cancels a run does first
    assert [handle.rank for handle in elsewhere.recover("run-1")] == [0, 1]
    assert caplog.text == ""


def _quote(namespace: str, spec: dict[str, object]) -> object:
    import jsonschema

    raise jsonschema.ValidationError(f"{spec['secrets']} is not valid")
