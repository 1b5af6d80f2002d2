"""``ls``, ``status``, ``logs``, ``wait``, ``cancel``, ``resume``, ``down``."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import Result
from replica_writer import ReplicaWriter
from rich.console import Console
from scripted_executor import ScriptedExecutor

from diloco_cloud.cli.tables import run_table, status_view
from diloco_cloud.run import Run

Call = Callable[..., Result]
MakeRun = Callable[..., Run]

READERS = ("status", "logs", "wait", "supervise", "cancel", "resume", "down")


def _end(scripted: ScriptedExecutor, state: str, **values: object) -> None:
    for rank in range(2):
        scripted.set(rank, state=state, **values)


@pytest.mark.parametrize("name", READERS)
def test_unknown_run_exits_102_with_a_suggestion(
    call: Call, make_run: MakeRun, store_uri: str, name: str
) -> None:
    make_run("demo-bx7f2")
    result = call(name, "demo-bx7f3", "--store", store_uri)
    assert result.exit_code == 102
    assert "Did you mean demo-bx7f2?" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("name", READERS)
def test_run_is_required(call: Call, name: str) -> None:
    result = call(name)
    assert result.exit_code == 2
    assert "Missing argument 'RUN'" in result.stderr


def test_unknown_command_suggests_one(call: Call) -> None:
    result = call("lanch")
    assert result.exit_code == 2
    assert "No such command 'lanch'. Did you mean launch?" in result.stderr


def test_store_comes_from_variable_or_the_working_directory(
    call: Call, make_run: MakeRun, store_uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_run()
    result = call("ls", "-q")
    assert result.exit_code == 2
    assert "no store was named, and there is no ./runs here" in result.stderr
    monkeypatch.setenv("DILOCO_STORE", store_uri)
    assert call("ls", "-q").stdout == "run-1\n"
    monkeypatch.delenv("DILOCO_STORE")
    (tmp_path / "runs").symlink_to(store_uri)
    monkeypatch.chdir(tmp_path)
    assert call("ls", "-q").stdout == "run-1\n"


@pytest.mark.parametrize("name", ["ls", "ps", "list"])
def test_ls_shows_runs(call: Call, make_run: MakeRun, store_uri: str, name: str) -> None:
    make_run("run-1")
    make_run("run-2")
    result = call(name, "--store", store_uri)
    assert result.exit_code == 0
    assert "run-1" in result.stdout
    assert "RUNNING" in result.stdout
    values = json.loads(call(name, "--store", store_uri, "--json").stdout)
    assert {one["run_id"] for one in values} == {"run-1", "run-2"}


def test_ls_of_a_store_that_is_not_there(call: Call, tmp_path: Path, s3_uri: str) -> None:
    for store, missing in ((str(tmp_path / "no"), "no directory"), ("s3://no-such-b/x", "bucket")):
        result = call("ls", "--store", store)
        assert (result.exit_code, result.stdout) == (1, "")
        assert missing in result.stderr


def test_ls_of_an_empty_store(call: Call, tmp_path: Path) -> None:
    result = call("ls", "--store", str(tmp_path))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "No runs here.\n")
    assert call("ls", "--store", str(tmp_path), "--json").stdout == "[]\n"


def test_status_shows_a_crash_with_exit_code_reason_and_log(
    call: Call, make_run: MakeRun, store_uri: str, scripted: ScriptedExecutor
) -> None:
    run = make_run()
    ReplicaWriter(run.store, 0).beat(round=3, loss=2.25, tokens_per_s=1234.5, waiting_for=[1])
    output = "Traceback (most recent call last):\nValueError: [bold]boom[/bold]"
    scripted.set(1, state="failed", exit_code=1, reason="exit_code", output=output)
    result = call("status", run.run_id, "--store", store_uri)
    assert result.exit_code == 0
    for text in ("round 3", "2.2500", "waits for 1", "FAILED", "exit code 1"):
        assert text in result.stdout
    assert "ValueError: [bold]boom[/bold]" in result.stdout
    values = json.loads(call("status", run.run_id, "--store", store_uri, "--json").stdout)
    assert values["replicas"][1]["exit_code"] == 1
    assert values["missing"] == [{"rank": 1, "why": "failed: exit_code"}]


def test_status_says_a_common_failure_once(
    call: Call, make_run: MakeRun, store_uri: str, scripted: ScriptedExecutor
) -> None:
    run = make_run(replicas=3)
    for rank in range(2):
        output = f"replica {rank} of 3\nValueError: bad shard {rank}"
        scripted.set(rank, state="failed", exit_code=1, message="ValueError: boom", output=output)
    scripted.set(2, state="failed", exit_code=1, message="KeyError: 'x'", output="KeyError: 'x'")
    shown = call("status", run.run_id, "--store", store_uri).stdout
    assert "replicas 0, 1 failed: ValueError: boom\n  the end of replica 0's log:\n" in shown
    assert shown.count("bad shard") == 1
    assert "replica 2 failed: KeyError: 'x'\n  the end of its log:\n" in shown


@pytest.mark.parametrize("watch", [False, True])
def test_status_has_the_bar_on_a_line_of_its_own(
    call: Call,
    make_run: MakeRun,
    store_uri: str,
    scripted: ScriptedExecutor,
    monkeypatch: pytest.MonkeyPatch,
    watch: bool,
) -> None:
    run = make_run(rounds=4)
    where = (run.run_id, "--store", store_uri)
    before = call("status", *where).stdout.splitlines()
    assert before[1].split() == ["replica", "state", "why"]
    ReplicaWriter(run.store, 0).beat(round=2)
    if watch:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr(Run, "watch", lambda run, interval: iter([run.status()]))
    shown = click.unstyle(call("status", *where, *(["-w"] if watch else [])).stdout)
    lines = shown.splitlines()
    start = next(index for index, line in enumerate(lines) if "round 2/4" in line)
    assert set(lines[start + 1].strip()) == {"━"}
    assert lines[start + 2].split()[:2] == ["replica", "state"]


def test_tables_fit_a_narrow_terminal(make_run: MakeRun, scripted: ScriptedExecutor) -> None:
    width = 60
    run = make_run("a-run-of-a-rather-long-name", rounds=4)
    ReplicaWriter(run.store, 0).beat(round=2, inner_step=100, loss=1.5, tokens_per_s=12345.0)
    scripted.set(1, state="failed", exit_code=1, message="a long story that has to be wrapped")
    console = Console(file=io.StringIO(), width=width)
    console.print(status_view(run.status(), width))
    console.print(run_table([run.status()]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= width
    assert "tokens" not in shown.partition("replica")[2]
    assert ("RUNNING" in shown, "a long" in shown) == (True, True)
    assert "…" in shown  # cut cells say so


def test_ls_of_a_run_that_has_not_begun_shows_no_round(
    call: Call, make_run: MakeRun, store_uri: str
) -> None:
    make_run(rounds=7)
    assert "/7" not in call("ls", "--store", store_uri).stdout


def test_status_watch_ends_with_the_run(
    call: Call, make_run: MakeRun, store_uri: str, scripted: ScriptedExecutor
) -> None:
    run = make_run()
    _end(scripted, "succeeded", exit_code=0)
    result = call("status", run.run_id, "--store", store_uri, "-w")
    assert result.exit_code == 0
    assert "SUCCEEDED" in result.stdout
    lines = call("status", run.run_id, "--store", store_uri, "-w", "--json").stdout.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["succeeded"]


def test_logs_names_replicas_and_times(call: Call, make_run: MakeRun, store_uri: str) -> None:
    run = make_run()
    ReplicaWriter(run.store, 0).log("first", ts=0.25)
    ReplicaWriter(run.store, 1).log("second", ts=1.0)
    where = (run.run_id, "--store", store_uri)
    assert call("logs", *where).stdout == "replica/0 first\nreplica/1 second\n"
    assert call("logs", *where, "--replica", "1").stdout == "second\n"
    assert call("logs", *where, "-n", "1").stdout == "replica/1 second\n"
    stamped = call("logs", *where, "--replica", "0", "--timestamps").stdout
    assert stamped == "1970-01-01T00:00:00.250Z first\n"
    assert call("logs", *where, "--replica", "9").exit_code == 2


@pytest.mark.parametrize(
    ("state", "values", "exit_code"),
    [
        ("succeeded", {"exit_code": 0}, 0),
        ("failed", {"exit_code": 1}, 100),
        ("cancelled", {}, 103),
    ],
)
def test_wait_and_logs_follow_tell_the_end_by_exit_code(
    call: Call,
    make_run: MakeRun,
    store_uri: str,
    scripted: ScriptedExecutor,
    state: str,
    values: dict[str, object],
    exit_code: int,
) -> None:
    run = make_run()
    _end(scripted, state, **values)
    result = call("wait", run.run_id, "--store", store_uri)
    assert (result.exit_code, result.stdout) == (exit_code, f"{state.upper()}\n")
    assert call("logs", run.run_id, "--store", store_uri, "-f").exit_code == exit_code
    document = json.loads(call("wait", run.run_id, "--store", store_uri, "--json").stdout)
    assert document["state"] == state


def test_wait_tells_where_the_model_is(
    call: Call, make_run: MakeRun, store_uri: str, scripted: ScriptedExecutor
) -> None:
    run = make_run()
    _end(scripted, "succeeded", exit_code=0)
    where = (run.run_id, "--store", store_uri)
    assert call("wait", *where).stderr == ""  # it left none
    where_it_is = "result/00000004-abc"
    run.store.create(f"{where_it_is}/model.safetensors", b"weights")
    run.store.create(f"{where_it_is}/manifest.json", b'{"files": ["model.safetensors"]}')
    result = call("wait", *where)
    assert result.stdout == "SUCCEEDED\n"
    assert result.stderr == f"The model is {store_uri}/run-1/{where_it_is}/model.safetensors\n"


def test_wait_that_times_out_exits_101(call: Call, make_run: MakeRun, store_uri: str) -> None:
    result = call("wait", make_run().run_id, "--store", store_uri, "--timeout", "0s")
    assert (result.exit_code, result.stdout) == (101, "RUNNING\n")


def test_cancel_resume_down_go_through_a_life(
    call: Call, make_run: MakeRun, store_uri: str
) -> None:
    where = (make_run().run_id, "--store", store_uri)
    assert "Asked replica 1 of run-1" in call("cancel", *where, "--replica", "1").stderr
    assert "Asked replica 0 of run-1" in call("cancel", *where).stderr
    repeated = call("cancel", *where)
    assert (repeated.exit_code, repeated.stderr) == (
        0,
        "Nothing to cancel: run-1 had ended already.\n",
    )
    assert call("wait", *where).exit_code == 103
    assert "Started replicas 0, 1 of run-1." in call("resume", *where).stderr
    assert call("resume", *where).exit_code == 2
    refused = call("down", *where)
    assert refused.exit_code == 2
    assert "which is RUNNING, and its results" in refused.stderr
    assert "Add --yes." in refused.stderr
    assert call("down", *where, "--yes").exit_code == 0
    assert call("status", *where).exit_code == 102


def test_own_errors_exit_1_without_traceback_unless_asked(
    call: Call, make_run: MakeRun, store_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    Path(store_uri, run.run_id, "run.json").write_text("{}")
    result = call("status", run.run_id, "--store", store_uri)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "is not the record of a run" in result.stderr
    monkeypatch.setenv("DILOCO_DEBUG", "1")
    result = call("status", run.run_id, "--store", store_uri)
    assert type(result.exception).__name__ == "CorruptError"


def test_colour_and_live_tables_are_for_terminals(
    call: Call,
    make_run: MakeRun,
    store_uri: str,
    scripted: ScriptedExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run(rounds=3)
    ReplicaWriter(run.store, 0).beat(round=1)
    where = (run.run_id, "--store", store_uri)
    assert "\x1b" not in call("status", *where).stdout
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal then
    assert "\x1b[36mRUNNING" in call("status", *where).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[36m" not in call("status", *where).stdout
    _end(scripted, "failed", exit_code=1, output="the last line")
    watched = call("status", *where, "-w").stdout
    assert "FAILED" in watched
    assert "the last line" in watched


def test_commands_work_where_heavy_packages_are_absent(
    make_run: MakeRun, store_uri: str, scripted: ScriptedExecutor
) -> None:
    run = make_run()
    ReplicaWriter(run.store, 0).log("hello")
    _end(scripted, "failed", exit_code=1)
    program = """if True:
        import sys
        class Absent:
            def find_spec(name, *_):
                if name in ("torch", "torchft", "transformers", "numpy", "obstore", "fsspec"):
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Absent)
        from diloco_cloud.cli.main import cli
        store, *commands = sys.argv[1:]
        for command in commands:
            try: cli([*command.split(), "--store", store])
            except SystemExit as end: print(command, "->", end.code or 0)
    """
    commands = ["ls", "status run-1", "logs run-1", "wait run-1", "resume run-1", "cancel run-1"]
    done = subprocess.run(
        [sys.executable, "-c", program, store_uri, *commands, "down run-1 --yes"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ends = [line for line in done.stdout.splitlines() if "->" in line]
    codes = [0, 0, 0, 100, 0, 0, 0]
    expected = zip([*commands, "down run-1 --yes"], codes, strict=True)
    assert ends == [f"{command} -> {code}" for command, code in expected], done.stderr
