"""Every error a user can meet, on one screen.

    DilocoError
    ├── UsageError                 the request is wrong; nothing was started
    │   ├── ConfigError              a TOML key, a flag or a value
    │   ├── UnknownBackendError      no executor of that name is installed
    │   ├── MissingDependencyError   an optional package is absent (also ImportError, RuntimeError)
    │   ├── TrainerImportError       the trainer cannot be imported or called
    │   ├── MissingRankError         a replica's environment does not tell its rank
    │   └── RunExistsError           the run id is taken in that store
    ├── RunNotFoundError           no such run in that store
    ├── RewardError                a reward function failed, or returned no finite number
    ├── LaunchError                a backend refused or failed to start replicas
    ├── ExchangeError              replicas could not agree on a round
    │   ├── RoundTimeoutError        peers did not contribute in time (also TimeoutError)
    │   ├── LayoutMismatchError      replicas train different tensors
    │   ├── MissedRoundError         a round was decided without this replica: it catches up
    │   ├── DriftError               this replica's global parameters differ from the others'
    │   ├── LeftRunError             this replica's rank has left the run for good
    │   └── CorruptContributionError bytes that are not a contribution of this run and round
    │       └── ForeignObjectError     not signed with the run's key
    └── StoreError                 the object store said no
        ├── AlreadyExistsError       create-once met an existing object (also FileExistsError)
        ├── NotFoundError            no such object or bucket (also FileNotFoundError)
        ├── DeniedError              credentials or permissions (also PermissionError)
        │   └── ExpiredCredentialsError  they were good once: fetched anew and retried
        ├── ThrottledError           slow down: retried
        ├── UnreachableError         network, timeout, 5xx: retried (also ConnectionError)
        ├── CorruptError             the store returned other bytes than were asked for
        └── UnsupportedStoreError    the store cannot do what a run needs

A message says what happened; ``fix``, where there is one, says what to do about it. The command
line prints both and no traceback unless ``DILOCO_DEBUG=1``.
"""

from __future__ import annotations


class DilocoError(Exception):
    """Base of all errors raised on purpose by this package.

    Args:
        message: what happened, in one sentence.
        fix: what the user can do about it, in one sentence.

    Attributes:
        backend: that ``message`` names, where a run has several; None where it names none.
    """

    backend: str | None = None

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  {self.fix}" if self.fix else self.message


class UsageError(DilocoError):
    """The request is wrong; nothing was started."""


class ConfigError(UsageError, ValueError):
    """A TOML key, a flag or a value is not acceptable."""


class UnknownBackendError(UsageError, ValueError):
    """No executor of that name is installed."""


class MissingDependencyError(UsageError, ImportError, RuntimeError):
    """An optional package is absent; ``fix`` names the extra that installs it."""


class TrainerImportError(UsageError, ImportError):
    """The trainer cannot be imported, or is not callable as a trainer."""


class MissingRankError(UsageError, RuntimeError):
    """A replica's environment does not tell its rank."""


class RunExistsError(UsageError):
    """The run id is taken in that store."""


class RunNotFoundError(DilocoError, LookupError):
    """No such run in that store."""


class RewardError(DilocoError, RuntimeError):
    """A reward function failed, or returned something other than one number per completion."""


class LaunchError(DilocoError, RuntimeError):
    """A backend refused or failed to start replicas; those already started were cancelled."""


class ExchangeError(DilocoError, RuntimeError):
    """Replicas could not agree on a round."""


class RoundTimeoutError(ExchangeError, TimeoutError):
    """Peers did not contribute, or did not finish their part, in time."""


class LayoutMismatchError(ExchangeError, ValueError):
    """Replicas train different tensors (names, shapes or dtypes)."""


class MissedRoundError(ExchangeError):
    """A round was decided without this replica's work, which it keeps for a later one."""


class DriftError(ExchangeError):
    """This replica's global parameters differ from those the others agreed on."""


class LeftRunError(ExchangeError):
    """This replica's rank has left the run: nothing of it is taken any more."""


class CorruptContributionError(ExchangeError, ValueError):
    """Bytes that are not a well-formed contribution of this run and round."""


class ForeignObjectError(CorruptContributionError):
    """An object in the prefix is not signed with the run's key: none of its replicas wrote it."""


class StoreError(DilocoError, OSError):
    """The object store said no."""

    def __str__(self) -> str:
        return DilocoError.__str__(self)


class AlreadyExistsError(StoreError, FileExistsError):
    """Create-once met an existing object."""


class NotFoundError(StoreError, FileNotFoundError):
    """No such object, or no such bucket."""


class DeniedError(StoreError, PermissionError):
    """Credentials or permissions do not allow the operation."""


class ExpiredCredentialsError(DeniedError):
    """The credentials have expired; fetched anew and retried before it reaches a caller."""


class ThrottledError(StoreError):
    """The store asked to slow down; retried with back-off before it reaches a caller."""


class UnreachableError(StoreError, ConnectionError):
    """Network failure, timeout or 5xx; retried with back-off before it reaches a caller."""


class CorruptError(StoreError):
    """The store returned other bytes than were asked for."""


class UnsupportedStoreError(StoreError):
    """The store cannot do what a run needs, such as conditional create."""
