"""The names, the order and the defaults that the composer is called by."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from diloco_cloud import composer
from diloco_cloud.composer import hints

REQUIRED = inspect.Parameter.empty
#: In the documented order; what follows the "*" goes by name only. Further options come after
#: these, and none is required.
SIGNATURES: dict[str, dict[str, Any]] = {
    "compose_loss": {
        "model": REQUIRED,
        "inputs": REQUIRED,
        "*": None,
        "alpha_sdpo": 0.1,
        "beta_replay": 0.05,
        "sdpo_jsd_beta": 0.5,
        "sdpo_temperature": 1.0,
        "sdpo_token_clip": None,
        "replay_dpo_beta": 0.1,
        "lm_ce_label_smoothing": 0.0,
        "dpo_variant": "dpo",
        "sdpo_wrapper": "none",
        "taid_t": None,
        "simpo_beta": 2.0,
        "simpo_gamma": 1.0,
        "entropy_opd_h_max": None,
    },
    "build_batch": {
        "tokenizer": REQUIRED,
        "*": None,
        "device": "cpu",
        "seed": 42,
        "variant": "factorial",
        "align_sdpo_shapes": False,
    },
    "generalized_jsd_loss": {
        "student_logits": REQUIRED,
        "teacher_logits": REQUIRED,
        "labels": None,
        "beta": 0.5,
        "temperature": 1.0,
        "reduction": "batchmean",
        "logits_are_probs": False,
        "top_k": None,
        "token_clip": None,
    },
    "simpo_loss": {
        "chosen_avg_logprobs": REQUIRED,
        "rejected_avg_logprobs": REQUIRED,
        "*": None,
        "beta": 2.0,
        "gamma": 1.0,
    },
    "avg_sequence_logprob": {"model_logprobs": REQUIRED, "response_mask": REQUIRED},
    "taid_loss": {
        "student_logits": REQUIRED,
        "teacher_logits": REQUIRED,
        "mask": None,
        "*": None,
        "t": REQUIRED,
    },
    "TAIDScheduler": {
        "num_train_steps": REQUIRED,
        "*": None,
        "t_start": 0.4,
        "t_end": 1.0,
        "alpha": 5e-4,
        "beta": 0.99,
        "disable_adaptive": False,
        "device": "cpu",
    },
    "entropy_aware_opd_loss": {
        "student_logits": REQUIRED,
        "teacher_logits": REQUIRED,
        "*": None,
        "labels": None,
        "h_max": None,
        "temperature": 1.0,
        "reduction": "batchmean",
    },
    "teacher_entropy": {"teacher_logits": REQUIRED},
    "ComposerReplicationTrainer": {
        "alpha_sdpo": 0.1,
        "beta_replay": 0.05,
        "sdpo_jsd_beta": 0.5,
        "sdpo_temperature": 1.0,
        "sdpo_token_clip": None,
        "replay_dpo_beta": 0.1,
        "dpo_variant": "dpo",
        "sdpo_wrapper": "none",
        "taid_t": None,
        "taid_scheduler": None,
        "simpo_beta": 2.0,
        "simpo_gamma": 1.0,
        "entropy_opd_h_max": None,
    },
    "ComposerDataCollator": {"tokenizer": REQUIRED},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_documented_one(name: str) -> None:
    documented = dict(SIGNATURES[name])
    found = inspect.signature(getattr(composer, name)).parameters
    named = [
        parameter
        for parameter in found.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    positional = list(documented).index("*") if "*" in documented else None
    if positional is not None:
        del documented["*"]
        kinds = [parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in named]
        assert kinds == [False] * positional + [True] * (len(kinds) - positional)
    defaults = {parameter.name: parameter.default for parameter in named}
    if name == "ComposerReplicationTrainer":  # all by name, so that their order is nobody's
        assert documented.items() <= defaults.items()
    else:
        assert list(defaults.items())[: len(documented)] == list(documented.items())
    further = defaults.keys() - documented.keys()
    assert all(defaults[each] is not REQUIRED for each in further)


def test_components_and_hints_have_the_documented_names() -> None:
    fields = [field.name for field in dataclasses.fields(composer.LossComponents)]
    assert fields[:4] == ["lm_ce", "sdpo_jsd", "trace_replay_dpo", "total"]
    turn = {"role", "content", "tool_call", "tool_error", "error_meta"}
    assert composer.TraceTurn.__annotations__.keys() == turn
    example = {"trace_id", "turns", "final_reward", "dpo_pairs"}
    assert composer.TraceExample.__annotations__.keys() == example
    context = "error_kind error_message available_tools tool_name tool_schema intent"
    assert hints.HintContext.__annotations__.keys() == set(context.split())
    assert hints.HintContext.__total__ is False
    assert list(inspect.signature(hints.dispatch).parameters) == ["error_kind", "ctx"]
    assert list(inspect.signature(hints.register).parameters) == ["error_kind", "fn"]
