"""How long one life of a replica lasts: the time limit, and the grace after SIGTERM."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import TERM_GRACE_ENV

#: Where the executor does not tell: the shortest grace of those we know.
DEFAULT_GRACE_S = 10.0
#: Seconds before its end at which a life says its last words, whether it has handed over or not,
#: and at which it ends by itself; less where there is little time.
LAST_WORDS_S, EXIT_S = 3.0, 1.0
_LAST_WORDS_SHARE, _EXIT_SHARE = 0.3, 0.1
#: A process that began this much before the replica in it was not started for it.
_STARTUP_S = 300.0

#: Why a life ends early.
Cause: TypeAlias = Literal["preempted", "timeout"]


@dataclass(frozen=True)
class Lifetime:
    """What one life is given; times are by the monotonic clock.

    Attributes:
        grace_s: seconds between SIGTERM and the end of the process by force.
        started_at: when the time limit began to count.
        timeout_s: seconds from then to SIGTERM, or to the end by force, as the provider has it.
    """

    grace_s: float = DEFAULT_GRACE_S
    started_at: float = 0.0
    timeout_s: float = math.inf

    @classmethod
    def of_process(
        cls,
        timeout_s: float,
        environ: Mapping[str, str] = os.environ,
        now: Callable[[], float] = time.monotonic,
    ) -> Lifetime:
        """The lifetime of this process, which an executor has just started.

        Args:
            timeout_s: seconds that the executor was asked to let it run.
            environ: with the executor's ``DILOCO_TERM_GRACE_S``, if it knows.
            now: seconds, monotonic.

        Raises:
            ConfigError: the grace is not a number of seconds.
        """
        return cls(_grace(environ), now() - _startup_s(), timeout_s)

    @property
    def hand_over_at(self) -> float:
        """When to hand over by itself: a grace before the time limit, so that it needs no signal.

        With a limit that is not much longer than the grace, half of it is for training.
        """
        return self.started_at + self.timeout_s - min(self.grace_s, self.timeout_s / 2)

    def notice(self, cause: Cause, at: float) -> Notice:
        """A notice given at the time ``at``."""
        limit = self.started_at + self.timeout_s
        return Notice(cause, at, limit if cause == "timeout" else at + self.grace_s)


@dataclass(frozen=True)
class Notice:
    """That a life must end, why and by when; times are by the monotonic clock.

    Attributes:
        given_at: when it was noted.
        killed_at: when the process ends by force.
    """

    cause: Cause
    given_at: float
    killed_at: float

    @property
    def last_words_at(self) -> float:
        """When to say how this life ended, whatever it has come to."""
        return self.killed_at - min(LAST_WORDS_S, _LAST_WORDS_SHARE * self._given_s)

    @property
    def exit_at(self) -> float:
        """When to end the process."""
        return self.killed_at - min(EXIT_S, _EXIT_SHARE * self._given_s)

    @property
    def _given_s(self) -> float:
        return max(0.0, self.killed_at - self.given_at)


def _grace(environ: Mapping[str, str]) -> float:
    text = environ.get(TERM_GRACE_ENV)
    if text is None:
        return DEFAULT_GRACE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(
            f"{TERM_GRACE_ENV}={text!r} is not a number of seconds",
            fix="The executor sets it to the seconds between SIGTERM and SIGKILL.",
        )
    return seconds


def _startup_s() -> float:
    """Seconds since this process began; 0 where that cannot be told, or says nothing.

    A replica may be called in a process that has served others before. And a sandbox's ``/proc``
    need not count from the same moment as its clock.
    """
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return 0.0
    return age if 0.0 <= age <= _STARTUP_S else 0.0
