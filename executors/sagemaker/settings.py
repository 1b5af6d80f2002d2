"""Settings of the SageMaker backend: the executor's constructor arguments, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import InstalledExtras
from diloco_cloud.executors.sagemaker.dlc import default_package
from diloco_cloud.executors.sagemaker.limits import check_keep_alive
from diloco_cloud.extras import extras_of

_S3: Final = "s3://"
_MOST_RETRIES: Final = 30
_NUMBERS: Final = {"spot_wait": 0, "keep_alive": 0, "retries": 0, "volume_gb": 1}
_NAMES: Final = ("subnets", "security_groups")
_TEXTS: Final = ("instance_type", "pytorch")
_OPTIONAL_TEXTS: Final = ("role", "image", "region", "source_dir", "package")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See :class:`~diloco_cloud.executors.sagemaker.SageMakerExecutor`."""

    role: str | None
    image: str | None
    instance_type: str
    region: str | None
    spot: bool
    spot_wait: int
    keep_alive: int
    retries: int
    volume_gb: int
    output_uri: str | None
    checkpoint_uri: str | None
    subnets: tuple[str, ...]
    security_groups: tuple[str, ...]
    tags: Mapping[str, str]
    source_dir: str | None
    pytorch: str
    package: str | None
    request: Mapping[str, Any]

    @classmethod
    def check(cls, **given: Any) -> Settings:
        """Settings from constructor arguments.

        Raises:
            ConfigError: a value that cannot work, or two that exclude each other.
        """
        for name, least in _NUMBERS.items():
            _check_number(name, given[name], least)
        for name in ("output_uri", "checkpoint_uri"):
            _check_s3(name, given[name])
        for name in ("tags", "request"):
            if not isinstance(given[name], Mapping):
                raise ConfigError(f"{name} is {given[name]!r}", fix="It must be a table.")
        for name in _NAMES:
            given[name] = _names(name, given[name])
        if not isinstance(given["spot"], bool):
            raise ConfigError(f"spot is {given['spot']!r}", fix="It must be true or false.")
        _check_text(given)
        settings = cls(**given)
        settings._check_together()
        return settings

    def installed_extras(self) -> InstalledExtras | None:
        """The extras put into AWS's container; None where image or sources are the user's."""
        if self.image is not None or self.source_dir is not None:
            return None  # a requirements.txt among the sources may name anything
        names = extras_of(self.package or default_package())
        if names is None:
            return None
        return InstalledExtras(names, f"sagemaker.package='{default_package('{extras}')}'")

    def _check_together(self) -> None:
        check_keep_alive(self.keep_alive)
        if self.retries > _MOST_RETRIES:
            raise ConfigError(
                f"retries is {self.retries}", fix=f"It must be at most {_MOST_RETRIES}."
            )
        if self.spot and self.keep_alive:
            raise ConfigError(
                "keep_alive cannot be had with spot instances",
                fix="Leave one of them out: warm pools are made of on-demand instances.",
            )
        if bool(self.subnets) != bool(self.security_groups):
            raise ConfigError(
                "a VPC needs both subnets and security_groups", fix="Name both, or neither."
            )
        if self.source_dir is not None and self.image is not None and self.package is not None:
            raise ConfigError(
                "package has no effect on an image of your own",
                fix="Install diloco-cloud in the image, and leave package out.",
            )


def _check_number(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"{name} is {value!r}", fix=f"It must be a whole number, at least {least}."
        )


def _check_s3(name: str, value: object) -> None:
    if value is not None and not (isinstance(value, str) and value.startswith(_S3)):
        raise ConfigError(f"{name} is {value!r}", fix="Write s3://bucket/prefix.")


def _check_text(given: Mapping[str, Any]) -> None:
    for name in (*_TEXTS, *_OPTIONAL_TEXTS):
        value = given[name]
        if not isinstance(value, str) and not (name in _OPTIONAL_TEXTS and value is None):
            raise ConfigError(f"{name} is {value!r}", fix="It must be a text.")


def _names(setting: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """Names from "a,b" or a list."""
    names = value.split(",") if isinstance(value, str) else list(value)
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{setting} is {value!r}", fix='Write "one", "one,two" or a list.')
    return tuple(name.strip() for name in names if name.strip())
