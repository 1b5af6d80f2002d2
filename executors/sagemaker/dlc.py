"""A container for whoever has no image: AWS's deep-learning container, prepared as it starts."""

from __future__ import annotations

import importlib.util

from diloco_cloud import __version__
from diloco_cloud.errors import ConfigError, MissingDependencyError
from diloco_cloud.executors.sagemaker.faults import message_of
from diloco_cloud.executors.sagemaker.source import SOURCE_PATH


def default_package(extras: str = "diloco,s3") -> str:
    """What is installed in the container: the version that launches."""
    return f"diloco-cloud[{extras}]=={__version__}"


def deep_learning_image(pytorch: str, region: str, instance_type: str) -> str:
    """The address of AWS's PyTorch training container, as the SageMaker SDK knows it.

    Args:
        pytorch: version: "2.9".
        region: of AWS.
        instance_type: decides between the images for CPUs and GPUs.

    Raises:
        MissingDependencyError: the SDK, which has the addresses, is not installed.
        ConfigError: there is no such container.
    """
    if importlib.util.find_spec("sagemaker") is None:
        raise MissingDependencyError(
            "no image was named, and finding AWS's own needs the SageMaker SDK",
            fix="Add --backend-arg image=ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG, or "
            "pip install 'diloco-cloud[sagemaker-sdk]'",
        )
    from sagemaker.core import image_uris

    try:
        uri = image_uris.retrieve(
            framework="pytorch",
            region=region,
            version=pytorch,
            instance_type=instance_type,
            image_scope="training",
        )
    except ValueError as error:
        raise ConfigError(
            f"AWS has no PyTorch {pytorch} training container for {instance_type} in {region}: "
            f"{message_of(error)}",
            fix="Choose another with --backend-arg pytorch=VERSION, or name an image.",
        ) from None
    return str(uri)


def setup_line(package: str) -> str:
    """A line of shell that makes the container ready for a replica.

    Args:
        package: requirement of this package, as pip takes it.
    """
    # pip leaves the container's own torch alone where its version suits.
    return (
        f"R={SOURCE_PATH}/requirements.txt; [ -f $R ] || R=/dev/null; "
        f"python -m pip install -q '{package}' -r $R"
    )
