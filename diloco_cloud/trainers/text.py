"""The text a language model trains on: read, split for validation, cut into shards.

Everything here is a pure function of the files' contents and a few numbers, so replicas that see
the same files agree on the split and on whose shard is whose without talking to one another.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from diloco_cloud.errors import ConfigError

logger = logging.getLogger(__name__)

#: Parts of the standard library that are not prose or program: tests, generated tables, vendored
#: copies, and what is installed next to it.
_STDLIB_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "turtledemo", "ensurepip"}
    | {"site-packages", "dist-packages"}
)
_BINARY_PROBE_BYTES = 8192
_READ_FIX = "Give text= a readable text file, or a directory that holds some."


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of text that is never mixed with another.

    Attributes:
        name: of its file, relative to where the text was read from, with ``/`` between parts.
        data: the bytes.
    """

    name: str
    data: bytes


@dataclass(frozen=True)
class Corpus:
    """Text split into a part to train on and a part held out.

    Attributes:
        training: documents to be sharded over the ranks, in an order that depends on names only.
        validation: documents no rank trains on.
    """

    training: tuple[Document, ...]
    validation: tuple[Document, ...]

    @property
    def digest(self) -> str:
        """Hex digest (128 bits) of names, contents and split; equal iff two replicas agree."""
        state = hashlib.blake2b(digest_size=16)
        for part in (self.training, self.validation):
            state.update(len(part).to_bytes(8, "little"))
            for document in part:
                for field in (os.fsencode(document.name), document.data):
                    state.update(len(field).to_bytes(8, "little") + field)
        return state.hexdigest()


def read_documents(path: str | os.PathLike[str] | None = None) -> list[Document]:
    """Read text from a file, from a directory (all of it), or from the standard library's sources.

    Hidden, binary and empty files are passed over, and so is a file whose contents have been read
    under another name: a copy of a held-out file must not reach the training text.

    Args:
        path: a file or directory; None reads the ``.py`` files of this Python's standard library.

    Returns:
        Documents in order of their names.

    Raises:
        ConfigError: nothing there, not readable, or no text in it.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = list(_walk(root, _STDLIB_SKIPPED, suffix=".py"))
    else:
        root = Path(path).expanduser()
        if not root.exists():
            raise ConfigError(f"there is no text at {root}", fix=_READ_FIX)
        files = [root] if root.is_file() else list(_walk(root))
        root = root.parent if root.is_file() else root
    documents: list[Document] = []
    contents: set[bytes] = set()
    for file in files:
        data = _read(file)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if data and b"\0" not in data[:_BINARY_PROBE_BYTES] and digest not in contents:
            contents.add(digest)
            documents.append(Document(file.relative_to(root).as_posix(), data))
    if not documents:
        raise ConfigError(f"no file at {root} holds text", fix=_READ_FIX)
    documents.sort(key=lambda document: document.name)
    logger.info("read %d documents from %s", len(documents), root)
    return documents


def split_corpus(documents: Sequence[Document], validation_fraction: float) -> Corpus:
    """Hold out about ``validation_fraction`` of the bytes.

    Whole documents are held out, drawn by a hash of their names. Where one document is more than a
    tenth of the text, that could be nearly all or nothing, so the end of each is held out instead.

    Raises:
        ConfigError: the fraction is not inside (0, 1), or leaves one side empty.
    """
    if not 0 < validation_fraction < 1:
        raise ConfigError(
            f"validation_fraction is {validation_fraction!r}", fix="It must be above 0 and below 1."
        )
    shuffled = sorted(documents, key=lambda document: _name_hash(document.name))
    ends = list(itertools.accumulate(len(document.data) for document in shuffled))
    if max(len(document.data) for document in shuffled) > ends[-1] / 10:
        cuts = [_cut(doc.data, int(len(doc.data) * (1 - validation_fraction))) for doc in shuffled]
        pairs = list(zip(shuffled, cuts, strict=True))
        training = [Document(doc.name, doc.data[:cut]) for doc, cut in pairs]
        validation = [Document(doc.name, doc.data[cut:]) for doc, cut in pairs]
    else:
        held_out = 1 + bisect_right(ends, validation_fraction * ends[-1])
        validation, training = shuffled[:held_out], shuffled[held_out:]
    corpus = Corpus(
        tuple(doc for doc in training if doc.data), tuple(doc for doc in validation if doc.data)
    )
    if not corpus.training or not corpus.validation:
        raise ConfigError(
            f"the text is too small to hold out {validation_fraction:g} of it",
            fix="Give more text, or another validation_fraction.",
        )
    return corpus


def shard(
    documents: Sequence[Document], *, rank: int, world_size: int, seed: int
) -> list[Document]:
    """Rank ``rank``'s part of the training text.

    The documents are put in an order that depends on ``seed``, laid end to end and cut into
    ``world_size`` equal parts (to within one character): together the shards are all of the text,
    and no two have a byte in common.
    """
    order = sorted(documents, key=lambda document: document.name)
    Random(seed).shuffle(order)
    total = sum(len(document.data) for document in order)
    start, stop = total * rank // world_size, total * (rank + 1) // world_size
    parts: list[Document] = []
    offset = 0
    for document in order:
        data, size = document.data, len(document.data)
        # Neighbours compute the same cut from the same numbers, so nothing is lost or shared.
        begin = _cut(data, min(max(start - offset, 0), size))
        end = _cut(data, min(max(stop - offset, 0), size))
        if begin < end:
            parts.append(Document(document.name, data[begin:end]))
        offset += size
    return parts


def _walk(root: Path, skipped: frozenset[str] = frozenset(), suffix: str = "") -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith("."))
        for name in sorted(names):
            if name.endswith(suffix) and not name.startswith("."):
                yield Path(folder, name)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes() if file.is_file() else b""
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", fix=_READ_FIX) from None


def _name_hash(name: str) -> bytes:
    return hashlib.blake2b(os.fsencode(name), digest_size=16).digest()


def _cut(data: bytes, position: int) -> int:
    """The last position up to ``position`` that is not inside a UTF-8 character."""
    while 0 < position < len(data) and data[position] & 0xC0 == 0x80:
        position -= 1
    return position
