"""What is written for a replica's command line, read by what the replica starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco_cloud.errors import ConfigError
from diloco_cloud.executor import Entrypoint, LaunchOptions, Script
from diloco_cloud.launch_request import LaunchRequest, check_launch
from diloco_cloud.replica_command import LONGEST_WORD, replica_command
from diloco_cloud.replica_entrypoint import _parser
from diloco_cloud.testing.contract_launching import ARGUMENTS
from diloco_cloud.testing.programs import MARK

PROGRAMS = "diloco_cloud.testing.programs"


def _request(entrypoint: Entrypoint, arguments: dict[str, Any]) -> LaunchRequest:
    return check_launch(2, entrypoint, arguments, LaunchOptions(), timeout=60)


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def test_function_gets_its_arguments_back() -> None:
    words = replica_command(_request(f"{PROGRAMS}:tell", ARGUMENTS), python=sys.executable)
    assert all(0 < len(word) <= LONGEST_WORD and word == word.strip() for word in words)
    told = _run(words).stdout.partition(MARK)[2]
    assert json.loads(told) == ARGUMENTS


@pytest.mark.parametrize("arguments", [{}, {"a": ""}])
def test_no_word_is_empty(arguments: dict[str, Any]) -> None:
    words = replica_command(_request(PROGRAMS, arguments), python=sys.executable)
    assert all(words)
    assert json.loads(_run(words).stdout.partition(MARK)[2]) == {"main": arguments}


def test_run_is_read_by_the_replica_entrypoints_own_parser() -> None:
    arguments = {"rendezvous_uri": "s3://bucket/runs/run-1", "spec_hash": "1f" * 16}
    words = replica_command(_request("diloco_cloud.replica_entrypoint", arguments))
    assert words[:3] == ["python", "-m", "diloco_cloud.replica_entrypoint"]
    read = _parser().parse_args(words[3:])
    assert (read.rendezvous_uri, read.spec_hash) == tuple(arguments.values())
    assert read.world_size == 2


def test_script_is_run_with_its_own_words(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    words = replica_command(_request(Script(str(script), ("+a.b=c", "d e")), {}), python="python3")
    assert words == ["python3", str(script), "+a.b=c", "d e"]


def test_exception_is_an_exit_code_and_a_traceback() -> None:
    words = replica_command(
        _request(f"{PROGRAMS}:fail", {"message": "boom"}), python=sys.executable
    )
    ended = _run(words)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: boom\n")


def test_word_that_no_provider_takes_is_refused() -> None:
    arguments = {"rendezvous_uri": "s3://" + "x" * LONGEST_WORD, "spec_hash": "1"}
    with pytest.raises(ConfigError, match="a word of 255 characters"):
        replica_command(_request("diloco_cloud.replica_entrypoint", arguments))
