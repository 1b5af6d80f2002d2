"""Building the outer loop, with every mistake torchft would accept in silence refused."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from diloco_cloud.errors import MissingDependencyError
from diloco_cloud.outer.sgd import OuterSGD

if TYPE_CHECKING:
    from diloco_cloud.outer.loop import OuterLoop
    from diloco_cloud.outer.manager import MockManager

logger = logging.getLogger(__name__)


def make_diloco_outer_loop(
    manager: MockManager,
    model_fragments: Sequence[nn.Module] | nn.Module,
    inner_optimizer: torch.optim.Optimizer,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    sync_every: int = 100,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
    model: nn.Module | None = None,
) -> OuterLoop:
    """A torchft DiLoCo whose replicas meet through ``manager``.

    Returns once this replica holds the agreed parameters: replica 0's initial ones in a new run,
    the newest committed ones in a run that has begun (``inner_steps_done`` then says where in the
    data to go on).

    Args:
        manager: this replica's manager.
        model_fragments: a module, or modules synchronised in turn (Streaming DiLoCo,
            arXiv:2501.18512). Only trainable parameters take part. Every parameter the inner
            optimizer trains must be in exactly one fragment.
        inner_optimizer: steps every batch; accelerate's wrapper is looked through.
        outer_lr: of the outer SGD on the mean pseudo-gradient (arXiv:2311.08105, section 3). For a
            run of few rounds 1, without momentum, is better: see
            :func:`diloco_cloud.horizon.outer_step`.
        outer_momentum: of the outer SGD.
        nesterov: whether the outer momentum is Nesterov's.
        sync_every: inner steps between two syncs of one fragment (H); a multiple of the number of
            fragments.
        fragment_sync_delay: inner steps a transfer overlaps with training (tau).
        fragment_update_alpha: weight of the local parameters when a fragment is merged: 0 takes
            the global ones, 1 keeps the local ones.
        model: that the fragments are parts of; its parameter names go into snapshots and the
            result. A single fragment is taken to be the model; without it, the names of several
            fragments are preceded by the fragment's index.

    Raises:
        MissingDependencyError: torchft is not installed (a RuntimeError).
        ValueError: a setting is out of range, or fragments overlap or leave a parameter out.
        TypeError: a trained parameter is not floating point.
        ExchangeError: the agreed parameters could not be had.
    """
    try:
        from diloco_cloud.outer.loop import OuterLoop, TrainableView
    except ImportError as error:
        raise MissingDependencyError(
            f"the outer loop needs torchft ({error})",
            fix="pip install 'diloco-cloud[diloco]' (Linux on x86-64)",
        ) from None
    modules = [model_fragments] if isinstance(model_fragments, nn.Module) else list(model_fragments)
    if not modules:
        raise ValueError("there is no model fragment to synchronise")
    check_schedule(len(modules), sync_every, fragment_sync_delay, fragment_update_alpha)
    optimizer = unwrap_optimizer(inner_optimizer)
    views = [TrainableView(module) for module in modules]
    _check_coverage(views, optimizer)
    _name_by_model(views, model)
    _warn_of_local_state(modules)
    kind = "Nesterov momentum" if nesterov else "momentum"
    logger.info("outer SGD: learning rate %g, %s %g", outer_lr, kind, outer_momentum)
    return OuterLoop(
        manager,
        views,
        optimizer,
        # One each: an optimizer shared by fragments would also step the other fragments'
        # parameters, with their inner gradients and the outer learning rate.
        [
            OuterSGD(view.parameters(), lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
            for view in views
        ],
        sync_every=sync_every,
        fragment_sync_delay=fragment_sync_delay,
        fragment_update_alpha=fragment_update_alpha,
        use_bucketization=False,
        modules=modules if model is None else [model],
    )


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside wrappers such as accelerate's, on which hooks do not work.

    Raises:
        TypeError: there is no torch optimizer inside.
    """
    inner = optimizer
    while not isinstance(inner, torch.optim.Optimizer) or not hasattr(
        inner, "_optimizer_step_post_hooks"
    ):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise TypeError(f"{type(optimizer).__name__} is not a torch optimizer")
    return inner


def check_schedule(fragments: int, sync_every: int, delay: int, alpha: float) -> None:
    """Refuse a schedule that cannot be kept, in words rather than torchft's assertions.

    Raises:
        ValueError: a setting is out of range.
    """
    if sync_every < fragments or sync_every % fragments:
        raise ValueError(
            f"sync_every ({sync_every}) must be a positive multiple of the {fragments} fragments"
        )
    interval = sync_every // fragments
    if not 0 <= delay < interval:
        raise ValueError(
            f"fragment_sync_delay ({delay}) must be at least 0 and below the {interval} inner "
            "steps between two rounds"
        )
    if not 0 <= alpha <= 1:
        raise ValueError(f"fragment_update_alpha ({alpha}) must be between 0 and 1")


def _check_coverage(views: Sequence[Any], optimizer: torch.optim.Optimizer) -> None:
    """Every trained parameter in exactly one fragment, and nothing that cannot be averaged."""
    home: dict[int, int] = {}
    for index, view in enumerate(views):
        if not view.names:
            raise ValueError(f"fragment {index} has no trainable parameters")
        for name, parameter in zip(view.names, view.parameters(), strict=True):
            if not parameter.is_floating_point():
                raise TypeError(f"{name} is {parameter.dtype}; only floating point can be averaged")
            if home.setdefault(id(parameter), index) != index:
                raise ValueError(
                    f"{name} is in fragments {home[id(parameter)]} and {index} (tied weights?); "
                    "put all modules that share it into one fragment"
                )
    left_out = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and id(parameter) not in home
    ]
    if left_out:
        shapes = ", ".join(str(tuple(p.shape)) for p in left_out[:3])
        raise ValueError(
            f"{len(left_out)} trained parameters (shapes {shapes} …) are in no fragment and would "
            "never be synchronised"
        )


def _name_by_model(views: Sequence[Any], model: nn.Module | None) -> None:
    """Give the fragments' parameters names that are unique in the run."""
    if model is None:
        if len(views) > 1:
            for index, view in enumerate(views):
                view.names = [f"{index}.{name}" for name in view.names]
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for view in views:
        view.names = [
            names.get(id(parameter), name)
            for name, parameter in zip(view.names, view.parameters(), strict=True)
        ]


def _warn_of_local_state(modules: Sequence[nn.Module]) -> None:
    """Running statistics are not parameters: each replica keeps its own."""
    for module in modules:
        for name, layer in module.named_modules():
            if isinstance(layer, _BatchNorm) and layer.track_running_stats:
                warnings.warn(
                    f"the running statistics of {name or type(layer).__name__} are not exchanged; "
                    "replicas end with different ones. Use a norm without them, or freeze them.",
                    stacklevel=3,
                )
                return
