"""Ending a replica without losing what it has done."""

from __future__ import annotations

import signal


class HandedOver(SystemExit):
    """This replica's work is in the store, and its process is to end.

    Raised in the training thread after :meth:`MockManager.request_hand_over`. The exit code is that
    of a process ended by SIGTERM, which schedulers restart.
    """

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)
