"""Rows that change places between ranks: each once, with all that belongs to it, and the ranks' work alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_offpolicy.rollouts.micro_batches import Lengths, Splitting, split_rows
from trl_offpolicy.rollouts.rank_balance import balanced, dealt

PARTS = 2
"""Micro-batches of a rank, of two rows each."""


def lengths_of(rows: list[list[tuple[int, int]]]) -> list[Lengths]:
    """Of (prompt, completion) lengths, by rank."""
    return [Lengths(*torch.tensor(own).T, torch.arange(len(own))) for own in rows]


@settings(deadline=None)  # the first example may wait for a busy machine
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.randoms())
def test_each_row_once_within_its_window(ranks: int, size: int, window: int, windows: int, draw: Any) -> None:
    count = size * window * windows
    lengths = [[(draw.randint(1, 99), draw.randint(1, 99)) for _ in range(count)] for _ in range(ranks)]
    keys = {"total": sum, "prompt": lambda one: one[0], "completion": lambda one: one[1]}

    for by, key in keys.items():
        plan = dealt(lengths_of(lengths), by, size=size, window=window)  # type: ignore[arg-type]

        places = sorted(place for own in plan for place in own)
        assert places == [(rank, row) for rank in range(ranks) for row in range(count)]
        for own in plan:
            assert [row // (size * window) for _, row in own] == [at // (size * window) for at in range(count)]
            for start in range(0, count, size * window):
                found = [key(lengths[rank][row]) for rank, row in own[start : start + size * window]]
                assert found == sorted(found, reverse=True)  # the longest come first


def test_ranks_compute_about_as_much() -> None:
    tail = torch.distributions.LogNormal(6.0, 0.8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = [(tail.sample((32,)) * (1 + rank)).clamp(max=8192).long().tolist() for rank in range(4)]

    plan = dealt(lengths_of([[(10, length) for length in own] for own in drawn]), "total", size=4, window=8)

    before = [sum(own) for own in drawn]
    after = [sum(drawn[rank][row] for rank, row in places) for places in plan]
    assert max(before) > 2 * min(before)
    assert max(after) < 1.05 * min(after)
    # and at the same time, padded to the longest row of each micro-batch
    for start in range(0, 32, 4):
        widest = [max(drawn[rank][row] for rank, row in places[start : start + 4]) for places in plan]
        assert max(widest) < 1.5 * min(widest)


def rows_of(rank: int, *, extra: int = 4) -> dict[str, Any]:
    """Four rows, in which all tells their number; those of rank 1 have longer completions and a longer prompt."""
    numbers = torch.arange(4) + 10 * (1 + rank)
    prompt_lengths, lengths = PROMPTS[rank], COMPLETIONS[rank]
    prompt_mask = torch.arange(int(prompt_lengths.max())).flip(0) < prompt_lengths[:, None]
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    whole = torch.cat([prompt_mask, mask], 1)
    return {
        "prompt_ids": prompt_mask * numbers[:, None],
        "prompt_mask": prompt_mask.long(),
        "completion_ids": mask * numbers[:, None],
        "completion_mask": mask.long(),
        "sampling_per_token_logps": mask * -numbers[:, None].float(),
        "policy_versions": numbers[:, None].expand(mask.shape).clone(),
        "decided_keep": mask,
        "decided_weights": numbers[:, None].float(),
        "advantages": numbers.float(),
        "group_rewards": numbers[:, None].expand(4, 3).float(),
        "routed_experts": torch.where(whole[..., None, None], numbers[:, None, None, None], -1).to(torch.int8),
        "kept_ids": [f"row {number}" for number in numbers.tolist()],
        "num_items_in_batch": torch.tensor(23),
        "tool_mask": None,
        "of a user": torch.full((4, extra), rank),
    }


PROMPTS = [torch.tensor([1, 2, 2, 1]), torch.tensor([2, 3, 3, 2])]
COMPLETIONS = [torch.tensor([3, 1, 6, 1]), torch.tensor([7, 5, 8, 2])]
"""One of rank 0 is longer than one of rank 1, so that they meet in a micro-batch."""
HOW = Splitting(window=PARTS, balance=True)
MULTIPLE = 4
"""Of which widths are multiples, where that is asked for."""


def run(rank: int) -> dict[str, Any]:
    """What becomes of the rows of two ranks, and of those that must stay."""
    rows, then = balanced(rows_of(rank, extra=9), PARTS, HOW)
    given = rows_of(rank, extra=9)
    weights = given["decided_weights"]
    stay = {
        "of a width that may be that of rank 1's tokens": rows_of(rank, extra=8),
        "one value a row on rank 0 alone": given | {"decided_weights": weights.expand(4, 1 + 7 * rank)},
        "neither tensors nor lists": given | {"of numpy": given["advantages"].numpy()},
        "dealt well already": given | {name: rows_of(0, extra=9)[name] for name in given if "kept" not in name},
        "not asked for": given,
    }  # fmt: skip
    kept = {}
    for why, those in stay.items():
        found, how = balanced(those, PARTS, replace(HOW, balance=why != "not asked for"))
        kept[why] = found is those and how.sort
    alike = with_long_prompts(given)
    found, how = balanced(alike, PARTS, replace(HOW, whole_groups=True))
    kept["prompts that are computed once where their rows are together"] = found is alike and how.sort
    kept["not so if each row computes its own"] = balanced(alike, PARTS, HOW)[0] is not alike
    parts = split_rows(rows, PARTS, then)
    rounded, how = balanced(in_multiples(given), PARTS, replace(HOW, multiple=MULTIPLE))
    widths = [
        (part["prompt_ids"].shape[1], part["completion_ids"].shape[1]) for part in split_rows(rounded, PARTS, how)
    ]
    plain = [{name: _plain(value) for name, value in part.items()} for part in parts]
    return {"parts": plain, "kept": kept, "sorts again": then.sort, "widths": widths, "dealt": not how.sort}


def with_long_prompts(rows: dict[str, Any]) -> dict[str, Any]:
    """The first two rows have one prompt of 300 tokens, and the last two another one of 300."""
    numbers = rows["advantages"].long().div(2, rounding_mode="floor").view(-1, 1).expand(-1, 300)
    kept = {name: rows[name] for name in ("completion_ids", "completion_mask", "advantages", "num_items_in_batch")}
    return kept | {"prompt_ids": numbers.contiguous(), "prompt_mask": torch.ones_like(numbers)}


def in_multiples(rows: dict[str, Any]) -> dict[str, Any]:
    """Rows as a trainer pads them with ``pad_to_multiple_of``: prompts left and completions right."""
    left, right = (-rows[name].shape[1] % MULTIPLE for name in ("prompt_ids", "completion_ids"))
    sides = {
        "prompt_ids": (left, 0),
        "prompt_mask": (left, 0),
        "completion_ids": (0, right),
        "completion_mask": (0, right),
    }
    kept = {name: rows[name] for name in ("advantages", "num_items_in_batch")}
    return kept | {name: torch.nn.functional.pad(rows[name], side) for name, side in sides.items()}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.integration
def test_two_ranks_exchange_rows_with_all_that_belongs_to_them(tmp_path: Path) -> None:
    said = two_ranks.launch(__file__, run, tmp_path)

    parts = [part for one in said for part in one["parts"]]
    assert sorted(int(n) for part in parts for n in part["advantages"]) == [10, 11, 12, 13, 20, 21, 22, 23]
    for one in said:
        first, second = (len(part["completion_ids"][0]) for part in one["parts"])
        assert first > second  # the longest first, on both ranks
        assert not one["sorts again"]
        assert one["dealt"] and all(width % MULTIPLE == 0 for widths in one["widths"] for width in widths)
        assert one["kept"] and all(one["kept"].values()), one["kept"]
    sizes = {
        10 * (1 + rank) + i: (int(PROMPTS[rank][i]), int(COMPLETIONS[rank][i])) for rank in (0, 1) for i in range(4)
    }
    for part in parts:
        numbers = [int(n) for n in part["advantages"]]
        wide = max(sizes[n][0] for n in numbers), max(sizes[n][1] for n in numbers)
        for at, n in enumerate(numbers):
            (prompt, completion), (left, right) = sizes[n], (wide[0] - sizes[n][0], wide[1] - sizes[n][1])
            assert part["prompt_ids"][at] == [0] * left + [n] * prompt
            assert part["prompt_mask"][at] == [0] * left + [1] * prompt
            assert part["completion_ids"][at] == [n] * completion + [0] * right
            assert part["completion_mask"][at] == [1] * completion + [0] * right
            assert part["decided_keep"][at] == [True] * completion + [False] * right
            assert part["sampling_per_token_logps"][at] == [-n] * completion + [0] * right
            assert part["policy_versions"][at] == [n] * wide[1]
            assert part["routed_experts"][at] == [[[-1]]] * left + [[[n]]] * (prompt + completion) + [[[-1]]] * right
            assert part["decided_weights"][at] == [n] and part["group_rewards"][at] == [n] * 3
            assert part["kept_ids"][at] == f"row {n}" and part["of a user"][at] == [n // 10 - 1] * 9
        assert part["num_items_in_batch"] == 23 and part["tool_mask"] is None


if __name__ == "__main__":
    two_ranks.join(run)
