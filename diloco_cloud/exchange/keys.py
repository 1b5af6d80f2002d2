"""The names of a round's objects (DESIGN, "A run is its prefix")."""

from __future__ import annotations

import re

ROUNDS = "rounds/"
_PART = re.compile(r"(put|leave)/([0-9]{4,9})\.([0-9]{4,9})\Z")


def directory(round_: int, fragment: int) -> str:
    """All that belongs to one round."""
    return f"{ROUNDS}{round_:08d}.{fragment}/"


def put(round_: int, fragment: int, rank: int, attempt: int) -> str:
    """A replica's contribution."""
    return f"{directory(round_, fragment)}put/{life(rank, attempt)}"


def leave(round_: int, fragment: int, rank: int, attempt: int) -> str:
    """A replica's word that it has finished: nothing more will come from it, from this round on."""
    return f"{directory(round_, fragment)}leave/{life(rank, attempt)}"


def commit(round_: int, fragment: int) -> str:
    """The decision."""
    return f"{directory(round_, fragment)}commit"


def shard(round_: int, fragment: int, index: int) -> str:
    """A reduced shard."""
    return f"{directory(round_, fragment)}sum/{index:04d}"


def life(rank: int, attempt: int) -> str:
    """One life of one rank."""
    return f"{rank:04d}.{attempt:04d}"


def round_of(name: str) -> int | None:
    """The round that a name below ``rounds/`` belongs to; None for what is not ours."""
    found = re.match(r"([0-9]{8,15})\.[0-9]{1,6}(/|\Z)", name)
    return int(found[1]) if found else None


def parse_part(key: str, directory: str) -> tuple[str, int, int] | None:
    """("put" or "leave", rank, attempt) of a replica's object in ``directory``, else None."""
    found = _PART.match(key.removeprefix(directory))
    return (found[1], int(found[2]), int(found[3])) if found else None
