"""What an import costs and needs, seen from a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Collection

import pytest

import diloco_cloud

#: Everything beyond what the launcher itself needs. The first four are dependencies of the core
#: but cost seconds; the others are optional.
NOT_AT_IMPORT = {
    *("torch", "transformers", "numpy", "tokenizers"),
    *("accelerate", "boto3", "botocore", "datasets", "fsspec", "gcsfs", "huggingface_hub"),
    *("matplotlib", "modal", "obstore", "openai", "peft", "ray", "s3fs", "sagemaker", "torchft"),
    "trl",
}

#: Makes modules look as if they were never installed.
HIDE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else super().find_spec(name, path, target)

sys.meta_path[:] = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
"""


def run_python(code: str, *, hidden: Collection[str] = ()) -> str:
    program = HIDE.format(hidden=sorted(hidden)) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(code: str) -> set[str]:
    """Top-level names of the modules that ``code`` leaves behind."""
    tail = "\nimport json, sys\nprint(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    return set(json.loads(run_python(textwrap.dedent(code) + tail).splitlines()[-1]))


def test_package_import_loads_nothing_heavy() -> None:
    assert loaded_by("import diloco_cloud") & {*NOT_AT_IMPORT, "click", "rich"} == set()


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["--version"]])
def test_cli_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
    import sys
    sys.argv = ["diloco-cloud", *{arguments!r}]
    from diloco_cloud.cli.main import main
    try:
        main()
    except SystemExit as done:
        assert not done.code, done.code
    """
    assert loaded_by(code) & NOT_AT_IMPORT == set()


def test_launcher_side_needs_no_optional_package() -> None:
    output = run_python(
        """
        import diloco_cloud
        from diloco_cloud import ReplicaStatus, RunSpec, ServerlessExecutor, launch, open_store
        from diloco_cloud.cli.main import main
        assert diloco_cloud._DILOCO_AVAILABLE is False
        assert diloco_cloud.make_diloco_outer_loop is None
        print("fine")
        """,
        hidden=NOT_AT_IMPORT,
    )
    assert output.strip() == "fine"


def test_exported_names_are_sorted_and_resolve() -> None:
    assert diloco_cloud.__all__ == sorted(set(diloco_cloud.__all__))
    missing = [name for name in diloco_cloud.__all__ if not hasattr(diloco_cloud, name)]
    assert missing == []
    assert set(diloco_cloud.__all__) <= set(dir(diloco_cloud))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        diloco_cloud.nonsense  # noqa: B018
