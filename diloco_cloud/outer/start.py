"""Beginning a run with given weights instead of replica 0's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from diloco_cloud import keys
from diloco_cloud.errors import ConfigError, CorruptError, LayoutMismatchError, NotFoundError
from diloco_cloud.outer.state import Fragment, FragmentState
from diloco_cloud.result import Result, read_result
from diloco_cloud.store import open_store


def declared_start(uri: str, fragments: Sequence[Fragment]) -> list[FragmentState]:
    """The fragments' initial states with parameters from a safetensors file, by name.

    Args:
        uri: of the file, or ``<run>/result/`` for the result of another run. It may hold more than
            is trained.
        fragments: of the model that is to begin with it.

    Raises:
        ConfigError: there is no such file.
        CorruptError: it is not a safetensors file.
        LayoutMismatchError: a trained parameter is not in it, or has another shape there.
    """
    weights = _read(uri)
    return [
        FragmentState(
            fragment.key,
            fragment.names,
            tuple(
                _declared(weights, name, parameter, uri)
                for name, parameter in zip(fragment.names, fragment.parameters, strict=True)
            ),
            {},
        )
        for fragment in fragments
    ]


@torch.no_grad()
def begin_with(uri: str, model: nn.Module) -> None:
    """Give a model that is in no outer loop yet what the run begins with.

    For what is computed from the initial weights before the outer loop loads them.

    Args:
        uri: see :func:`declared_start`.
        model: whose trainable parameters are overwritten.

    Raises:
        ConfigError: there is no such file.
        CorruptError: it is not a safetensors file.
        LayoutMismatchError: a trained parameter is not in it, or has another shape there.
    """
    weights = _read(uri)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(_declared(weights, name, parameter, uri))


def _read(uri: str) -> dict[str, torch.Tensor]:
    try:
        return load(_result_of(uri) if uri.endswith(f"/{keys.RESULT}") else _file(uri))
    except NotFoundError:
        raise ConfigError(f"init_from: {uri} does not exist", fix="Check the URI.") from None
    except SafetensorError as error:
        raise CorruptError(f"{uri} is not a safetensors file: {error}") from None


def _file(uri: str) -> bytes:
    directory, _, name = uri.rpartition("/")
    return open_store(directory or ".").get(name)


def _result_of(uri: str) -> bytes:
    """The weights of a run's result, which may be replaced by a later one while it is read."""
    store = open_store(uri.removesuffix(f"/{keys.RESULT}"))
    before: Result | None = None
    while True:
        result = read_result(store)
        if result is None or result.model is None or result == before:
            raise NotFoundError(f"{uri} has no model")
        with suppress(NotFoundError):
            return store.get(result.model)
        before = result


def _declared(
    weights: Mapping[str, torch.Tensor], name: str, parameter: torch.Tensor, uri: str
) -> torch.Tensor:
    found = weights.get(name)
    if found is None or found.shape != parameter.shape:
        there = "missing" if found is None else tuple(found.shape)
        raise LayoutMismatchError(
            f"parameter {name} is {tuple(parameter.shape)} here and {there} in {uri}",
            fix="Begin with weights of the same model.",
        )
    return found.to(parameter.dtype)
