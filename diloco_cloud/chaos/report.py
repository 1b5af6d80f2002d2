"""A storm's figures beside a fault-free run's, and beside what others have published."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from diloco_cloud.chaos.referee import Verdict

#: Goodput of Decoupled DiLoCo (arXiv:2604.21428) with 8 learners, a fault of each every 7.3 times
#: what it costs, simulated; and what the same rates leave of a barrier of 8.
DECOUPLED_GOODPUT: Final = 0.88
BARRIER_GOODPUT: Final = 0.48


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        others: what others report of the same.
    """

    what: str
    ours: str
    others: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A rehearsal.

    Attributes:
        replicas: number of ranks.
        scale: how many times faster than life the storm went by.
        seed: of everything.
        round_s: seconds that a round takes by the replicas' pace.
        calm: the fault-free run.
        storm: the other.
    """

    replicas: int
    scale: float
    seed: int
    round_s: float
    calm: Verdict
    storm: Verdict

    @property
    def rounds_kept(self) -> float:
        """Committed rounds per second, relative to the fault-free run."""
        return self.storm.rounds_per_s / self.calm.rounds_per_s

    @property
    def tokens_kept(self) -> float:
        """Merged tokens per second, relative to the fault-free run."""
        return self.storm.tokens_per_s / self.calm.tokens_per_s

    @property
    def violations(self) -> tuple[str, ...]:
        """What must never be, and was, in either run."""
        return tuple(f"calm: {line}" for line in self.calm.violations) + self.storm.violations

    def rows(self) -> Sequence[Row]:
        """The table."""
        calm, storm, n = self.calm, self.storm, self.replicas
        faults = sum(storm.faults.values())
        named = ", ".join(f"{count} × {kind}" for kind, count in sorted(storm.faults.items()))
        pace = faults / storm.rounds if storm.rounds else 0.0
        return [
            Row("faults", f"{faults}: {named}" if faults else "none", "ft-diloco 45: 28, 9, 8"),
            Row("faults per round", f"{pace:.2f}", "ft-diloco 2.5"),
            Row("rounds, of fault-free", f"{self.rounds_kept:.1%}", "ft-diloco 97.7 %"),
            Row(
                "tokens merged, of fault-free",
                f"{self.tokens_kept:.1%}",
                f"Decoupled {DECOUPLED_GOODPUT:.0%} (simulated), barrier {BARRIER_GOODPUT:.0%}",
            ),
            Row(
                "replicas in a round",
                f"{storm.participation:.1f} of {n} (calm {calm.participation:.1f})",
                "ft-diloco 16 of 32",
            ),
            Row("kills recovered", f"{storm.recovered} of {len(storm.recoveries)}", "27 of 27"),
            Row(
                "kill to the next round",
                self._seconds(storm.survivors_s),
                "ft-diloco 5.0 s; fsb_decoupled_diloco 1.0 s after a 30 s lease",
            ),
            Row("kill to being back in one", self._seconds(storm.back_s), "ft-diloco 149 s"),
            Row(
                "equal parameters everywhere",
                f"after each of {storm.states} outer steps" if not self.violations else "see below",
                "ft-diloco 84 of 84, with 2 replicas",
            ),
            Row("rule violations", str(len(self.violations))),
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **{name: getattr(self, name) for name in ("replicas", "scale", "seed", "round_s")},
            "rounds_kept": self.rounds_kept,
            "tokens_kept": self.tokens_kept,
            "calm": verdict_json(self.calm),
            "storm": verdict_json(self.storm),
        }

    def _seconds(self, value: float | None) -> str:
        if value is None:
            return "-"
        unscaled = f", {value * self.scale:.0f} s at life's speed" if self.scale != 1 else ""
        return f"{value:.1f} s{unscaled}"


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain JSON values, with what is derived from it."""
    derived = ("rounds_per_s", "tokens", "tokens_per_s", "recovered", "back_s", "survivors_s")
    return {
        **dataclasses.asdict(verdict),
        **{name: getattr(verdict, name) for name in derived},
    }
