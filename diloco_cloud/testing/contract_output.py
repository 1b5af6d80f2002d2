"""The contract of logs and of secrets: what may be read of a replica, and what never may."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict

import pytest

from diloco_cloud.executor import LaunchOptions, PreviewsLaunch, ReplicaHandle, ServerlessExecutor
from diloco_cloud.testing.contract_base import ContractBase
from diloco_cloud.testing.crash_reports import readable
from diloco_cloud.testing.fleet import PROGRAMS, Fleet

SECRET_NAME = "CONTRACT_SUITE_SECRET"
#: The launcher's variable that the replica's takes its value from.
SOURCE_NAME = "CONTRACT_SUITE_SOURCE"
SECRET = "canary-9f3d21c07b-in-the-mine"


class OutputContract(ContractBase):
    """``stream_logs``, and the provider's channel for secrets."""

    def test_log_can_be_read_while_the_replica_runs(self, fleet: Fleet) -> None:
        (handle,) = fleet.launch("count", lines=3, seconds=600)
        log = fleet.output(handle, "line 2")
        assert [line for line in log.splitlines() if line.startswith("line ")] == [
            "line 0",
            "line 1",
            "line 2",
        ]
        assert fleet.executor.poll(handle) == "running"

    def test_log_has_stdout_and_stderr_and_stays(
        self, fleet: Fleet, make_executor: Callable[[], ServerlessExecutor]
    ) -> None:
        (handle,) = fleet.launch("count", lines=2)
        fleet.collect([handle])
        log = fleet.output(handle, "to stderr")
        assert "line 1" in log
        assert make_executor().stream_logs(handle).splitlines() == log.splitlines()

    def test_log_is_no_longer_than_was_asked(self, fleet: Fleet) -> None:
        (handle,) = fleet.launch("count", lines=300)
        fleet.collect([handle])
        fleet.output(handle, "to stderr")
        log = fleet.executor.stream_logs(handle, n_lines=5)
        assert len(log.splitlines()) <= 5
        assert "line 299" in log
        assert "line 290" not in log
        assert fleet.executor.stream_logs(handle, n_lines=0) == ""
        assert "line 101" in fleet.executor.stream_logs(handle)

    def test_logs_of_replicas_are_kept_apart(self, fleet: Fleet) -> None:
        handles = fleet.launch("identify", 2, names=["REPLICA_RANK"])
        fleet.collect(handles)
        assert [fleet.told(handle) for handle in handles] == [
            {"REPLICA_RANK": "0"},
            {"REPLICA_RANK": "1"},
        ]

    def test_secret_reaches_the_replica_and_nobody_else(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv(SOURCE_NAME, SECRET)
        caplog.set_level(logging.DEBUG)  # of SDKs too
        options = LaunchOptions(secrets=[f"{SECRET_NAME}={SOURCE_NAME}"])
        (handle,) = fleet.launch("fingerprint", options=options, name=SECRET_NAME)
        assert fleet.told(handle) == hashlib.sha256(SECRET.encode()).hexdigest()
        (result,) = fleet.collect([handle])
        seen = [
            json.dumps(asdict(handle)),
            repr(result),
            repr(fleet.executor),
            repr(vars(fleet.executor)),
            fleet.executor.stream_logs(handle),
            caplog.text,
        ]
        assert [text for text in seen if SECRET in text] == []

    def test_secret_is_in_no_error(self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nor in a local variable on its way, which tools that report crashes show."""

        def refuse(handle: ReplicaHandle) -> None:
            raise RuntimeError(f"nobody wants replica {handle.rank}")

        monkeypatch.setenv(SECRET_NAME, SECRET)
        options = LaunchOptions(secrets=[SECRET_NAME], on_launched=refuse)
        with pytest.raises(RuntimeError, match="nobody wants replica 0") as caught:
            fleet.launch("sleep", options=options)
        lines = readable(caught.value).splitlines()
        assert [line for line in lines if SECRET in line] == []

    def test_secret_is_in_no_preview(
        self, executor: ServerlessExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not isinstance(executor, PreviewsLaunch):
            pytest.skip("this executor has no preview_launch")
        monkeypatch.setenv(SECRET_NAME, SECRET)
        options = LaunchOptions(name="contract-preview", secrets=[SECRET_NAME])
        requests = executor.preview_launch(
            1, f"{PROGRAMS}:sleep", {}, gpu=self.gpu, timeout=600, options=options
        )
        assert SECRET not in json.dumps(requests)
