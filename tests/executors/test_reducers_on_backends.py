"""A volunteer reducer is the same image and command as a replica, with another module, anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco_cloud.executor import PreviewsLaunch
from diloco_cloud.executor_registry import get_executor
from diloco_cloud.run.names import provider_name
from diloco_cloud.run.reducers import reducers_request
from diloco_cloud.run.spec import RunSpec
from diloco_cloud.run.start import build_request

#: As long as run ids may be: providers' names and words have limits.
RUN = "a" * 40
SETTINGS: dict[str, dict[str, Any]] = {
    "hf-jobs": {},
    "modal": {},
    "ray": {"address": "http://127.0.0.1:8265"},
    "sagemaker": {
        "role": "arn:aws:iam::123456789012:role/replicas",
        "region": "us-east-1",
        "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/image:1",
    },
    "slurm": {},
}


@pytest.mark.parametrize("backend", SETTINGS)
def test_every_backend_can_run_reducers(backend: str) -> None:
    executor = get_executor(backend, **SETTINGS[backend])
    assert isinstance(executor, PreviewsLaunch)
    spec = RunSpec(run_id=RUN, backend=backend, replicas=2, reducers=3, rounds=3, gpu="H100")
    uri = f"s3://bucket/runs/{RUN}"
    request = reducers_request(spec, uri)
    text = json.dumps(request.submit(executor.preview_launch))
    assert "diloco_cloud.reducer_entrypoint" in text
    assert f"{provider_name(RUN, uri, 0.0)}-R" in text
    assert "H100" not in text


@pytest.mark.parametrize("backend", SETTINGS)
def test_every_backend_tells_runs_of_one_id_apart(backend: str) -> None:
    """A store knows its own ids only, and an account may serve many stores."""
    executor = get_executor(backend, **SETTINGS[backend])
    assert isinstance(executor, PreviewsLaunch)
    spec = RunSpec(run_id=RUN, backend=backend, replicas=1, rounds=3)
    uris = [f"s3://{bucket}/runs/{RUN}" for bucket in ("a", "b")]
    requests = [build_request(spec, uri) for uri in uris]
    names = [request.options.name for request in requests]
    texts = [json.dumps(request.submit(executor.preview_launch)) for request in requests]
    assert [[name in text for name in names] for text in texts] == [[True, False], [False, True]]
