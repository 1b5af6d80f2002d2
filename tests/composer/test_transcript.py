"""Turns as the templates of real models write them, found again token by token."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from chats import TEMPLATES, a_trace, chat_tokenizer, spacing_tokenizer, with_template

from diloco_cloud.composer.messages import MessageWriter
from diloco_cloud.composer.pieces import CONTEXT, PieceTokenizer
from diloco_cloud.composer.trace import TraceTurn
from diloco_cloud.composer.transcript import Transcriber
from diloco_cloud.errors import ConfigError

CHAT: list[TraceTurn] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "A file."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Let me look\n\nYes."},
]
#: Those that write a turn the same whatever follows, so that there is something to compare with.
STEADY = ["smollm2", "qwen2_5", "llama2", "llama3", "llama3_1", "gemma3"]


def _said(template: str, turns: list[TraceTurn]) -> list[str]:
    pieces = Transcriber(chat_tokenizer(template)).pieces(turns)
    return [piece.text for piece in pieces if piece.turn != CONTEXT]


@pytest.mark.parametrize("template", STEADY)
def test_pieces_are_the_text_the_template_writes(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    pieces = Transcriber(tokenizer).pieces(CHAT)
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert "".join(piece.text for piece in pieces) == whole.rstrip()
    assert [piece.turn for piece in pieces] == [CONTEXT, 2, CONTEXT, 4]


@pytest.mark.parametrize("template", STEADY)
def test_tokens_are_those_the_template_has(template: str) -> None:
    """Token by token what transformers makes of the conversation in one go."""
    tokenizer = chat_tokenizer(template)
    tokens = PieceTokenizer(tokenizer).tokens(Transcriber(tokenizer).pieces(CHAT))
    reference = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert reference[: len(tokens)] == tokens.ids
    assert tokenizer.decode(reference[len(tokens) :]).strip() == ""


@pytest.mark.parametrize(
    ("template", "stop"),
    [
        ("smollm2", "<|im_end|>"),
        ("qwen2_5", "<|im_end|>"),
        ("qwen3", "<|im_end|>"),
        ("llama3", "<|eot_id|>"),
        ("llama3_1", "<|eot_id|>"),
        ("phi3", "<|end|>"),
        ("gemma3", "<end_of_turn>"),
        ("deepseek_r1_distill", "<｜end▁of▁sentence｜>"),
    ],
)
def test_turns_end_with_what_ends_the_models_turn(template: str, stop: str) -> None:
    """Neither short of the stop token, nor with the line break or end of text behind it."""
    assert _said(template, CHAT) == [f"A file.{stop}", f"Let me look\n\nYes.{stop}"]


@pytest.mark.parametrize("template", ["qwen3", "deepseek_r1_distill"])
def test_thinking_stays_in_every_turn(template: str) -> None:
    """Templates of reasoning models drop it once a question follows."""
    stop = "<|im_end|>" if template == "qwen3" else "<｜end▁of▁sentence｜>"
    turns: list[TraceTurn] = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "<think>\nfirst\n</think>\n\none"},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "<think>\nsecond\n</think>\n\ntwo"},
    ]
    rendered = chat_tokenizer(template).apply_chat_template(turns, tokenize=False)
    assert "first" not in rendered
    # DeepSeek's prompt opens the thinking itself.
    opening = "<think>\n" if template == "qwen3" else ""
    assert _said(template, turns) == [
        f"{opening}first\n</think>\n\none{stop}",
        f"{opening}second\n</think>\n\ntwo{stop}",
    ]


def test_empty_thoughts_that_the_template_adds_are_context() -> None:
    pieces = Transcriber(chat_tokenizer("qwen3")).pieces(CHAT[1:3])
    assert pieces[0].text.endswith("assistant\n<think>\n\n</think>\n\n")
    assert pieces[1].text == "A file.<|im_end|>"


@pytest.mark.parametrize("template", sorted(TEMPLATES.keys() - {"llama2"}))
def test_nothing_of_a_failed_call_is_lost(template: str) -> None:
    """Half of these templates drop calls, or what stands beside them, without a word."""
    first, second, third, *_ = _said(template, a_trace()["turns"])
    assert "Reading." in first
    assert "Raed" in first
    assert "a.py" in first
    assert "Read" in second
    assert '{"to' in third


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_results_of_tools_are_in_the_context(template: str) -> None:
    pieces = Transcriber(chat_tokenizer(template)).pieces(a_trace()["turns"])
    context = "".join(piece.text for piece in pieces if piece.turn == CONTEXT)
    for told in ("no tool Raed", "x = 1", "Unterminated string", "Try again."):
        assert told in context


def test_calls_are_written_as_the_template_has_them() -> None:
    call = {"name": "Read", "arguments": {"path": "a"}}
    turns: list[TraceTurn] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_call": call},
    ]
    (qwen,), (llama,), (chatml,) = (_said(t, turns) for t in ("qwen2_5", "llama3_1", "smollm2"))
    as_text = '<tool_call>\n{"name": "Read", "arguments": {"path": "a"}}\n</tool_call><|im_end|>'
    assert qwen == chatml == as_text
    assert llama == '{"name": "Read", "parameters": {"path": "a"}}<|eot_id|>'


@pytest.mark.parametrize("template", ["llama2", "phi3"])
def test_tokens_have_no_space_the_text_has_not(template: str) -> None:
    """Tokenizers that put a space before any text would put one before every turn."""
    tokenizer = spacing_tokenizer(template)
    pieces = Transcriber(tokenizer).pieces(CHAT)
    tokens = PieceTokenizer(tokenizer).tokens(pieces)
    whole = tokenizer("".join(piece.text for piece in pieces), add_special_tokens=False)[
        "input_ids"
    ]
    assert "".join(tokenizer.convert_ids_to_tokens(tokens.ids)) == "".join(
        tokenizer.convert_ids_to_tokens(whole)
    )


@pytest.mark.parametrize("template", ["qwen2_5", "llama3", "phi3", "gemma3"])
def test_pieces_agree_with_templates_that_mark_the_turns(template: str) -> None:
    """TRL has versions of these templates with `{% generation %}` around the turns."""
    tokenizer = with_template(_trl_template(f"{template}_training"))
    encoded = tokenizer.apply_chat_template(
        CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens = PieceTokenizer(tokenizer).tokens(Transcriber(tokenizer).pieces(CHAT))
    length = len(tokens)
    theirs = encoded["assistant_masks"][:length]
    assert encoded["input_ids"][:length] == tokens.ids
    ours = [int(turn != CONTEXT) for turn in tokens.turns]
    # Some of theirs have the line break behind the stop token too; no model writes it.
    different = [i for i in range(length) if ours[i] != theirs[i]]
    assert all(theirs[i] and tokenizer.decode([tokens.ids[i]]) == "\n" for i in different)
    assert sum(ours) > 10


def test_pieces_follow_the_templates_of_trl_or_say_why_not() -> None:
    """All that TRL knows: each conversation comes out whole, or is refused with a reason."""
    refused = []
    for path in sorted(_trl_templates().glob("*[!g].jinja")):  # not the variants for training
        tokenizer = with_template(path.read_text(encoding="utf-8"))
        try:
            pieces = Transcriber(tokenizer).pieces(a_trace()["turns"])
        except ConfigError:
            refused.append(path.stem)
            continue
        said = [piece.text for piece in pieces if piece.turn != CONTEXT]
        wanted = ["Reading.", "Read", '{"to', "It will not work.", "Done."]
        assert all(part in text for part, text in zip(wanted, said, strict=True)), path.stem
    text_models = [r for r in refused if not r.startswith(("llava", "idefics", "smolvlm"))]
    assert len(text_models) <= 6, text_models


def test_transcriber_refuses_a_tokenizer_without_template() -> None:
    with pytest.raises(ConfigError, match="has no chat template") as error:
        Transcriber(with_template(None))
    assert "chat_template" in (error.value.fix or "")


def test_writer_says_what_the_template_refuses() -> None:
    writer = MessageWriter(chat_tokenizer("gemma3"))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}] * 2
    with pytest.raises(ConfigError, match=r"cannot write the turns user, user: .*alternate"):
        writer.render(messages)


def test_transcriber_refuses_a_template_that_leaves_the_words_out() -> None:
    """As those of vision models do, which take a content's parts and skip a string."""
    template = (
        "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}"
        "{{ part.text if part is mapping }}{% endfor %}<|im_end|>{% endfor %}"
    )
    with pytest.raises(ConfigError, match="leaves out what the assistant said"):
        Transcriber(with_template(template)).pieces(CHAT)


def test_transcriber_refuses_a_template_that_rewrites_the_past() -> None:
    template = (
        "{{ messages | length }}{% for m in messages %}{% if loop.last %}{{ m['content'] }}"
        "<|im_end|>{% endif %}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="cannot be followed"):
        Transcriber(with_template(template)).pieces(CHAT)


def _trl_templates() -> Path:
    spec = find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("trl is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    if not folder.is_dir():
        pytest.skip("this version of trl has no templates of its own")
    return folder


def _trl_template(name: str) -> str:
    return (_trl_templates() / f"{name}.jinja").read_text(encoding="utf-8")
