"""Rows that change places between ranks: each once, with all that belongs to it, and the ranks' work alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import two_ranks
from hypothesis import given
from hypothesis import strategies as st

from trl_offpolicy.rollouts.micro_batches import Splitting, split_rows
from trl_offpolicy.rollouts.rank_balance import balanced, dealt

SIZE, PARTS = 2, 2


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.randoms())
def test_each_row_once_within_its_window(ranks: int, size: int, window: int, windows: int, draw: Any) -> None:
    count = size * window * windows
    costs = [[draw.randint(1, 99) for _ in range(count)] for _ in range(ranks)]

    plan = dealt(costs, size=size, window=window)

    assert sorted(place for places in plan for place in places) == [(r, i) for r in range(ranks) for i in range(count)]
    for places in plan:
        assert [i // (size * window) for _, i in places] == [i // (size * window) for i in range(count)]
        for start in range(0, count, size * window):
            own = [costs[rank][i] for rank, i in places[start : start + size * window]]
            assert own == sorted(own, reverse=True)  # the longest come first


def test_ranks_compute_about_as_much() -> None:
    lengths = torch.distributions.LogNormal(6.0, 0.8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        costs = [(lengths.sample((32,)) * (1 + rank)).clamp(max=8192).long().tolist() for rank in range(4)]

    plan = dealt(costs, size=4, window=8)

    before = [sum(own) for own in costs]
    after = [sum(costs[rank][i] for rank, i in places) for places in plan]
    assert max(before) > 2 * min(before)
    assert max(after) < 1.05 * min(after)
    # and at the same time, padded to the longest row of each micro-batch
    for start in range(0, 32, 4):
        widest = [max(costs[rank][i] for rank, i in places[start : start + 4]) for places in plan]
        assert max(widest) < 1.5 * min(widest)


def rows_of(rank: int) -> dict[str, Any]:
    """Four rows, whose tokens, weights and records all tell their number; those of rank 1 are longer and wider."""
    numbers = torch.arange(4) + 10 * (1 + rank)
    prompt_lengths, lengths = torch.tensor([1, 2, 2, 1]) + rank, torch.tensor([3, 1, 2, 1]) + 4 * rank
    prompt, completion = int(prompt_lengths.max()), int(lengths.max())
    prompt_mask = torch.arange(prompt).flip(0) < prompt_lengths[:, None]
    mask = torch.arange(completion) < lengths[:, None]
    whole = torch.cat([prompt_mask, mask], 1)
    return {
        "prompt_ids": prompt_mask * numbers[:, None],
        "prompt_mask": prompt_mask.long(),
        "completion_ids": mask * numbers[:, None],
        "completion_mask": mask.long(),
        "sampling_per_token_logps": mask * -numbers[:, None].float(),
        "advantages": numbers.float(),
        "group_rewards": numbers[:, None].expand(4, 3).float(),
        "routed_experts": torch.where(whole[..., None, None], numbers[:, None, None, None], -1).to(torch.int8),
        "kept_ids": [f"row {number}" for number in numbers.tolist()],
        "num_items_in_batch": torch.tensor(23),
        "tool_mask": None,
    }


def run(rank: int) -> dict[str, Any]:
    how = Splitting(window=PARTS, balance=True)
    rows, then = balanced(rows_of(rank), PARTS, how)
    unknown = {**rows_of(rank), "of a user": torch.zeros_like(rows_of(rank)["completion_ids"]) + rank}
    kept, _ = balanced(unknown if rank else rows_of(rank), PARTS, how)  # one rank alone cannot move its rows
    return {
        "parts": [{name: _plain(value) for name, value in part.items()} for part in split_rows(rows, PARTS, then)],
        "kept": kept["kept_ids"],
    }


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def test_two_ranks_exchange_rows_with_all_that_belongs_to_them(tmp_path: Path) -> None:
    said = two_ranks.launch(__file__, run, tmp_path)

    numbers = [[part["advantages"] for part in one["parts"]] for one in said]
    assert sorted(int(n) for one in numbers for part in one for n in part) == [10, 11, 12, 13, 20, 21, 22, 23]
    assert all(n >= 20 for one in numbers for n in one[0])  # the longest first, on both ranks
    lengths = {10 * (1 + rank) + i: n + 4 * rank for rank in range(2) for i, n in enumerate([3, 1, 2, 1])}
    for one in said:
        for part in one["parts"]:
            width = max(lengths[int(n)] for n in part["advantages"])
            for at, number in enumerate(map(int, part["advantages"])):
                length = lengths[number]
                assert part["completion_ids"][at] == [number] * length + [0] * (width - length)
                assert part["completion_mask"][at] == [1] * length + [0] * (width - length)
                assert part["sampling_per_token_logps"][at] == [-number] * length + [0] * (width - length)
                assert {n for n in part["prompt_ids"][at] if n} == {number}
                assert part["group_rewards"][at] == [number] * 3
                assert {n for place in part["routed_experts"][at] for layer in place for n in layer} <= {number, -1}
                assert part["kept_ids"][at] == f"row {number}"
            assert part["num_items_in_batch"] == 23 and part["tool_mask"] is None
    assert [one["kept"] for one in said] == [[f"row {10 * (1 + rank) + i}" for i in range(4)] for rank in range(2)]


if __name__ == "__main__":
    two_ranks.join(run)
