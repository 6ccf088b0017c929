"""Fifty steps in bfloat16: the Lightning module goes where the TRL trainer goes, as far as the precision can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import both_trainers
import pytest
import torch
from both_trainers import run_lightning, run_trl, trl_side
from tiny_models import tiny_model

STEPS, RATE = 50, 0.002
MIXED, WEIGHTS, FULL = "bf16-mixed", "bf16 weights", "float32"


def moved(weights: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """(parameters,) how far the weights went from the first step to the last."""
    first, last = weights[0], weights[-1]
    return torch.cat([(last[name].float() - first[name].float()).flatten() for name in first])


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Distance of two movements, relative to the second."""
    return float((one - other).norm() / other.norm())


@pytest.mark.slow
def test_fifty_steps(make_args: Any, fresh_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    found = {}
    for case in (FULL, MIXED, WEIGHTS):
        dtype = torch.bfloat16 if case == WEIGHTS else torch.float32
        build = trl_side(make_args, lambda kind: fresh_model(kind).to(dtype), tokenizer)
        theirs, rows, calls = run_trl(
            build, gradient_accumulation_steps=1, max_steps=STEPS, learning_rate=RATE, bf16=case == MIXED
        )
        options = {"model": tiny_model().to(dtype)}
        watch, _ = run_lightning(
            tmp_path,
            calls,
            1,
            options,
            {},
            steps=STEPS,
            rate=RATE,
            precision="bf16-mixed" if case == MIXED else "32-true",
        )
        found[case] = (moved(theirs.weights), moved(watch.weights), rows, watch.logs)
        print(case, gap(found[case][1], found[case][0]), gap(found[case][0], found[FULL][0]))
        for key in ("loss", "offpolicy/mismatch/kl_k3", "entropy", "grad_norm"):
            x = torch.tensor([row[key] for row in rows])
            y = torch.tensor([row[key] for row in watch.logs])
            print("  ", key, float((x - y).abs().max()), float((x - y).mean()), float(x.abs().mean()))
