"""The contract suite itself: it fails who breaks a rule, and runs from the command line."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from diloco_cloud.executor import (
    Entrypoint,
    LaunchOptions,
    ReplicaHandle,
    ReplicaResult,
    ReplicaStatus,
)
from diloco_cloud.executors.local import LocalProcessExecutor
from diloco_cloud.secrets import read_secrets, revealed
from diloco_cloud.testing import ExecutorContract, Fleet

LIVE = ["--pyargs", "diloco_cloud.testing.live"]


class Tolerable(LocalProcessExecutor):
    """Keeps the contract."""


class TellsTooLate(LocalProcessExecutor):
    """Tells of replicas when all are started, and leaves them alone when it cannot."""

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any],
        *,
        options: LaunchOptions = LaunchOptions(),  # noqa: B008
        **rest: Any,
    ) -> list[ReplicaHandle]:
        quiet = dataclasses.replace(options, on_launched=None)
        handles = super().launch_replicas(
            n_replicas, entrypoint, entrypoint_args, options=quiet, **rest
        )
        for handle in handles:
            if options.on_launched is not None:
                options.on_launched(handle)
        return handles


class CountsFromZero(LocalProcessExecutor):
    """Takes every launch for a whole one."""

    def launch_replicas(self, *args: Any, options: LaunchOptions, **rest: Any) -> Any:
        whole = dataclasses.replace(options, ranks=None, world_size=None)
        return super().launch_replicas(*args, options=whole, **rest)


class NotesSecrets(LocalProcessExecutor):
    """Keeps what it was given where everybody can read it."""

    def launch_replicas(self, *args: Any, options: LaunchOptions, **rest: Any) -> Any:
        self.sent = revealed(read_secrets(options.secrets, os.environ))
        return super().launch_replicas(*args, options=options, **rest)


class LogsSecrets(LocalProcessExecutor):
    """Says all that it does, if somebody listens."""

    def launch_replicas(self, *args: Any, options: LaunchOptions, **rest: Any) -> Any:
        values = revealed(read_secrets(options.secrets, os.environ))
        logging.getLogger(__name__).debug("launching with %s", values)
        return super().launch_replicas(*args, options=options, **rest)


class HoldsSecrets(LocalProcessExecutor):
    """Reveals secrets long before they are sent."""

    def launch_replicas(self, *args: Any, options: LaunchOptions, **rest: Any) -> Any:
        env = {**options.env, **revealed(read_secrets(options.secrets, os.environ))}
        options = dataclasses.replace(options, env=env, secrets=())
        return super().launch_replicas(*args, options=options, **rest)


class NeverLoses(LocalProcessExecutor):
    """Takes what nobody knows for something that may still come."""

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        status = super().poll(handle)
        return ReplicaStatus("unknown") if status.reason == "lost" else status


class Forgives(LocalProcessExecutor):
    """Calls every end a success."""

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        status = super().poll(handle)
        return ReplicaStatus("succeeded", exit_code=0) if status == "failed" else status


class LeavesRunning(LocalProcessExecutor):
    """Cancels nothing."""

    def cancel(self, handle: ReplicaHandle) -> None:
        pass


class GivesUp(LocalProcessExecutor):
    """Raises for the first replica that failed."""

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None
    ) -> list[ReplicaResult]:
        results = super().collect(handles, timeout=timeout)
        assert not [result for result in results if result["status"] == "failed"]
        return results


class Chatters(LocalProcessExecutor):
    """Shows the whole log, whatever was asked for."""

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        return super().stream_logs(handle, n_lines=10_000)


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Makes fleets of a kind of executor; what they leave is ended by an honest one."""
    state, fleets = tmp_path / "state", []

    def make(kind: type[LocalProcessExecutor], patience_s: float) -> Fleet:
        fleets.append(Fleet(kind(state_dir=state, grace=0.3), patience_s=patience_s))
        return fleets[-1]

    yield make
    honest = LocalProcessExecutor(state_dir=state, grace=0.3)
    for fleet in fleets:
        handles = honest.recover(fleet.name)
        for handle in handles:
            honest.cancel(handle)
        honest.collect(handles, timeout=30)


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (TellsTooLate, "test_failing_on_launched_leaves_nothing_running"),
        (CountsFromZero, "test_one_rank_of_a_run_can_be_started_again"),
        (NotesSecrets, "test_secret_reaches_the_replica_and_nobody_else"),
        (LogsSecrets, "test_secret_reaches_the_replica_and_nobody_else"),
        (HoldsSecrets, "test_secret_is_in_no_error"),
        (NeverLoses, "test_replica_that_the_provider_does_not_know_is_lost"),
        (Forgives, "test_exit_code_is_told"),
        (Forgives, "test_replica_that_outruns_its_timeout_is_stopped"),
        (LeavesRunning, "test_cancel_may_be_repeated_and_is_final"),
        (GivesUp, "test_one_failure_hides_no_other_replica"),
        (Chatters, "test_log_is_no_longer_than_was_asked"),
    ],
)
def test_executor_that_breaks_a_rule_fails(
    make_fleet: Callable[..., Fleet],
    request: pytest.FixtureRequest,
    kind: type[LocalProcessExecutor],
    test: str,
) -> None:
    rule = getattr(ExecutorContract(), test)
    given = [name for name in inspect.signature(rule).parameters if name != "fleet"]
    fixtures = {name: request.getfixturevalue(name) for name in given}
    rule(make_fleet(Tolerable, 60.0), **fixtures)
    with pytest.raises(AssertionError):
        rule(make_fleet(kind, 5.0), **fixtures)


def _pytest(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    plugin = ["-p", "diloco_cloud.testing.plugin", "-p", "no:cacheprovider", "-q", "-rs"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_live_suite_runs_on_the_backend_that_is_named(tmp_path: Path) -> None:
    state = f"state_dir={tmp_path / 'state'}"
    words = ["--live", "--backend", "local", "--backend-arg", state, "-k", "told_who or success"]
    ended = _pytest(*LIVE, *words, directory=tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert "2 passed" in ended.stdout
    assert list((tmp_path / "state").iterdir())


def test_live_suite_costs_nothing_unless_asked(tmp_path: Path) -> None:
    ended = _pytest(*LIVE, "--backend", "local", "-k", "told_who", directory=tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert "needs --live, and an account" in ended.stdout


def test_live_suite_names_a_wrong_backend_or_setting(tmp_path: Path) -> None:
    words = [*LIVE, "--live", "-k", "told_who"]
    assert "--live needs --backend NAME" in _pytest(*words, directory=tmp_path).stdout
    unknown = _pytest(*words, "--backend", "locla", directory=tmp_path).stdout
    assert "Did you mean 'local'?" in unknown
    wrong = _pytest(*words, "--backend", "local", "--backend-arg", "x", directory=tmp_path).stdout
    assert "--backend-arg 'x' has no '='" in wrong


def test_suite_without_pytest_names_it() -> None:
    program = """
import sys
sys.modules["pytest"] = None
import diloco_cloud.testing.programs
try:
    from diloco_cloud.testing import ExecutorContract
except ImportError as error:
    print(type(error).__name__, error.fix)
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "MissingDependencyError pip install pytest\n"
