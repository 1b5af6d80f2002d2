"""A launch as Modal will be asked for it: typed, JSON, and made without any network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from diloco_cloud.entrypoints import Function
from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import TERM_GRACE_ENV, Script
from diloco_cloud.executors.modal.hardware import parse_gpus
from diloco_cloud.executors.modal.image import ImagePlan, plan_image, trainer_modules
from diloco_cloud.executors.modal.settings import ModalSettings
from diloco_cloud.launch_request import LaunchRequest

#: Name of the one function of an App of ours.
FUNCTION: Final = "replica"
#: Seconds an input may run on Modal; what is to run longer goes on in a retry.
LONGEST_S: Final = 86_400
MOST_RETRIES: Final = 10
#: Seconds that Modal's own time limit comes after ours, which lets a replica hand over first.
MARGIN_S: Final = 60
#: Seconds between the signal of a preemption and the end, as Modal has it; and what of them a
#: replica is told, as the signal has to reach it and its end to be noticed.
GRACE_S: Final = 30
_TOLD_GRACE_S: Final = 27


@dataclass(frozen=True, kw_only=True)
class ModalPlan:
    """One launch.

    Attributes:
        app: name of the App, one per run.
        function: keyword arguments of ``App.function``, without image and secrets.
        retries: how often Modal starts a replica again that has used up its time slice.
        image: None where the user gave an image, or a function, of their own.
        modal_secrets: names of Secrets that are kept at Modal.
        secret_keys: variables sent as a Secret of the App's own; their values are not here.
        tags: of the App, for billing reports.
        calls: arguments of each call, in the order of ``spawn``.
    """

    app: str
    function: dict[str, Any]
    retries: int
    image: ImagePlan | None
    modal_secrets: tuple[str, ...]
    secret_keys: tuple[str, ...]
    tags: dict[str, str]
    calls: tuple[dict[str, Any], ...]

    def requests(self) -> list[dict[str, Any]]:
        """What Modal is asked, in order, as JSON values."""
        if self.image is None:
            return [{"call": "Function.spawn", "arguments": one} for one in self.calls]
        deployment = {
            "call": "App.deploy",
            "app": self.app,
            "tags": self.tags,
            "function": {**self.function, "retries": self.retries},
            "image": self.image.to_json(),
            "secrets": {"by_name": list(self.modal_secrets), "variables": list(self.secret_keys)},
        }
        return [
            deployment,
            *({"call": "Function.spawn", "arguments": one} for one in self.calls),
        ]


def app_name(name: str) -> str:
    """The App of the run, or other launch, called ``name``."""
    kept = "".join(
        char if char.isascii() and (char.isalnum() or char in "-._") else "-" for char in name
    )
    return f"diloco-{kept}"[:64]


def plan_launch(
    request: LaunchRequest,
    settings: ModalSettings,
    *,
    name: str,
    gpu: str | Sequence[str] | None,
    timeout: float,
) -> ModalPlan:
    """What a launch asks of Modal.

    Args:
        request: has been checked.
        settings: of the executor.
        name: of the launch; the run's id.
        gpu: of each replica; default: the settings'.
        timeout: seconds each replica may run, over all its time slices.

    Raises:
        ConfigError: something that Modal cannot do.
    """
    gpus = parse_gpus(gpu) or settings.gpu
    retries = _retries(timeout)
    limit = _limit(timeout, retries)
    _check_rendezvous(request)
    return ModalPlan(
        app=app_name(name),
        function=_function(settings, gpus, limit),
        retries=retries,
        image=_image(request, settings),
        modal_secrets=settings.modal_secrets,
        secret_keys=tuple(sorted(request.secrets)),
        tags={"diloco-run": name[:63]},
        calls=tuple(
            {"rank": rank, "job": _job(request, rank, limit, resumes=retries > 0)}
            for rank in request.ranks
        ),
    )


def _function(settings: ModalSettings, gpus: tuple[str, ...], limit: float) -> dict[str, Any]:
    values = {
        "name": FUNCTION,
        "gpu": gpus[0] if len(gpus) == 1 else list(gpus) or None,
        "cpu": settings.cpu,
        "memory": settings.memory,
        "region": list(settings.region) or None,
        "cloud": settings.cloud,
        "timeout": min(math.ceil(limit) + MARGIN_S, LONGEST_S),
        "startup_timeout": settings.startup_timeout,
        # A container that is used once leaves nothing behind for the next life on it.
        "single_use_containers": True,
    }
    return {key: value for key, value in values.items() if value is not None}


def _retries(timeout: float) -> int:
    slices = math.ceil(timeout / LONGEST_S)
    if slices > 1 + MOST_RETRIES:
        days = (1 + MOST_RETRIES) * LONGEST_S // 86_400
        raise ConfigError(
            f"a replica on Modal cannot run for {timeout / 86_400:.0f} days",
            fix=f"Ask for at most {days} days, and resume the run after them.",
        )
    return slices - 1


def _limit(timeout: float, retries: int) -> float:
    """Seconds after which a replica is told to end, in each of its time slices."""
    return LONGEST_S - MARGIN_S if retries else min(timeout, LONGEST_S - MARGIN_S)


def _job(request: LaunchRequest, rank: int, limit: float, *, resumes: bool) -> dict[str, Any]:
    """What a container is told; see ``container.run_replica``. No secret is in it."""
    return {
        **_target(request),
        "environment": {
            **request.environment(rank),
            TERM_GRACE_ENV: str(_TOLD_GRACE_S),
        },
        "limit_s": limit,
        "resumes": resumes,
    }


def _target(request: LaunchRequest) -> dict[str, Any]:
    target = request.target
    if isinstance(target, Script):
        return {"script": Path(target.path).name, "args": list(target.args)}
    assert isinstance(target, Function)  # a callable has been refused
    return {"module": target.module, "function": target.name, "arguments": request.arguments}


def _image(request: LaunchRequest, settings: ModalSettings) -> ImagePlan | None:
    if settings.function is not None:
        return None
    target = request.target
    files = (str(Path(target.path).absolute()),) if isinstance(target, Script) else ()
    given = settings.image is not None
    brought = trainer_modules(request.imports, image_is_given=given)
    modules = tuple(dict.fromkeys((*settings.modules, *brought)))
    if settings.image is not None and not isinstance(settings.image, str):
        return ImagePlan(registry="(given)", modules=modules, files=files)
    return plan_image(settings.image, extras=settings.extras, modules=modules, files=files)


def _check_rendezvous(request: LaunchRequest) -> None:
    """Refuse a store that no container could reach, before it is paid for."""
    uri = request.arguments.get("rendezvous_uri")
    if isinstance(uri, str) and uri.partition("://")[0] in (uri, "file", "memory"):
        raise ConfigError(
            f"replicas on Modal cannot reach {uri}",
            fix="Put the run in a bucket: --store s3://bucket/runs, gs:// or az://.",
        )
