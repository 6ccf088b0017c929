"""On a GPU: no preset waits for the device, and all give what they give on the CPU. Not part of ``make test``.

``TEST_DEVICE=cpu`` rehearses on a CPU what does not need CUDA itself.
"""

import os
from dataclasses import replace

import pytest
import torch
from rollouts.plain_and_shared import KINDS, assert_equal, both, model_of, rows_of
from transformers.utils import is_flash_attn_2_available

from trl_offpolicy import PolicyBatch, presets
from trl_offpolicy.engines.weights.files import write_adapter, write_weights

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("TEST_DEVICE", "cuda")


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


def rows_there(**how):
    return {name: value.to(DEVICE) for name, value in rows_of(3, 4, prompt=37, length=21, **how).items()}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence_has_the_log_probs_and_gradient_of_the_plain_path(kind, attention, mixed):
    model = model_of(kind, attn_implementation=attention).to(DEVICE)
    for shared in (True, False):
        assert_equal(model, rows_there(mixed=mixed), shared=shared, counted=True, limit=2e-5)


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence_in_bfloat16_is_as_exact_as_the_plain_path(kind, attention):
    if attention != "sdpa" and not is_flash_attn_2_available():
        pytest.skip("flash-attn is not installed")
    rows = rows_there()
    (exact, exact_gradient), _ = both(model_of(kind).to(DEVICE), rows, counted=True)
    model = model_of(kind, attn_implementation=attention).to(DEVICE, torch.bfloat16)
    (plain, plain_gradient), (shared, shared_gradient) = both(model, rows, counted=True)
    far = [float((logps.float() - exact).abs().max()) for logps in (plain, shared)]
    assert far[1] < 2 * far[0] + 1e-3
    far = [float((gradient.float() - exact_gradient).norm()) for gradient in (plain_gradient, shared_gradient)]
    assert far[1] < 2 * far[0]
