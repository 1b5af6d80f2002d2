"""All-reduce by an object store: the seeds' interface over the round protocol.

store = ObjectStoreAllReduce("s3://bucket/run", rank=0, world_size=4)
store.allreduce(tensor)         # every replica ends with the same mean, to the bit
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import overload

import torch

from diloco_cloud import keys
from diloco_cloud.errors import ConfigError, DilocoError, ExchangeError
from diloco_cloud.exchange.codecs import require_codec
from diloco_cloud.exchange.commit import Commit
from diloco_cloud.exchange.host import write_back
from diloco_cloud.exchange.links import LinkMeter
from diloco_cloud.exchange.membership import Membership
from diloco_cloud.exchange.rounds import RoundExchange
from diloco_cloud.exchange.signing import Signer
from diloco_cloud.exchange.watch import Clock
from diloco_cloud.store import open_store, run_name
from diloco_cloud.store.base import ObjectStore
from diloco_cloud.store.metered import MeteredStore, Usage

logger = logging.getLogger(__name__)


class ObjectStoreAllReduce:
    """One rank's door to the rounds below a prefix.

    Args:
        uri: the run's prefix: ``s3://``, ``gs://``, ``az://``, ``file://``, any fsspec URI, or a
            path. A prefix serves one run; another run's rounds in it are refused.
        rank: 0-based, below ``world_size``.
        world_size: replicas whose contributions make a round.
        round_id: number of the first round; 0 by default.
        timeout_s: seconds a round waits for peers.
        poll_interval_s: longest pause between two looks at the store; the pauses begin at 10 ms
            and grow with the wait.
        join_timeout_s: seconds the first round waits; by default as ``timeout_s``.
        attempt: which life of the rank this is; by default ``DILOCO_ATTEMPT``, or 0.
        reduction: "all-gather", "sharded", or "auto" by payload and world size.
        codec: how contributions are encoded, by name (:mod:`.codecs`); the same on every replica.
        membership: who a round waits for; by default every rank.
        store: an open store to use instead of opening ``uri``.
        clock: what waiting is measured with.
        key: secret of a signed run, the same on every replica; nothing that is not signed with it
            is averaged or followed. None for a run that is not signed.

    Attributes:
        prefix: the run's prefix.
        exchange: runs the rounds.

    Raises:
        ConfigError: there is no such codec; ``rank`` is outside ``[0, world_size)``, or ``attempt``
            is negative (a ValueError).
        MissingDependencyError: the package for the URI's scheme is absent (a RuntimeError).
    """

    def __init__(
        self,
        uri: str,
        rank: int,
        world_size: int,
        *,
        round_id: int | None = None,
        timeout_s: float = 1800.0,
        poll_interval_s: float = 1.0,
        join_timeout_s: float | None = None,
        attempt: int | None = None,
        reduction: str = "auto",
        codec: str = "fp32",
        membership: Membership | None = None,
        store: ObjectStore | None = None,
        clock: Clock | None = None,
        key: bytes | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"rank {rank} is outside [0, {world_size})",
                fix="Every replica needs a rank of its own.",
            )
        if attempt is None:
            attempt = int(os.environ.get("DILOCO_ATTEMPT", "0"))
        if attempt < 0:
            raise ConfigError(f"attempt {attempt} is negative", fix="Attempts count from 0.")
        require_codec(codec)
        self.uri = os.fspath(uri).rstrip("/") + "/"
        self.rank = rank
        self.world_size = world_size
        self.prefix = open_store(uri) if store is None else store
        clock = Clock() if clock is None else clock
        meter = LinkMeter(clock.now)
        self._metered = MeteredStore(self.prefix, meter)
        self.exchange = RoundExchange(
            store=self._metered,
            run=run_name(self.uri),
            signer=Signer(key, run_name(self.uri)),
            rank=rank,
            world_size=world_size,
            attempt=attempt,
            timeout_s=timeout_s,
            join_timeout_s=timeout_s if join_timeout_s is None else join_timeout_s,
            poll_interval_s=poll_interval_s,
            reduction=reduction,
            codec=codec,
            clock=clock,
            meter=meter,
        )
        if membership is not None:
            self.exchange.membership = membership
        self._continued = round_id is not None
        self._first = self._round_counter = round_id or 0

    @property
    def round_id(self) -> int:
        """Number of the next round."""
        return self._round_counter

    @property
    def usage(self) -> Usage:
        """Requests and bytes of the rounds so far."""
        return self._metered.usage

    @overload
    def allreduce(self, tensor: torch.Tensor, *, name: str | None = None) -> torch.Tensor: ...

    @overload
    def allreduce(
        self, tensor: Sequence[torch.Tensor], *, name: Sequence[str] | None = None
    ) -> list[torch.Tensor]: ...

    def allreduce(
        self,
        tensor: torch.Tensor | Sequence[torch.Tensor],
        *,
        name: str | Sequence[str] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Replace ``tensor`` by its mean over the replicas, and return it.

        One call is one round and one object, whether for a tensor or a list of them. Blocks until
        every replica has contributed. dtype and device stay; the mean is taken in fp32. After an
        error, tensors that are large (8 MiB or more together) or sent in shards may hold neither
        what they did nor the mean.

        Args:
            tensor: a tensor or a list; fp32, bf16, fp16 or fp64, on any device.
            name: what the tensor (or each tensor of the list) is called; replicas whose names
                differ are told so instead of averaging unlike things.

        Raises:
            TimeoutError: a peer did not contribute in time.
            LayoutMismatchError: replicas contributed other names, shapes or dtypes.
            ExchangeError: the prefix holds another run's rounds, or no replica had finite values.
            ValueError: a tensor shares memory with itself (expanded), so it cannot be written to.
        """
        single = isinstance(tensor, torch.Tensor)
        tensors = [tensor] if isinstance(tensor, torch.Tensor) else list(tensor)
        names = [name] if isinstance(name, str) else name
        if self.world_size == 1:
            self._round_counter += 1
        else:
            self._reduce([t.detach() for t in tensors], names)
        return tensors[0] if single else tensors

    def _reduce(self, tensors: list[torch.Tensor], names: Sequence[str] | None) -> None:
        for tensor in tensors:
            if any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
                raise ValueError("an expanded tensor cannot be replaced by its mean; clone() it")
        round_ = self._round_counter
        first = round_ == self._first
        if first:
            self._refuse_other_rounds(round_)
        result = self.exchange.exchange(round_, 0, tensors, names=names, in_place=True)
        if first:
            self._refuse_decision_without_us(result.commit)
        self._round_counter += 1
        if result.tensors is None:
            raise ExchangeError(f"round {round_}: nothing to average: {result.reason}")
        write_back(tensors, result.tensors)
        if not first and self.rank == result.commit.contributors[0].rank:
            self.discard(round_ - 1)

    def _refuse_other_rounds(self, round_: int) -> None:
        """A prefix in which another run has met would answer with that run's means."""
        listed = self.prefix.list(keys.ROUNDS)
        numbers = {keys.round_of(info.key.removeprefix(keys.ROUNDS)) for info in listed}
        others = [n for n in numbers if n is not None and n != round_]
        if self._continued:
            others = [n for n in others if n > round_]
        if others:
            raise ExchangeError(
                f"{self.uri} already holds rounds of another run",
                fix="Use a fresh prefix, or continue that run with its round_id.",
            )

    def _refuse_decision_without_us(self, commit: Commit) -> None:
        lives = [(one.rank, one.attempt) for one in commit.contributors]
        lives += [(one.rank, one.attempt) for one in commit.excluded]
        if (self.rank, self.exchange.attempt) not in lives:
            raise ExchangeError(
                f"round {commit.round} was already decided in {self.uri}, without this replica",
                fix="Use a fresh prefix, or continue that run with its round_id.",
            )

    def discard(self, round_: int) -> None:
        """Delete a round: everyone who contributed to the next one has read it."""
        try:
            listed = self.prefix.list(keys.round_prefix(round_))
            self.prefix.delete_many([info.key for info in listed])
        except DilocoError as error:
            logger.warning("round %d could not be deleted: %s", round_, error)
