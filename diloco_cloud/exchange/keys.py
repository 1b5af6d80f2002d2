"""The names of a round's objects (DESIGN, "A run is its prefix")."""

from __future__ import annotations

ROUNDS = "rounds/"


def directory(round_: int, fragment: int) -> str:
    """All that belongs to one round."""
    return f"{ROUNDS}{round_:08d}.{fragment}/"


def put(round_: int, fragment: int, rank: int, attempt: int) -> str:
    """A replica's contribution."""
    return f"{directory(round_, fragment)}put/{rank:04d}.{attempt:04d}"


def commit(round_: int, fragment: int) -> str:
    """The decision."""
    return f"{directory(round_, fragment)}commit"


def shard(round_: int, fragment: int, index: int) -> str:
    """A reduced shard."""
    return f"{directory(round_, fragment)}sum/{index:04d}"


def parse_directory(name: str) -> tuple[int, int] | None:
    """Round and fragment of a directory's name, or None for something that is not ours."""
    head, _, tail = name.rstrip("/").partition(".")
    return (int(head), int(tail)) if head.isdigit() and tail.isdigit() else None


def parse_put(key: str) -> tuple[int, int] | None:
    """Rank and attempt of a contribution's key, or None for any other key."""
    parent, _, name = key.rpartition("/")
    rank, _, attempt = name.partition(".")
    if parent.endswith("/put") and rank.isdigit() and attempt.isdigit():
        return int(rank), int(attempt)
    return None
