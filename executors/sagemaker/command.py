"""The command of a container, as an ``AlgorithmSpecification`` has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from diloco_cloud.executors.sagemaker.limits import check_words

#: Runs a command with the run's secrets in its environment.
_WRAPPER: Final = ("python", "-m", "diloco_cloud.executors.sagemaker.container")
#: Words of "python -m module": what is a container's entrypoint, and not its arguments.
_HEAD: Final = 3


def container_command(
    words: Sequence[str], *, has_secrets: bool, setup: str | None = None
) -> dict[str, list[str]]:
    """What runs in a container.

    Args:
        words: "python", "-m", a module, and its arguments.
        has_secrets: whether there are secrets to be fetched first.
        setup: a line of shell to run before, in a container that has bash.

    Raises:
        ConfigError: they are more than SageMaker takes.
    """
    command = [*_WRAPPER, *words] if has_secrets else list(words)
    head, rest = command[:_HEAD], command[_HEAD:]
    if setup is not None:
        head, rest = ["bash", "-c", f'{setup} && exec "$0" "$@"'], command
    check_words(head)
    check_words(rest)
    return {"ContainerEntrypoint": head, **({"ContainerArguments": rest} if rest else {})}
