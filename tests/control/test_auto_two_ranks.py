"""The choice of the correction on two processes with different rows: both choose the same, by the rows of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks

import trl_offpolicy as op
from trl_offpolicy.control.auto import AutoSession
from trl_offpolicy.presets.preset import auto_preset


def rows(noise: float, seed: int, ranks: tuple[int, ...]) -> op.PolicyBatch:
    """16 responses of each rank; only rank 0 has a mismatch."""
    parts: list[torch.Tensor] = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(10 * seed + rank)
        spread = noise if rank == 0 else 0.0
        parts.append(spread * torch.randn(16, 24, generator=generator) - spread**2 / 2)
    log_ratio = torch.cat(parts)
    sampling = torch.full_like(log_ratio, -1.0)
    return op.PolicyBatch(
        per_token_logps=sampling + log_ratio,
        sampling_per_token_logps=sampling,
        completion_mask=torch.ones_like(log_ratio).bool(),
        advantages=torch.ones(len(log_ratio)),
        group_ids=torch.cat([torch.arange(16) // 4 + 4 * rank for rank in ranks]),
    )


def choose(ranks: tuple[int, ...]) -> dict[str, Any]:
    session = AutoSession(auto_preset(patience=2))
    session.decide_first(rows(0.0, 0, ranks), 0)
    session.end_generation(1)
    for step in (2, 3, 4):
        session.observe(rows(0.6, step, ranks))
        session.end_generation(step)
    return {"state": session.state_dict(), "metrics": session.metrics()}


def run(rank: int) -> dict[str, Any]:
    return choose((rank,))


@pytest.mark.integration
def test_both_ranks_choose_the_same_as_one_process_with_all_rows(tmp_path: Path) -> None:
    first, second = two_ranks.launch(__file__, run, tmp_path)
    assert first == second  # to the last digit: a decision may hang on it
    together = choose((0, 1))
    assert first["state"]["choice"] == together["state"]["choice"] != "none"
    assert first["metrics"] == pytest.approx(together["metrics"], rel=1e-6, abs=1e-9)


if __name__ == "__main__":
    two_ranks.join(run)
