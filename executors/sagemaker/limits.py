"""What SageMaker accepts, checked before it is asked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from diloco_cloud.errors import ConfigError

#: Characters of a job's name.
LONGEST_NAME: Final = 63
#: Characters of one word of a container's command, and words.
_LONGEST_WORD: Final = 256
_MOST_WORDS: Final = 100
_MOST_VARIABLES: Final = 100
_LONGEST_VALUE: Final = 512
#: Seconds that a job may run, and that it may wait for capacity and run.
LONGEST_RUN: Final = 28 * 86_400
#: Seconds that an instance may be kept after its job.
_LONGEST_KEEP: Final = 21_600
_NAME: Final = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
_VARIABLE: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_ROLE: Final = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/?[\w+=,.@/-]+", re.ASCII)
_ECR: Final = re.compile(r"\d{12}\.dkr\.ecr(?:-fips)?\.([a-z0-9-]+)\.amazonaws\.[a-z.]+/\S+")


def check_name(name: str, *, suffix: int) -> None:
    """Check that jobs can be named after a run.

    Args:
        name: of the run.
        suffix: characters that are added to it.
    """
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} cannot begin the names of training jobs",
            fix="Use letters, digits and dashes, and neither begin nor end with a dash.",
        )
    if len(name) + suffix > LONGEST_NAME:
        raise ConfigError(
            f"{name!r} is too long to begin the names of training jobs",
            fix=f"Use at most {LONGEST_NAME - suffix} characters.",
        )


def check_environment(environment: Mapping[str, str]) -> None:
    """Check the variables of a job."""
    if len(environment) > _MOST_VARIABLES:
        raise ConfigError(
            f"a replica's environment has {len(environment)} variables",
            fix=f"SageMaker takes {_MOST_VARIABLES}; put the rest into the image or a file.",
        )
    for name, value in environment.items():
        if _VARIABLE.fullmatch(name) is None:
            raise ConfigError(
                f"env has the variable {name!r}", fix="Use letters, digits and underscores."
            )
        if max(len(name), len(value)) > _LONGEST_VALUE:
            raise ConfigError(
                f"the variable {name} has {len(value)} characters",
                fix=f"SageMaker takes {_LONGEST_VALUE}; put it into the image or a file.",
            )


def check_words(words: Sequence[str]) -> None:
    """Check the words of a container's command."""
    if len(words) > _MOST_WORDS or any(len(word) > _LONGEST_WORD for word in words):
        raise ConfigError(
            "the entrypoint's arguments are too long for a training job",
            fix=f"SageMaker takes {_MOST_WORDS} words of {_LONGEST_WORD} characters; "
            "put the arguments into a file, and pass its address.",
        )
    # Its pattern is `.*`, and a dot stands for no line break.
    broken = [word for word in words if len(f"{word}.".splitlines()) > 1]
    if broken:
        raise ConfigError(
            f"the argument {broken[0]!r} has a line break", fix="SageMaker takes single lines only."
        )


def check_timeout(timeout: float) -> None:
    """Check the time limit of a job, in seconds."""
    if timeout > LONGEST_RUN:
        raise ConfigError(
            f"timeout is {timeout:g} s", fix="A training job may run for 28 days (2419200 s)."
        )


def check_role(role: str | None) -> str:
    """The execution role's ARN."""
    if role is None:
        raise ConfigError(
            "SageMaker needs an execution role",
            fix="Add --backend-arg role=arn:aws:iam::ACCOUNT:role/NAME: the role that replicas "
            "have, with access to the store.",
        )
    if _ROLE.fullmatch(role) is None:
        raise ConfigError(
            f"role is {role!r}, which is no ARN of a role",
            fix="`aws iam get-role --role-name NAME --query Role.Arn` tells it.",
        )
    return role


def check_image(image: str, region: str) -> None:
    """Check that SageMaker could pull an image."""
    found = _ECR.fullmatch(image)
    if found is None or len(image) > 255:
        raise ConfigError(
            f"image is {image!r}, which is not in Amazon ECR",
            fix="SageMaker pulls from ECR only: push it to "
            f"ACCOUNT.dkr.ecr.{region}.amazonaws.com/NAME:TAG.",
        )
    if found[1] != region:
        raise ConfigError(
            f"the image is in {found[1]}, and the jobs would run in {region}",
            fix=f"Push it to an ECR repository in {region}, or add "
            f"--backend-arg region={found[1]}.",
        )


def check_keep_alive(seconds: int) -> None:
    """Check how long instances are kept."""
    if not 0 <= seconds <= _LONGEST_KEEP:
        raise ConfigError(
            f"keep_alive is {seconds} s", fix=f"It must be between 0 and {_LONGEST_KEEP} s."
        )
