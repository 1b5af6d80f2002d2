"""The commands and options that people type: frozen here, so that a change is a decision."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from diloco_cloud.cli.launch import command as launch_command
from diloco_cloud.cli.main import COMMANDS, cli
from diloco_cloud.run.config import SETTING_KEYS

SURFACE = {
    "launch": """
        --backend --backend-arg --replicas --reducers --store --name --run-id --trainer
        --trainer-args --set --sync-every --rounds --fragments --fragment-sync-delay
        --fragment-update-alpha
        --outer-optimizer --outer-lr --outer-momentum --nesterov --no-nesterov --merge --weighting
        --seed --init-from --codec --reduction --snapshot-every
        --quorum --grace --heartbeat --max-restarts --hang-timeout
        --checkpoint-inner --no-checkpoint-inner
        --outlier-norm --signed --no-signed --gpu --timeout --round-timeout --join-timeout --secret
        --env --env-file -d --detach --dry-run --json -y --yes -q --quiet
    """,
    "ls": "--store --json -q --quiet",
    "status": "--store -w --watch --json",
    "logs": "--store -f --follow -n --tail --since --replica --timestamps",
    "wait": "--store --timeout --json",
    "supervise": "--store --max-restarts --json",
    "cancel": "--store --replica",
    "resume": "--store --replica --replicas --backend",
    "down": "--store -y --yes",
    "export": "",  # that of launch, with other ends: see below
    "chaos": "--replicas --minutes --faults-per-hour --scale --seed --round --keep --json",
}
SURFACE["export"] = " ".join(
    (
        set(SURFACE["launch"].split())
        - {"--backend", "--backend-arg", "-d", "--detach", "--json", "-y", "--yes", "-q", "--quiet"}
    )
    | {"--to", "--image", "--cpus", "--memory", "--infra", "--spot", "--namespace"}
    | {"--service-account", "--secret-name", "--node-selector"}
)


def _command(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


def _options(command: click.Command) -> set[str]:
    options = [p for p in command.params if isinstance(p, click.Option)]
    return {name for p in options for name in (*p.opts, *p.secondary_opts)}


def test_commands_are_frozen() -> None:
    assert list(COMMANDS) == list(SURFACE)


@pytest.mark.parametrize("name", SURFACE)
def test_options_are_frozen(name: str) -> None:
    assert _options(_command(name)) == set(SURFACE[name].split())


@pytest.mark.parametrize("alias", ["ps", "list"])
def test_aliases_are_the_same_command(alias: str) -> None:
    assert _command(alias) is _command("ls")


@pytest.mark.parametrize("name", SURFACE)
def test_short_help_is_that_of_the_command(name: str) -> None:
    assert _command(name).get_short_help_str(100).startswith(COMMANDS[name][2].removesuffix("."))


def test_every_setting_is_a_flag() -> None:
    parameters = {str(p.name) for p in launch_command.params}
    assert set(SETTING_KEYS) - parameters == set()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["launch", "--help"], []])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from diloco_cloud.cli.main import cli\n"
        f"try: cli({arguments!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'torchft', 'transformers', 'numpy', 'obstore', 'fsspec', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_help_of_the_group_imports_no_command() -> None:
    program = (
        "import sys\n"
        "from diloco_cloud.cli.main import cli\n"
        "try: cli(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'diloco_cloud.run' not in sys.modules\n"
        "assert 'diloco_cloud.cli.launch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
