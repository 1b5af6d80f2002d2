"""An inner optimizer's state as tensors by name and JSON, and back to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from diloco_cloud.outer.tensor_file import can_hold

#: Parameters of a model, by name.
Parameters = Mapping[str, torch.nn.Parameter]


def describe(optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[str, Any]:
    """What the state's form depends on, as JSON values: equal for optimizers that can swap states.

    Learning rates and the like may change from step to step and are not in it; switches such as
    ``amsgrad`` are.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    kind = type(optimizer)
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "groups": [
            {
                "parameters": [names[id(p)] for p in group["params"] if id(p) in names],
                "switches": {k: v for k, v in sorted(group.items()) if isinstance(v, bool)},
            }
            for group in optimizer.param_groups
        ],
    }


def capture(
    optimizer: torch.optim.Optimizer, parameters: Parameters
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state's tensors, copied to the CPU, and the rest of it by parameter, as JSON values.

    Raises:
        TypeError: it holds something that is neither a tensor nor a plain value.
    """
    tensors: dict[str, torch.Tensor] = {}
    values = {
        name: _pack(dict(optimizer.state[parameter]), name, tensors)
        for name, parameter in parameters.items()
        if parameter in optimizer.state
    }
    return tensors, values


def unpack(
    tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], parameters: Parameters
) -> dict[torch.nn.Parameter, dict[str, Any]]:
    """The state by parameter, its tensors on the devices that they were on.

    Raises:
        ValueError: the values are none that :func:`capture` made.
        KeyError, TypeError: likewise.
    """
    found: dict[torch.nn.Parameter, dict[str, Any]] = {}
    for name, packed in values.items():
        parameter = parameters[name]
        entries = _unpack(packed, tensors, parameter.device)
        if not isinstance(entries, dict):
            raise ValueError("an optimizer's state is a mapping")
        found[parameter] = entries
    return found


def replace(
    optimizer: torch.optim.Optimizer, state: Mapping[torch.nn.Parameter, dict[str, Any]]
) -> None:
    """Give ``optimizer`` this state, and no other.

    ``load_state_dict`` would cast a state that is kept in fp32 to the parameter's own dtype.
    """
    optimizer.state.clear()
    for parameter, entries in state.items():
        optimizer.state[parameter] = entries


def _pack(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        if not can_hold(value):
            raise TypeError(f"{path} is a {type(value).__name__} of {value.dtype}")
        tensors[path] = value.detach().to("cpu", copy=True)
        return {"tensor": path, "host": value.device.type == "cpu"}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"plain": value}
    if type(value) in (list, tuple):
        packed = [_pack(one, f"{path}/{i}", tensors) for i, one in enumerate(value)]
        return {type(value).__name__: packed}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _pack(one, f"{path}/{key}", tensors) for key, one in value.items()}}
    raise TypeError(f"{path} is a {type(value).__name__}")


def _unpack(packed: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    match packed:
        case {"tensor": path, "host": host}:
            return tensors[path].to("cpu" if host else device)
        case {"plain": value}:
            return value
        case {"list": items}:
            return [_unpack(one, tensors, device) for one in items]
        case {"tuple": items}:
            return tuple(_unpack(one, tensors, device) for one in items)
        case {"dict": items}:
            return {key: _unpack(one, tensors, device) for key, one in items.items()}
    raise ValueError("not an optimizer's state")
