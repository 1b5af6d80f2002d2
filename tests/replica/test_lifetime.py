"""What an executor tells of a life's length, and what is made of it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from diloco_cloud.errors import ConfigError
from diloco_cloud.replica.lifetime import Lifetime

GRACE = "DILOCO_TERM_GRACE_S"


def test_grace_comes_from_the_executor() -> None:
    assert Lifetime.of_process(60, {GRACE: "120"}).grace_s == 120.0
    assert Lifetime.of_process(60, {}).grace_s == 10.0


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", ""])
def test_grace_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=GRACE):
        Lifetime.of_process(60, {GRACE: text})


@pytest.mark.parametrize(
    ("grace_s", "last_words", "exit_"),
    [(30.0, 27.0, 29.0), (120.0, 117.0, 119.0), (10.0, 7.0, 9.0), (1.0, 0.7, 0.9), (0.0, 0.0, 0.0)],
)
def test_hand_over_gets_nearly_all_of_the_grace(
    grace_s: float, last_words: float, exit_: float
) -> None:
    notice = Lifetime(grace_s).notice("preempted", 100.0)
    assert notice.last_words_at == pytest.approx(100 + last_words)
    assert notice.exit_at == pytest.approx(100 + exit_)


def test_time_limit_counts_from_the_start_of_the_process() -> None:
    program = (
        "import time; time.sleep(1)\n"
        "from diloco_cloud.replica.lifetime import Lifetime\n"
        "print(time.monotonic() - Lifetime.of_process(60, {}).started_at)"
    )
    began = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert 1.0 <= float(found.stdout) <= time.monotonic() - began + 0.05


def test_time_limit_of_a_process_that_is_old_counts_from_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + 3600.0)
    assert Lifetime.of_process(60, {}, now=lambda: 5.0).started_at == 5.0
