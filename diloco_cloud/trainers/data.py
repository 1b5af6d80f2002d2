"""From a path to what one replica trains on and what the run is judged on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from diloco_cloud import keys
from diloco_cloud.errors import AlreadyExistsError, ConfigError
from diloco_cloud.store.base import ObjectStore
from diloco_cloud.trainers.batches import BatchSampler, validation_windows
from diloco_cloud.trainers.text import Corpus, read_documents, shard, split_corpus
from diloco_cloud.trainers.tokenization import Tokenizer, make_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How text becomes batches; the defaults of each are those of the trainer.

    Attributes:
        text: file or directory; None for the standard library's sources.
        tokenizer: "byte" or "bpe".
        vocabulary_size: of "bpe".
        batch_size: windows per inner step.
        sequence_length: predicted tokens per window.
        validation_fraction: part of the text held out.
        validation_sequences: windows of it that are evaluated each time.
    """

    text: str | None
    tokenizer: str
    vocabulary_size: int
    batch_size: int
    sequence_length: int
    validation_fraction: float
    validation_sequences: int


@dataclass(frozen=True, kw_only=True)
class ReplicaData:
    """One replica's batches, and what is common to all.

    Attributes:
        tokenizer: the same on every replica.
        sampler: this rank's batches.
        validation: held-out ids, int64, shape (windows, sequence_length + 1).
        bytes_per_token: of the held-out text; turns nats per token into bits per byte.
        corpus_digest: equal iff replicas read the same text.
    """

    tokenizer: Tokenizer
    sampler: BatchSampler
    validation: torch.Tensor
    bytes_per_token: float
    corpus_digest: str


def prepare_data(options: TextOptions, *, rank: int, world_size: int, seed: int) -> ReplicaData:
    """Read, split, shard and encode; every rank computes the same split and tokenizer.

    Raises:
        ConfigError: no text, too little of it, or an option out of range.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank {rank} of a run of {world_size} replicas", fix="Ranks count from 0."
        )
    corpus, tokenizer = _read(options)
    mine = shard(corpus.training, rank=rank, world_size=world_size, seed=seed)
    if not mine:
        raise ConfigError(
            f"the text is too small for {world_size} replicas: rank {rank} gets none of it",
            fix="Give more text, or fewer replicas.",
        )
    sampler = BatchSampler(
        tokens=tokenizer.encode(mine),
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
        seed=seed,
        rank=rank,
    )
    logger.info("rank %d trains on %d tokens of %d documents", rank, len(sampler), len(mine))
    validation, bytes_per_token = _held_out(options, corpus, tokenizer)
    return ReplicaData(
        tokenizer=tokenizer,
        sampler=sampler,
        validation=validation,
        bytes_per_token=bytes_per_token,
        corpus_digest=corpus.digest,
    )


def held_out_windows(options: TextOptions) -> torch.Tensor:
    """The held-out sample alone, as every replica with these options has it.

    Returns:
        int64 ids, shape (windows, sequence_length + 1).

    Raises:
        ConfigError: no text, too little of it, or an option out of range.
    """
    return _held_out(options, *_read(options))[0]


def _read(options: TextOptions) -> tuple[Corpus, Tokenizer]:
    corpus = split_corpus(read_documents(options.text), options.validation_fraction)
    return corpus, make_tokenizer(options.tokenizer, corpus.training, options.vocabulary_size)


def _held_out(
    options: TextOptions, corpus: Corpus, tokenizer: Tokenizer
) -> tuple[torch.Tensor, float]:
    """Windows, and bytes per token of the whole held-out text."""
    tokens = tokenizer.encode(corpus.validation)
    windows = validation_windows(
        tokens, count=options.validation_sequences, sequence_length=options.sequence_length
    )
    return windows, sum(len(document.data) for document in corpus.validation) / len(tokens)


def require_same_corpus(store: ObjectStore, corpus_digest: str) -> None:
    """Hold all replicas of a run to the text that the first of them read.

    Machines differ (another Python has another standard library), and nothing else would tell:
    held-out text would leak, and learnt tokenizers would differ in silence.

    Args:
        store: the run's prefix.
        corpus_digest: of the text this replica read.

    Raises:
        ConfigError: another replica read other text.
    """
    key = keys.TRAINER + "corpus"
    try:
        store.create(key, corpus_digest.encode())
    except AlreadyExistsError:
        theirs = store.get(key).decode()
        if theirs != corpus_digest:
            raise ConfigError(
                f"this replica's text ({corpus_digest}) is not the run's ({theirs})",
                fix="Give text= the same files on every replica; the default text is that of each "
                "machine's own Python.",
            ) from None
