"""Ways to compute channel 2's Jensen-Shannon divergence over a large vocabulary.

Three kinds. ``logits``: the loss alone, of two tensors (1, T, V). ``hidden``: from the states
before the output head, and through it. ``trainer``: a model's passes too, over the batch that the
trainer makes of a hinted rollout, by the trainer's own functions and by others in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from diloco_cloud.composer import fused_jsd_loss, generalized_jsd_loss
from diloco_cloud.composer.channels import SDPOOptions
from diloco_cloud.composer.forward import ChannelForward
from diloco_cloud.composer.hinted_rollouts import (
    CONTEXT_IDS,
    CONTEXT_MASK,
    LOSS_MASK,
    paired_turns,
)

BETA: Final = 0.5
#: Tokens that student and teacher see before the turn.
PROMPT: Final = 32
HINTED_PROMPT: Final = 48


@dataclass(frozen=True)
class Shape:
    """(1, T, V) logits, or (1, T, H) states before a head of V by H."""

    tokens: int
    vocabulary: int
    hidden: int


@dataclass(frozen=True)
class Contender:
    """One way to compute the loss.

    Attributes:
        name: in the table.
        kind: which others it is compared with.
        prepare: makes inputs; what it gives computes the loss of them.
        plain: the formula written out, or TRL's of the same sort: it runs on fake tensors, and may
            need more memory than there is.
    """

    name: str
    kind: str
    prepare: Callable[[Shape], Callable[[], Tensor]]
    plain: bool = False


def formula(student: Tensor, teacher: Tensor) -> Tensor:
    """Agarwal et al., Eq. 1, as it is written."""
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    m = (BETA * q.exp() + (1 - BETA) * p.exp()).log()
    each = BETA * q.exp() * (q - m) + (1 - BETA) * p.exp() * (p - m)
    return each.sum(-1).mean()


def trl(student: Tensor, teacher: Tensor) -> Tensor:
    from trl.experimental.gkd import GKDTrainer

    # Labels would make it copy what counts; without, it divides by the number of sequences.
    loss: Tensor = GKDTrainer.generalized_jsd_loss(
        student, teacher, beta=BETA, num_items_in_batch=student.size(1)
    )
    return loss


def ours(student: Tensor, teacher: Tensor) -> Tensor:
    return generalized_jsd_loss(student, teacher, beta=BETA, reduction="mean")


def ours_on_few(student: Tensor, teacher: Tensor) -> Tensor:
    """Of one token in eight, as in a turn that went wrong."""
    labels = torch.full(student.shape[:-1], -100)
    labels[:, ::8] = 0
    return generalized_jsd_loss(student, teacher, labels, beta=BETA)


def trl_from_hidden(student: Tensor, teacher: Tensor, head: torch.nn.Linear) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    fixed = head.weight.detach()
    per_token, _ = ChunkedDivergenceFunction.apply(
        student[0], head.weight, None, teacher[0], fixed, None, BETA, 1.0
    )
    loss: Tensor = per_token.mean()
    return loss


def _of_logits(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Shape], Any]:
    def prepare(shape: Shape) -> Callable[[], Tensor]:
        student = torch.randn(1, shape.tokens, shape.vocabulary, requires_grad=True)
        teacher = torch.randn(1, shape.tokens, shape.vocabulary)
        return lambda: loss(student, teacher)

    return prepare


def _of_hidden(loss: Callable[[Tensor, Tensor, torch.nn.Linear], Tensor]) -> Callable[[Shape], Any]:
    def prepare(shape: Shape) -> Callable[[], Tensor]:
        head = torch.nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        student = torch.randn(1, shape.tokens, shape.hidden, requires_grad=True)
        teacher = torch.randn(1, shape.tokens, shape.hidden)
        return lambda: loss(student, teacher, head)

    return prepare


def _model(shape: Shape) -> Any:
    """A Qwen2 with two thin layers under a vocabulary of the real size, tied as small ones are."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=shape.tokens + HINTED_PROMPT,
        # At the usual scale, student and teacher would hardly differ.
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def _micro_batch(shape: Shape) -> dict[str, Tensor]:
    """What the trainer hands channel 2: one rollout of T tokens, all of which count."""
    ids = torch.randint(0, shape.vocabulary, (1, PROMPT + HINTED_PROMPT + shape.tokens))
    prompt, context, completion = ids.split([PROMPT, HINTED_PROMPT, shape.tokens], dim=1)
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        LOSS_MASK: torch.ones_like(completion),
        CONTEXT_IDS: context,
        CONTEXT_MASK: torch.ones_like(context),
    }


def _in_trainer(*, may_use_head: bool) -> Callable[[Shape], Any]:
    """As ``ComposerReplicationTrainer._distill`` does it."""

    def prepare(shape: Shape) -> Callable[[], Tensor]:
        model, inputs = _model(shape), _micro_batch(shape)
        passes = ChannelForward(model, may_use_head=may_use_head)

        def compute() -> Tensor:
            turns = paired_turns(inputs, 0)
            assert turns is not None
            found = passes.distill(model, *turns, SDPOOptions(jsd_beta=BETA))
            assert passes.uses_head == may_use_head
            return found.loss

        return compute

    return prepare


def _in_its_place(loss: Callable[[Any, Tensor, Tensor, int], Tensor]) -> Callable[[Shape], Any]:
    """The same passes of the same batch, with another loss behind them."""

    def prepare(shape: Shape) -> Callable[[], Tensor]:
        model, inputs = _model(shape), _micro_batch(shape)
        turn = inputs["completion_ids"]
        student = torch.cat([inputs["prompt_ids"], turn], dim=1)
        teacher = torch.cat([inputs[CONTEXT_IDS], turn], dim=1)
        return lambda: loss(model, student, teacher, turn.size(1))

    return prepare


def _formula_of_model(model: Any, student: Tensor, teacher: Tensor, turn: int) -> Tensor:
    options: dict[str, Any] = {"logits_to_keep": turn + 1, "use_cache": False}
    with torch.no_grad():
        target = model(teacher, **options).logits[:, :-1]
    return formula(model(student, **options).logits[:, :-1], target)


def _trl_of_model(model: Any, student: Tensor, teacher: Tensor, turn: int) -> Tensor:
    def states(ids: Tensor) -> Tensor:
        found: Tensor = model.model(ids, use_cache=False).last_hidden_state[:, -turn - 1 : -1]
        return found

    with torch.no_grad():
        target = states(teacher)
    return trl_from_hidden(states(student), target, model.lm_head)


CONTENDERS: Final = [
    Contender("formula", "logits", _of_logits(formula), plain=True),
    Contender("TRL", "logits", _of_logits(trl), plain=True),
    Contender("ours", "logits", _of_logits(ours)),
    Contender("ours, 1 in 8", "logits", _of_logits(ours_on_few)),
    Contender(
        "formula",
        "hidden",
        _of_hidden(lambda s, t, head: formula(head(s), head(t).detach())),
        plain=True,
    ),
    Contender("TRL", "hidden", _of_hidden(trl_from_hidden)),
    Contender("ours", "hidden", _of_hidden(lambda s, t, h: fused_jsd_loss(s, t, h, beta=BETA))),
    Contender("formula", "trainer", _in_its_place(_formula_of_model), plain=True),
    Contender("TRL", "trainer", _in_its_place(_trl_of_model)),
    Contender("ours", "trainer", _in_trainer(may_use_head=True)),
    Contender("ours, logits", "trainer", _in_trainer(may_use_head=False)),
]
KINDS: Final = tuple(dict.fromkeys(one.kind for one in CONTENDERS))
