"""Settings of the Modal backend: the executor's constructor arguments, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from diloco_cloud.errors import ConfigError
from diloco_cloud.executors.modal.hardware import check_cloud, parse_gpus, parse_regions

if TYPE_CHECKING:
    import modal

#: Extras of the package that the default image has: the outer loop, and the client of the stores.
DEFAULT_EXTRAS: Final = ("diloco", "s3")
#: Settings that a function of the user's own decides by itself.
_OF_OUR_FUNCTION: Final = (
    *("image", "gpu", "cpu", "memory", "region", "cloud", "modules", "modal_secrets"),
)


@dataclass(frozen=True, kw_only=True)
class ModalSettings:
    """See :class:`~diloco_cloud.executors.modal.ModalExecutor`."""

    image: str | modal.Image | None
    gpu: tuple[str, ...]
    cpu: float | None
    memory: int | None
    region: tuple[str, ...]
    cloud: str | None
    modules: tuple[str, ...]
    extras: tuple[str, ...]
    modal_secrets: tuple[str, ...]
    startup_timeout: int
    function: str | modal.Function[Any, Any, Any] | None

    @classmethod
    def check(cls, **given: Any) -> ModalSettings:
        """Settings from constructor arguments.

        Raises:
            ConfigError: a value that cannot work, or two that exclude each other.
        """
        if given["function"] is not None:
            _check_function(given)
        for name in ("cpu", "memory", "startup_timeout"):
            value = given[name]
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and value > 0):
                raise ConfigError(f"{name} is {value!r}", fix="It must be a positive number.")
        return cls(
            **{
                **given,
                "gpu": parse_gpus(given["gpu"]),
                "region": parse_regions(given["region"]),
                "cloud": check_cloud(given["cloud"]),
                "extras": _names("extras", given["extras"]),
                "modules": _names("modules", given["modules"]),
                "modal_secrets": _names("modal_secrets", given["modal_secrets"]),
            }
        )


def _names(setting: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """Names from "a,b" or a list."""
    names = value.split(",") if isinstance(value, str) else list(value)
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{setting} is {value!r}", fix='Write "one", "one,two" or a list.')
    return tuple(name.strip() for name in names if name.strip())


def _check_function(given: dict[str, Any]) -> None:
    clash = [name for name in _OF_OUR_FUNCTION if given[name]]
    if clash:
        raise ConfigError(
            f"{clash[0]} has no effect on a function of your own",
            fix=f"Set it where the function is decorated, and leave {clash[0]} out here.",
        )
    function = given["function"]
    if isinstance(function, str) and not all(function.partition("/")):
        raise ConfigError(
            f"function is {function!r}", fix='Write "app-name/function-name" of a deployed App.'
        )
