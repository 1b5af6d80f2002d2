"""Which backend each replica is started on, when a run that goes on is given another fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from diloco_cloud.errors import UsageError
from diloco_cloud.run.status import ReplicaView


def place(
    fleet: Mapping[str, int], others: Sequence[ReplicaView], starting: Sequence[ReplicaView]
) -> dict[int, str]:
    """The backends of replicas that are to be started, by rank.

    Each goes back to where it was while there is room; the rest go where there is, in the fleet's
    order.

    Args:
        fleet: how many replicas there are to be on each backend: as many as there are views, those
            that have done their work among them.
        others: replicas that stay what and where they are.
        starting: those that are to be started.

    Raises:
        UsageError: there are more of the others on a backend than the fleet has.
    """
    room = Counter(fleet)
    for view in others:
        if view.state == "succeeded":  # it has done its work, and takes nobody's place
            continue
        backend = view.backend or ""
        room[backend] -= 1
        if room[backend] < 0:
            there = fleet.get(backend, 0)
            raise UsageError(
                f"replica {view.rank} is {view.state} on {backend}, "
                f"where there would be {'none' if there == 0 else f'only {there}'}",
                fix=f"Give {backend} more, or cancel the replica first.",
            )
    places: dict[int, str] = {}
    for view in starting:
        if view.backend is not None and room[view.backend] > 0:
            room[view.backend] -= 1
            places[view.rank] = view.backend
    left = iter([backend for backend in fleet for _ in range(room[backend])])
    return {view.rank: places.get(view.rank) or next(left) for view in starting}
