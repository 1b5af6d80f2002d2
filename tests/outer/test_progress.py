"""What a replica knows of its own progress."""

from __future__ import annotations

from diloco_cloud.outer.progress import Progress


def test_idle_time_counts_from_the_last_step_or_change_of_phase() -> None:
    now = 100.0
    progress = Progress(now=lambda: now)

    def idle() -> float:
        seconds: float = progress.snapshot()["idle_s"]
        return seconds

    progress.resume(0, 0, 0)  # it has joined
    now += 5
    assert idle() == 0  # its first step may compile for long
    progress.report(1, None, {})
    for _ in range(2):
        now += 3
        assert idle() == 3
        progress.report(1, None, {})
        assert idle() == 0
    now += 7
    progress.enter("syncing")
    assert idle() == 0
    now += 2
    progress.touch()
    assert (idle(), progress.phase) == (0, "syncing")


def test_idle_time_does_not_end_with_what_others_do() -> None:
    now = 0.0
    progress = Progress(now=lambda: now)
    progress.resume(3, 3, 9)
    progress.touch()
    now += 60
    progress.waiting_for = [2]  # by the thread of an exchange that goes on beside
    progress.metrics["loss"] = 1.0
    assert progress.snapshot()["idle_s"] == 60
