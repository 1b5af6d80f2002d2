"""Launch, find again, wait, cancel, resume and delete, on a backend that does as it is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from manual_clock import Clock
from replica_writer import ReplicaWriter
from scripted_executor import ScriptedExecutor

from diloco_cloud import keys
from diloco_cloud.errors import (
    ConfigError,
    LaunchError,
    NotFoundError,
    RunExistsError,
    RunNotFoundError,
    UnknownBackendError,
    UsageError,
)
from diloco_cloud.executor import ReplicaHandle
from diloco_cloud.run import Run, RunSpec, launch, list_runs
from diloco_cloud.store import open_store

MakeRun = Callable[..., Run]


def test_launch_records_spec_and_handles_and_passes_only_uri_and_hash(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run(replicas=3, gpu="H100", timeout=7200)
    record = json.loads(run.store.get(keys.RUN))
    assert record["hash"] == run.spec.digest
    assert record["spec"] == run.spec.to_json()
    for rank in range(3):
        handle = json.loads(run.store.get(keys.handle(rank, 0)))
        assert handle["metadata"] == {"file": f"{rank}.0.json"}
    request = json.loads((scripted.directory / "0.0.json").read_text())["request"]
    assert request == {
        "entrypoint": "diloco_cloud.replica_entrypoint",
        "entrypoint_args": {"rendezvous_uri": run.uri, "spec_hash": run.spec.digest},
        "gpu": "H100",
        "timeout": 7200,
        "attempt": 0,
        "world_size": 3,
        "secrets": [],
        "region": "eu",
    }


def test_launch_twice_with_one_id_is_refused(make_run: MakeRun) -> None:
    make_run()
    with pytest.raises(RunExistsError, match=r"'run-1' is taken.*\n.*another name"):
        make_run()


def test_launch_without_the_weights_to_begin_with_writes_nothing(
    trainer: str, store_uri: str, tmp_path: Path
) -> None:
    missing = str(tmp_path / "gone.safetensors")
    with pytest.raises(ConfigError, match=r"there is no .*gone\.safetensors"):
        launch(RunSpec(run_id="run-1", trainer=trainer, init_from=missing), store_uri)
    assert not Path(store_uri).exists()


def test_launch_from_a_result_that_will_be_replaced_writes_nothing(
    trainer: str, store_uri: str, tmp_path: Path
) -> None:
    begin = f"{tmp_path}/other/result/"
    with pytest.raises(ConfigError, match="there is no model in"):
        launch(RunSpec(run_id="run-1", trainer=trainer, init_from=begin), store_uri)
    result = tmp_path / "other" / "result" / "00000003-abc"
    result.mkdir(parents=True)
    (result / "model.safetensors").write_bytes(b"weights")
    manifest = {"round": 3, "final": False, "files": ["model.safetensors"]}
    (result / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="goes on"):
        launch(RunSpec(run_id="run-1", trainer=trainer, init_from=begin), store_uri)
    assert not Path(store_uri).exists()


def test_launch_that_fails_half_way_cancels_and_leaves_nothing(
    make_run: MakeRun, scripted: ScriptedExecutor, store_uri: str
) -> None:
    (scripted.directory / "refuse.2").touch()
    with pytest.raises(LaunchError) as caught:
        make_run(replicas=3)
    assert str(caught.value) == (
        "run-1 was not launched: backend 'scripted' failed to start the replicas: out of capacity\n"
        "  What had been started on scripted was cancelled. Nothing of run-1 is left."
    )
    assert [scripted.poll(one) for one in scripted.recover("")] == ["cancelled"] * 2
    assert list_runs(store_uri) == []
    (scripted.directory / "refuse.2").unlink()
    assert make_run(replicas=3).status().state == "running"  # the id is free again


def test_launch_interrupted_half_way_cancels_and_leaves_nothing(
    scripted: ScriptedExecutor, trainer: str, store_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Interrupted(ScriptedExecutor):
        def set(self, rank: int, attempt: int = 0, **values: object) -> None:
            if rank == 1:
                raise KeyboardInterrupt
            super().set(rank, attempt, **values)

    spec = RunSpec(run_id="run-1", backend="scripted", replicas=2, trainer=trainer)
    with pytest.raises(KeyboardInterrupt):
        launch(spec, store_uri, executor=Interrupted())
    assert scripted.get(ReplicaHandle(0, "scripted", {"file": "0.0.json"}))["state"] == "cancelled"
    assert list_runs(store_uri) == []
    assert "run-1 was not launched. Nothing of run-1 is left." in caplog.text


def test_launch_that_fails_waits_for_the_end_of_what_had_begun(
    scripted: ScriptedExecutor, trainer: str, store_uri: str, clock: Clock
) -> None:
    class Slow(ScriptedExecutor):
        def cancel(self, handle: ReplicaHandle) -> None:
            clock.scheduled = [lambda: None, lambda: super(Slow, self).cancel(handle)]

    (scripted.directory / "refuse.1").touch()
    spec = RunSpec(run_id="run-1", backend="scripted", replicas=2, trainer=trainer)
    with pytest.raises(LaunchError, match=r"Nothing of run-1 is left\."):
        launch(spec, store_uri, executor=Slow(), clock=clock.time, sleep=clock.sleep)
    assert clock.naps == 2
    assert list_runs(store_uri) == []


def test_launch_that_fails_keeps_the_record_of_what_goes_on(
    scripted: ScriptedExecutor, trainer: str, store_uri: str, clock: Clock
) -> None:
    class Endless(ScriptedExecutor):
        def cancel(self, handle: ReplicaHandle) -> None:
            pass

    (scripted.directory / "refuse.1").touch()
    spec = RunSpec(run_id="run-1", backend="scripted", replicas=2, trainer=trainer)
    with pytest.raises(LaunchError) as caught:
        launch(spec, store_uri, executor=Endless(), clock=clock.time, sleep=clock.sleep)
    assert (caught.value.fix or "").endswith(
        f"`diloco-cloud down run-1 --store {store_uri}` deletes what it has written."
    )
    assert [run.run_id for run in list_runs(store_uri)] == ["run-1"]


def test_launch_on_an_unknown_backend_writes_nothing(trainer: str, store_uri: str) -> None:
    spec = RunSpec(run_id="run-1", backend="locale", trainer=trainer)
    with pytest.raises(UnknownBackendError, match="Did you mean 'local'"):
        launch(spec, store_uri)
    assert not Path(store_uri).exists()


def test_launch_stores_names_of_secrets_never_values(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, store_uri: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very-secret")
    make_run(secrets=("HF_TOKEN",))
    texts = [path.read_bytes() for path in Path(store_uri).rglob("*") if path.is_file()]
    assert any(b"HF_TOKEN" in text for text in texts)
    assert not any(b"very-secret" in text for text in texts)


def test_launch_without_a_secrets_value_is_refused(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(UsageError, match=r"HF_TOKEN is not set in this environment"):
        make_run(secrets=("HF_TOKEN",))


def test_open_of_an_unknown_id_suggests_one(make_run: MakeRun, store_uri: str) -> None:
    make_run("demo-bx7f2")
    with pytest.raises(RunNotFoundError, match="Did you mean demo-bx7f2"):
        Run.open(store_uri, "demo-bx7f3")
    with pytest.raises(RunNotFoundError, match="Did you mean demo-bx7f2"):
        Run.open(store_uri, "demo")
    with pytest.raises(RunNotFoundError):
        Run.open(store_uri, "../demo")


def test_open_in_a_store_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError):
        Run.open(tmp_path / "nowhere", "run-1")
    with pytest.raises(NotFoundError, match="there is no directory"):
        list_runs(tmp_path / "nowhere")


def test_list_runs_is_newest_first_and_skips_what_is_no_run(
    make_run: MakeRun, clock: Clock, store_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_run("run-1")
    clock.now += 60
    make_run("run-2")
    store = open_store(store_uri)
    store.create("broken/run.json", b"{}")
    store.create("other/file", b"")
    assert [run.run_id for run in list_runs(store_uri)] == ["run-2", "run-1"]
    assert "broken is left out" in caplog.text


def test_wait_returns_when_all_have_ended(
    make_run: MakeRun, scripted: ScriptedExecutor, clock: Clock
) -> None:
    run = make_run()
    clock.scheduled = [
        lambda: scripted.set(0, state="succeeded", exit_code=0),
        lambda: scripted.set(1, state="succeeded", exit_code=0),
    ]
    assert run.wait().state == "succeeded"
    assert clock.naps == 2


def test_wait_gives_up_at_its_timeout(make_run: MakeRun, clock: Clock) -> None:
    run = make_run()
    before = clock.now
    status = run.wait(timeout=30)
    assert (status.state, clock.now - before) == ("running", 30)


def test_cancel_is_idempotent_and_leaves_the_ended_alone(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run(replicas=3)
    scripted.set(0, state="succeeded", exit_code=0)
    assert run.cancel([1]) == [1]
    assert run.cancel() == [2]
    assert run.cancel() == []
    assert [view.state for view in run.status().replicas] == ["succeeded", "cancelled", "cancelled"]
    assert run.status().state == "succeeded"


def test_cancel_of_a_rank_that_is_not_there(make_run: MakeRun) -> None:
    with pytest.raises(UsageError, match=r"no replica 7.*\n.*replicas 0 to 1"):
        make_run().cancel([7])


def test_cancel_records_the_wish_even_if_the_backend_is_not_here(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, store_uri: str
) -> None:
    run = make_run()
    monkeypatch.setattr("diloco_cloud.run.executors.get_executor", _absent)
    with pytest.raises(UnknownBackendError):
        Run.open(store_uri, run.run_id).cancel()
    assert run.store.head(keys.cancel(1, 0))


def _absent(name: str) -> None:
    raise UnknownBackendError(f"there is no backend {name!r}")


def test_resume_starts_only_what_ended_early(make_run: MakeRun, scripted: ScriptedExecutor) -> None:
    run = make_run(replicas=3)
    scripted.set(0, state="succeeded", exit_code=0)
    scripted.set(2, state="failed", exit_code=1)
    assert run.resume() == [2]
    request = json.loads((scripted.directory / "2.1.json").read_text())["request"]
    assert (request["attempt"], request["world_size"]) == (1, 3)
    assert [view.attempt for view in run.status().replicas] == [0, 0, 1]
    scripted.set(2, attempt=1, state="failed", exit_code=1)
    assert run.resume() == [2]
    assert run.status().replicas[2].attempt == 2


def test_resume_of_a_running_run_is_refused(make_run: MakeRun) -> None:
    run = make_run()
    with pytest.raises(UsageError, match="run-1 is running"):
        run.resume()
    with pytest.raises(UsageError, match="replica 1 of run-1 is running"):
        run.resume([1])


def test_resume_of_a_finished_run_says_so(make_run: MakeRun, scripted: ScriptedExecutor) -> None:
    run = make_run()
    for rank in range(2):
        scripted.set(rank, state="succeeded", exit_code=0)
    with pytest.raises(UsageError, match="has succeeded; there is nothing to resume"):
        run.resume()


def test_resume_by_two_at_once_starts_one_life(
    make_run: MakeRun, scripted: ScriptedExecutor
) -> None:
    run = make_run(replicas=1)
    scripted.set(0, state="failed", exit_code=1)
    # Another resume has announced the next life after we looked.
    run.status()
    original = run.store.create

    def create(key: str, data: bytes) -> None:
        if key == keys.intent(0, 1):
            original(key, b"{}")
        original(key, data)

    run.store.create = create  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="being resumed by someone else"):
        run.resume()
    assert not (scripted.directory / "0.1.json").exists()


def test_down_deletes_everything_but_not_a_running_run(
    make_run: MakeRun, scripted: ScriptedExecutor, store_uri: str
) -> None:
    make_run("keep")
    run = make_run("drop")
    ReplicaWriter(run.store, 0).log("hello")
    with pytest.raises(UsageError, match="drop is running"):
        run.down()
    assert run.down(cancel=True) >= 4
    assert [one.run_id for one in list_runs(store_uri)] == ["keep"]
    with pytest.raises(RunNotFoundError):
        Run.open(store_uri, "drop")


def test_down_leaves_no_ghost_of_a_run_whose_replicas_opened_its_prefix(
    make_run: MakeRun, store_uri: str
) -> None:
    run = make_run()
    ReplicaWriter(open_store(run.uri), 0).log("hello")
    run.down(cancel=True)
    assert not Path(store_uri, run.run_id).exists()


def test_open_of_a_deleted_run_does_not_suggest_itself(make_run: MakeRun, store_uri: str) -> None:
    run = make_run()
    run.down(cancel=True)
    Path(store_uri, run.run_id).mkdir()  # SeaweedFS too lists a directory for a while
    with pytest.raises(RunNotFoundError) as caught:
        Run.open(store_uri, run.run_id)
    assert "Did you mean" not in str(caught.value)


def test_down_lets_the_executor_forget_every_attempt(
    make_run: MakeRun, scripted: ScriptedExecutor, store_uri: str
) -> None:
    class Forgetful(ScriptedExecutor):
        forgotten: ClassVar[list[str]] = []

        def forget(self, handle: ReplicaHandle) -> None:
            self.forgotten.append(handle.metadata["file"])

    run = make_run(replicas=2)
    scripted.set(1, state="failed", exit_code=1)
    run.resume()
    Run.open(store_uri, run.run_id, executor=Forgetful()).down(cancel=True)
    assert sorted(Forgetful.forgotten) == ["0.0.json", "1.0.json", "1.1.json"]


def test_results_and_metrics_are_read_back(make_run: MakeRun) -> None:
    run = make_run()
    for rank in range(2):
        ReplicaWriter(run.store, rank).end(result={"loss": rank}, digest="abc")
        for round_ in range(2):
            key = keys.metrics(rank, 0, round_)
            run.store.create(key, json.dumps({"round": round_, "loss": 1.0}).encode())
    assert (run.results().model, run.results().manifest, run.results().files) == (None, None, ())
    files = ["config.json", "model.safetensors"]
    for name in files:
        run.store.create(f"result/00000004-abc/{name}", b"weights")
    manifest = json.dumps({"digest": "abc", "files": files}).encode()
    run.store.create("result/00000004-abc/manifest.json", manifest)
    run.store.create("result/00000005-def/model.safetensors", b"not yet whole")
    results = run.results()
    assert results.digest == "abc"
    assert results.returned == [{"loss": 0}, {"loss": 1}]
    assert results.files == tuple(f"result/00000004-abc/{name}" for name in files)
    assert results.model == "result/00000004-abc/model.safetensors"
    assert [(row["rank"], row["round"]) for row in run.metrics()] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_launch_into_a_bucket_that_is_not_there(
    scripted: ScriptedExecutor, trainer: str, s3_uri: str
) -> None:
    spec = RunSpec(run_id="run-1", backend="scripted", trainer=trainer)
    with pytest.raises(NotFoundError, match="no-such-bucket"):
        launch(spec, "s3://no-such-bucket/runs")
    assert list(scripted.directory.iterdir()) == []


def test_run_on_s3_from_launch_to_down(
    scripted: ScriptedExecutor, trainer: str, s3_uri: str
) -> None:
    spec = RunSpec(run_id="run-1", backend="scripted", replicas=2, trainer=trainer)
    launch(spec, s3_uri)
    run = Run.open(s3_uri, "run-1")
    writer = ReplicaWriter(run.store, 0)
    writer.beat(round=3)
    writer.log("hello")
    for rank in range(2):
        scripted.set(rank, state="unknown")  # nobody to ask: the heartbeat's age decides
    assert [view.state for view in run.status().replicas] == ["running", "unknown"]
    assert [line.text for line in run.logs(ranks=[0])] == ["hello"]
    with pytest.raises(RunExistsError):
        launch(spec, s3_uri)
    run.cancel()
    for rank in range(2):
        scripted.set(rank, state="cancelled")
    run.down()
    assert list_runs(s3_uri) == []


def test_wait_ends_when_the_run_is_deleted_meanwhile(
    make_run: MakeRun, clock: Clock, store_uri: str
) -> None:
    run = make_run()
    other = Run.open(store_uri, run.run_id)
    clock.scheduled = [lambda: None, lambda: other.down(cancel=True)]
    with pytest.raises(RunNotFoundError, match="run-1 has been deleted"):
        run.wait()
