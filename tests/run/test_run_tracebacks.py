"""Which lines of a crash are shown."""

from __future__ import annotations

from diloco_cloud.run.tracebacks import end_of_log, without_plumbing

HEADER = "Traceback (most recent call last):"


def _frame(path: str) -> list[str]:
    return [f'  File "{path}", line 7, in f', "    g(", "        1)", "    ^^"]


def test_a_traceback_of_nothing_but_plumbing_loses_its_header_too() -> None:
    lines = [HEADER, *_frame("/x/diloco_cloud/replica_entrypoint.py"), "TrainerImportError: no"]
    assert without_plumbing(["before", *lines, "after"]) == [
        "before",
        "TrainerImportError: no",
        "after",
    ]


def test_frames_of_the_user_and_of_libraries_stay() -> None:
    frames = [*_frame("/me/child.py"), *_frame("/x/diloco_cloud/outer/loop.py")]
    lines = [HEADER, *_frame("<frozen runpy>"), *frames, "ValueError: a", "    b"]
    assert without_plumbing(lines) == [HEADER, *frames, "ValueError: a", "    b"]


def test_end_of_log_keeps_both_ends_of_a_long_traceback() -> None:
    frames = [line for i in range(30) for line in (f'  File "{i}.py", line 1, in f', "    g()")]
    shown = end_of_log(["log", HEADER, *frames, "ValueError: boom"], 20)
    assert len(shown) == 20
    assert shown[:3] == [HEADER, '  File "0.py", line 1, in f', "    g()"]
    assert shown[8] == "  …"
    assert shown[-3:] == ['  File "29.py", line 1, in f', "    g()", "ValueError: boom"]


def test_end_of_log_is_the_last_lines_otherwise() -> None:
    lines = [*map(str, range(30)), HEADER, *_frame("/me.py"), "ValueError: boom"]
    assert end_of_log(lines, 10) == lines[-10:]
    assert end_of_log(["a"], 10) == ["a"]
