"""The names of everything in a run's prefix (docs/architecture.md lists them).

Writers and readers take keys from here only, so that the layout has one definition.
"""

from __future__ import annotations

import re

RUN = "run.json"
REPLICAS = "replicas/"
ALIVE = "alive/"
ROUNDS = "rounds/"
STATE = "state/"
INNER = "inner/"
METRICS = "metrics/"
LOGS = "logs/"
RESULT = "result/"
#: A prefix of its own, laid out as a run's: what is told of volunteer reducers, and by them.
REDUCERS = "reducers"
#: What trainers want beside the trained parameters; copied into each result.
RESULT_FILES = f"{RESULT}files/"
#: In the directory of a result: the trained parameters, and what says that it is complete.
MODEL = "model.safetensors"
RESULT_MANIFEST = "manifest.json"
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
    """That somebody is about to start this life; created once, so that no two can."""
    return f"{REPLICAS}{rank:04d}/{attempt:04d}.intent.json"


def stopped(rank: int, attempt: int) -> str:
    """That a supervisor does not start this rank again after this life, and why; created once."""
    return f"{REPLICAS}{rank:04d}/{attempt:04d}.stopped.json"


def hung(rank: int, attempt: int) -> str:
    """That a supervisor ends this life because it stands still, and since when; created once."""
    return f"{REPLICAS}{rank:04d}/{attempt:04d}.hung.json"


def size(number: int) -> str:
    """How many replicas the run has from now on; created once, the highest number counts."""
    return f"{REPLICAS}size.{number:04d}.json"


def supervisor(name: str) -> str:
    """A supervisor's sign of life; overwritten."""
    return f"{REPLICAS}supervisor.{name}.json"


def claim(rank: int, attempt: int) -> str:
    """The process that is this life; created once, so that no two are the same one."""
    return f"{REPLICAS}{rank:04d}/{attempt:04d}.claim.json"


def cancel(rank: int, attempt: int) -> str:
    """That a user asked for this life to be cancelled."""
    return f"{REPLICAS}{rank:04d}/{attempt:04d}.cancel.json"


def alive(rank: int) -> str:
    """The heartbeat of a rank; overwritten."""
    return f"{ALIVE}{rank:04d}.json"


def parse_alive(key: str) -> int | None:
    """The rank of a heartbeat, else None."""
    found = re.fullmatch(r"alive/([0-9]{4,9})\.json", key)
    return int(found[1]) if found else None


def metrics(rank: int, attempt: int, round_: int) -> str:
    """Figures of one round as one replica saw it."""
    return f"{METRICS}{rank:04d}.{attempt:04d}/{round_:08d}.json"


def log_chunk(rank: int, attempt: int, sequence: int) -> str:
    """A piece of a replica's JSON-lines log."""
    return f"{LOGS}{rank:04d}.{attempt:04d}/{sequence:08d}.jsonl"


def snapshot_number(name: str) -> int | None:
    """The round that a name below ``state/`` belongs to; None for what is not ours."""
    return int(name) if re.fullmatch(r"[0-9]{8,15}", name) else None


def snapshot(round_: int) -> str:
    """The directory of a snapshot of the outer state after ``round_`` decisions."""
    return f"{STATE}{round_:08d}/"


_IN_RESULT = re.compile(rf"{RESULT}([0-9]{{8,15}})-[^/]+/")


def result(round_: int, digest: str) -> str:
    """The directory of a result: global parameters after ``round_`` decisions, and their digest."""
    return f"{RESULT}{round_:08d}-{digest[:12]}/"


def result_round(key: str) -> int | None:
    """The round of a result's directory, or of an object in it; else None."""
    found = _IN_RESULT.match(key)
    return int(found[1]) if found else None


def is_result_manifest(key: str) -> bool:
    """Whether a key is that of a result's manifest."""
    found = _IN_RESULT.match(key)
    return found is not None and key[found.end() :] == RESULT_MANIFEST


def inner_directory(rank: int) -> str:
    """The inner checkpoints of a rank."""
    return f"{INNER}{rank:04d}/"


def inner(rank: int, round_: int, attempt: int) -> str:
    """What one life of a rank had for itself when it contributed to a round."""
    return f"{inner_directory(rank)}{round_:08d}.{attempt:04d}.safetensors"


def parse_inner(key: str) -> tuple[int, int] | None:
    """(round, attempt) of an inner checkpoint, else None."""
    found = re.search(r"/([0-9]{8,15})\.([0-9]{4,9})\.safetensors\Z", key)
    return (int(found[1]), int(found[2])) if found else None


_PART = re.compile(r"(put|join|leave|away)/([0-9]{4,9})\.([0-9]{4,9})\Z")


def round_prefix(round_: int) -> str:
    """What all keys of one round begin with, whatever its fragment."""
    return f"{ROUNDS}{round_:08d}."


def directory(round_: int, fragment: int) -> str:
    """All that belongs to one round."""
    return f"{round_prefix(round_)}{fragment}/"


def put(round_: int, fragment: int, rank: int, attempt: int) -> str:
    """A replica's contribution."""
    return f"{directory(round_, fragment)}put/{life(rank, attempt)}"


def leave(round_: int, fragment: int, rank: int, attempt: int) -> str:
    """A replica's word that it has finished: nothing more will come from it, from this round on."""
    return f"{directory(round_, fragment)}leave/{life(rank, attempt)}"


def join(round_: int, fragment: int, rank: int, attempt: int) -> str:
    """A replica's word that it has come up to this round, which from now on counts on it."""
    return f"{directory(round_, fragment)}join/{life(rank, attempt)}"


def away(round_: int, fragment: int, rank: int, attempt: int) -> str:
    """A replica's word that this life of it ends, so that nobody waits for it."""
    return f"{directory(round_, fragment)}away/{life(rank, attempt)}"


def commit(round_: int, fragment: int) -> str:
    """The decision."""
    return f"{directory(round_, fragment)}commit"


def is_commit(key: str) -> bool:
    """Whether a key is a decision's."""
    return key.startswith(ROUNDS) and key.endswith("/commit")


def stream(round_: int, fragment: int) -> str:
    """What is on its way in a round, in small objects; beside what is looked at all the time."""
    return f"{round_prefix(round_)}{fragment}.stream/"


def opening(round_: int, fragment: int, rank: int, attempt: int) -> str:
    """The header of a contribution whose chunks are still to come."""
    return f"{openings(round_, fragment)}{life(rank, attempt)}"


def openings(round_: int, fragment: int) -> str:
    """The directory of a round's openings."""
    return f"{stream(round_, fragment)}open/"


def opened_by(key: str) -> tuple[int, int] | None:
    """(rank, attempt) of an opening, else None."""
    found = re.search(r"/open/([0-9]{4,9})\.([0-9]{4,9})\Z", key)
    return (int(found[1]), int(found[2])) if found else None


def part(round_: int, fragment: int, chunk: int, spread: int, rank: int, attempt: int) -> str:
    """One chunk of a contribution whose chunks are dealt into ``spread`` groups."""
    group = parts(round_, fragment, chunk % spread)
    return f"{group}{chunk:06d}/{life(rank, attempt)}"


def parts(round_: int, fragment: int, group: int) -> str:
    """The directory of one group of chunks, of all contributions."""
    return f"{stream(round_, fragment)}part/{group:04d}/"


def outline(round_: int, fragment: int, name: str) -> str:
    """A decision that is expected of a round, for those who reduce ahead of it."""
    return f"{outlines(round_, fragment)}{name}"


def outlines(round_: int, fragment: int) -> str:
    """The directory of a round's outlines."""
    return f"{stream(round_, fragment)}outline/"


def is_stream(name: str) -> bool:
    """Whether a name below ``rounds/`` is that of a stream's directory."""
    return re.fullmatch(r"[0-9]{8,15}\.[0-9]{1,6}\.stream", name) is not None


def outlines_in(name: str) -> str:
    """The directory of outlines in a stream's directory, by its name below ``rounds/``."""
    return f"{ROUNDS}{name}/outline/"


def sums(round_: int, fragment: int, name: str) -> str:
    """The directory of a commit's means, by the beginning of the commit's digest."""
    return f"{stream(round_, fragment)}sum/{name}/"


def sum_(round_: int, fragment: int, name: str, chunk: int) -> str:
    """The mean of one chunk."""
    return f"{sums(round_, fragment, name)}{chunk:06d}"


def life(rank: int, attempt: int) -> str:
    """One life of one rank."""
    return f"{rank:04d}.{attempt:04d}"


def round_of(name: str) -> int | None:
    """The round that a name below ``rounds/`` belongs to; None for what is not ours."""
    found = re.match(r"([0-9]{8,15})\.[0-9]{1,6}(\.stream)?(/|\Z)", name)
    return int(found[1]) if found else None


def parse_streamed(key: str) -> tuple[int, int, int] | None:
    """(chunk, rank, attempt) of a part, else None."""
    found = re.search(r"/([0-9]{6,9})/([0-9]{4,9})\.([0-9]{4,9})\Z", key)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def parse_part(key: str, directory: str) -> tuple[str, int, int] | None:
    """("put", "join", "leave" or "away", rank, attempt) of a replica's object, else None."""
    found = _PART.match(key.removeprefix(directory))
    return (found[1], int(found[2]), int(found[3])) if found else None
