from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_cloud.errors import (
    ConfigError,
    MissingDependencyError,
    UnknownBackendError,
    UsageError,
)
from diloco_cloud.executor_registry import executor_names, get_executor
from diloco_cloud.executors.local import LocalProcessExecutor

CONFORMING = """
class Executor:
    backend_name = "mycloud"
    supports_inter_replica_network = False
    def __init__(self, *, region="eu"): self.region = region
    def launch_replicas(self, n_replicas, entrypoint, entrypoint_args, **options): ...
    def poll(self, handle): ...
    def stream_logs(self, handle, *, n_lines=200): ...
    def cancel(self, handle): ...
    def collect(self, handles, *, timeout=None): ...
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a distribution that declares the backend "my-cloud"."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str, *, name: str = "plugin_one", extras: tuple[str, ...] = ()) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        provides = "".join(f"Provides-Extra: {extra}\n" for extra in extras)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\n{provides}\n")
        (info / "entry_points.txt").write_text(
            f"[diloco_cloud.executors]\nmy-cloud = {name}:Executor\n"
        )
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()

    return write


def test_local_is_installed() -> None:
    assert "local" in executor_names()
    assert isinstance(get_executor("local", cpu_threads=2), LocalProcessExecutor)


def test_installed_package_adds_a_backend(install: Callable[..., None]) -> None:
    install(CONFORMING)
    assert "my-cloud" in executor_names()
    assert get_executor("my-cloud", region="us").region == "us"  # type: ignore[attr-defined]


def test_unknown_backend_is_told_what_there_is() -> None:
    with pytest.raises(UnknownBackendError) as caught:
        get_executor("locla")
    assert "Did you mean 'local'?" in str(caught.value)
    assert "Installed:" in str(caught.value)
    with pytest.raises(UnknownBackendError) as caught:
        get_executor("zzz")
    assert "Did you mean" not in str(caught.value)


def test_backend_declared_twice_is_refused(install: Callable[..., None]) -> None:
    install(CONFORMING)
    install(CONFORMING, name="plugin_two")
    with pytest.raises(UsageError, match=r"declared more than once: plugin_one:.*plugin_two:"):
        get_executor("my-cloud")


def test_missing_sdk_names_the_extra(install: Callable[..., None]) -> None:
    install("import absent_sdk.jobs", extras=("my", "other"))
    assert "my-cloud" in executor_names()
    with pytest.raises(MissingDependencyError) as caught:
        get_executor("my-cloud")
    assert "needs absent_sdk" in caught.value.message
    assert caught.value.fix == "pip install 'plugin_one[my]'"


def test_missing_sdk_without_extra_names_the_package(install: Callable[..., None]) -> None:
    install("import absent_sdk")
    with pytest.raises(MissingDependencyError) as caught:
        get_executor("my-cloud")
    assert caught.value.fix == "pip install 'absent_sdk'"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("import plugin_one.nothing", "not a package"),
        ("Executor = dict", "not a ServerlessExecutor"),
        ("", "AttributeError"),
    ],
)
def test_broken_plugin_is_an_error_only_when_chosen(
    install: Callable[..., None], source: str, words: str
) -> None:
    install(source)
    assert "my-cloud" in executor_names()
    with pytest.raises(UsageError, match=words):
        get_executor("my-cloud")


def test_wrong_settings_are_refused(install: Callable[..., None]) -> None:
    install(CONFORMING)
    with pytest.raises(ConfigError, match="has no setting 'colour'") as caught:
        get_executor("my-cloud", colour="red")
    assert caught.value.fix == "Its settings: region."
    with pytest.raises(ConfigError, match="has no setting 'regoin'") as caught:
        get_executor("my-cloud", regoin="us")
    assert caught.value.fix == "Did you mean 'region'?"
    with pytest.raises(ConfigError, match="cpu_threads is 0"):
        get_executor("local", cpu_threads=0)
