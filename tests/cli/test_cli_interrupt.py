"""Ctrl-C in a command that follows a run: the run goes on, and it says so."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
from click.testing import Result
from scripted_executor import ScriptedExecutor

from diloco_cloud.executor import ReplicaHandle, ReplicaStatus
from diloco_cloud.run import Run


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    """The test process's own handling of SIGINT, again after the command has changed it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("typed", "again"),
    [
        (("wait",), "wait"),
        (("supervise",), "supervise"),
        (("logs", "-f"), "logs -f"),
        (("status", "-w"), "status -w"),
        (("status", "-w", "--json"), "status -w --json"),
    ],
)
def test_interrupted_command_says_that_the_run_goes_on(
    call: Callable[..., Result],
    make_run: Callable[..., Run],
    store_uri: str,
    monkeypatch: pytest.MonkeyPatch,
    typed: tuple[str, ...],
    again: str,
) -> None:
    run = make_run()

    def interrupted(self: ScriptedExecutor, handle: ReplicaHandle) -> ReplicaStatus:
        signal.raise_signal(signal.SIGINT)
        return ReplicaStatus("running")

    with monkeypatch.context() as patched:
        patched.setattr(ScriptedExecutor, "poll", interrupted)
        result = call(*typed, "run-1", "--store", store_uri)
    assert result.exit_code == 130
    where = f"run-1 --store {store_uri}"
    assert result.stderr.startswith("\nrun-1 goes on")
    assert result.stderr.endswith(
        f"; to come back: diloco-cloud {again} {where}; to stop it: diloco-cloud cancel {where}\n"
    )
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # the second one waits for nothing
    assert run.status().state == "running"
