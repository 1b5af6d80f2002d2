"""Tokenizers and batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco_cloud.errors import ConfigError
from diloco_cloud.trainers.batches import BatchSampler, validation_windows
from diloco_cloud.trainers.data import TextOptions, prepare_data
from diloco_cloud.trainers.text import Document
from diloco_cloud.trainers.tokenization import ByteTokenizer, make_tokenizer

TEXT = [
    Document("a", b"the cat sat on the mat; " * 200),
    Document("b", "Grüße, 世界".encode() * 50),
]


def _options(text: Path, **changes: object) -> TextOptions:
    values: dict[str, object] = {
        "text": str(text),
        "tokenizer": "byte",
        "vocabulary_size": 300,
        "batch_size": 2,
        "sequence_length": 16,
        "validation_fraction": 0.1,
        "validation_sequences": 8,
    }
    return TextOptions(**{**values, **changes})  # type: ignore[arg-type]


def test_byte_tokenizer_marks_the_end_of_each_document() -> None:
    ids = ByteTokenizer().encode([Document("a", b"\x00\xff"), Document("b", b"z")])
    assert ids.tolist() == [0, 255, 256, ord("z"), 256]


def test_bpe_round_trips_and_ends_documents_with_its_last_id() -> None:
    from tokenizers import Tokenizer

    tokenizer = make_tokenizer("bpe", TEXT, 280)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.vocabulary_size <= 280
    assert ids.max() == tokenizer.vocabulary_size - 1 == ids[-1]
    saved = Tokenizer.from_str(tokenizer.files()["tokenizer.json"].decode())
    ends = np.flatnonzero(ids == ids[-1])
    assert saved.decode(ids[: ends[0]].tolist()) == TEXT[0].data.decode()
    assert saved.decode(ids[ends[0] + 1 : ends[1]].tolist()) == TEXT[1].data.decode()


def test_bpe_is_the_same_in_processes_with_other_hash_seeds_and_threads() -> None:
    program = (
        "import hashlib\n"
        "from diloco_cloud.trainers.text import read_documents, split_corpus\n"
        "from diloco_cloud.trainers.tokenization import make_tokenizer\n"
        "documents = split_corpus(read_documents(), 0.1).training[:40]\n"
        "files = make_tokenizer('bpe', documents, 600).files()\n"
        "print(hashlib.sha256(files['tokenizer.json']).hexdigest())\n"
    )
    digests = set()
    for threads in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": threads, "RAYON_NUM_THREADS": threads}
        digests.add(
            subprocess.run(
                [sys.executable, "-c", program],
                env=environment,
                check=True,
                capture_output=True,
                timeout=120,
            ).stdout
        )
    assert len(digests) == 1


@pytest.mark.parametrize("kind_and_size", [("morse", 300), ("bpe", 100), ("bpe", 1 << 17)])
def test_make_tokenizer_refuses_what_cannot_be(kind_and_size: tuple[str, int]) -> None:
    with pytest.raises(ConfigError):
        make_tokenizer(kind_and_size[0], TEXT, kind_and_size[1])


def _sampler(seed: int = 1, rank: int = 0) -> BatchSampler:
    tokens = np.arange(5000, dtype=np.uint16)
    return BatchSampler(tokens=tokens, batch_size=4, sequence_length=32, seed=seed, rank=rank)


def test_batch_is_a_pure_function_of_seed_rank_and_step() -> None:
    first = _sampler()
    expected = [first.batch(step) for step in range(5)]
    restarted = _sampler()
    assert torch.equal(restarted.batch(3), expected[3])
    assert torch.equal(restarted.batch(0), expected[0])
    others = [first.batch(1), _sampler(rank=1).batch(0), _sampler(seed=2).batch(0)]
    assert not any(torch.equal(expected[0], other) for other in others)


def test_batch_holds_windows_of_the_shard() -> None:
    batch = _sampler(seed=-3).batch(7)
    assert batch.shape == (4, 33)
    assert batch.dtype == torch.int64
    assert torch.equal(batch, batch[:, :1] + torch.arange(33))


def test_batches_reach_both_ends_of_the_shard() -> None:
    tokens = np.arange(6, dtype=np.uint16)
    sampler = BatchSampler(tokens=tokens, batch_size=64, sequence_length=4, seed=0, rank=0)
    assert set(sampler.batch(0)[:, 0].tolist()) == {0, 1}


def test_sampler_refuses_a_shard_shorter_than_one_window() -> None:
    with pytest.raises(ConfigError, match="rank 2 has 8 tokens"):
        BatchSampler(tokens=np.zeros(8, np.uint16), batch_size=1, sequence_length=8, seed=0, rank=2)


def test_validation_windows_do_not_overlap_and_span_the_text() -> None:
    windows = validation_windows(np.arange(1000, dtype=np.uint16), count=5, sequence_length=50)
    starts = windows[:, 0]
    assert windows.shape == (5, 51)
    assert starts[0] == 0
    assert windows[-1, -1] == 999
    assert (starts.diff() >= 50).all()


def test_validation_windows_are_no_more_than_the_text_holds() -> None:
    windows = validation_windows(np.arange(101, dtype=np.uint16), count=64, sequence_length=50)
    assert len(windows) <= 2


def test_prepare_data_agrees_between_ranks_on_all_but_the_shard(tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / f"{index}.txt").write_text(f"document {index} says something. " * 40)
    first, second = (
        prepare_data(_options(tmp_path, tokenizer="bpe"), rank=rank, world_size=2, seed=0)
        for rank in range(2)
    )
    assert first.corpus_digest == second.corpus_digest
    assert first.tokenizer.files() == second.tokenizer.files()
    assert torch.equal(first.validation, second.validation)
    assert not np.array_equal(first.sampler.tokens, second.sampler.tokens)


def test_prepare_data_refuses_text_too_small_for_the_world(tmp_path: Path) -> None:
    text = tmp_path / "small.txt"
    text.write_bytes(bytes(range(32, 127)) * 4)
    with pytest.raises(ConfigError, match="not enough for one sequence") as caught:
        prepare_data(_options(text), rank=3, world_size=64, seed=0)
    assert "fewer replicas" in str(caught.value)


def test_prepare_data_refuses_a_rank_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank 2"):
        prepare_data(_options(tmp_path), rank=2, world_size=2, seed=0)
