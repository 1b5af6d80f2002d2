"""What a launch would ask of Modal, and what is refused before anything is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco_cloud.errors import ConfigError, MissingDependencyError, UsageError
from diloco_cloud.executor import LaunchOptions, Script
from diloco_cloud.executors.modal import ModalExecutor
from diloco_cloud.executors.modal.image import requirements

SLEEP = "diloco_cloud.testing.programs:sleep"
RUN = "diloco_cloud.replica_entrypoint"


def _preview(settings: dict[str, Any], **launch: Any) -> list[dict[str, Any]]:
    arguments = {"n_replicas": 1, "entrypoint": SLEEP, "entrypoint_args": {}, **launch}
    return ModalExecutor(**settings).preview_launch(**arguments)


def test_deployment_has_one_function_with_all_that_was_asked_for() -> None:
    settings = {
        "gpu": "A100",
        "cpu": 2.5,
        "memory": 4096,
        "region": "us-east,eu-west",
        "cloud": "aws",
        "modal_secrets": ["wandb"],
        "extras": "diloco",
    }
    options = LaunchOptions(name="run-1")
    deployment, *calls = _preview(
        settings, n_replicas=3, gpu="h100:8, A100-80GB", timeout=600, options=options
    )
    assert deployment["app"] == "diloco-run-1"
    assert deployment["tags"] == {"diloco-run": "run-1"}
    assert deployment["function"] == {
        "name": "replica",
        "gpu": ["H100:8", "A100-80GB"],
        "cpu": 2.5,
        "memory": 4096,
        "region": ["us-east", "eu-west"],
        "cloud": "aws",
        "timeout": 660,
        "startup_timeout": 1800,
        "single_use_containers": True,
        "retries": 0,
    }
    assert deployment["secrets"] == {"by_name": ["wandb"], "variables": []}
    assert [call["arguments"]["rank"] for call in calls] == [0, 1, 2]


@pytest.mark.parametrize(
    ("timeout", "retries", "slice_s", "modal_s"),
    [
        (60, 0, 60, 120),
        (86_400, 0, 86_340, 86_400),
        (86_401, 1, 86_340, 86_400),
        (11 * 86_400, 10, 86_340, 86_400),
    ],
)
def test_long_timeout_becomes_time_slices(
    timeout: int, retries: int, slice_s: int, modal_s: int
) -> None:
    deployment, call = _preview({}, timeout=timeout)
    assert deployment["function"]["retries"] == retries
    assert deployment["function"]["timeout"] == modal_s
    job = call["arguments"]["job"]
    assert (job["limit_s"], job["resumes"]) == (slice_s, retries > 0)


def test_own_gpu_of_the_executor_is_the_default() -> None:
    deployment, _ = _preview({"gpu": ["L4", "T4"]})
    assert deployment["function"]["gpu"] == ["L4", "T4"]
    deployment, _ = _preview({})
    assert "gpu" not in deployment["function"]


def test_image_is_made_of_what_is_installed_here() -> None:
    deployment, _ = _preview({"extras": ["diloco", "s3"]})
    image = deployment["image"]
    assert image["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert "diloco_cloud" in image["modules"]
    assert any(text.startswith("torch==") and "+" not in text for text in image["packages"])
    assert any(text.startswith("obstore==") for text in image["packages"])
    assert not any(text.startswith("modal") for text in image["packages"])


def test_requirements_are_what_pip_takes(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text("\n".join(requirements(["diloco", "s3", "train"])))
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet"]
    ran = subprocess.run(
        [*command, "--no-index", "--disable-pip-version-check", "-r", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_image_of_a_registry_is_taken_as_it_is() -> None:
    deployment, _ = _preview({"image": "ghcr.io/me/replica:1", "modules": "json,email"})
    assert deployment["image"] == {"registry": "ghcr.io/me/replica:1", "modules": ["json", "email"]}


def test_script_is_sent_along(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("")
    deployment, call = _preview({}, entrypoint=Script(str(path), ("+a=1",)))
    assert deployment["image"]["files"] == [str(path)]
    assert call["arguments"]["job"]["script"] == "train.py"
    assert call["arguments"]["job"]["args"] == ["+a=1"]


def test_own_function_is_only_called() -> None:
    requests = _preview({"function": "my-app/replica"}, n_replicas=2)
    assert [request["call"] for request in requests] == ["Function.spawn"] * 2


def test_preview_needs_no_sdk() -> None:
    program = (
        "import sys, json\n"
        "from diloco_cloud.executors.modal import ModalExecutor\n"
        f"ModalExecutor(gpu='H100').preview_launch(1, {SLEEP!r}, {{}})\n"
        "print(json.dumps([name for name in ('modal', 'torch') if name in sys.modules]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(ran.stdout) == []


def test_absent_sdk_is_met_when_the_executor_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(MissingDependencyError) as caught:
        ModalExecutor()
    assert "diloco-cloud[modal]" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("settings", "launch", "says", "fix"),
    [
        ({}, {"gpu": "H10"}, "no GPU 'H10'", "'H100'"),
        ({}, {"gpu": "A100:16"}, "16 GPUs", "1 to 8"),
        ({"gpu": "A 100"}, {}, "no GPU of Modal's", "H100:8"),
        ({"gpu": ["H100", 8]}, {}, "no GPU of Modal's", "H100:8"),
        ({"cloud": "ibm"}, {}, "cloud is 'ibm'", "aws, gcp"),
        ({"region": ""}, {}, "region is ''", "us-east"),
        ({"cpu": 0}, {}, "cpu is 0", "positive"),
        ({"memory": "much"}, {}, "memory is 'much'", "positive"),
        ({"extras": "s4"}, {}, "no extra 's4'", "s3"),
        ({"modules": ["no_such_module"]}, {}, "no module 'no_such_module'", "importable"),
        ({"modules": [3]}, {}, "modules is [3]", "list"),
        ({}, {"timeout": 12 * 86_400}, "12 days", "at most 11 days"),
        ({}, {"entrypoint": print}, "callable", "module"),
        (
            {},
            {"entrypoint": RUN, "entrypoint_args": {"rendezvous_uri": "/tmp/runs/r1"}},
            "cannot reach /tmp/runs/r1",
            "s3://",
        ),
        (
            {},
            {"entrypoint": RUN, "entrypoint_args": {"rendezvous_uri": "file:///tmp/runs/r1"}},
            "cannot reach",
            "bucket",
        ),
        ({"function": "replica"}, {}, "function is 'replica'", "app-name/function-name"),
        ({"function": "a/b", "gpu": "H100"}, {}, "gpu has no effect", "decorated"),
        ({"function": "a/b"}, {"gpu": "H100"}, "gpu='H100' has no effect", "decorated"),
    ],
)
def test_bad_request_is_refused_with_a_fix(
    settings: dict[str, Any], launch: dict[str, Any], says: str, fix: str
) -> None:
    with pytest.raises(UsageError) as caught:
        _preview(settings, **launch)
    assert says in caught.value.message
    assert fix in str(caught.value.fix)


def test_own_function_takes_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "canary")
    options = LaunchOptions(secrets=["MY_SECRET"])
    with pytest.raises(ConfigError, match="cannot be given MY_SECRET") as caught:
        _preview({"function": "a/b"}, options=options)
    assert "canary" not in str(caught.value)
