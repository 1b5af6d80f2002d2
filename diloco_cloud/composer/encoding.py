"""Prompts as token ids, the way TRL's trainer encodes them for a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from diloco_cloud.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = Mapping[str, Any]
#: Plain text, or the messages of a conversation that ends before the model's turn.
Prompt: TypeAlias = str | Sequence[Message]


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes what comes before the model's turn.

    Attributes:
        tokenizer: of the model.
        tools: schemas or functions the template shows to the model.
        chat_template: used instead of the tokenizer's own.
        template_options: further arguments of ``apply_chat_template``.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: Sequence[Any] = ()
    chat_template: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Ids of all that precedes the turn, the template's opening of it included.

        Raises:
            ConfigError: a conversation, but no chat template.
        """
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        require_template(self.tokenizer, self.chat_template)
        text = self.render([dict(message) for message in prompt], add_generation_prompt=True)
        # The template writes special tokens itself.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def tool_schemas(self) -> dict[str, dict[str, Any]]:
        """The JSON schema of each tool's arguments, by the tool's name."""
        from transformers.utils.chat_template_utils import get_json_schema

        found = (get_json_schema(tool) if callable(tool) else tool for tool in self.tools)
        functions = (schema.get("function", schema) for schema in found)
        return {each["name"]: each.get("parameters", {}) for each in functions}

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The text of a conversation, as the template writes it.

        Args:
            messages: of the conversation.
            **options: of ``apply_chat_template``.
        """
        conversation: Any = list(messages)
        return str(
            self.tokenizer.apply_chat_template(
                conversation,
                **{
                    "tools": list(self.tools) or None,
                    "chat_template": self.chat_template,
                    **self.template_options,
                    **options,
                    "tokenize": False,
                },
            )
        )


class RenderingTokenizer:
    """A tokenizer that writes conversations as an encoder does: for the collator's parts.

    Args:
        encoder: whose template, tools and options are used; all else is its tokenizer's.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self.chat_template = encoder.chat_template or encoder.tokenizer.chat_template

    @property
    def pad_token_id(self) -> int | None:
        """The id that fills rows up."""
        found: int | None = self._encoder.tokenizer.pad_token_id
        return found

    def __call__(self, text: Any, /, **kwargs: Any) -> Any:
        """As the tokenizer."""
        return self._encoder.tokenizer(text, **kwargs)

    def apply_chat_template(self, messages: Any, /, **kwargs: Any) -> str:
        """The text of a conversation."""
        return self._encoder.render(messages, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder.tokenizer, name)


def require_template(tokenizer: Any, chat_template: str | None = None) -> None:
    """Refuse conversations where nothing says how the model wants them written.

    Raises:
        ConfigError: there is no chat template.
    """
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"prompts are conversations, and {type(tokenizer).__name__} has no chat template",
            fix="Use an instruction-tuned model's tokenizer, set tokenizer.chat_template, or give "
            "prompts as plain text.",
        )
