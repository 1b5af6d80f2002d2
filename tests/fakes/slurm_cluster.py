"""Clusters for the tests of the Slurm backend: a real one of one node, or commands that act it.

Both are driven by the same commands, found on PATH, and by the same methods here.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from servers import die_with_parent, free_ports

COMMANDS = Path(__file__).with_name("slurm_commands.py")
#: Seconds between SIGTERM and SIGKILL.
KILL_WAIT_S = 3
START_TIMEOUT_S = 30.0
#: Directories that a login shell may leave out of PATH.
_SBIN = os.pathsep.join(("/usr/local/sbin", "/usr/sbin", "/sbin"))


class Cluster(Protocol):
    """What a test does to a cluster."""

    @property
    def env(self) -> dict[str, str]:
        """Variables by which the commands find it."""

    def preempt(self, task: str) -> None:
        """Take a running task's node away; it is queued again."""

    def outage(self) -> contextlib.AbstractContextManager[None]:
        """While it is entered, the controller is down."""

    def kept(self) -> bytes:
        """Everything that the controller has stored or was sent."""


def daemons() -> list[str]:
    """Those that a real cluster needs and this machine lacks."""
    path = os.pathsep.join((os.environ.get("PATH", ""), _SBIN))
    return [name for name in ("slurmctld", "slurmd", "sbatch") if not shutil.which(name, path=path)]


class RealCluster:
    """slurmctld and slurmd on 127.0.0.1, with a directory of their own and no other state."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._ports = free_ports(2)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self._root / "slurm.conf")}

    def start(self) -> None:
        for name in ("state", "spool"):
            (self._root / name).mkdir()
        (self._root / "slurm.conf").write_text(self._conf())
        (self._root / "gres.conf").write_text(
            "".join(f"Name=gpu Type=a100 File=/dev/{d}\n" for d in ("null", "zero", "full"))
        )
        self._run("slurmctld", "-D", "-c", "-i")
        self._await_controller()
        self._run("slurmd", "-D", "-N", socket.gethostname().partition(".")[0])
        self._await_node()

    def stop(self) -> None:
        # Jobs first: they are children of slurmstepd, which outlives slurmd.
        subprocess.run(
            ["scancel", "--me", "--signal=KILL", "--full"], env=self._environment, check=False
        )
        with contextlib.suppress(TimeoutError):
            self._until(lambda: not self._ask("squeue", "--noheader", "--me"))
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)
        # A slurmstepd that has not told its job's end goes on trying to.
        deadline = time.monotonic() + START_TIMEOUT_S
        while left := self.processes():
            assert time.monotonic() < deadline, f"{left} do not die"
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """Everything that runs on behalf of this cluster: its configuration is in their names."""
        mark = self.env["SLURM_CONF"].encode()
        return [pid for pid in _pids() if mark in _environment_of(pid)]

    def preempt(self, task: str) -> None:
        subprocess.run(["scontrol", "requeue", task], env=self._environment, check=True)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        controller = self._processes["slurmctld"]
        controller.send_signal(signal.SIGTERM)
        controller.wait(timeout=20)
        try:
            yield
        finally:
            self._run("slurmctld", "-D")  # which reads the state that it has saved
            self._await_controller()

    def kept(self) -> bytes:
        files = [path for path in (self._root / "state").rglob("*") if path.is_file()]
        logs = list(self._root.glob("*.log"))
        return b"".join(path.read_bytes() for path in [*files, *logs])

    @property
    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join((os.environ.get("PATH", ""), _SBIN))
        return {**os.environ, **self.env, "PATH": path}

    def _run(self, daemon: str, *options: str) -> None:
        binary = shutil.which(daemon, path=self._environment["PATH"])
        assert binary is not None
        with (self._root / f"{daemon}.out").open("ab") as output:
            self._processes[daemon] = subprocess.Popen(
                [binary, *options, "-f", self.env["SLURM_CONF"]],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def _ask(self, *argv: str) -> str:
        done = subprocess.run(
            argv, env=self._environment, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else f"error: {done.stderr}"

    def _await_controller(self) -> None:
        self._until(lambda: "UP" in self._ask("scontrol", "ping"))

    def _await_node(self) -> None:
        self._until(lambda: self._ask("sinfo", "--noheader", "--format=%t").startswith("idle"))

    def _until(self, condition: Any) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                logs = [p.read_text(errors="replace")[-2000:] for p in self._root.glob("*.log")]
                raise TimeoutError("the Slurm cluster did not get there:\n" + "\n".join(logs))
            time.sleep(0.1)

    def _conf(self) -> str:
        root, host, user = self._root, socket.gethostname().partition(".")[0], getpass.getuser()
        controller, node = self._ports
        return f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
# A requeued job waits until its old credential has expired; two minutes as it comes.
AuthInfo=cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
KillWait={KILL_WAIT_S}
MessageTimeout=3
InactiveLimit=0
GresTypes=gpu
# The machine has fewer; the tests are about states, not about speed.
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=16000 Gres=gpu:a100:3
PartitionName=long Nodes={host} Default=YES MaxTime=7-00:00:00 State=UP
PartitionName=short Nodes={host} MaxTime=01:00:00 State=UP
"""


def _pids() -> list[int]:
    """Of all processes but this one."""
    found = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid in found if pid != os.getpid()]


def _environment_of(pid: int) -> bytes:
    """What a process was started with; nothing for one that is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


class FakeCluster:
    """Commands that speak as the real ones do and run the jobs as processes of this machine."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._bin = root / "bin"
        self._bin.mkdir()
        (root / "tasks").mkdir()
        for name in ("sbatch", "squeue", "scancel", "scontrol", "sinfo"):
            script = self._bin / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} -I {COMMANDS} {name} "$@"\n')
            script.chmod(0o755)
        self.configure()

    @property
    def env(self) -> dict[str, str]:
        path = os.pathsep.join((str(self._bin), os.environ.get("PATH", "")))
        return {"PATH": path, "FAKE_SLURM": str(self._root)}

    def configure(self, **settings: Any) -> None:
        """Change how it behaves; see ``slurm_commands.DEFAULTS``. What is not named is reset."""
        values = {"kill_wait": KILL_WAIT_S, **settings}
        temporary = self._root / "settings.new"
        temporary.write_text(json.dumps(values))
        temporary.replace(self._root / "settings.json")

    def preempt(self, task: str) -> None:
        self._command("scontrol", "requeue", task)

    def end(self, task: str, state: str) -> None:
        """Let a task end in a state that no job of its own accord gets into, such as NODE_FAIL."""
        self._command("fake-end", task, state)

    def forget(self) -> None:
        """Let the controller forget the jobs that have ended."""
        self._command("fake-forget")

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        self.configure(down=True)
        try:
            yield
        finally:
            self.configure()

    def kept(self) -> bytes:
        return (self._root / "requests.jsonl").read_bytes()

    def submissions(self) -> list[list[str]]:
        """Command lines of every sbatch that was not a rehearsal."""
        lines = (self._root / "requests.jsonl").read_text().splitlines()
        argvs = [json.loads(line)["argv"] for line in lines]
        return [argv for argv in argvs if argv[0] == "sbatch" and "--test-only" not in argv]

    def stop(self) -> None:
        self._command("fake-stop")

    def _command(self, *argv: str) -> None:
        subprocess.run(
            [sys.executable, "-I", str(COMMANDS), *argv],
            env={**os.environ, **self.env},
            check=True,
            timeout=30,
        )
