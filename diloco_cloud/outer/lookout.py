"""Watches the open round while this replica still trains for it.

When a quorum is in and this replica would need much longer, it contributes the steps it has done:
nobody waits for the slowest, and the slowest loses nothing. When the round has been decided already
(this process was stopped, or cut off), it stops training on old parameters.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from diloco_cloud.errors import DilocoError
from diloco_cloud.exchange.rounds import RoundExchange

logger = logging.getLogger(__name__)

#: Pauses between two looks, each one LIST, as parts of a round: there is little to be seen before
#: most of it has passed, and then every pause is one in which all others wait for this replica.
_FIRST_LOOK = 0.8
_PAUSE = 0.01
_SHORTEST_S = 0.05


@dataclass
class Lookout:
    """A thread that looks at the open round now and then.

    Attributes:
        exchange: of this replica.
        overlap_steps: inner steps that an exchange runs beside.
        closing: this replica should contribute now.
        decided: the newest round that it found decided.
    """

    exchange: RoundExchange
    overlap_steps: int = 0
    closing: bool = field(default=False, init=False)
    decided: int = field(default=-1, init=False)
    _open: tuple[int, int] | None = field(default=None, init=False)
    _opened_at: float = field(default=0.0, init=False)
    _remaining_s: float = field(default=0.0, init=False)
    _step_s: float | None = field(default=None, init=False)
    _stepped_at: float | None = field(default=None, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _over: bool = field(default=False, init=False)

    def step(self, round_: int, fragment: int, steps_left: int) -> bool:
        """Note an inner step; returns whether to contribute without the steps that are left.

        Args:
            round_: the open round.
            fragment: whose turn it is.
            steps_left: inner steps until this replica contributes by itself.
        """
        if self.exchange.membership.is_strict:
            return False
        now = self.exchange.clock.now()
        if self._stepped_at is not None:
            took = now - self._stepped_at
            self._step_s = (
                took if self._step_s is None else self._step_s + (took - self._step_s) / 8
            )
        self._stepped_at = now
        self.exchange.membership.overlap_s = self.overlap_steps * (self._step_s or 0.0)
        self._remaining_s = steps_left * (self._step_s or 0.0)
        if self._open != (round_, fragment):
            with self._changed:
                self._open, self.closing = (round_, fragment), False
                self._opened_at = now
                self._changed.notify()
            self._start()
        return self.closing

    def rest(self) -> None:
        """This replica has contributed: nothing is to be watched until its next step."""
        self._open, self._stepped_at = None, None

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._over, self._open = True, None
            self._changed.notify()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="diloco-lookout", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._open is None and not self._over:
                    self._changed.wait()
                if self._over:
                    return
                watched = self._open
                self._changed.wait(self._period_s)
                if watched != self._open or self.closing:
                    continue
            if watched is not None:
                self._look(watched)

    @property
    def _period_s(self) -> float:
        passed_s = self.exchange.clock.now() - self._opened_at
        round_s = self.exchange.membership.round_s
        interval_s = self.exchange.poll_interval_s
        if round_s is None:
            # A new life comes into the middle of a round, whose end may be near: if it looked too
            # late, and trained for all of its own round meanwhile, it would miss one after another.
            own_s = passed_s + self._remaining_s
            return min(max(_PAUSE * own_s, _SHORTEST_S), interval_s)
        usual_s = max(_PAUSE * round_s, min(_SHORTEST_S, interval_s))
        return max(_FIRST_LOOK * round_s - passed_s, usual_s)

    def _look(self, watched: tuple[int, int]) -> None:
        try:
            seen = self.exchange.look(*watched)
        except DilocoError as error:
            logger.debug("could not look at round %d: %s", watched[0], error)
            return
        rules, history = self.exchange.membership, self.exchange.history
        closing = rules.closes(seen, history, self._remaining_s)
        with self._changed:
            if self._open == watched:
                self.closing = closing
                if seen.decided:
                    self.decided = watched[0]
