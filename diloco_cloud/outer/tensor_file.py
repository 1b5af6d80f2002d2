"""Tensors and JSON in one safetensors file, which any tool can open, with a digest over both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load

from diloco_cloud.errors import CorruptError
from diloco_cloud.exchange.layout import byte_view
from diloco_cloud.exchange.signing import Signer
from diloco_cloud.store.base import Buffer

#: Names of dtypes in a safetensors header.
_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def can_hold(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one, of a dtype that the format has."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dtype in _DTYPES


def encode(tensors: Mapping[str, torch.Tensor], values: Any, signer: Signer) -> list[Buffer]:
    """The file, in pieces; the tensors' memory is not copied.

    Args:
        tensors: by name, on the CPU; see :func:`can_hold`.
        values: what goes with them, as JSON values.
        signer: of the run.
    """
    # Widest first, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    views = [byte_view(tensors[name]) for name in names]
    table: dict[str, Any] = {}
    at = 0
    for name, view in zip(names, views, strict=True):
        table[name] = {
            "dtype": _DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [at, at + len(view)],
        }
        at += len(view)
    text = json.dumps(values)
    digest = _digest(text, table, views)
    seal = {"values": text, "digest": digest, "mac": signer.mac("inner", [digest.encode()])}
    header = json.dumps({"__metadata__": seal, **table}).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    return [len(header).to_bytes(8, "little"), header, *views]


def decode(data: bytes, signer: Signer, what: str) -> tuple[dict[str, torch.Tensor], str]:
    """Tensors of a file that is whole, and its values as JSON text.

    Raises:
        CorruptError: it is not such a file, or a byte of it has changed.
        ForeignObjectError: it is not signed with the run's key.
    """
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        table = json.loads(data[8:start])
        seal = table.pop("__metadata__")
        text, digest, mac = (str(seal[name]) for name in ("values", "digest", "mac"))
        if _digest(text, table, [memoryview(data)[start:]]) != digest:
            raise ValueError("its bytes have changed")
        tensors = load(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{what} cannot be read: {error}") from None
    except SafetensorError as error:
        raise CorruptError(f"{what} cannot be read: {error}") from None
    signer.check("inner", mac, [digest.encode()], what, own=True)
    return tensors, text


def _digest(text: str, table: Mapping[str, Any], views: list[memoryview]) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update(json.dumps([text, table], sort_keys=True).encode())
    for view in views:
        hasher.update(view)
    return str(hasher.hexdigest())
