"""Tokenizers with the chat templates of public models, and conversations for them.

The templates are those that the models' repositories on the Hugging Face Hub publish with their
tokenizers: SmolLM2-135M-Instruct, Qwen2.5-7B-Instruct, Qwen3-8B, Llama-2-7b-chat,
Meta-Llama-3-8B-Instruct, Llama-3.1-8B-Instruct, Phi-3-mini-4k-instruct, gemma-3-4b-it and
DeepSeek-R1-Distill-Qwen-7B.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from diloco_cloud.composer.trace import TraceExample, TraceTurn

TEMPLATES = {path.stem: path for path in Path(__file__).parent.glob("chat_templates/*.jinja")}

#: One token each, as in the models' own vocabularies; the first ends a sequence.
SPECIAL = [
    *("<|endoftext|>", "<pad>", "<bos>", "<s>", "</s>"),
    *("<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("<start_of_turn>", "<end_of_turn>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
]
#: How Qwen and Llama 3 split text into words.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = (
    "The user asks and the assistant answers: it calls a tool and reads the result.\n"
    '{"name": "Read", "arguments": {"path": "src/main.py"}}\n\n\nReminder: system user assistant '
    "tool file not found, no such file or directory. Let me look at this again, then fix it."
)


def chat_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with merges, and the template of that name."""
    return with_template(TEMPLATES[template].read_text())


@cache
def with_template(template: str | None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with merges, and a template given as text."""
    return _made(_byte_level(), template)


@cache
def _byte_level() -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=500, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
        ),
    )
    return core


def spacing_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """As Llama 2 has it: a space before every text, and none where the text goes on."""
    core = Tokenizer(models.BPE(byte_fallback=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    letters = [*map(chr, range(32, 127)), "\n", "▁"]
    core.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=500, initial_alphabet=letters, special_tokens=SPECIAL, show_progress=False
        ),
    )
    return _made(core, TEMPLATES[template].read_text())


def _made(core: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token=SPECIAL[0],
        pad_token="<pad>",
        additional_special_tokens=SPECIAL,
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


def a_trace(**changes: Any) -> TraceExample:
    """A session with two errors: a tool that is not there, and arguments that are not JSON."""
    read = {"name": "Read", "arguments": {"path": "a.py"}}
    turns: list[TraceTurn] = [
        {"role": "user", "content": "Fix a.py."},
        {
            "role": "assistant",
            "content": "<think>\nI look.\n</think>\n\nReading.",
            "tool_call": {"name": "Raed", "arguments": {"path": "a.py"}},
        },
        {
            "role": "tool",
            "content": "no tool Raed",
            "tool_error": "tool_not_found",
            "error_meta": {"available_tools": ["Read", "Edit"]},
        },
        {"role": "assistant", "content": "", "tool_call": read},
        {"role": "tool", "content": "x = 1"},
        {"role": "assistant", "content": "", "tool_call": {"name": "Edit", "arguments": '{"to'}},
        {"role": "tool", "content": "Unterminated string", "tool_error": "json_decode"},
        {"role": "assistant", "content": "It will not work."},
        {"role": "user", "content": "Try again."},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nDone."},
    ]
    return cast(TraceExample, {"trace_id": "t", "turns": turns, "final_reward": 0.5, **changes})


def marked(tokenizer: PreTrainedTokenizerFast, ids: Tensor, mask: Tensor) -> str:
    """The text of the tokens of a row that a mask marks."""
    return str(tokenizer.decode(ids[mask.bool()]))
