"""Writes what a replica writes into its run's prefix."""

from __future__ import annotations

import json
import time
from typing import Any

from diloco_cloud import keys
from diloco_cloud.store.base import ObjectStore


class ReplicaWriter:
    """One life of one replica."""

    def __init__(self, store: ObjectStore, rank: int, attempt: int = 0) -> None:
        self.store = store
        self.rank = rank
        self.attempt = attempt
        self.sequence = 0

    def beat(self, **values: Any) -> None:
        beat = {
            "rank": self.rank,
            "attempt": self.attempt,
            "state": "training",
            "round": 0,
            "step": 0,
            "waiting_for": [],
            "excluded": None,
            "time": time.time(),
            **values,
        }
        self.store.put(keys.alive(self.rank), json.dumps(beat).encode())

    def end(self, state: str = "succeeded", **values: Any) -> None:
        outcome = {
            "rank": self.rank,
            "attempt": self.attempt,
            "state": state,
            "exit_code": 0 if state == "succeeded" else 1,
            "reason": None if state == "succeeded" else "exit_code",
            "error": None,
            "traceback": None,
            "result": None,
            "digest": None,
            **values,
        }
        self.store.create(keys.outcome(self.rank, self.attempt), json.dumps(outcome).encode())

    def log(self, *messages: str, ts: float = 1000.0, **fields: Any) -> None:
        """One chunk, with one record per message, a second apart."""
        records = [
            {"ts": ts + i, "level": "INFO", "rank": self.rank, "message": message, **fields}
            for i, message in enumerate(messages)
        ]
        text = "".join(json.dumps(record) + "\n" for record in records)
        self.store.create(keys.log_chunk(self.rank, self.attempt, self.sequence), text.encode())
        self.sequence += 1
