"""Settings of the Modal backend: the executor's constructor arguments, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import InstalledExtras
from diloco_cloud.executors.modal.hardware import check_cloud, parse_gpus, parse_regions

if TYPE_CHECKING:
    import modal

    from diloco_cloud.launch_request import LaunchRequest

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

    def installed_extras(self) -> InstalledExtras | None:
        """The extras of the image that is made; None where there is another."""
        if self.image is not None or self.function is not None:
            return None
        return InstalledExtras(frozenset(self.extras), "modal.extras={extras}")


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


def check_own_function(request: LaunchRequest, gpu: str | None) -> None:
    """Refuse what only the decorator of the user's own function can say."""
    if gpu is not None:
        raise ConfigError(
            f"gpu={gpu!r} has no effect on a function of your own",
            fix="Set it where the function is decorated.",
        )
    if request.secrets:
        names = ", ".join(sorted(request.secrets))
        raise ConfigError(
            f"a function of your own cannot be given {names}",
            fix="Add modal.Secret.from_name(…) where it is decorated, and leave --secret out.",
        )
