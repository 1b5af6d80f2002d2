"""The contract between a run and the place its replicas run on.

A backend implements :class:`ServerlessExecutor`; nothing else of it is ever called. The rules:

* ``launch_replicas`` is all or nothing: when it raises, every replica it had started is cancelled.
* Handles are plain data: they are written to the run's prefix and used from other processes, on
  other days, by a fresh executor object made with the same arguments.
* ``poll`` alone decides a replica's state. A transport failure is UNKNOWN, never FAILED; an id the
  provider does not know is FAILED with reason "lost".
* ``cancel`` does not wait, may be repeated, and succeeds on a replica that has ended.
* ``collect`` returns one result per handle, in order, whatever happened to each.
* All methods may be called from several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

State: TypeAlias = Literal["pending", "running", "succeeded", "failed", "cancelled", "unknown"]
#: Why a replica is in its state; None while it is well.
Reason: TypeAlias = Literal[
    "exit_code", "preempted", "timeout", "out_of_memory", "no_capacity", "cancelled", "lost"
]
TERMINAL_STATES: Final = frozenset({"succeeded", "failed", "cancelled"})

#: Default name of the environment variable that tells a replica its rank.
RANK_ENV: Final = "REPLICA_RANK"
#: Environment variable that tells a replica how many seconds there are between SIGTERM and its end.
TERM_GRACE_ENV: Final = "DILOCO_TERM_GRACE_S"


class ReplicaStatus(str):
    """A replica's state, and why: ``status == "failed" and status.exit_code == 137``.

    A ``str`` equal to one of :data:`State`, so that it compares, prints and serialises as the
    state alone.

    Attributes:
        exit_code: of the replica's process, where known; negative for a signal.
        reason: one of :data:`Reason`, or None.
        message: one line from the provider, or "".
    """

    exit_code: int | None
    reason: Reason | None
    message: str

    def __new__(
        cls,
        state: State,
        *,
        exit_code: int | None = None,
        reason: Reason | None = None,
        message: str = "",
    ) -> ReplicaStatus:
        status = super().__new__(cls, state)
        status.exit_code, status.reason, status.message = exit_code, reason, message
        return status

    @property
    def is_terminal(self) -> bool:
        return str(self) in TERMINAL_STATES


@dataclass
class ReplicaHandle:
    """Finds a replica again, from any process.

    Attributes:
        rank: 0-based index of the replica within its run.
        backend_name: the executor that launched it.
        metadata: JSON values only; private to the executor.
    """

    rank: int
    backend_name: str
    metadata: dict[str, Any] = field(default_factory=dict)


class ReplicaResult(dict[str, Any]):
    """What ``collect`` tells of one replica: rank, status, exit_code, error, result.

    ``status`` is a :class:`ReplicaStatus`; ``error`` is None or a line of text; ``result`` is what
    the entrypoint returned, where the backend can bring it back. Keys read as attributes too, and
    ``replica_id`` is another name for ``rank``.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self["rank" if name == "replica_id" else name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Script:
    """An entrypoint that is a Python file, run as ``python path *args``."""

    path: str
    args: tuple[str, ...] = ()


Entrypoint: TypeAlias = str | Script | Callable[..., Any]


@dataclass(frozen=True)
class LaunchOptions:
    """What a run adds to a plain launch. Every field has a default that changes nothing.

    Attributes:
        name: prefix for provider-side names; of a run, its id and what tells it from runs of the
            same id in other stores. ``recover`` finds by it, and nothing else's.
        ranks: which ranks to start, in order; default ``range(n_replicas)``.
        world_size: of the run; default ``n_replicas``. Differs when one rank is restarted.
        attempt: which life of these ranks this is; reaches the replica as ``DILOCO_ATTEMPT``.
        env: added to each replica's environment.
        secrets: what the launcher's environment has for the replicas' and travels by the provider's
            secret channel only: "NAME", or "NAME=SOURCE" where the replicas' variable NAME takes
            the value of the launcher's variable SOURCE, so that replicas of one run on several
            backends can have credentials of their own. Never a value. An executor finds them as
            :class:`~diloco_cloud.secrets.Secret` in ``LaunchRequest.secrets``.
        imports: modules that the entrypoint will import by their names, as a run's trainer is. An
            executor that can take sources along takes theirs; one that knows that they will not be
            there refuses the launch.
        on_launched: called with each handle as soon as the provider has returned it.
    """

    name: str = "diloco"
    ranks: Sequence[int] | None = None
    world_size: int | None = None
    attempt: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    imports: Sequence[str] = ()
    on_launched: Callable[[ReplicaHandle], None] | None = None


@runtime_checkable
class ServerlessExecutor(Protocol):
    """Launches and follows replicas on one kind of backend."""

    backend_name: str
    supports_inter_replica_network: bool

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: int = 3600,
        options: LaunchOptions = LaunchOptions(),
    ) -> list[ReplicaHandle]:
        """Start ``n_replicas`` replicas and return their handles in rank order.

        Args:
            n_replicas: at least 1.
            entrypoint: a module ("pkg.mod", its ``main`` is called), a function ("pkg.mod:fn" or
                "pkg.mod.fn"), a :class:`Script`, or (local only) a callable.
            entrypoint_args: JSON values; keyword arguments of the entrypoint. The reserved key
                ``rank_env`` names the rank variable and is not passed on.
            gpu: the backend's own name for the accelerator of each replica.
            timeout: seconds each replica may run.
            options: what a run adds: ranks, attempt, environment, secrets, a callback.

        Each replica sees its rank in ``REPLICA_RANK`` (or ``rank_env``) and ``REPLICA_GROUP_ID``,
        the number of replicas in ``NUM_REPLICA_GROUPS``, and ``DILOCO_ATTEMPT``; and in
        ``DILOCO_TERM_GRACE_S`` the seconds the backend gives it between SIGTERM and its end.

        Raises:
            UsageError: the request cannot be satisfied here; nothing was started.
            LaunchError: the provider failed; everything started was cancelled.
        """

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """The replica's state now; never blocks for long, never raises for a provider's failure."""

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """The last ``n_lines`` lines of stdout and stderr, best effort."""

    def cancel(self, handle: ReplicaHandle) -> None:
        """Ask the replica to stop; idempotent."""

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None
    ) -> list[ReplicaResult]:
        """Wait until every replica has ended, or ``timeout`` seconds have passed.

        One result per handle, in order. A replica still going at the timeout keeps its state
        ("running", "pending", "unknown") and says so in ``error``; it is not cancelled.
        """


# What an executor may have besides. Each is looked for by its name alone.


@runtime_checkable
class ChecksLaunch(Protocol):
    """Can find out before anything is written or started that a launch cannot work."""

    def check_launch(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: int = 3600,
        options: LaunchOptions = LaunchOptions(),
    ) -> None:
        """Ask the provider what costs nothing: credentials, hardware, quotas, names.

        ``launch_replicas`` checks the same things; a launcher asks first, so that a run that
        cannot start leaves nothing behind.

        Raises:
            UsageError: ``launch_replicas`` with the same arguments would raise it.
            LaunchError: the provider cannot be asked at all.
        """


@runtime_checkable
class PreviewsLaunch(Protocol):
    """Can show what it would send to its provider; ``launch --dry-run`` prints it."""

    def preview_launch(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: int = 3600,
        options: LaunchOptions = LaunchOptions(),
    ) -> list[dict[str, Any]]:
        """The provider's own requests, in order, as JSON values; without any network.

        A secret's value is never in them, and what only the provider could tell is left out.

        Raises:
            UsageError: the request cannot be satisfied, as far as this machine can tell.
        """


class InstalledExtras(NamedTuple):
    """Extras of this package that replicas will have.

    Attributes:
        names: of the extras.
        setting: the backend's own that decides it, as ``--backend-arg`` takes it, with
            "{extras}" where their names go.
    """

    names: frozenset[str]
    setting: str


@runtime_checkable
class InstallsPackage(Protocol):
    """Installs this package where its replicas run, so that it knows what they will lack."""

    def installed_extras(self) -> InstalledExtras | None:
        """The extras it installs; None where the user's own image or command decides that."""


@runtime_checkable
class RecoversReplicas(Protocol):
    """Can find what a launcher started that died before it could say so."""

    def recover(self, name: str) -> list[ReplicaHandle]:
        """Handles of all replicas that were launched as ``options.name``, ended ones too.

        Raises:
            LaunchError: the provider cannot be asked, or has something of that name that it does
                not tell. Whoever cancels a run must not believe that nothing is left.
        """


@runtime_checkable
class ForgetsReplicas(Protocol):
    """Keeps records of replicas that are its own to delete, such as logs on this machine."""

    def forget(self, handle: ReplicaHandle) -> None:
        """Delete what is kept of a replica that has ended."""


@runtime_checkable
class ReleasesRun(Protocol):
    """Keeps something for a run as a whole: an App that its replicas are calls of, or secrets."""

    def release(self, name: str) -> None:
        """Give it back, now that all replicas launched as ``name`` have ended; never raises.

        Whoever sees that a run has ended calls it, so it may come more than once, and must leave
        alone what a replica that was started meanwhile needs.
        """
