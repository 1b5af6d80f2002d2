"""The names of everything in a run's prefix (DESIGN, "A run is its prefix").

Writers and readers take keys from here only, so that the layout has one definition.
"""

from __future__ import annotations

RUN = "run.json"
REPLICAS = "replicas/"
ALIVE = "alive/"
ROUNDS = "rounds/"
STATE = "state/"
METRICS = "metrics/"
LOGS = "logs/"
RESULT = "result/"
#: What a trainer's replicas hold each other to, each object created once.
TRAINER = "trainer/"
#: Overwritten by a reader that needs to know what time it is at the store.
CLOCK = "clock"


def handle(rank: int, attempt: int) -> str:
    """What the executor returned for one life of a rank."""
    return f"{REPLICAS}{rank:04d}/{attempt:04d}.json"


def outcome(rank: int, attempt: int) -> str:
    """How one life of a rank ended, in the replica's own words; created once."""
    return f"{REPLICAS}{rank:04d}/{attempt:04d}.outcome.json"


def intent(rank: int, attempt: int) -> str:
    """That a resume is about to start this life; created once, so that two resumes can't both."""
    return f"{REPLICAS}{rank:04d}/{attempt:04d}.intent.json"


def cancel(rank: int, attempt: int) -> str:
    """That a user asked for this life to be cancelled."""
    return f"{REPLICAS}{rank:04d}/{attempt:04d}.cancel.json"


def alive(rank: int) -> str:
    """The heartbeat of a rank; overwritten."""
    return f"{ALIVE}{rank:04d}.json"


def metrics(rank: int, attempt: int, round_: int) -> str:
    """Figures of one round as one replica saw it."""
    return f"{METRICS}{rank:04d}.{attempt:04d}/{round_:08d}.json"


def log_chunk(rank: int, attempt: int, sequence: int) -> str:
    """A piece of a replica's JSON-lines log."""
    return f"{LOGS}{rank:04d}.{attempt:04d}/{sequence:08d}.jsonl"
