"""What the tests of the SageMaker backend share: a fake AWS, and executors that meet it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.aws_server import FakeAws, clean_aws_environment, fake_aws

from diloco_cloud.executors.sagemaker import SageMakerExecutor

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/diloco-replica:1"
OUTPUT = "s3://bucket/output"

MakeExecutor = Callable[..., SageMakerExecutor]


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAws]:
    """AWS, with its address and credentials in the environment and no others."""
    for name in clean_aws_environment():
        monkeypatch.delenv(name)
    with fake_aws() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(server.directory / "no-config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(server.directory / "no-credentials"))
        server.role_credentials = {"AccessKeyId": "test-key", "SecretAccessKey": "test-secret"}
        yield server


@pytest.fixture
def make_executor(aws: FakeAws) -> MakeExecutor:
    """Makes executors with settings that work, others besides."""

    def make(**settings: Any) -> SageMakerExecutor:
        defaults = {"role": aws.role, "image": IMAGE, "output_uri": OUTPUT}
        return SageMakerExecutor(**{**defaults, **settings})

    return make


@pytest.fixture
def executor(make_executor: MakeExecutor) -> SageMakerExecutor:
    return make_executor()
