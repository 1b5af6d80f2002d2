"""Text, split and shards: nothing leaks, nothing is lost, everybody agrees."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from diloco_cloud.errors import ConfigError
from diloco_cloud.trainers.text import Document, read_documents, shard, split_corpus

WINDOW = 24


def _random_documents(count: int, *, seed: int = 0, size: int = 4000) -> list[Document]:
    generator = random.Random(seed)
    return [
        Document(f"{index:03d}.txt", generator.randbytes(size + generator.randrange(size)))
        for index in range(count)
    ]


def _windows(documents: list[Document] | tuple[Document, ...]) -> set[bytes]:
    return {
        document.data[start : start + WINDOW]
        for document in documents
        for start in range(len(document.data) - WINDOW + 1)
    }


@pytest.mark.parametrize("count", [1, 3, 40])
def test_split_corpus_shares_no_window_between_training_and_validation(count: int) -> None:
    documents = _random_documents(count)
    corpus = split_corpus(documents, 0.1)
    assert not _windows(corpus.training) & _windows(corpus.validation)
    held_out = sum(len(document.data) for document in corpus.validation)
    assert 0.08 < held_out / sum(len(document.data) for document in documents) < 0.2


def test_split_corpus_holds_out_whole_files_where_there_are_many() -> None:
    documents = _random_documents(40)
    corpus = split_corpus(documents, 0.1)
    key = {document.name: document for document in documents}
    assert sorted(corpus.training + corpus.validation, key=lambda d: d.name) == documents
    assert all(key[document.name] == document for document in corpus.validation)


def test_split_corpus_does_not_depend_on_the_order_of_the_files() -> None:
    documents = _random_documents(40)
    forward, backward = split_corpus(documents, 0.1), split_corpus(documents[::-1], 0.1)
    assert forward == backward
    assert forward.digest == backward.digest


def test_corpus_digest_changes_with_one_byte() -> None:
    documents = _random_documents(12)
    changed = [Document(documents[0].name, documents[0].data + b"x"), *documents[1:]]
    assert split_corpus(documents, 0.1).digest != split_corpus(changed, 0.1).digest


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 11])
def test_shards_are_disjoint_exhaustive_and_even(world_size: int, count: int) -> None:
    documents = _random_documents(count)
    shards = [
        shard(documents, rank=rank, world_size=world_size, seed=5) for rank in range(world_size)
    ]
    seen: dict[str, bytes] = {}
    for part in shards:
        for document in part:
            seen[document.name] = seen.get(document.name, b"") + document.data
    assert seen == {document.name: document.data for document in documents}
    sizes = [sum(len(document.data) for document in part) for part in shards]
    assert max(sizes) - min(sizes) <= 8


def test_shard_never_cuts_a_character() -> None:
    text = Document("poem.txt", "äöüß€𝄞".encode() * 101)
    for rank in range(5):
        for document in shard([text], rank=rank, world_size=5, seed=0):
            document.data.decode("utf-8")


def test_shard_depends_on_the_seed() -> None:
    documents = _random_documents(11)
    first = shard(documents, rank=0, world_size=3, seed=1)
    assert first == shard(documents[::-1], rank=0, world_size=3, seed=1)
    assert first != shard(documents, rank=0, world_size=3, seed=2)


def test_read_documents_passes_over_copies_hidden_binary_and_empty_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config").write_text("hidden")
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "sub/b.txt").write_text("more text")
    (tmp_path / "sub/copy.txt").write_text("text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "image.bin").write_bytes(b"\x89PNG\0\0")
    names = [document.name for document in read_documents(tmp_path)]
    assert names == ["a.txt", "sub/b.txt"]


def test_read_documents_finds_the_standard_library_without_its_tests() -> None:
    documents = read_documents()
    names = {document.name for document in documents}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any({"test", "site-packages"} & set(Path(name).parts) for name in names)
    assert not any(str(sys.prefix) in name for name in names)
    assert sum(len(document.data) for document in documents) > 4_000_000


def test_read_documents_names_the_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no text at .*absent") as caught:
        read_documents(tmp_path / "absent")
    assert caught.value.fix


def test_read_documents_refuses_a_directory_without_text(tmp_path: Path) -> None:
    (tmp_path / "image.bin").write_bytes(b"\0\1\2")
    with pytest.raises(ConfigError, match="holds text"):
        read_documents(tmp_path)


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 2])
def test_split_corpus_refuses_a_fraction_that_leaves_one_side_empty(fraction: float) -> None:
    with pytest.raises(ConfigError, match="validation_fraction"):
        split_corpus(_random_documents(2), fraction)


def test_split_corpus_refuses_a_text_of_one_byte() -> None:
    with pytest.raises(ConfigError, match="too small"):
        split_corpus([Document("a", b"a")], 0.1)
