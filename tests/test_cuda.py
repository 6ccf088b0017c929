"""On a GPU: no preset waits for the device, and all give what they give on the CPU. Not part of ``make test``."""

from dataclasses import replace

import pytest
import torch

from trl_offpolicy import PolicyBatch, presets
from trl_offpolicy.engines.weights.files import write_adapter, write_weights

pytestmark = pytest.mark.gpu


def batch(device, rows=8, length=64):
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, length, generator=generator) * 3
    fields = {
        "per_token_logps": old + 0.02 * torch.randn(rows, length, generator=generator),
        "old_per_token_logps": old,
        "sampling_per_token_logps": old + 0.05 * torch.randn(rows, length, generator=generator),
        "completion_mask": torch.arange(length) < torch.randint(1, length, (rows, 1), generator=generator),
        "advantages": torch.randn(rows, generator=generator),
        "rewards": torch.rand(rows, generator=generator),
        "group_rewards": (torch.rand(rows, 4, generator=generator) > 0.3).float(),
        "entropies": torch.rand(rows, length, generator=generator),
        "ref_per_token_logps": old + 0.1 * torch.randn(rows, length, generator=generator),
        "group_ids": torch.arange(rows) // 4,
        "policy_versions": torch.zeros(rows, dtype=torch.long),
    }
    return PolicyBatch(**{name: value.to(device) for name, value in fields.items()}, current_version=1)


@pytest.mark.parametrize("name", presets.names())
def test_nothing_waits_for_the_device(name):
    objective = presets.get(name).objective
    here, there = batch("cpu"), batch("cuda")
    current = there.per_token_logps.requires_grad_()
    objective(there)  # first calls allocate and choose kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = objective(replace(there, per_token_logps=current))
        out.loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = objective(here)
    assert torch.equal(out.keep_mask.cpu(), expected.keep_mask)
    torch.testing.assert_close(out.weights.cpu(), expected.weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.loss.detach().cpu(), expected.loss, rtol=1e-5, atol=1e-6)


def test_weights_of_a_device_are_written_and_compared(tmp_path):
    weights = {"a": torch.rand(8, 8, device="cuda"), "b": torch.ones(4, device="cuda", dtype=torch.bfloat16)}
    assert write_adapter(tmp_path / "adapter", {"r": 8}, weights) > 0
    assert write_weights(tmp_path / "whole", iter(weights.items())) > 0
