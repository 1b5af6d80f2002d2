"""Judges requests by the API's own model, which botocore ships and does not enforce."""

from __future__ import annotations

import functools
import re
from typing import Any

import botocore.session
from botocore.model import OperationModel, Shape
from fakes.aws_errors import AwsError


@functools.cache
def operation(service: str, name: str) -> OperationModel:
    """An operation of a service."""
    return botocore.session.get_session().get_service_model(service).operation_model(name)


def validate(service: str, name: str, params: dict[str, Any]) -> None:
    """Raise ``AwsError`` as the service does for the first constraint that is not met."""
    shape = operation(service, name).input_shape
    if shape is not None:
        _check(shape, params, "")


def _check(shape: Shape, value: Any, path: str) -> None:
    kind = shape.type_name
    if kind == "structure":
        _check_structure(shape, value, path)
    elif kind == "list":
        _check_size(shape, value, path)
        for i, item in enumerate(value):
            _check(shape.member, item, f"{path}.{i + 1}.member")
    elif kind == "map":
        _check_size(shape, value, path)
        for key, item in value.items():
            _check(shape.key, key, f"{path}.{key}.key")
            _check(shape.value, item, f"{path}.{key}.value")
    elif kind == "string":
        _check_string(shape, value, path)
    elif kind in ("integer", "long"):
        _check_number(shape, value, path)


def _check_structure(shape: Shape, value: Any, path: str) -> None:
    for name in shape.required_members:
        if name not in value:
            raise _refused(None, f"{path}.{name}", "Member must not be null")
    for name, item in value.items():
        if name not in shape.members:
            raise AwsError("SerializationException", f"unknown member {path}.{name}")
        _check(shape.members[name], item, f"{path}.{name}")


def _check_size(shape: Shape, value: Any, path: str) -> None:
    limits = shape.metadata
    if not limits.get("min", 0) <= len(value) <= limits.get("max", len(value)):
        wanted = f"between {limits.get('min', 0)} and {limits.get('max')}"
        raise _refused(value, path, f"Member must have length {wanted}")


def _check_string(shape: Shape, value: Any, path: str) -> None:
    if not isinstance(value, str):
        raise AwsError("SerializationException", f"{path} is no string")
    _check_size(shape, value, path)
    if shape.enum and value not in shape.enum:
        raise _refused(value, path, f"Member must satisfy enum value set: {shape.enum}")
    pattern = shape.metadata.get("pattern")
    if pattern and not re.fullmatch(_as_python(pattern), value):
        raise _refused(value, path, f"Member must satisfy regular expression pattern: {pattern}")


def _check_number(shape: Shape, value: Any, path: str) -> None:
    limits = shape.metadata
    if not limits.get("min", value) <= value <= limits.get("max", value):
        raise _refused(value, path, f"Member must be between {limits}")


def _as_python(pattern: str) -> str:
    r"""Java's classes of characters: letters, separators and digits of any script."""
    return pattern.replace(r"\p{L}\p{Z}\p{N}", r"\w\s")


def _refused(value: object, path: str, constraint: str) -> AwsError:
    name = path.lstrip(".")
    return AwsError(
        "ValidationException",
        f"1 validation error detected: Value '{value}' at '{name}' failed to satisfy constraint: "
        f"{constraint}",
    )
