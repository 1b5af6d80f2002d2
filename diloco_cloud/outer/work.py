"""The handle ``MockManager.allreduce`` returns, shaped like torchft's Work."""

from __future__ import annotations

from collections.abc import Callable

import torch


class _ImmediateWork:
    """Work whose ``wait`` runs what is left to do, once, in the calling thread.

    Args:
        finish: what is left; None for work that is done already.
    """

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish
        self._future: torch.futures.Future[None] = torch.futures.Future()
        if finish is None:
            self._future.set_result(None)

    def wait(self, timeout: object = None) -> bool:
        """Finish the work. Callbacks of :meth:`get_future` have run when this returns."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
            self._future.set_result(None)
        return True

    def get_future(self) -> torch.futures.Future[None]:
        """A future that is resolved by :meth:`wait`, or already for work that is done."""
        return self._future
