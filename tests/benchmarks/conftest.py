"""A tiny world for the tests of the fault suite."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "faults"))
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17], [18, 19, 20, 21, 22], [23, 24, 25, 26], [27, 28, 29]]


@pytest.fixture(scope="module")
def world() -> Any:
    """A tiny Llama with random updates in place of trained ones."""
    from weights import VERSIONS, Updates, Weights
    from worlds import World

    model = tiny_model("llama", seed=3, max_position_embeddings=128).eval()
    chance = torch.Generator().manual_seed(0)

    def moved(scale: float) -> dict[str, Any]:
        return {name: scale * p.std() * torch.randn(p.shape, generator=chance)
                for name, p in model.named_parameters() if p.dim() == 2}  # fmt: skip

    step = moved(0.05)
    updates = Updates([{n: k * v for n, v in step.items()} for k in range(1, VERSIONS + 1)], moved(0.2))
    return World("tiny", 0, Weights(model, updates), [list(ids) for ids in PROMPTS], [1], 0)
