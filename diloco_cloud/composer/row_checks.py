"""What a row of prompts must be for the rest of the composer to read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_cloud.errors import ConfigError


def check_prompt(prompt: Any, where: str) -> None:
    """Refuse what is neither text nor the messages of a conversation.

    Args:
        prompt: of one row.
        where: what to call the row.

    Raises:
        ConfigError: it is empty, or of another type, or a message lacks its role or its content.
    """
    if prompt is None or (isinstance(prompt, str | list | tuple) and not prompt):
        raise ConfigError(f"the prompt of {where} is empty", fix="Leave such rows out.")
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list | tuple):
        raise ConfigError(
            f"the prompt of {where} is {type(prompt).__name__} {prompt!r:.40}",
            fix="Write it as text, or as a list of messages.",
        )
    for number, message in enumerate(prompt):
        if lacks := _lacks(message):
            raise ConfigError(
                f"in the prompt of {where}, message {number} {lacks}",
                fix='Write each message as {"role": "user", "content": "…"}.',
            )


def _lacks(message: Any) -> str | None:
    """What is wrong with a message, if anything."""
    if not isinstance(message, Mapping):
        return f"is {type(message).__name__}, not an object"
    if not isinstance(message.get("role"), str):
        return "has no 'role'"
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        return "has no 'content'"
    if not isinstance(content, str | list | tuple | None):
        return f"has {type(content).__name__} for 'content'"
    return None


def check_error_meta(meta: Any, where: str) -> None:
    """Refuse an ``error_meta`` that is no object.

    Args:
        meta: of one row, or None.
        where: what to call the row.

    Raises:
        ConfigError: see above.
    """
    if meta is not None and not isinstance(meta, Mapping):
        raise ConfigError(
            f"error_meta of {where} is {type(meta).__name__} {meta!r:.40}, not an object",
            fix='Write it as an object, such as {"error_message": "…"}, or leave it out.',
        )
