"""Which parameters are taken for embeddings."""

from __future__ import annotations

from torch import nn

from diloco_cloud.outer.embeddings import are_embeddings


class Tied(nn.Module):
    """A model whose output projection is its embedding, under a name that says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight


def test_embeddings_are_told_by_the_module_that_holds_them() -> None:
    model = Tied()
    names, parameters = zip(*model.named_parameters(), strict=True)
    flags = are_embeddings([model], parameters)
    assert [name for name, flag in zip(names, flags, strict=True) if flag] == ["table.weight"]


def test_embeddings_are_found_in_fragments_and_at_any_depth() -> None:
    model = Tied()
    other = nn.EmbeddingBag(3, 4)
    parts = [nn.ModuleList([nn.ModuleList([model.table])]), other]
    asked = [model.table.weight, model.body[0].weight, other.weight]
    assert are_embeddings(parts, asked) == (True, False, True)
    assert are_embeddings([model.body], asked) == (False, False, False)
    # By the parameter itself, not by its values or its name.
    assert are_embeddings(parts, [model.table.weight.detach().clone()]) == (False,)
