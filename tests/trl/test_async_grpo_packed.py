"""Flat loss terms to (B, T) and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_offpolicy.trl.async_grpo.packed import PackedRows


def test_tool_output_is_a_gap() -> None:
    """Sample 0 has trained tokens at 4, 5 and 8 (6 and 7 are a tool's), sample 2 at 2; sample 1 has none."""
    layout = PackedRows.of(torch.tensor([0, 0, 0, 2]), torch.tensor([4, 5, 8, 2]))
    assert layout.shape == (3, 5)
    assert layout.mask.tolist() == [[True, True, False, False, True], [False] * 5, [True, False, False, False, False]]
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    padded = layout.scatter(values, fill=-1.0)
    assert padded.tolist() == [[1.0, 2.0, -1.0, -1.0, 3.0], [-1.0] * 5, [4.0, -1.0, -1.0, -1.0, -1.0]]
    assert layout.by_sample(torch.tensor([7, 7, 7, 9]), fill=-1).tolist() == [7, -1, 9]
    (padded * torch.arange(15).view(3, 5)).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [0.0, 1.0, 4.0, 10.0]


@given(data=st.data())
def test_there_and_back(data: st.DataObject) -> None:
    """Any samples with any trained positions; the order within the flat list is TRL's, sample after sample."""
    samples = data.draw(st.lists(st.sets(st.integers(0, 20), min_size=1, max_size=6), min_size=1, max_size=5))
    rows = torch.tensor([row for row, places in enumerate(samples) for _ in places])
    positions = torch.tensor([place for places in samples for place in sorted(places)])
    layout, values = PackedRows.of(rows, positions), torch.arange(len(rows)).float() + 1
    padded = layout.scatter(values, fill=0.0)
    assert torch.equal(layout.gather(padded), values)
    assert int((padded != 0).sum()) == len(rows) == int(layout.mask.sum())
    assert layout.mask[:, 0].all() and layout.mask.any(0)[-1]


def test_layouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one term"):
        PackedRows.of(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long))
    with pytest.raises(ValueError, match="two terms have the same"):
        PackedRows.of(torch.tensor([0, 0]), torch.tensor([3, 3]))
