"""The container image of a replica, in code.

By default it is made for the launcher: the same minor version of Python, the package's own
requirements at the versions that are installed here, and the source of the package and of the
trainer as it is here, which Modal mounts when a container starts. So a checkout needs no release,
and a change of the source no new image.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from diloco_cloud.errors import ConfigError

if TYPE_CHECKING:
    import modal

_DISTRIBUTION: Final = "diloco-cloud"
_PACKAGE: Final = "diloco_cloud"
#: Where Modal puts local files; it is in ``sys.path`` of every function.
_ROOT: Final = "/root"
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][\w.-]*)\s*(\[[^\]]*\])?([^;]*)(?:;(.*))?")
_EXTRA_CLAUSE = re.compile(r"""\s*(?:and\s+)?extra\s*==\s*["']([\w-]+)["']\s*""")


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """What an image is made of.

    Attributes:
        registry: an image to begin with; None for a plain Debian with Python.
        python: its version, "3.11"; None where the registry's image brings its own.
        packages: for pip.
        modules: local Python modules and packages that are mounted.
        files: local files that are mounted beside them.
    """

    registry: str | None = None
    python: str | None = None
    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        lists = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
        return {name: value for name, value in lists.items() if value}


def plan_image(
    registry: str | None,
    *,
    extras: Sequence[str],
    modules: Sequence[str],
    files: Sequence[str] = (),
) -> ImagePlan:
    """Settle what an image is made of.

    Args:
        registry: an image that has the package installed; None: one is made.
        extras: of the package, for the image that is made.
        modules: of the user's.
        files: of the user's.

    Raises:
        ConfigError: a module that is not here, or one that Modal could not mount.
    """
    for name in modules:
        _check_module(name)
    if registry is not None:
        return ImagePlan(registry=registry, modules=tuple(modules), files=tuple(files))
    return ImagePlan(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        packages=tuple(requirements(extras)),
        modules=(*own_modules(), *modules),
        files=tuple(files),
    )


def own_modules() -> tuple[str, ...]:
    """The package itself. A checkout links to its executors, and Modal follows no links inside."""
    spec = importlib.util.find_spec(_PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    linked = any(Path(place, "executors").is_symlink() for place in places or ())
    return (_PACKAGE, __name__.rpartition(".")[0]) if linked else (_PACKAGE,)


def requirements(extras: Sequence[str]) -> list[str]:
    """What the package requires, each at the version that is installed here if it is.

    Raises:
        ConfigError: the package has no such extra.
    """
    distribution = importlib.metadata.distribution(_DISTRIBUTION)
    offered = distribution.metadata.get_all("Provides-Extra") or []
    unknown = sorted(set(extras) - set(offered))
    if unknown:
        raise ConfigError(
            f"diloco-cloud has no extra {unknown[0]!r}",
            fix=f"It has {', '.join(sorted(offered))}.",
        )
    found: dict[str, str] = {}
    for text in distribution.requires or []:
        match = _REQUIREMENT.fullmatch(text)
        if match is None:
            continue
        name, options, bounds, marker = match[1], match[2] or "", match[3].strip(), match[4] or ""
        extra = _EXTRA_CLAUSE.search(marker)
        if name == _DISTRIBUTION or (extra is not None and extra[1] not in extras):
            continue
        marker = _EXTRA_CLAUSE.sub("", marker).strip()
        pinned = f"{name}{options}{_pin(name) or bounds}"
        found[name] = f"{pinned}; {marker}" if marker else pinned
    return sorted(found.values())


def _pin(name: str) -> str | None:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return f"=={version.partition('+')[0]}"  # a local build, such as torch's for CPUs, is not there


def trainer_modules(imports: Sequence[str], *, image_is_given: bool) -> tuple[str, ...]:
    """Packages of this machine that replicas will import, and that are to be mounted.

    Args:
        imports: modules.
        image_is_given: whether the user has made the image. It may have what is installed here,
            as a release or built for Linux.

    Raises:
        ConfigError: one is not here, and nothing else could bring it.
    """
    found: list[str] = []
    for module in imports:
        top = module.partition(".")[0]
        spec = _find(top)
        if spec is None and not image_is_given:
            raise ConfigError(
                f"the trainer's module {module!r} is not on this machine",
                fix="Start replicas from where it is, or name an image that has it: "
                "--backend-arg image=…",
            )
        if spec is not None and not (image_is_given and _is_installed(spec)):
            found.append(top)
    return tuple(found)


def _is_installed(spec: ModuleSpec) -> bool:
    places = [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any({"site-packages", "dist-packages"} & {*Path(place).parts} for place in places)


def _find(name: str) -> ModuleSpec | None:
    """A module of this machine, as it will be found when replicas are started."""
    top, _, inner = name.partition(".")
    try:
        # A trainer is imported from the directory that it is launched from, too.
        spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path]) or importlib.util.find_spec(top)
        return importlib.util.find_spec(name) if inner else spec
    except (ImportError, ValueError):
        return None


def _check_module(name: object) -> None:
    if not isinstance(name, str) or _find(name) is None:
        raise ConfigError(
            f"modules: there is no module {name!r} here",
            fix="Name an importable module or package, without .py; launch from its directory.",
        )


def build(plan: ImagePlan, sdk: Any) -> modal.Image:
    """The image as Modal's own object; nothing is sent yet.

    Args:
        plan: what it is made of.
        sdk: the module ``modal``.
    """
    if plan.registry is not None:
        image = sdk.Image.from_registry(plan.registry)
    else:
        image = sdk.Image.debian_slim(python_version=plan.python)
    if plan.packages:
        image = image.uv_pip_install(*plan.packages)
    return mount(plan, image)


def mount(plan: ImagePlan, image: modal.Image) -> modal.Image:
    """``image`` with the plan's local modules and files, which come last: a build never sees them.

    They are not part of the image, so that a change of them builds nothing.
    """
    for path in plan.files:
        image = image.add_local_file(path, f"{_ROOT}/{Path(path).name}")
    return image.add_local_python_source(*plan.modules) if plan.modules else image
