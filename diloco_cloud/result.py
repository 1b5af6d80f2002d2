"""Which of a run's results counts: the one after the most rounds.

Each result is a directory of its own, named by its round and digest, in which ``manifest.json`` is
written last: without it there is no result yet. Directories of earlier rounds are deleted once a
later one has its manifest; whoever is slow may leave one, which changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from diloco_cloud import keys
from diloco_cloud.errors import NotFoundError
from diloco_cloud.store.base import ObjectStore


@dataclass(frozen=True)
class Result:
    """An exported result.

    Attributes:
        directory: of its files, in the run's prefix; ends with "/".
        manifest: digest, round, step, files; final: nobody was going on when it was written.
    """

    directory: str
    manifest: Mapping[str, Any]

    @property
    def round(self) -> int:
        """Decisions that it includes."""
        return keys.result_round(self.directory) or 0

    @property
    def is_final(self) -> bool:
        """Whether nobody was going on when it was written."""
        return self.manifest.get("final") is not False

    @property
    def files(self) -> tuple[str, ...]:
        """Keys of its files in the run's prefix, without the manifest."""
        names = self.manifest.get("files")
        names = names if isinstance(names, list) else []
        return tuple(self.directory + name for name in names if isinstance(name, str))

    @property
    def model(self) -> str | None:
        """The key of the trained parameters in the run's prefix; None if there are none."""
        key = self.directory + keys.MODEL
        return key if key in self.files else None


def read_result(store: ObjectStore) -> Result | None:
    """The result that counts; None where there is none.

    Args:
        store: the run's prefix.
    """
    before: list[str] = []
    while True:
        listed = [info.key for info in store.list(keys.RESULT)]
        found = sorted(filter(keys.is_result_manifest, listed), key=_by_round)
        for _, group in groupby(reversed(found), keys.result_round):
            standing = [one for key in group if (one := _read(store, key)) is not None]
            if standing:
                return max(standing, key=lambda one: (one.is_final, one.directory))
        # One that is gone again has been replaced, so that a later one is there.
        if found == before:
            return None
        before = found


def _by_round(key: str) -> tuple[int, str]:
    return keys.result_round(key) or 0, key


def _read(store: ObjectStore, key: str) -> Result | None:
    try:
        found = json.loads(store.get(key))
    except (NotFoundError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    return Result(key.removesuffix(keys.RESULT_MANIFEST), found)
