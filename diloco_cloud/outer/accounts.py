"""Which of a replica's work is in which contribution: every token in exactly one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from diloco_cloud.exchange.work import Work
from diloco_cloud.outer.progress import Mark

_START = Mark()


@dataclass
class _Account:
    """One fragment's.

    Attributes:
        inherited: work that an earlier life did and this one contributes; it comes before this
            life's own, and the marks below count it.
        settled: work up to here has its place in a decided round.
        carried: work from ``settled`` up to here missed a round.
        staleness: rounds of the fragment that it missed.
        dropped: tokens whose work is gone; they are in no contribution, and in no count.
    """

    inherited: Mark = _START
    settled: Mark = _START
    carried: Mark = _START
    staleness: int = 0
    dropped: int = 0


class Accounts:
    """The accounts of all fragments, in the units of :class:`~.progress.Mark`."""

    def __init__(self) -> None:
        self._by_fragment: dict[int, _Account] = {}

    def of(self, fragment: int, now: Mark) -> dict[str, int]:
        """Tokens, inner steps, and what of them is late, that a contribution made now stands for.

        Returns:
            The fields of :class:`~diloco_cloud.exchange.rounds.Work` that count.
        """
        account = self._by_fragment.setdefault(fragment, _Account())
        now = _sum(account.inherited, now)
        return {
            "tokens": now.tokens - account.settled.tokens,
            "inner_steps": now.steps - account.settled.steps,
            "carried": max(0, account.carried.tokens - account.settled.tokens),
            "staleness": account.staleness,
            "processed": now.tokens - account.dropped,
        }

    def settle(self, fragment: int, at: Mark) -> None:
        """The work up to ``at`` is in a decided round, or was left out for good."""
        old = self._by_fragment.setdefault(fragment, _Account())
        settled = _sum(old.inherited, at)
        self._by_fragment[fragment] = _Account(old.inherited, settled, dropped=old.dropped)

    def settle_if(self, fragment: int, at: Mark, life: int) -> bool:
        """Settle the work up to ``at`` if a decision has it, whatever became of it there.

        Args:
            fragment: whose account it is.
            at: the open contribution's mark.
            life: tokens that this life had processed in the contribution that was decided last.

        Returns:
            Whether it was open, and is settled now.
        """
        account = self._by_fragment.setdefault(fragment, _Account())
        total = _sum(account.inherited, at)
        if total.tokens <= account.settled.tokens or life < total.tokens - account.dropped:
            return False
        self.settle(fragment, at)
        return True

    def drop(self, fragment: int, at: Mark) -> None:
        """The work up to ``at`` is gone, and will be in no contribution."""
        account = self._by_fragment.setdefault(fragment, _Account())
        lost = _sum(account.inherited, at).tokens - account.settled.tokens
        self.settle(fragment, at)
        self._by_fragment[fragment].dropped += lost

    def age(self, fragment: int, rounds: int, now: Mark) -> None:
        """Rounds of a fragment were decided without what this replica has done for it until now."""
        account = self._by_fragment.setdefault(fragment, _Account())
        now = _sum(account.inherited, now)
        if rounds and now.tokens > account.settled.tokens:
            account.carried = now
            account.staleness += rounds

    def pending(self, fragments: int, contributed: int, now: Mark) -> list[dict[str, int]]:
        """What a next life would have to contribute, by fragment, if this one ended now.

        Args:
            fragments: how many there are.
            contributed: the one whose work is in a contribution, all of it.
            now: how much has been processed.
        """
        found: list[dict[str, int]] = []
        for fragment in range(fragments):
            if fragment != contributed:
                account = self.of(fragment, now)
                del account["processed"]
                found.append({"fragment": fragment, **account})
        return found

    def inherit(self, pending: Iterable[Mapping[str, int]]) -> None:
        """Begin with the work that an earlier life of this rank left, by :meth:`pending`.

        To the ledger it is as if this life had processed it: the earlier one never said it had.
        """
        for one in pending:
            self._by_fragment[one["fragment"]] = _Account(
                inherited=Mark(one["tokens"], one["inner_steps"]),
                carried=Mark(one["carried"]),
                staleness=one["staleness"],
            )


def at_usual_length(
    tensors: list[torch.Tensor], work: Work, usual_steps: int
) -> list[torch.Tensor]:
    """A pseudo-gradient with late work in it, as long as one of a usual number of inner steps.

    The outer learning rate and momentum are chosen for pseudo-gradients of that many steps. One of
    several rounds' work is several times longer, and momentum multiplies that (measured: half of
    all contributions lost, perplexity 15 % above that of a run without losses; scaled, 2 %).
    FedNova (arXiv:2007.04481, section 4) normalises by local steps for the same reason.

    Args:
        tensors: of the fragment, any floating dtype; not written.
        work: what they stand for.
        usual_steps: inner steps of a contribution that missed no round.
    """
    if work.staleness == 0 or work.inner_steps <= usual_steps:
        return tensors
    return [tensor * (usual_steps / work.inner_steps) for tensor in tensors]


def _sum(one: Mark, other: Mark) -> Mark:
    return Mark(one.tokens + other.tokens, one.steps + other.steps)
