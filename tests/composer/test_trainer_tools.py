"""Tool calls that fail, in TRL's own tool loop: the hint, and the tokens it is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chats
import pytest
import tiny
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from diloco_cloud.composer.hints import dispatch

pytestmark = tiny.pytestmark

QUESTION = "What is in a.py?"


def read(path: str) -> str:
    """Read a file.

    Args:
        path: where it is.
    """
    raise FileNotFoundError(f"there is no {path}")


async def search(word: str) -> str:
    """Search all files.

    Args:
        word: to look for.
    """
    raise TimeoutError("nothing answers")


def size(path: str) -> int:
    """The size of a file.

    Args:
        path: where it is.
    """
    return 7


def call(name: str, **arguments: Any) -> str:
    function = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{function}\n</tool_call><|im_end|>"


class Scripted(Qwen2ForCausalLM):
    """A model whose rollouts are given: turn by turn, the same for every prompt."""

    turns: list[list[int]]

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        turn = torch.tensor(self.turns.pop(0))
        return torch.cat([input_ids, turn.expand(len(input_ids), -1)], dim=1)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = chats.chat_tokenizer("qwen3")
    made.eos_token = "<|im_end|>"
    return made


def rollouts(
    where: Path,
    tokenizer: PreTrainedTokenizerFast,
    turns: list[str],
    args: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A trainer after a step, and the batch that it trained on."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = Scripted(config)
    model.turns = tokenizer(turns, add_special_tokens=False)["input_ids"]
    settings: dict[str, Any] = {
        "model": model,
        "processing_class": tokenizer,
        "train_dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": QUESTION}]}]),
        "dpo_pairs": None,
        "beta_replay": 0,
        "tools": [read, search, size],
        "hint_generator": dispatch,
        **changes,
    }
    sizes = {
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 1024,
        "max_steps": 1,
        **(args or {}),
    }
    trainer = tiny.trainer(where, args=sizes, **settings)
    trainer.train()
    return trainer, trainer._buffered_inputs[0]


def told(
    tokenizer: PreTrainedTokenizerFast, batch: dict[str, torch.Tensor], row: int = 0
) -> tuple[str, str]:
    """What the teacher reads of a rollout, and the turn that it judges."""
    context = chats.marked(
        tokenizer, batch["ctx_teacher_prompt_ids"][row], batch["ctx_teacher_prompt_mask"][row]
    )
    turn = chats.marked(tokenizer, batch["completion_ids"][row], batch["sdpo_loss_mask"][row])
    return context, turn


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (call("read", path="a.py"), "this call of read fails as it stands. The error is: there is"),
        (call("search", word="x"), "this call of search fails as it stands. The error is: nothing"),
        (call("raed", path="a.py"), "no tool named 'raed'. The available tools are: read, search"),
        (call("size", file="a.py"), 'match its schema. The schema of size: {"type": "object"'),
    ],
    ids=["raises", "raises while awaited", "unknown tool", "wrong argument"],
)
def test_trainer_hints_the_turn_whose_tool_call_failed(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, wrong: str, hint: str
) -> None:
    right = call("size", path="a.py")
    trainer, batch = rollouts(tmp_path, tokenizer, [right, wrong, "It is gone.<|im_end|>"])
    context, turn = told(tokenizer, batch)
    # The first call went well, the second did not, and it is the one that is judged.
    assert turn == wrong
    assert hint in context
    assert context.index(QUESTION) < context.index("<tool_response>\n7") < context.index("Reminder")
    assert context.endswith("<|im_start|>assistant\n")
    # What came after the error is in neither context.
    assert "It is gone." not in context
    written = len(tokenizer(wrong, add_special_tokens=False)["input_ids"])
    assert tiny.history(trainer, "composer/sdpo/active") == [2 * written]
    assert trainer.activity["sdpo"].total["skipped"] == 0


class Files:
    """An environment whose tool fails."""

    def reset(self, **_: Any) -> str:
        return " Look."

    def read(self, path: str) -> str:
        """Read a file.

        Args:
            path: where it is.
        """
        raise FileNotFoundError(f"there is no {path}")


class Web:
    """An environment that has not the other's tool."""

    def reset(self, **_: Any) -> str:
        return " Look."

    def fetch(self, url: str) -> str:
        """Fetch a page.

        Args:
            url: of the page.
        """
        return url


@pytest.mark.parametrize("both", [False, True], ids=["one", "two"])
def test_trainer_hints_failed_calls_in_environments_with_their_own_tools(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    both: bool,
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    question = [{"role": "user", "content": QUESTION}]
    rows = [{"prompt": question, "environment": name} for name in ("files", "web")]
    wrong = call("read", path="a.py")
    _, batch = rollouts(
        tmp_path,
        tokenizer,
        [wrong, "It is gone.<|im_end|>"],
        train_dataset=Dataset.from_list(rows if both else rows[:1]),
        tools=None,
        environment_factory={"files": Files, "web": Web} if both else Files,
        args={"per_device_train_batch_size": 4 if both else 2},
    )
    found = [told(tokenizer, batch, row) for row in range(len(batch["completion_ids"]))]
    assert {turn for _, turn in found} == {wrong}
    hints = {context.partition("Reminder: ")[2].partition("<|im_end|>")[0] for context, _ in found}
    expected = {
        "this call of read fails as it stands. The error is: there is no a.py "
        "Take its cause into account before you act."
    }
    if both:
        expected.add("there is no tool named 'read'. The available tools are: fetch.")
    assert hints == expected
    for context, _ in found:
        assert f"{QUESTION} Look.\n\nReminder" in context
        # The tools of the rollout's own environment are written, and no others.
        assert ('"name": "fetch"' in context) == ("no tool named" in context)
