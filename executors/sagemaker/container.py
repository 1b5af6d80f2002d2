"""Runs in the container: fetches the run's secrets into the environment, and becomes the command.

    python -m diloco_cloud.executors.sagemaker.container python -m package.module argument …

SageMaker shows a job's environment to whoever may describe the job, so secrets do not travel there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

from diloco_cloud.executors.sagemaker.secrets import SECRETS_ENV


def fetch_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The secrets that the environment refers to, by the variables they are meant for.

    Raises:
        OSError: they cannot be had.
    """
    place = environ.get(SECRETS_ENV)
    if place is None:
        return {}
    region, _, name = place.partition(":")
    try:
        import boto3

        client = boto3.Session(region_name=region).client("secretsmanager")
        values: dict[str, str] = json.loads(client.get_secret_value(SecretId=name)["SecretString"])
    except ImportError as error:
        raise OSError(
            f"the image lacks boto3, which fetches {name}: install diloco-cloud[sagemaker] in it"
        ) from error
    except Exception as error:  # botocore's and json's: all mean that there are no secrets
        raise OSError(
            f"the secret {name} cannot be read ({type(error).__name__}: {error}); the execution "
            "role needs secretsmanager:GetSecretValue on it"
        ) from error
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by the command; returns only if that fails."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        sys.stderr.write(f"usage: python -m {__spec__.name} COMMAND…\n")
        return 2
    try:
        environment = {**os.environ, **fetch_secrets(os.environ)}
        os.execvpe(words[0], words, environment)
    except OSError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
