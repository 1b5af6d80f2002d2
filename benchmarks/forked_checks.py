"""What must be true of a finished run, whoever was killed in it; found out without its replicas.

Everything is recomputed from the objects themselves: the commits, the contributions they name, and
the counts of tokens that the trainers kept in shared memory.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from forked_run import ForkedRun
from safetensors.torch import load

from diloco_cloud import keys
from diloco_cloud.exchange.commit import DRIFTED, Commit
from diloco_cloud.exchange.contribution import decode, digest
from diloco_cloud.result import read_result


class ViolatedError(AssertionError):
    """What must always hold does not."""


def require(condition: bool, complaint: str) -> None:
    """Raise ``ViolatedError`` unless ``condition`` holds."""
    if not condition:
        raise ViolatedError(complaint)


@dataclass(frozen=True)
class Decision:
    """A commit and when it was created, in seconds since the epoch."""

    commit: Commit
    at: float

    @property
    def lives(self) -> set[tuple[int, int]]:
        """Rank and attempt of each contributor."""
        return {(one.rank, one.attempt) for one in self.commit.contributors}


@dataclass(frozen=True)
class Log:
    """Every object that matters of a run, deleted ones included."""

    run: ForkedRun

    def decisions(self) -> list[Decision]:
        """All decisions; one for every round.

        Raises:
            ViolatedError: a round has two, or none.
        """
        found: dict[int, Decision] = {}
        for key, path in self._objects("rounds/", "/commit"):
            decision = Decision(Commit.decode(path.read_bytes()), path.stat().st_mtime)
            known = found.setdefault(decision.commit.round, decision)
            require(known.commit == decision.commit, f"{key} was decided twice")
            # A late duplicate of the request brings a deleted commit back.
            if decision.at < known.at:
                found[decision.commit.round] = decision
        require(sorted(found) == list(range(len(found))), f"rounds without decision in {found}")
        return [found[number] for number in range(len(found))]

    def read(self, key: str) -> bytes:
        """An object, deleted or not."""
        for _, path in self._objects(key, ""):
            return path.read_bytes()
        raise ViolatedError(f"{key} was never there")

    def _objects(self, start: str, end: str) -> Iterator[tuple[str, Path]]:
        prefix = self.run.root / "run"
        for info in self.run.prefix.list(start):
            if info.key.endswith(end):
                yield info.key, prefix / info.key
        for path in (self.run.root / "kept").glob(f"{start.replace('/', '+')}*"):
            key = path.name.partition("@")[0].replace("+", "/")
            if key.endswith(end):
                yield key, path


def check(run: ForkedRun) -> list[Decision]:
    """Check a finished run; returns its decisions.

    Raises:
        ViolatedError: something does not hold.
    """
    log = Log(run)
    decisions = log.decisions()
    commits = [one.commit for one in decisions]
    _check_contributors(commits)
    _check_bases(run, commits)
    _check_ledger(run, commits)
    return decisions


def _check_contributors(commits: Sequence[Commit]) -> None:
    """No rank twice in a round, no life after a newer one of its rank, nobody adrift."""
    newest: dict[int, int] = {}
    for commit in commits:
        ranks = [one.rank for one in commit.contributors]
        require(len(set(ranks)) == len(ranks), f"a rank is twice in round {commit.round}")
        for one in commit.contributors:
            require(one.attempt >= newest.get(one.rank, 0), f"an old life in round {commit.round}")
            newest[one.rank] = one.attempt
        drifted = [one.rank for one in commit.excluded if one.reason == DRIFTED]
        require(not drifted, f"round {commit.round}: ranks {drifted} drifted")


def _manifest(run: ForkedRun) -> Mapping[str, Any]:
    result = read_result(run.prefix)
    if result is None:
        raise ViolatedError("there is no result")
    return result.manifest


def _check_bases(run: ForkedRun, commits: Sequence[Commit]) -> None:
    """Everybody ended with the parameters of its last round, and the result has the very last."""
    last = len(commits)
    manifest = _manifest(run)
    require(manifest["round"] == last, f"the result is of round {manifest['round']}, not {last}")
    require(len(run.ends) == run.job.replicas, f"only ranks {sorted(run.ends)} came to an end")
    for rank, end in run.ends.items():
        base = commits[end.round].base if end.round < last else manifest["digest"]
        require(end.digest == base, f"rank {rank} ended with other parameters than the rest")


def _check_ledger(run: ForkedRun, commits: Sequence[Commit]) -> None:
    """Every token was merged once or died with its process, by the run's books and by ours."""
    merged = merged_tokens(commits)
    for commit in commits:
        for entry in commit.ledger:
            require(entry.balance == 0, f"the ledger of round {commit.round} does not balance")
    for entry in commits[-1].ledger:
        ours = sum(tokens for (rank, _), tokens in merged.items() if rank == entry.rank)
        require(entry.merged == ours, f"rank {entry.rank}: {ours} tokens merged, not {entry}")
    for rank, attempt in run.started:
        processed = run.board.processed(rank, attempt)
        mine = merged.get((rank, attempt), 0)
        require(mine <= processed, f"replica {rank}.{attempt}: merged {mine} of {processed}")
        if run.ends[rank].attempt == attempt:
            require(mine == processed, f"replica {rank}.{attempt} lost {processed - mine} tokens")


def merged_tokens(commits: Sequence[Commit]) -> Mapping[tuple[int, int], int]:
    """By rank and attempt, the tokens in the global parameters."""
    merged: dict[tuple[int, int], int] = defaultdict(int)
    for commit in commits:
        for one in commit.contributors if commit.decision == "commit" else ():
            merged[one.rank, one.attempt] += one.tokens
    return merged


def replay(run: ForkedRun, commits: Sequence[Commit]) -> None:
    """Take all outer steps anew, by hand, from the initial state and the contributions.

    Raises:
        ViolatedError: the parameters before some round, or at the end, are not those of the run.
    """
    log = Log(run)
    manifest = json.loads(log.read("state/00000000/manifest.json"))
    stored = load(log.read(f"state/00000000/{manifest['fragments'][0]['object']}"))
    names = [name for name, _ in run.job.model(0).named_parameters()]
    theta = torch.cat([stored[f"parameter.{name}"].flatten() for name in names])
    buffer: torch.Tensor | None = None
    lr, momentum = run.job.outer["outer_lr"], run.job.outer["outer_momentum"]
    for commit in commits:
        require(_digest(theta) == commit.base, f"round {commit.round} is not what it builds on")
        total = torch.zeros_like(theta)
        for one, weight in zip(commit.contributors, commit.weights, strict=True):
            total += _contribution(log, commit, one.rank, one.attempt, one.header) * weight
        mean = total / sum(commit.weights)
        buffer = mean.clone() if buffer is None else buffer.mul_(momentum).add_(mean)
        theta -= (mean + buffer * momentum) * lr
    final = _manifest(run)["digest"]
    require(_digest(theta) == final, "the result is not what its rounds make")


def _contribution(log: Log, commit: Commit, rank: int, attempt: int, name: str) -> torch.Tensor:
    data = log.read(keys.put(commit.round, commit.fragment, rank, attempt))
    header = decode(data, "contribution")
    require(digest(data[: header.size]) == name, f"round {commit.round}: not what was committed")
    payload = bytearray(data[header.size :])
    for chunk in range(header.chunks) if header.spread else ():
        payload += log.read(
            keys.part(commit.round, commit.fragment, chunk, header.spread, rank, attempt)
        )
    return torch.frombuffer(payload, dtype=torch.float32)


def _digest(flat: torch.Tensor) -> str:
    return blake3(flat.numpy().tobytes()).hexdigest()
