"""The model of the attribution's tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny model whose context matters: its weights are larger than at random."""
    found = tiny_model().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in found.model.layers:
            for weight in (layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return found
