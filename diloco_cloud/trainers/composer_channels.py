"""The composer replica's ``channels``: functions by import path, and nothing that nobody reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from diloco_cloud.composer.rewards import load_object
from diloco_cloud.errors import ConfigError

logger = logging.getLogger(__name__)

_FUNCTIONS: Final = ("hint_generator", "rollout_func", "environment_factory")
#: Settings by the channel that reads them; of channel 2 by its wrapper, of 3 by its variant.
_SDPO: Final[Mapping[str, tuple[str, ...]]] = {
    "sdpo_token_clip": ("none", "taid", "entropy_opd"),
    "sdpo_jsd_beta": ("none",),
    "sdpo_temperature": ("none", "entropy_opd"),
    "entropy_opd_h_max": ("entropy_opd",),
    "entropy_opd_mode": ("entropy_opd",),
}
_REPLAY: Final[Mapping[str, tuple[str, ...]]] = {
    "dpo_variant": ("dpo", "simpo"),
    "replay_batch_size": ("dpo", "simpo"),
    "max_dpo_seq_len": ("dpo", "simpo"),
    "replay_dpo_beta": ("dpo",),
    "simpo_beta": ("simpo",),
    "simpo_gamma": ("simpo",),
}


def load_functions(channels: Mapping[str, Any] | None) -> dict[str, Any]:
    """``channels`` with what TOML and JSON name as "pkg.module:function" imported.

    Args:
        channels: keywords of the trainer. ``hint_generator``, ``rollout_func`` and
            ``environment_factory`` are functions (the last also an object of several), ``tools`` is
            a list of them.

    Raises:
        ConfigError: one of these is no function and no import path, or leads nowhere.
    """
    found = {name: value for name, value in (channels or {}).items() if value is not None}
    for name in _FUNCTIONS:
        value = found.get(name)
        if isinstance(value, Mapping):
            found[name] = {key: _function(name, each) for key, each in value.items()}
        elif value is not None:
            found[name] = _function(name, value)
    if "tools" in found:
        if not isinstance(found["tools"], list | tuple):
            raise ConfigError(
                f"channels sets tools to {found['tools']!r}, not a list",
                fix='Write tools as a list: ["pkg.module:tool"].',
            )
        found["tools"] = [_tool(_function("tools", each)) for each in found["tools"]]
    return found


def _tool(function: Any) -> Any:
    """``function``, of which a schema can be made for the chat template."""
    from transformers.utils import chat_template_utils as templates

    unreadable = (templates.DocstringParsingException, templates.TypeHintParsingException)
    try:
        templates.get_json_schema(function)
    except (*unreadable, ValueError, TypeError) as error:
        raise ConfigError(
            f"channels.tools has {getattr(function, '__name__', function)}, which cannot be shown "
            f"to a model: {error}",
            fix="Give it annotations, and a docstring with an Args section.",
        ) from error
    return function


def _function(setting: str, value: Any) -> Any:
    if callable(value):
        return value
    if not isinstance(value, str):
        raise ConfigError(
            f"channels sets {setting} to {value!r}, which is no function",
            fix='Name one as "pkg.module:function".',
        )
    try:
        return load_object(value)
    except ConfigError as error:
        raise ConfigError(
            f"channels sets {setting}: {error.message}",
            fix=error.fix or 'Name a function as "pkg.module:function".',
        ) from error


def makes_rollouts(channels: Mapping[str, Any]) -> bool:
    """Whether channel 2 can have hints that no row brings: of failed tool calls, or rollouts."""
    has_tools = any(channels.get(name) for name in ("tools", "environment_factory"))
    return ("hint_generator" in channels and has_tools) or "rollout_func" in channels


def check_read(
    channels: Mapping[str, Any],
    *,
    sdpo_wrapper: str,
    has_hints: bool,
    has_error_kinds: bool,
    has_pairs: bool,
) -> None:
    """Refuse settings of a channel that has no data, or of a loss that is another one's.

    With ``strict=False`` among them they are warnings.

    Args:
        channels: see :func:`load_functions`.
        sdpo_wrapper: of channel 2.
        has_hints: whether channel 2 has data.
        has_error_kinds: whether rows have what a hint generator reads.
        has_pairs: whether channel 3 has data.

    Raises:
        ConfigError: see above.
    """
    variant = str(channels.get("dpo_variant", "dpo"))
    unread: dict[str, str] = {}
    for name in channels:
        if name in _SDPO and not has_hints:
            unread[name] = "no prompt has a hint or an error_kind"
        elif name in _SDPO and sdpo_wrapper not in _SDPO[name]:
            unread[name] = f"sdpo_wrapper is {sdpo_wrapper!r}"
        elif name in _REPLAY and not has_pairs:
            unread[name] = "there are no dpo_pairs"
        elif name in _REPLAY and variant not in _REPLAY[name]:
            unread[name] = f"dpo_variant is {variant!r}"
    if "hint_generator" in channels and not (has_error_kinds or makes_rollouts(channels)):
        unread["hint_generator"] = "there are no tools, and no prompt has an error_kind"
    for name, why in unread.items():
        what = f"channels sets {name}, and nothing reads it: {why}"
        if channels.get("strict", True):
            raise ConfigError(
                what, fix='Leave it out, or give what it is for; "strict": false only warns.'
            )
        logger.warning("%s", what)
