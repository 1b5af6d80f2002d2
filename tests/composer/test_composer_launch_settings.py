"""What a launched replica makes of its settings, and what it returns."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from one_replica import ONE_STEP, replica
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from diloco_cloud.composer.hints import dispatch
from diloco_cloud.errors import ConfigError, RewardError
from diloco_cloud.replica.launched import _log_failure
from diloco_cloud.trainers.composer_channels import check_read, load_functions, makes_rollouts
from diloco_cloud.trainers.pretrained import load_pretrained
from diloco_cloud.trainers.run_length import run_length

pytestmark = tiny.pytestmark


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: to look up.
    """
    return word


def test_channels_name_functions_by_import_path() -> None:
    found = load_functions(
        {
            "hint_generator": "diloco_cloud.composer.hints:dispatch",
            "tools": [f"{__name__}:look_up", look_up],
            "environment_factory": {"one": "builtins:dict"},
            "rollout_func": None,
            "sdpo_token_clip": 2.0,
        }
    )
    assert found == {
        "hint_generator": dispatch,
        "tools": [look_up, look_up],
        "environment_factory": {"one": dict},
        "sdpo_token_clip": 2.0,
    }
    assert makes_rollouts(found)
    assert not makes_rollouts({"hint_generator": dispatch, "tools": []})
    for channels, told in [
        ({"tools": "math:sqrt"}, "tools to 'math:sqrt', not a list"),
        ({"tools": [3]}, "tools to 3, which is no function"),
        ({"tools": ["math:sqrt"]}, "tools has sqrt, which cannot be shown to a model"),
        ({"rollout_func": "math:nothing"}, "rollout_func: math:nothing cannot be imported"),
        ({"hint_generator": "math:pi"}, "hint_generator: math:pi is float"),
    ]:
        with pytest.raises(ConfigError, match=told) as caught:
            load_functions(channels)
        assert caught.value.fix


@pytest.mark.parametrize(
    ("channels", "data", "unread"),
    [
        ({"sdpo_jsd_beta": 1.0}, {}, "sdpo_jsd_beta"),
        ({"sdpo_jsd_beta": 1.0}, {"has_hints": True}, None),
        ({"entropy_opd_mode": "paper"}, {"has_hints": True}, "entropy_opd_mode"),
        ({"dpo_variant": "simpo", "simpo_beta": 1.0}, {"has_pairs": True}, None),
        ({"dpo_variant": "simpo"}, {}, "dpo_variant"),
        ({"simpo_beta": 1.0}, {"has_pairs": True}, "simpo_beta"),
        ({"hint_generator": dispatch}, {"has_hints": True}, "hint_generator"),
        ({"hint_generator": dispatch}, {"has_hints": True, "has_error_kinds": True}, None),
        ({"hint_generator": dispatch, "tools": [math.sqrt]}, {"has_hints": True}, None),
    ],
)
def test_channels_that_nothing_reads_are_refused_or_told(
    channels: dict[str, Any],
    data: dict[str, bool],
    unread: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    none: dict[str, Any] = dict.fromkeys(["has_hints", "has_error_kinds", "has_pairs"], False)
    keywords = {**none, **data, "sdpo_wrapper": "none"}
    if unread is None:
        check_read(channels, **keywords)
        return
    with pytest.raises(ConfigError, match=f"channels sets {unread}, and nothing reads it"):
        check_read(channels, **keywords)
    with caplog.at_level(logging.WARNING, "diloco_cloud"):
        check_read({**channels, "strict": False}, **keywords)
    assert f"channels sets {unread}" in caplog.text


def test_run_length_is_said_once() -> None:
    assert run_length(4, 3, None) == run_length(4, None, 12) == run_length(4, 3, 12) == 12
    for settings, told in [
        ((4, None, None), "how long"),
        ((4, 3, 11), "are not inner_steps 11"),
        ((4, None, 0), "inner_steps is 0"),
    ]:
        with pytest.raises(ConfigError, match=told):
            run_length(*settings)


def breaks(completions: list[Any], **_: Any) -> list[float]:
    raise KeyError("answer")


def test_replica_whose_rewards_all_fail_ends_well_and_tells(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"x{i}"}) for i in range(4)))
    judged = {
        "task": None,
        "task_args": {},
        "prompts": str(rows),
        "rewards": [f"{__name__}:breaks"],
    }
    result = replica(str(tmp_path), 0, 1, **ONE_STEP, **judged, channels={"strict": False})
    assert (result["reward"], result["mean_reward"]) == (None, None)
    assert result["reward_failures"] == {"breaks: raised KeyError: 'answer'": 1}
    assert "reward" not in result["metrics"]


def moved(where: Path, lora: dict[str, Any] | None) -> str:
    """Weights that are far from those the tiny model has by its name."""
    model: Any = load_pretrained("tiny", cache=where).model
    if lora is not None:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    torch.manual_seed(1)
    trained = {
        name: (p + 0.2 * torch.randn_like(p)).detach().contiguous()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    save_file(trained, where / "start.safetensors")
    return str(where / "start.safetensors")


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["q_proj", "v_proj"]}])
def test_reference_policies_are_what_the_run_begins_with(
    tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "x", "chosen": "yes", "rejected": "nope"}))
    result = replica(
        str(tmp_path),
        0,
        1,
        init_from=moved(tmp_path, lora),
        **ONE_STEP,
        lora=lora,
        task_args={},
        dpo_pairs=str(pairs),
        grpo={"beta": 0.1},
    )
    assert result["replay_active"] == 4
    # Before any step, channel 3's reference and that of GRPO's KL are the policy itself.
    assert result["metrics"]["composer/replay/margin"] == pytest.approx(0, abs=1e-4)
    assert result["metrics"]["composer/replay/loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert result["metrics"]["kl"] == pytest.approx(0, abs=1e-4)


def test_reward_error_is_logged_without_a_traceback_unless_asked_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DILOCO_DEBUG", raising=False)
    _log_failure(RewardError("reward function boom raised KeyError (mine.py:1, in boom)"))
    assert caplog.messages == ["failed: reward function boom raised KeyError (mine.py:1, in boom)"]
    assert caplog.records[0].exc_info is None
    monkeypatch.setenv("DILOCO_DEBUG", "1")
    _log_failure(RewardError("reward function boom raised KeyError (mine.py:1, in boom)"))
    assert caplog.records[1].exc_info is not None
