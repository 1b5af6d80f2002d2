"""One training job: its statuses from creation to end, around a container that really runs."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fakes.aws_container import Container, base_environment

if TYPE_CHECKING:
    from fakes.aws_training import Training

#: What becomes of a container from outside.
Fate = Literal["stop", "preempt", "lose"]
_LOOK_S = 0.02


class TrainingJob:
    """A training job; its own thread moves it on.

    Args:
        platform: that runs it.
        creation: the request that created it.
        arn: of the job.
    """

    def __init__(self, platform: Training, creation: dict[str, Any], arn: str) -> None:
        self.platform = platform
        self.creation = creation
        self.name: str = creation["TrainingJobName"]
        self.arn = arn
        self.created = time.time()
        self.started: float | None = None
        self.ended: float | None = None
        self.status, self.secondary = "InProgress", "Starting"
        self.transitions: list[dict[str, Any]] = []
        self.failure: str | None = None
        self.warm_pool: dict[str, Any] | None = None
        self.containers = 0
        self.pid: int | None = None
        self._trained_s = 0.0
        self._retries = creation.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0)
        self._wishes: list[Fate] = []
        self._stopping = threading.Event()
        self._move("InProgress", "Starting")
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    # -- from outside --------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self.status in ("Completed", "Failed", "Stopped")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """SIGTERM, and the grace."""
        self._move("Stopping", "Stopping")
        self._stopping.set()

    def preempt(self) -> None:
        """Take the spot instance back; the job goes on when there is another."""
        self._wishes.append("preempt")

    def lose(self) -> None:
        """Lose the machine without warning: an internal error of SageMaker's."""
        self._wishes.append("lose")

    def join(self) -> None:
        self._thread.join(timeout=30)

    # -- in its thread -------------------------------------------------------------------------

    def _run(self) -> None:
        again = True
        while again:
            if not self._place():
                return
            again = self._train()

    def _place(self) -> bool:
        """Find an instance; whether there was one."""
        deadline = self.created + self._limit("MaxWaitTimeInSeconds")
        ready = time.time() + self.platform.start_delay_s
        if self.platform.full.is_set() and not self.containers:  # else it is Interrupted
            self._move("InProgress", "Pending")
        while time.time() < ready or self.platform.full.is_set():
            if self._stopping.wait(_LOOK_S):
                self._end("Stopped", "Stopped")
                return False
            if time.time() > deadline:
                self._end("Stopped", "MaxWaitTimeExceeded")
                return False
        if self.platform.failures:
            self._end("Failed", "Failed", self.platform.failures.popleft())
            return False
        self._move("InProgress", "Starting")
        self.platform.take_warm_pool(self)
        return True

    def _train(self) -> bool:
        """Run the container to its end; whether there is to be another."""
        stream = self.platform.logs.open(self.name)
        directory = self.platform.directory / self.name
        directory.mkdir(exist_ok=True)
        self.platform.download(self.creation, directory)
        began = time.time()
        container = Container(
            self._command(),
            self._environment(directory),
            directory,
            lambda line: self.platform.logs.write(stream, line),
        )
        self.containers += 1
        self.pid = container.pid
        self.started = self.started or began
        self._move("InProgress", "Training")
        fate = self._await(container)
        if fate in ("stop", "preempt", "timeout"):
            container.terminate()
            until = time.time() + self.platform.term_grace_s
            while container.exit_code() is None and time.time() < until:
                time.sleep(_LOOK_S)
        code = container.exit_code()
        container.close()
        self.pid = None
        self._trained_s += time.time() - began
        return self._after(fate, code, directory)

    def _await(self, container: Container) -> str:
        """What ends the container: itself ("exit"), "timeout", or somebody's wish."""
        limit = time.time() + self._limit("MaxRuntimeInSeconds") - self._trained_s
        while container.exit_code() is None:
            if self._stopping.is_set():
                return "stop"
            if self._wishes:
                return self._wishes.pop(0)
            if time.time() > limit:
                return "timeout"
            time.sleep(_LOOK_S)
        return "exit"

    def _after(self, fate: str, code: int | None, directory: Path) -> bool:
        """Move on from a container that has ended; whether there is to be another."""
        if fate == "stop" or self._stopping.is_set():
            self._end("Stopped", "Stopped")
        elif fate == "timeout":
            self._end("Stopped", "MaxRuntimeExceeded")
        elif fate == "preempt" and self.creation.get("EnableManagedSpotTraining"):
            self._move("InProgress", "Interrupted")
            self._stopping.wait(self.platform.interruption_s)
            return True
        elif fate in ("preempt", "lose"):
            if self._retries > 0:
                self._retries -= 1
                self._move("InProgress", "Restarting")
                return True
            message = "We encountered an internal error. Please try again."
            self._end("Failed", "Failed", f"InternalServerError: {message}")
        elif code == 0:
            self._move("InProgress", "Uploading")
            self._end("Completed", "Completed")
        else:
            note = directory / "opt" / "ml" / "output" / "failure"
            said = note.read_text()[:1024] if note.exists() else ""
            self._end("Failed", "Failed", f"AlgorithmError: {said}, exit code: {code}")
        return False

    def _command(self) -> list[str]:
        algorithm = self.creation["AlgorithmSpecification"]
        entrypoint = algorithm.get("ContainerEntrypoint", ["train"])
        return [*entrypoint, *algorithm.get("ContainerArguments", [])]

    def _environment(self, directory: Path) -> dict[str, str]:
        return {
            **base_environment(directory),
            **self.platform.container_environment(),
            "TRAINING_JOB_NAME": self.name,
            "TRAINING_JOB_ARN": self.arn,
            **self.creation.get("Environment", {}),
        }

    def _limit(self, name: str) -> float:
        return float(self.creation["StoppingCondition"].get(name, math.inf))

    def _move(self, status: str, secondary: str) -> None:
        with self.platform.lock:
            if self.status == "Stopping" and status == "InProgress":
                return
            self.status, self.secondary = status, secondary
            self.transitions.append({"Status": secondary, "StartTime": time.time()})

    def _end(self, status: str, secondary: str, failure: str | None = None) -> None:
        self.failure = failure
        self.ended = time.time()
        with self.platform.lock:
            self._keep_warm()
            # Its last status is not seen before everything else of its end.
            self.status, self.secondary = status, secondary
            self.transitions.append({"Status": secondary, "StartTime": self.ended})

    def _keep_warm(self) -> None:
        seconds = self.creation["ResourceConfig"].get("KeepAlivePeriodInSeconds", 0)
        if seconds and self.containers:
            self.warm_pool = {"Status": "Available", "ResourceRetainedBillableTimeInSeconds": 0}

    # -- answers -------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """As in a listing."""
        optional = {"TrainingEndTime": self.ended, "WarmPoolStatus": self.warm_pool}
        return {
            "TrainingJobName": self.name,
            "TrainingJobArn": self.arn,
            "CreationTime": self.created,
            "LastModifiedTime": self.transitions[-1]["StartTime"],
            "TrainingJobStatus": self.status,
            "SecondaryStatus": self.secondary,
            **{name: value for name, value in optional.items() if value is not None},
        }

    def description(self) -> dict[str, Any]:
        """As described."""
        seconds = max(1, math.ceil(self._trained_s)) if self.ended and self.started else None
        optional = {
            "FailureReason": self.failure,
            "TrainingStartTime": self.started,
            "TrainingTimeInSeconds": seconds,
            "BillableTimeInSeconds": seconds,
        }
        hidden = ("Tags",)
        return {
            **{name: value for name, value in self.creation.items() if name not in hidden},
            **self.summary(),
            "ModelArtifacts": {"S3ModelArtifacts": "s3://bucket/model.tar.gz"},
            "SecondaryStatusTransitions": list(self.transitions),
            **{name: value for name, value in optional.items() if value is not None},
        }
