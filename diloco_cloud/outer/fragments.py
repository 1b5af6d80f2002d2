"""The fragments that an outer loop has registered with its manager, and what is left of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from diloco_cloud.errors import LayoutMismatchError
from diloco_cloud.outer.result import global_digest
from diloco_cloud.outer.state import Fragment, FragmentState, StateFns


class Fragments:
    """The fragments of one manager, in the order in which they take turns.

    torchft's DiLoCo registers two functions for each; our outer loop describes it further, which
    makes its state visible without copies. After the loop has gone, copies of the state remain.

    Attributes:
        fns: load and save function by key.
        turns: how many take turns, also after they have gone; 1 for LocalSGD, which registers none.
        lost: the last loop went after a sync that failed, so that its state is not the run's.
    """

    def __init__(self) -> None:
        self.fns: dict[str, StateFns] = {}
        self.turns = 1
        self.lost = False
        self._described: dict[str, Fragment] = {}
        self._left: list[FragmentState] = []

    def __iter__(self) -> Iterator[Fragment]:
        return iter(self._described.values())

    def __getitem__(self, index: int) -> Fragment:
        return list(self._described.values())[index]

    def __len__(self) -> int:
        return len(self._described)

    def register(self, key: str, fns: StateFns) -> None:
        """Remember how to read and write a fragment's state.

        Raises:
            AssertionError: the key is registered already (as torchft's Manager does).
        """
        assert key not in self.fns, f"{key} is registered already"
        self.fns[key] = fns
        self.turns, self.lost = len(self.fns), False

    def describe(
        self,
        key: str,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        embeddings: Sequence[bool] = (),
    ) -> None:
        """Tell what a registered fragment is made of; see :class:`Fragment`."""
        self._described[key] = Fragment(
            key,
            self.fns[key],
            tuple(names),
            tuple(parameters),
            optimizer,
            tuple(embeddings) or (False,) * len(names),
        )

    def globals_of(self, index: int) -> tuple[Sequence[torch.Tensor], Sequence[str]]:
        """Global parameters of a fragment and their names; of torchft's own DiLoCo too."""
        if index < len(self._described):
            return self[index].parameters, self[index].names
        if index < len(self.fns):
            _, save = list(self.fns.values())[index]
            saved = save().get("original_parameters", {})
            return list(saved.values()), list(saved)
        return (), ()

    def embeddings_of(self, index: int) -> Sequence[bool]:
        """For each parameter of a fragment, whether it is an embedding, where that is known."""
        return self[index].embeddings if index < len(self._described) else ()

    def capture(self) -> list[FragmentState]:
        """Copies of the state of all fragments."""
        return [fragment.capture() for fragment in self]

    def states(self) -> list[FragmentState]:
        """Their state now, or as it was when the loop went."""
        return self.capture() or self._left

    def digest(self) -> str | None:
        """Hex BLAKE3 over the global parameters of all fragments; None if there are none."""
        states = self.states()
        return global_digest(states) if states else None

    def clear(self, *, keep: bool) -> None:
        """Forget the fragments.

        Args:
            keep: their state is sound, and a next outer loop in this process goes on from it;
                otherwise that one joins the run anew, from the store.
        """
        self._left = self.states() if keep else []
        self.lost = len(self) > 0 and not keep
        self.fns.clear()
        self._described.clear()

    def take_over(self) -> bool:
        """Give the fragments the state that an earlier loop in this process left, if one did.

        Raises:
            LayoutMismatchError: they are not that loop's fragments.
        """
        states, self._left = self._left, []
        if not states:
            return False
        if [state.key for state in states] != list(self._described):
            raise LayoutMismatchError("the second outer loop has other fragments than the first")
        for fragment, state in zip(self, states, strict=True):
            fragment.restore(state)
        return True
