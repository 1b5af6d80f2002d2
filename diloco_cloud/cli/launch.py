"""``diloco-cloud launch``."""

from __future__ import annotations

import os
import signal
from typing import Any

import click

from diloco_cloud.cli import exit_codes, options, output
from diloco_cloud.executor import PreviewsLaunch, ServerlessExecutor
from diloco_cloud.run import Run, config
from diloco_cloud.run import launch as launch_run
from diloco_cloud.run.config import Settings
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.run.start import LaunchRequest

_EPILOG = """\b
Examples:
  diloco-cloud launch --replicas 4 --rounds 20
  diloco-cloud launch run.toml --set learning_rate=3e-4 -d
  diloco-cloud launch --store s3://bucket/runs --trainer my.module:train --dry-run
  diloco-cloud launch run.toml --replicas modal=2,hf-jobs=2 --gpu modal=A100,hf-jobs=a10g-large

\b
Every setting may also be a key of CONFIG.toml or a variable DILOCO_<SETTING>.
A flag overrides a variable, which overrides the file.

\b
Exit codes: 0 succeeded, 100 failed, 101 not finished, 103 cancelled, 130 detached by Ctrl-C,
1 an error of its own, 2 a wrong request.
"""


@click.command("launch", epilog=_EPILOG)
@click.argument("config_file", metavar="[CONFIG.toml]", required=False, type=click.Path())
@click.option("--backend", metavar="NAME", help="Where replicas run.  [default: local]")
@click.option(
    "--backend-arg", "backend_args", metavar="KEY=VALUE", multiple=True, help="A setting of it."
)
@click.option(
    "--replicas",
    metavar="N",
    type=options.Replicas(),
    help="How many, or BACKEND=N,…  [default: 4]",
)
@click.option("--reducers", metavar="R", type=int, help="CPU-only jobs that average for them.")
@click.option("--store", metavar="URI", help="Where the run goes.  [default for local: ./runs]")
@click.option("--name", metavar="NAME", help="Beginning of the run's id.  [default: diloco]")
@click.option("--run-id", metavar="ID", help="Exactly this id, instead of NAME-random.")
@click.option("--trainer", metavar="PKG.MODULE:FUNCTION", help="What each replica trains.")
@click.option("--trainer-args", metavar="JSON", help="Arguments of the trainer, as an object.")
@click.option("--set", "assignments", metavar="KEY=VALUE", multiple=True, help="One of them.")
@click.option("--sync-every", metavar="H", type=int, help="Inner steps between two syncs.")
@click.option("--rounds", metavar="R", type=int, help="Syncs of each fragment.")
@click.option("--fragments", metavar="P", type=int, help="Parts of the model, synced in turn.")
@click.option("--fragment-sync-delay", metavar="TAU", type=int, help="Steps a transfer overlaps.")
@click.option("--fragment-update-alpha", metavar="A", type=float, help="Local weight in a merge.")
@click.option("--outer-optimizer", metavar="HOW", help="auto, averaging, nesterov or sgd.")
@click.option("--outer-lr", metavar="LR", type=float, help="Of the outer optimizer.")
@click.option("--outer-momentum", metavar="M", type=float, help="Of the outer optimizer.")
@click.option("--nesterov/--no-nesterov", default=None, help="Of the outer optimizer.")
@click.option("--merge", metavar="HOW", help="mean or rda.")
@click.option("--weighting", metavar="HOW", help="By tokens, equal or quality.")
@click.option("--seed", metavar="SEED", type=int, help="Of everything random.")
@click.option("--init-from", metavar="URI", help="Weights to begin with: a file, or a run.")
@click.option(
    "--codec", metavar="NAME", help="Of contributions: fp32, bf16, int8, e3m0, e2m1, sparse."
)
@click.option("--reduction", metavar="HOW", help="auto, all-gather or sharded.")
@click.option("--snapshot-every", metavar="N", type=int, help="Rounds between two snapshots.")
@click.option("--quorum", metavar="K", type=int, help="Replicas without which no round is decided.")
@click.option("--grace", metavar="TIME", type=options.Duration(), help="To wait after a quorum.")
@click.option("--heartbeat", metavar="TIME", type=options.Duration(), help="Between signs of life.")
@click.option("--max-restarts", metavar="N", type=int, help="In a row, of a replica that dies.")
@click.option(
    "--hang-timeout",
    metavar="TIME",
    type=options.SwitchableDuration(),
    help="Without a step, until it is restarted; or off.",
)
@click.option(
    "--checkpoint-inner/--no-checkpoint-inner", default=None, help="Store inner optimizers too."
)
@click.option("--outlier-norm", metavar="X", type=options.Switchable(), help="Or off.")
@click.option("--signed/--no-signed", default=None, help="By the secret key DILOCO_RUN_KEY.")
@click.option("--gpu", metavar="GPU", help="Per replica, in the backend's words, or BACKEND=GPU,…")
@click.option("--timeout", metavar="TIME", type=options.Duration(), help="A replica may run.")
@click.option("--round-timeout", metavar="TIME", type=options.Duration(), help="To wait for peers.")
@click.option("--join-timeout", metavar="TIME", type=options.Duration(), help="For all to start.")
@click.option(
    "--secret",
    "secrets",
    metavar="[BACKEND:]NAME[=SOURCE]",
    multiple=True,
    help="Variable sent secretly; its value is that of NAME here, or of SOURCE.",
)
@click.option(
    "--env", "env", metavar="[BACKEND:]K=V", multiple=True, help="Variable of each replica."
)
@click.option("--env-file", metavar="FILE", type=click.Path(), help="The same, one per line.")
@click.option("-d", "--detach", is_flag=True, help="Return when the replicas are launched.")
@click.option("--dry-run", is_flag=True, help="Print what would be launched, and stop.")
@options.json_option
@options.yes_option
@click.option("-q", "--quiet", is_flag=True, help="Print the run's id only.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    config_file: str | None,
    detach: bool,
    dry_run: bool,
    as_json: bool,
    yes: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Start a run and follow it, starting again replicas that die.

    Ctrl-C detaches: the run goes on.
    """
    settings = config.resolve(settings_of(flags), environ=os.environ, file=config_file)
    _note_what_waits(settings.spec)
    if dry_run:
        _print_plan(settings)
        return
    spec = settings.spec
    if set(spec.ranks_by_backend) != {"local"}:  # the others cost money
        question = f"Launch {output.jobs_text(spec)} on {output.places_text(spec)}?"
        options.confirm(question, yes=yes)
    run = launch_run(spec, settings.store_uri)
    if detach:
        _announce(run, as_json=as_json, quiet=quiet, detached=True)
        if as_json:
            output.print_json(output.status_json(run, run.status()))
    else:
        ctx.exit(_attach(run, as_json=as_json, quiet=quiet))


def settings_of(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags as settings: those that come in several forms put together."""
    arguments = flags.pop("trainer_args")
    trainer_args = config.parse_json_object(arguments, "--trainer-args") if arguments else {}
    trainer_args |= config.parse_set(flags.pop("assignments"))
    env_file = flags.pop("env_file")
    env = config.read_env_file(env_file) if env_file else {}
    env |= config.parse_assignments(flags.pop("env"), "--env")
    assignments = config.parse_set(flags.pop("backend_args"), "--backend-arg")
    backend_args = config.parse_backend_args(assignments)
    return {**flags, "trainer_args": trainer_args, "env": env, "backend_args": backend_args}


def _note_what_waits(spec: RunSpec) -> None:
    """Tell of settings of backends that no replica is launched on: it may be a mistake."""
    waiting = [side.backend for side in spec.fleet if side.backend not in spec.ranks_by_backend]
    if waiting:
        output.note(
            f"Note: no replica is on {', '.join(waiting)}: only `resume` can use its settings."
        )


def _print_plan(settings: Settings) -> None:
    """What would be asked of the executors, after every check that needs no network."""
    from diloco_cloud.run.launcher import build_requests, check_launch

    spec = settings.spec
    executors = check_launch(spec, settings.store_uri)
    gpu = spec.on("local").gpu
    if "local" in spec.ranks_by_backend and gpu is not None:
        output.note(f"Warning: gpu {gpu} has no effect: local replicas share this machine's.")
    run_uri = f"{settings.store_uri.rstrip('/')}/{spec.run_id}"
    sides = {
        backend: _side_plan(requests, executors.get(backend))
        for backend, requests in build_requests(spec, run_uri).items()
    }
    output.print_json(
        {
            "store": settings.store_uri,
            "spec": spec.to_json(),
            "hash": spec.digest,
            **({"sides": sides} if len(sides) > 1 else sides[spec.backend]),
        }
    )


def _side_plan(requests: list[LaunchRequest], executor: ServerlessExecutor) -> dict[str, Any]:
    """What one executor is asked for, and what it would send to its provider, if it can tell."""
    replicas, *reducers = requests
    plan: dict[str, Any] = {"request": replicas.to_json()}
    if reducers:
        plan["reducers_request"] = reducers[0].to_json()
    if isinstance(executor, PreviewsLaunch):
        shown = (request.submit(executor.preview_launch) for request in requests)
        plan["provider_requests"] = [one for each in shown for one in each]
    return plan


def _announce(run: Run, *, as_json: bool, quiet: bool, detached: bool) -> None:
    """The id on stdout, what to type next on stderr."""
    if not as_json:
        click.echo(run.run_id)
    if not quiet:
        verb = "is" if run.spec.replicas + run.spec.reducers == 1 else "are"
        output.note(
            f"{output.jobs_text(run.spec)} {verb} launched on {output.places_text(run.spec)}."
        )
        output.next_steps(run, unsupervised=detached)


def _attach(run: Run, *, as_json: bool, quiet: bool) -> int:
    """Follow the run to its end, starting again what dies; returns the exit code."""
    from diloco_cloud.cli.progress import follow

    try:
        _announce(run, as_json=as_json, quiet=quiet, detached=False)
        status = run.supervise() if quiet else follow(run, err=True, supervise=True)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends this at once
        dying = "" if run.spec.max_restarts == 0 else " Nobody restarts what dies of it now."
        output.note(f"\nDetached; {run.run_id} goes on.{dying}")
        output.next_steps(run, unsupervised=True)
        return exit_codes.INTERRUPTED
    if as_json:
        output.print_json(output.status_json(run, status))
    if not quiet:
        output.result_place(run, status)
    return exit_codes.of_state(status.state)
