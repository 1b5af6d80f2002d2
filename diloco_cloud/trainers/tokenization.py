"""Text to token ids: bytes as they are, or a byte-pair encoding trained at start.

Both know one special token, the end of a document, as their last id.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from diloco_cloud.errors import ConfigError, MissingDependencyError
from diloco_cloud.trainers.text import Document

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

#: Bytes a tokenizer learns from. More changes a small vocabulary little and delays every start.
TOKENIZER_TEXT_BYTES = 2 << 20
END_OF_DOCUMENT = "<|endoftext|>"
_BYTES = 256


class Tokenizer(Protocol):
    """Encodes documents; identical on every replica that was given the same training text."""

    @property
    def vocabulary_size(self) -> int:
        """Number of distinct ids."""

    def encode(self, documents: Sequence[Document]) -> npt.NDArray[np.uint16]:
        """All documents as one row of ids, each followed by the end-of-document id."""

    def files(self) -> dict[str, bytes]:
        """What a reader of the trained model needs to encode text the same way."""


class ByteTokenizer:
    """Ids 0 to 255 are the bytes, 256 ends a document."""

    vocabulary_size = _BYTES + 1

    def encode(self, documents: Sequence[Document]) -> npt.NDArray[np.uint16]:
        end = np.array([_BYTES], np.uint16)
        rows = [np.frombuffer(document.data, np.uint8) for document in documents]
        return np.concatenate([part for row in rows for part in (row.astype(np.uint16), end)])

    def files(self) -> dict[str, bytes]:
        config = {"tokenizer": "byte", "vocab_size": self.vocabulary_size, "eos_token_id": _BYTES}
        return {"byte_tokenizer.json": json.dumps(config, indent=2).encode()}


class BytePairTokenizer:
    """Byte-level BPE (the GPT-2 scheme) learnt from the beginning of the training text.

    Args:
        documents: training text, in an order every replica agrees on.
        vocabulary_size: ids wanted, at least 257 and at most 65536; a short text may yield fewer.
    """

    def __init__(self, documents: Sequence[Document], vocabulary_size: int) -> None:
        try:
            from tokenizers import Tokenizer as FastTokenizer
            from tokenizers import decoders, models, pre_tokenizers, trainers
        except ImportError as error:
            raise MissingDependencyError(
                "the tokenizers package is not installed", fix="pip install transformers"
            ) from error
        tokenizer: FastTokenizer = FastTokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary_size - 1,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_sample(documents), trainer)
        # Added last, so that its id follows the learnt ones however many there are.
        tokenizer.add_special_tokens([END_OF_DOCUMENT])
        self._tokenizer = tokenizer
        self._end = tokenizer.token_to_id(END_OF_DOCUMENT)

    @property
    def vocabulary_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, documents: Sequence[Document]) -> npt.NDArray[np.uint16]:
        texts = [document.data.decode("utf-8", errors="replace") for document in documents]
        rows = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        end = np.array([self._end], np.uint16)
        parts = [part for row in rows for part in (np.array(row.ids, np.uint16), end)]
        return np.concatenate(parts)

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": self._tokenizer.to_str(pretty=True).encode()}


def make_tokenizer(kind: str, documents: Sequence[Document], vocabulary_size: int) -> Tokenizer:
    """A tokenizer by name.

    Args:
        kind: "byte" or "bpe".
        documents: training text, in an order every replica agrees on.
        vocabulary_size: for "bpe".

    Raises:
        ConfigError: unknown kind, or a vocabulary that does not fit the scheme.
    """
    if kind == "byte":
        return ByteTokenizer()
    if kind != "bpe":
        raise ConfigError(f"tokenizer is {kind!r}", fix='It must be "byte" or "bpe".')
    if not _BYTES < vocabulary_size <= 1 << 16:
        raise ConfigError(
            f"vocabulary_size is {vocabulary_size!r}", fix="It must be between 257 and 65536."
        )
    return BytePairTokenizer(documents, vocabulary_size)


def _sample(documents: Sequence[Document]) -> list[str]:
    texts: list[str] = []
    left = TOKENIZER_TEXT_BYTES
    for document in documents:
        if left <= 0:
            break
        texts.append(document.data[:left].decode("utf-8", errors="replace"))
        left -= len(document.data)
    return texts
