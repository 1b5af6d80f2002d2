"""What each channel did since the last log, and a word where one did nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass
class ChannelActivity:
    """Counters of one channel.

    Attributes:
        name: in logs, "sdpo" or "replay".
        total: counts of the whole run: ``steps`` (micro-batches), ``active`` (tokens for "sdpo",
            pairs for "replay"), ``tokens`` and ``skipped`` (rows or pairs).
        reasons: why micro-batches were idle, and why rows were skipped, of the whole run.
    """

    name: str
    total: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    _window: Counter[str] = field(default_factory=Counter)
    _idle_windows: int = 0

    def count(self, *, active: int, tokens: int, skipped: int = 0, idle: str | None = None) -> None:
        """Add one micro-batch."""
        found = {"steps": 1, "active": active, "tokens": tokens, "skipped": skipped}
        self._window.update(found)
        self.total.update(found)
        if idle is not None:
            self.reasons[idle] += 1

    def skip(self, reasons: Mapping[str, int]) -> None:
        """Add rows or pairs that never came into a micro-batch, by reason."""
        skipped = {"skipped": sum(reasons.values())}
        self._window.update(skipped)
        self.total.update(skipped)
        self.reasons.update(reasons)

    def end_window(self) -> dict[str, float]:
        """Figures since the last call, for the log; warns where nothing was learnt.

        The warning comes after the 1st, 2nd, 4th, 8th … such window in a row.
        """
        window, self._window = self._window, Counter()
        if not window["steps"]:
            return {}
        if window["active"]:
            self._idle_windows = 0
        else:
            self._idle_windows += 1
            if self._idle_windows & (self._idle_windows - 1) == 0:
                logger.warning(
                    "the %s channel learnt nothing in the last %d micro-batches (%s)",
                    self.name,
                    window["steps"],
                    ", ".join(f"{why}: {n}" for why, n in self.reasons.items())
                    or "no row is for it",
                )
        return {
            f"composer/{self.name}/{key}": float(window[key])
            for key in ("active", "tokens", "skipped")
        }
