"""Sorted and trimmed micro-batches: every field follows its row, and nothing but padding is lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trl_offpolicy.rollouts.micro_batches import (
    Splitting,
    in_first_order,
    lengths_of,
    padded_tokens,
    scoring_chunks,
    split_rows,
    trimmed,
    used_columns,
)

ROWS, PROMPT, LENGTH, GROUP = 12, 5, 9, 3
BY_TOKEN = (
    "tool_mask", "sampling_per_token_logps", "old_per_token_logps", "ref_per_token_logps", "proximal_per_token_logps",
    "policy_versions", "decided_keep", "advantages",
)  # fmt: skip


def generation_batch(seed: int = 0) -> dict[str, Tensor]:
    """Ragged rows in random order; each entry of each field says its row and its place: 100 row + position."""
    random = torch.Generator().manual_seed(seed)
    prompt_length = torch.randint(1, PROMPT, (ROWS // GROUP,), generator=random).repeat_interleave(GROUP)
    length = torch.randint(1, LENGTH, (ROWS,), generator=random)
    number = 100 * torch.arange(ROWS)[:, None]
    prompt_mask = torch.arange(PROMPT) >= PROMPT - prompt_length[:, None]
    mask = torch.arange(LENGTH) < length[:, None]
    group = (torch.arange(ROWS) // GROUP)[:, None]
    rows = {
        "prompt_ids": torch.where(prompt_mask, 10 * group + torch.arange(PROMPT), 0),
        "prompt_mask": prompt_mask.long(),
        "completion_ids": torch.where(mask, number + torch.arange(LENGTH), 0),
        "completion_mask": mask.long(),
        "group_ids": group[:, 0],
        "decided_weights": number.float(),
        "rewards": number[:, 0].float(),
        "routed_experts": (number + torch.arange(PROMPT + LENGTH))[..., None, None].expand(-1, -1, 2, 2),
        "num_items_in_batch": mask.sum(),
        **{name: number + torch.arange(LENGTH) for name in BY_TOKEN},
    }
    order = torch.randperm(ROWS, generator=random)
    return {name: value if value.dim() == 0 else value[order] for name, value in rows.items()}


def of_rows(rows: dict[str, Tensor]) -> dict[int, dict[str, list[float]]]:
    """What each row holds, by its number, without padding."""
    found = {}
    for i, number in enumerate(rows["rewards"].tolist()):
        prompt, mask = rows["prompt_mask"][i].bool(), rows["completion_mask"][i].bool()
        own = {"prompt_ids": rows["prompt_ids"][i][prompt], "completion_ids": rows["completion_ids"][i][mask]}
        own |= {name: rows[name][i][mask] for name in BY_TOKEN}
        own["routed_experts"] = rows["routed_experts"][i][torch.cat([prompt, mask])]
        own |= {name: rows[name][i] for name in ("group_ids", "decided_weights")}
        found[int(number)] = {name: value.tolist() for name, value in own.items()}
    return found


@pytest.mark.parametrize("whole_groups", [False, "auto", True])
@pytest.mark.parametrize("sort", [True, False])
def test_everything_follows_its_row(sort: bool, whole_groups: bool | str) -> None:
    rows = generation_batch()
    parts = split_rows(rows, 4, Splitting(4, sort=sort, whole_groups=whole_groups))

    seen: dict[int, dict[str, list[float]]] = {}
    for part in parts:
        assert len(part["rewards"]) == ROWS // 4
        assert part["num_items_in_batch"] is rows["num_items_in_batch"]
        assert part["routed_experts"].shape[1] == part["prompt_ids"].shape[1] + part["completion_ids"].shape[1]
        seen |= of_rows(part)
    assert seen == of_rows(rows)


@pytest.mark.parametrize("sort", [True, False])
def test_a_micro_batch_is_as_wide_as_its_longest_row(sort: bool) -> None:
    for part in split_rows(generation_batch(), 4, Splitting(4, sort=sort)):
        assert part["prompt_mask"][:, 0].any() and part["completion_mask"][:, -1].any()
        assert part["decided_weights"].shape[1] == 1  # one weight for each row


def test_sorting_leaves_out_padding() -> None:
    rows = generation_batch()
    plain = split_rows(rows, 6, Splitting(6, sort=False))
    sorted_ = split_rows(rows, 6, Splitting(6))

    def tokens(parts: list[dict[str, Tensor]]) -> int:
        return sum(part["prompt_ids"].numel() + part["completion_ids"].numel() for part in parts)

    assert tokens(sorted_) < tokens(plain) < ROWS * (PROMPT + LENGTH)
    lengths = lengths_of(rows)
    order = torch.cat([torch.tensor([rows["rewards"].tolist().index(r) for r in part["rewards"]]) for part in sorted_])
    assert padded_tokens(lengths.rows(order), 2) == tokens(sorted_)


def test_an_optimizer_step_keeps_its_rows() -> None:
    """With a window of two micro-batches, rows stay in their half of the generation batch."""
    rows = generation_batch()
    parts = split_rows(rows, 4, Splitting(2))
    for half, pair in enumerate((parts[:2], parts[2:])):
        expected = rows["rewards"][6 * half : 6 * half + 6].tolist()
        assert sorted(torch.cat([part["rewards"] for part in pair]).tolist()) == sorted(expected)


def test_whole_groups_meet() -> None:
    parts = split_rows(generation_batch(), 4, Splitting(4, whole_groups=True))
    assert all(len(part["group_ids"].unique()) == 1 for part in parts)


def test_auto_groups_rows_only_where_a_shared_prompt_costs_less() -> None:
    rows = generation_batch()
    short = {**rows, "prompt_mask": (torch.arange(PROMPT) == PROMPT - 1).long().expand(ROWS, -1)}
    short["prompt_ids"] = 1 + short["group_ids"][:, None].expand(-1, PROMPT)
    groups = [part["group_ids"].unique() for part in split_rows(short, 4, Splitting(4, whole_groups="auto"))]
    assert any(len(found) > 1 for found in groups)  # prompts of one token: sorting by length is better

    wide = torch.nn.functional.pad(rows["prompt_ids"] + 1, (200, 0), value=1)
    long = {**rows, "prompt_ids": wide, "prompt_mask": torch.ones_like(wide)}
    del long["routed_experts"]
    groups = [part["group_ids"].unique() for part in split_rows(long, 4, Splitting(4, whole_groups="auto"))]
    assert all(len(found) == 1 for found in groups)


def test_auto_groups_rows_within_an_optimizer_step_only() -> None:
    """Prompts of 200 tokens; in windows of two micro-batches rows stay in their half, unless all groups are wanted."""
    rows = generation_batch()
    wide = torch.nn.functional.pad(rows["prompt_ids"] + 1, (200, 0), value=1)
    long = {**rows, "prompt_ids": wide, "prompt_mask": torch.ones_like(wide)}
    del long["routed_experts"]

    def halves(whole_groups: bool | str) -> list[set[float]]:
        parts = split_rows(long, 4, Splitting(2, whole_groups=whole_groups))  # type: ignore[arg-type]
        return [set(torch.cat([part["rewards"] for part in pair]).tolist()) for pair in (parts[:2], parts[2:])]

    plain = [set(half.tolist()) for half in rows["rewards"].split(6)]
    assert halves("auto") == plain != halves(True)


def test_widths_are_multiples_on_request() -> None:
    rows = generation_batch()
    short = {
        name: value if value.dim() == 0 else value[rows["completion_mask"].sum(1) <= 3] for name, value in rows.items()
    }
    assert trimmed(short)["completion_ids"].shape[1] <= 3
    assert trimmed(short, multiple=4)["completion_ids"].shape[1] == 4
    assert trimmed(short, multiple=4)["prompt_ids"].shape[1] == 4
    assert trimmed(short, multiple=64)["completion_ids"].shape[1] == LENGTH  # no wider than it was


def test_rows_without_tokens_keep_one_column() -> None:
    rows = generation_batch()
    rows["completion_mask"] = torch.zeros_like(rows["completion_mask"])
    assert trimmed(rows)["completion_ids"].shape == (ROWS, 1)


def test_unknown_fields_of_tokens_stop_the_cut() -> None:
    rows = generation_batch() | {"mine": torch.zeros(ROWS, LENGTH)}
    rows["completion_mask"][:, -2:] = 0
    assert trimmed(rows)["completion_ids"].shape == (ROWS, LENGTH)
    rows["mine"] = torch.zeros(ROWS, 3)
    assert trimmed(rows)["completion_ids"].shape[1] < LENGTH


def test_rewards_of_a_group_as_wide_as_a_completion_do_not_stop_the_cut() -> None:
    rows = generation_batch() | {"group_rewards": torch.zeros(ROWS, LENGTH)}
    rows["completion_mask"][:, -2:] = 0
    part = trimmed(rows)
    assert part["completion_ids"].shape[1] < LENGTH and part["group_rewards"].shape == (ROWS, LENGTH)


def test_images_are_left_alone() -> None:
    rows = generation_batch() | {"pixel_values": torch.zeros(ROWS, 2)}
    parts = split_rows(rows, 4, Splitting(4))
    assert torch.equal(torch.cat([part["completion_ids"] for part in parts]), rows["completion_ids"])


def test_lists_and_none_follow_as_well() -> None:
    rows = generation_batch()
    rows |= {"names": [str(int(value)) for value in rows["rewards"]], "nothing": None}
    for part in split_rows(rows, 4, Splitting(4)):
        assert part["nothing"] is None
        assert [float(name) for name in part["names"]] == part["rewards"].tolist()


def test_scoring_chunks_cover_all_rows_once_and_come_back_in_order() -> None:
    rows = generation_batch()
    lengths = lengths_of(rows)
    chunks = scoring_chunks(lengths, 5)
    assert [len(chunk) for chunk in chunks] == [5, 5, 2]
    parts = []
    for chunk in chunks:
        mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)[chunk]
        columns = used_columns(mask, PROMPT)
        whole = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)[chunk]
        parts.append(whole[:, columns][:, PROMPT - columns.start :])
    assert torch.equal(in_first_order(parts, chunks, LENGTH), rows["completion_ids"])


def test_forwards_without_gradient_keep_widths_of_a_multiple() -> None:
    mask = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]])  # eight columns of prompt
    assert used_columns(mask, 8) == slice(5, 10)
    assert used_columns(mask, 8, multiple=4) == slice(4, 12)
    assert used_columns(mask, 8, multiple=64) == slice(0, 13)


def test_a_window_divides_the_micro_batches() -> None:
    with pytest.raises(ValueError, match="window must divide the number of micro-batches, 4, but got 3"):
        split_rows(generation_batch(), 4, Splitting(3))
