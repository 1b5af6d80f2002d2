"""What launched replicas make of a file of prompts: the same, whatever share each has of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny

from diloco_cloud.errors import ConfigError
from diloco_cloud.trainers.composer_data import ReplicaPrompts, replica_prompts
from diloco_cloud.trainers.composer_rollouts import Rollouts, own_rollouts, sdpo_weight
from diloco_cloud.trainers.pretrained import load_pretrained

pytestmark = tiny.pytestmark


def prompts(where: Path, rows: list[Any], rank: int = 0, world_size: int = 2) -> ReplicaPrompts:
    file = where / "rows.jsonl"
    file.write_text("\n\n".join(json.dumps(row) for row in rows))
    return replica_prompts(
        rank=rank,
        world_size=world_size,
        attempt=0,
        seed=0,
        count=len(rows),
        task=None,
        task_args={},
        prompts=str(file),
        rewards=["math:fsum"],
        pairs=None,
    )


def rollouts(where: Path, rows: list[Any], rank: int, alpha: float | None = None) -> Rollouts:
    data = prompts(where, rows, rank)
    return own_rollouts(
        data,
        load_pretrained("tiny", cache=where),
        {},
        alpha_sdpo=sdpo_weight(alpha, data, {}, "none"),
        max_completion_length=8,
        template_options=None,
    )


def row(index: int, **columns: Any) -> dict[str, Any]:
    return {"prompt": f"x{index}", **columns}


@pytest.mark.parametrize(
    "rows",
    [
        [row(0), *(row(i, hint="think", answer=i) for i in range(1, 8))],
        [row(i, hint=None if i % 2 == 0 else "think", answer=i) for i in range(8)],
    ],
    ids=["the first row has no hint", "every second row has none"],
)
def test_replicas_have_the_columns_of_the_whole_file(tmp_path: Path, rows: list[Any]) -> None:
    shares = [rollouts(tmp_path, rows, rank, alpha=0.3) for rank in range(2)]
    for share in shares:
        assert share.rows.column_names[0] == "prompt"
        assert {*share.rows.column_names} == {"prompt", "hint", "answer"}
        assert share.alpha_sdpo == 0.3
    hinted = [sum(hint is not None for hint in share.rows["hint"]) for share in shares]
    assert abs(hinted[0] - hinted[1]) <= 1
    assert min(hinted) >= 2
    found = [dict(r) for share in shares for r in share.rows]
    by_prompt = sorted(found, key=lambda r: str(r["prompt"]))
    assert by_prompt == [{"hint": None, "answer": None, **r} for r in rows]


def test_replica_without_a_hint_in_its_share_is_idle_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [row(i) for i in range(7)] + [row(7, hint="think")]
    with caplog.at_level(logging.WARNING, "diloco_cloud"):
        weights = [rollouts(tmp_path, rows, rank).alpha_sdpo for rank in range(2)]
    assert sorted(weights) == [0.0, 0.1]
    assert caplog.text.count("channel 2 is idle in this replica") == 1


def test_file_without_any_hint_has_channel_2_off_everywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [row(i, hint=None) for i in range(4)]
    with caplog.at_level(logging.WARNING, "diloco_cloud"):
        assert [rollouts(tmp_path, rows, rank).alpha_sdpo for rank in range(2)] == [0.0, 0.0]
    assert caplog.text.count("channel 2 is off") == 2
    with pytest.raises(ConfigError, match="the channel has no data"):
        rollouts(tmp_path, rows, 0, alpha=0.1)


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("hint", "h " * 4000, "no row's prompt and hint leave room for a turn"),
        ("error_kind", "unheard_of", "no row's error_kind makes a hint"),
    ],
)
def test_hints_that_none_can_use_are_refused_in_all_replicas(
    tmp_path: Path, column: str, value: str, told: str
) -> None:
    rows = [row(i, **({} if i % 2 == 0 else {column: value})) for i in range(4)]
    for rank in range(2):
        with pytest.raises(ConfigError, match=told) as caught:
            rollouts(tmp_path, rows, rank, alpha=0.1)
        assert "alpha_sdpo=0" in str(caught.value.fix)


def test_prompts_that_do_not_fit_are_left_out_before_the_shares_are_cut(tmp_path: Path) -> None:
    rows = [row(i, hint="think") if i < 4 else {"prompt": "x" * 4000} for i in range(8)]
    shares = [rollouts(tmp_path, rows, rank) for rank in range(2)]
    assert [(len(share.rows), share.skipped) for share in shares] == [(2, 4)] * 2


SAID = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"prompt": [{"role": "user"}]}, "message 0 has no 'content'"),
        ({"prompt": [SAID, {"content": "x"}]}, "message 1 has no 'role'"),
        ({"prompt": [SAID, "x"]}, "message 1 is str, not an object"),
        ({"prompt": [{"role": "user", "content": 3}]}, "message 0 has int for 'content'"),
        ({"prompt": 3}, "is int 3"),
        ({"prompt": ""}, "is empty"),
        ({"question": "x"}, "is empty"),
        ({"prompt": "x"}, "has text for 'prompt', which is of another type"),
        ({"prompt": [SAID], "answer": "three"}, "has text for 'answer', which is of another type"),
        ({"prompt": [SAID], "error_meta": "type"}, "error_meta .* is str 'type'"),
    ],
)
def test_row_that_cannot_be_used_is_named(tmp_path: Path, bad: dict[str, Any], told: str) -> None:
    good = {"prompt": [SAID], "answer": 3}
    for rank in range(2):
        with pytest.raises(ConfigError, match=told) as caught:
            prompts(tmp_path, [good, good, bad, good], rank)
        # Every second line is empty.
        assert "rows.jsonl, line 5" in caught.value.message
        assert caught.value.fix


def test_file_without_prompts_tells_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no 'prompt' column; it has question"):
        prompts(tmp_path, [{"question": "x"}] * 2)
    with pytest.raises(ConfigError, match=r"rows.jsonl has 0 rows for 2 replicas"):
        prompts(tmp_path, [])
