"""The CPU tricks give the numbers of the plain operations: one block of rows or many, bytes for booleans."""

import pytest
import torch

import trl_offpolicy as op
from trl_offpolicy.functional import _fast
from trl_offpolicy.functional._fast import any_true, as_float, both, count_true, row_blocks

CORRECTION = op.Correction(
    weight=op.TruncateWeight(max_weight=1.3),
    keep=(op.RatioBand(level="sequence_mean", low=0.9, high=1.2), op.RatioBand(level="token", low=0.5, high=2.0)),
)


def batch():
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(7, 5, generator=generator) * 2
    sampling = old + 0.3 * torch.randn(7, 5, generator=generator)
    sampling[2, 1] = float("nan")
    return op.PolicyBatch(
        per_token_logps=old + 0.1,
        old_per_token_logps=old,
        sampling_per_token_logps=sampling,
        completion_mask=torch.arange(5) < torch.tensor([5, 0, 3, 1, 5, 4, 2])[:, None],
        advantages=torch.ones(7),
    )


@pytest.mark.parametrize("tokens", [1, 9, 10, 34])  # one row a block, one, two, six of seven
def test_many_blocks_are_one(tokens, monkeypatch):
    whole = CORRECTION(batch())
    monkeypatch.setitem(_fast.BLOCK_TOKENS, "cpu", tokens)

    parts = CORRECTION(batch())

    assert torch.equal(parts.weights, whole.weights)
    assert torch.equal(parts.keep_mask, whole.keep_mask)
    assert parts.stats.compute() == pytest.approx(whole.stats.compute(), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("rows", "length"), [(0, 4), (1, 1), (7, 3), (3, 10**6)])
def test_blocks_cover_every_row_once(rows, length):
    slices = list(row_blocks(torch.Size([rows, length]), torch.device("cpu")))

    assert [row for one in slices for row in range(rows)[one]] == list(range(rows))
    assert len(slices) >= 1


@pytest.mark.parametrize("shape", [(0, 3), (4, 1), (5, 6)])
def test_boolean_helpers_are_what_torch_says(shape):
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(shape, generator=generator) < 0.4
    rows = torch.rand(shape[0], 1, generator=generator) < 0.5

    assert torch.equal(as_float(mask), mask.float())
    assert torch.equal(count_true(mask), mask.sum(-1).float())
    assert torch.equal(any_true(mask), mask.any(-1))
    assert torch.equal(any_true(mask, keepdim=True), mask.any(-1, keepdim=True))
    assert torch.equal(both(mask, rows), mask & rows)
    assert torch.equal(both(mask.T, mask.T), mask.T)
