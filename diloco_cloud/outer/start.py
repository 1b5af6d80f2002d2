"""Beginning a run with given weights instead of replica 0's own."""

from __future__ import annotations

from collections.abc import Sequence

from safetensors import SafetensorError
from safetensors.torch import load

from diloco_cloud.errors import ConfigError, CorruptError, LayoutMismatchError, NotFoundError
from diloco_cloud.outer.state import Fragment, FragmentState
from diloco_cloud.store import open_store


def declared_start(uri: str, fragments: Sequence[Fragment]) -> list[FragmentState]:
    """The fragments' initial states with parameters from a safetensors file, by name.

    Args:
        uri: of the file; the result of another run is ``<run>/result/model.safetensors``. It may
            hold more than is trained.
        fragments: of the model that is to begin with it.

    Raises:
        ConfigError: there is no such file.
        CorruptError: it is not a safetensors file.
        LayoutMismatchError: a trained parameter is not in it, or has another shape there.
    """
    directory, _, name = uri.rpartition("/")
    try:
        weights = load(open_store(directory or ".").get(name))
    except NotFoundError:
        raise ConfigError(f"init_from: {uri} does not exist", fix="Check the URI.") from None
    except SafetensorError as error:
        raise CorruptError(f"{uri} is not a safetensors file: {error}") from None
    states = []
    for fragment in fragments:
        for own, parameter in zip(fragment.names, fragment.parameters, strict=True):
            if own not in weights or weights[own].shape != parameter.shape:
                there = tuple(weights[own].shape) if own in weights else "missing"
                raise LayoutMismatchError(
                    f"parameter {own} is {tuple(parameter.shape)} here and {there} in {uri}",
                    fix="Begin with weights of the same model.",
                )
        parameters = tuple(
            weights[own].to(parameter.dtype)
            for own, parameter in zip(fragment.names, fragment.parameters, strict=True)
        )
        states.append(FragmentState(fragment.key, fragment.names, parameters, {}))
    return states
