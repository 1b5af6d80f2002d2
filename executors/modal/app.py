"""The App of a run: deployed, called, stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from diloco_cloud.executors.modal import image as images
from diloco_cloud.executors.modal.calls import look
from diloco_cloud.executors.modal.container import run_replica
from diloco_cloud.executors.modal.plan import FUNCTION, ModalPlan
from diloco_cloud.executors.modal.session import Session
from diloco_cloud.executors.modal.settings import ModalSettings
from diloco_cloud.secrets import Secret, revealed

logger = logging.getLogger(__name__)

#: Tag of an App: when it was last deployed, in seconds since the epoch.
DEPLOYED_TAG: Final = "diloco-deployed"
#: Seconds that pass at most between a look at a run and what is done about its end, with what the
#: clocks of two machines may differ by.
_MARGIN_S: Final = 120.0


@dataclass(frozen=True)
class Place:
    """Where calls are made.

    Attributes:
        function: of the SDK.
        app: of the SDK; None where it is the user's own, and not ours to stop.
        name: of the App, if it is ours.
        is_new: nobody had deployed it before.
    """

    function: Any
    app: Any
    name: str | None
    is_new: bool

    def spawn(self, arguments: Mapping[str, Any]) -> str:
        """Start one call; its id."""
        call_id: str = self.function.spawn(**arguments).object_id
        return call_id


def own_function(session: Session, settings: ModalSettings) -> Place:
    """The function that the user named or gave, wherever it is deployed."""
    function = settings.function
    if isinstance(function, str):
        app, _, name = function.partition("/")
        function = session.function(app, name)
        function.hydrate()
    return Place(function, None, None, is_new=False)


def deploy(
    session: Session, plan: ModalPlan, settings: ModalSettings, secrets: Mapping[str, Secret]
) -> Place:
    """Deploy the run's App, or a new version of it; replicas that run in the old one go on.

    Blocks while an image is built, which may take minutes the first time.

    Args:
        session: with Modal.
        plan: what to deploy.
        settings: of the executor.
        secrets: the plan's ``secret_keys``; revealed to a Secret of Modal's, and nowhere else.
    """
    modal = session.modal
    is_new = session.app(plan.app) is None
    tags = {**plan.tags, DEPLOYED_TAG: f"{time.time():.0f}"}
    app = modal.App(plan.app, tags=tags, include_source=False)
    sent = [modal.Secret.from_dict(revealed(secrets))] if secrets else []
    function = app.function(
        image=_image(session, plan, settings),
        secrets=[*map(session.secret, plan.modal_secrets), *sent],
        retries=modal.Retries(max_retries=plan.retries, initial_delay=1.0, backoff_coefficient=1.0),
        **plan.function,
    )(run_replica)
    app.deploy(environment_name=session.environment, client=session.client)
    logger.info("App %s is deployed as %s", plan.app, app.app_id)
    return Place(function, app, plan.app, is_new)


def waiting_or_running(session: Session, name: str) -> int:
    """How many calls of a run's App have not ended."""
    return sum(_stats(session, name))


def stop_if_idle(session: Session, name: str) -> None:
    """Stop a run's App, unless one of its calls waits or runs."""
    app = session.app(name)
    if app is not None and waiting_or_running(session, name) == 0:
        _stop(session, app, name)


def stop_if_over(session: Session, name: str, known: Collection[str]) -> None:
    """Stop the App of a run whose replicas have all ended, as far as anybody can tell.

    A call that still waits for a machine is either one that a launcher made and did not live to
    write down, or that of a launch which came after the look at the run. The App was deployed for
    the latter, a moment ago. Or Modal starts it again, and could not be asked at that look.

    Args:
        session: with Modal.
        name: of the App.
        known: ids of its calls that the one who asks has handles of.
    """
    app = session.app(name)
    if app is None:
        return
    waiting, running = _stats(session, name)
    if running == 0 and (waiting == 0 or _are_orphans(session, app, known)):
        _stop(session, app, name)


def _stats(session: Session, name: str) -> tuple[int, int]:
    """How many calls of an App wait for a machine, and how many run."""
    try:
        stats = session.function(name, FUNCTION).get_current_stats()
    except session.modal.exception.NotFoundError:
        return 0, 0
    return int(stats.backlog), int(stats.num_running_inputs)


def _are_orphans(session: Session, app: Any, known: Collection[str]) -> bool:
    """Whether nobody has handles of the calls of an App that wait for a machine."""
    return _age_s(session, app) > _MARGIN_S and all(
        look(session.modal, session.client, call_id).status.is_terminal for call_id in known
    )


def _age_s(session: Session, app: Any) -> float:
    """Seconds since an App was deployed; 0 where that is not known."""
    tag = app.get_tags(client=session.client).get(DEPLOYED_TAG, "")
    return time.time() - int(tag) if tag.isdecimal() else 0.0


def _stop(session: Session, app: Any, name: str) -> None:
    app.stop(client=session.client)
    logger.info("App %s is stopped", name)


def _image(session: Session, plan: ModalPlan, settings: ModalSettings) -> Any:
    assert plan.image is not None  # only a function of the user's own has none
    if settings.image is not None and not isinstance(settings.image, str):
        return images.mount(plan.image, settings.image)
    return images.build(plan.image, session.modal)
