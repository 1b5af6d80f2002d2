"""``diloco-cloud export``."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Final

import click

from diloco_cloud.cli import launch, output
from diloco_cloud.errors import UsageError
from diloco_cloud.run import config
from diloco_cloud.run.elsewhere import STOP_COMMANDS
from diloco_cloud.secrets import parse_secret
from diloco_cloud.store.opening import check_uri

#: Options of ``launch`` that say how replicas are launched and followed from here.
_NOT_OURS: Final = frozenset(
    {"backend", "backend_args", "detach", "as_json", "yes", "quiet", "dry_run"}
)
#: What each orchestrator takes besides.
_TAKES: Final = {
    "kubernetes": {"namespace", "service_account", "secret_name", "node_selector"},
    "skypilot": {"infra", "spot"},
}
_EPILOG = """\b
Examples:
  diloco-cloud export --to kubernetes run.toml --image IMAGE > run.yaml && kubectl apply -f run.yaml
  diloco-cloud export --to skypilot run.toml --image IMAGE --gpu A100 > run.yaml

\b
The run is written to its store, where replicas find what they are to train; --dry-run leaves that
out. status, logs and wait follow the run as any other. Stop it where it was started.
"""


@click.command("export", epilog=_EPILOG)
@click.option(
    "--to", "target", type=click.Choice(sorted(_TAKES)), required=True, help="Whose words."
)
@click.option("--image", metavar="IMAGE", required=True, help="Has diloco-cloud installed.")
@click.option("--cpus", metavar="N", type=float, help="Of each replica.")
@click.option("--memory", metavar="SIZE", help="Of each replica.")
@click.option("--namespace", metavar="NAME", help="Kubernetes: of the Job.")
@click.option("--service-account", metavar="NAME", help="Kubernetes: of the pods.")
@click.option("--secret-name", metavar="NAME", help="Kubernetes: of the Secret.  [default: run id]")
@click.option("--node-selector", metavar="K=V", multiple=True, help="Kubernetes: a label of nodes.")
@click.option("--infra", metavar="INFRA", help="SkyPilot: where, such as aws/us-east-1.")
@click.option("--spot", is_flag=True, help="SkyPilot: on spot machines.")
@click.option("--dry-run", is_flag=True, help="Print it, and write nothing to the store.")
def command(
    target: str,
    image: str,
    cpus: float | None,
    memory: str | None,
    dry_run: bool,
    **flags: Any,
) -> None:
    """Print what starts a run's replicas on Kubernetes or by SkyPilot."""
    from diloco_cloud.exports import to_yaml
    from diloco_cloud.run.export import create_exported, export_request

    own = _own_options(target, flags)
    settings = _settings(target, flags)
    spec = settings.spec
    common = {
        "name": spec.run_id,
        "image": image,
        "gpu": spec.gpu,
        "timeout": spec.timeout,
        "restarts": spec.max_restarts,
        "secrets": spec.on(target).secret_names,
        "cpus": cpus,
        "memory": memory,
    }
    check_uri(settings.store_uri)
    request = export_request(spec, settings.store_uri)
    document = _exporter(target)(request, **common, **own)
    if not dry_run:
        create_exported(spec, settings.store_uri)
    click.echo(to_yaml(document), nl=False)
    if not dry_run:
        _next_steps(target, settings, own.get("secret_name") or spec.run_id)


def _settings(target: str, flags: dict[str, Any]) -> config.Settings:
    """The run's settings; where a file names a backend, it is not the one that is meant."""
    file = flags.pop("config_file")
    layers = [config.read_file(file) if file else {}, config.read_environment(os.environ), flags]
    counts = [layer["replicas"] for layer in layers if layer.get("replicas") is not None]
    if counts and not isinstance(counts[-1], int):
        raise UsageError(
            f"{target} starts all replicas of a run, and these are on several backends",
            fix="Say how many there are: --replicas 4, for example.",
        )
    given = launch.settings_of({**flags, "backend_args": (), "backend": "local"})
    settings = config.resolve(given, environ=os.environ, file=file)
    spec = dataclasses.replace(settings.spec, backend=target, backend_args={}, fleet=())
    return dataclasses.replace(settings, spec=spec)


def _own_options(target: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Options of the orchestrator, taken out of ``flags``.

    Raises:
        UsageError: one of another orchestrator's.
    """
    own = {}
    for name in sorted(set().union(*_TAKES.values())):
        value = flags.pop(name)
        if not value:
            continue
        if name not in _TAKES[target]:
            raise UsageError(f"{target} takes no --{name.replace('_', '-')}", fix="Leave it out.")
        own[name] = value
    if "node_selector" in own:
        own["node_selector"] = config.parse_assignments(own["node_selector"], "--node-selector")
    return own


def _exporter(target: str) -> Any:
    from diloco_cloud import exports

    return {"kubernetes": exports.kubernetes_job, "skypilot": exports.skypilot_task}[target]


def _next_steps(target: str, settings: config.Settings, secret_name: str) -> None:
    spec = settings.spec
    secrets = [parse_secret(entry) for entry in spec.on(target).secrets]
    if target == "kubernetes":
        if secrets:
            values = "".join(f' --from-literal={name}="${source}"' for name, source in secrets)
            output.note(f"First: kubectl create secret generic {secret_name}{values}")
    else:
        from diloco_cloud.exports.skypilot import launch_commands

        file = f"{spec.run_id}.yaml"
        words = [name if name == source else f'{name}="${source}"' for name, source in secrets]
        output.note(launch_commands(spec.run_id, range(spec.replicas), words, file))
    output.note(f"Stop it by: {STOP_COMMANDS[target].format(run_id=spec.run_id)}")
    output.note(f"Look at it: diloco-cloud status {spec.run_id} --store {settings.store_uri}")


# Every setting of a run is an option here, too.
command.params += [p for p in launch.command.params if p.name not in _NOT_OURS]
