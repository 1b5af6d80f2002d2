"""When to look at the store again.

A look is a billed request, and what it is late is lost by everybody who waits. Where nothing is
known of when the event comes, pauses of a tenth of what has been waited keep the delay below 10 %
and the looks logarithmic. Where a plan or earlier rounds tell when to expect it, looks are rare
before that moment and close around it: a third of the requests, a tenth of the delay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

#: Of what has been waited, of what is expected to be, or of being overdue.
_SHARE: Final = 0.1
#: Around the expected moment, as part of the expected wait.
_CLOSE: Final = 0.01


@dataclass(frozen=True)
class Pace:
    """Pauses between looks, by how long has been waited.

    An event that comes when it is expected is noticed within 1 % of the wait; one that is early,
    within 10 % of the expected wait; one that is late, within 10 % of how late it is.

    Attributes:
        shortest_s, longest_s: of all pauses.
        expected_s: after how long a wait the event is expected; None where nothing is known.
    """

    shortest_s: float = 0.01
    longest_s: float = 1.0
    expected_s: float | None = None

    def pause_s(self, waited_s: float) -> float:
        """Seconds until the next look.

        Args:
            waited_s: seconds from the first look to now.
        """
        return min(max(self._wish_s(waited_s), self.shortest_s), self.longest_s)

    def looks(self, seconds: float) -> int:
        """Looks until an event after ``seconds`` is seen, the one that shows it included."""
        waited, looks = 0.0, 1
        while waited < seconds:
            pause = self.pause_s(waited)
            steady = min(self._steady_until(waited, pause), seconds) - waited
            steps = max(1, int(steady // pause))
            waited += steps * pause
            looks += steps
        return looks

    def _steady_until(self, waited_s: float, pause_s: float) -> float:
        """Until when the pauses stay as they are, so that a long wait need not be stepped through.

        Args:
            waited_s: seconds waited so far.
            pause_s: the pause that follows.
        """
        expected = self.expected_s or 0.0
        close = (1 - _SHARE) * expected
        if waited_s < close:
            far = self.longest_s if pause_s == self.longest_s else _SHARE * expected
            return close - far
        if waited_s < expected:
            return expected
        return math.inf if pause_s == self.longest_s else 0.0

    def _wish_s(self, waited_s: float) -> float:
        expected = self.expected_s
        if expected is None:
            return _SHARE * waited_s
        before = (1 - _SHARE) * expected - waited_s
        if before > 0:
            return min(_SHARE * expected, before)
        return max(_CLOSE * expected, _SHARE * (waited_s - expected))
