"""``Correction(compiled=True)``: one graph of torch.compile, the numbers of the plain call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from property_cases import CORRECTIONS
from torch._dynamo.utils import counters
from trainer_runs import TIMES, Engine, records

import trl_offpolicy as op
from trl_offpolicy.trl.config import resolve_preset

pytestmark = pytest.mark.integration

ROWS, LENGTH = 8, 40
TYPICAL = op.Correction(
    weight=op.TruncateWeight(max_weight=1.5),
    keep=(op.RatioBand(low=0.9, high=1.1), op.OutlierVeto(low=0.3, high=3.0)),
    measure=("mismatch", "kept"),
)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def batch_of(
    seed: int, *, rows: int = ROWS, length: int = LENGTH, noise: float = 0.4, version: int = 9
) -> op.PolicyBatch:
    """Every field that a correction reads; NaN on padding, and three tokens whose log-probs are not finite."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=random)
    lengths[0] = length
    mask = torch.arange(length).expand(rows, -1) < lengths
    old = -3 * torch.rand(rows, length, generator=random) - 0.01
    sampling, current = (old + noise * torch.randn(rows, length, generator=random) for _ in range(2))
    sampling[0, 2], old[0, 3], current[0, 4] = math.nan, -math.inf, math.inf
    return op.PolicyBatch(
        **{
            f"{name}per_token_logps": torch.where(mask, values, math.nan)
            for name, values in {"": current, "old_": old, "sampling_": sampling}.items()
        },
        completion_mask=mask,
        advantages=torch.randn(rows, generator=random),
        rewards=torch.randint(2, (rows,), generator=random).float(),
        group_ids=torch.arange(rows) // 4,
        group_rewards=torch.randint(2, (rows, 2), generator=random).float(),
        policy_versions=torch.randint(6, 10, (rows,), generator=random),
        current_version=version,
    )


def check_same(correction: op.Correction, batch: op.PolicyBatch) -> None:
    plain, compiled = correction(batch), replace(correction, compiled=True)(batch)

    assert compiled.keep_mask.dtype == torch.bool
    assert torch.equal(compiled.keep_mask, plain.keep_mask)
    torch.testing.assert_close(compiled.weights, plain.weights, rtol=1e-5, atol=1e-6)
    assert (compiled.sequence_weights is None) == (plain.sequence_weights is None)
    expected, seen = plain.stats.compute(), compiled.stats.compute()
    assert list(seen) == list(expected)
    for key, value in expected.items():
        assert seen[key] == pytest.approx(value, rel=2e-4, abs=2e-5, nan_ok=True), key


def test_one_graph_gives_the_numbers_of_the_plain_call_at_every_size_and_version() -> None:
    check_same(TYPICAL, batch_of(0))
    check_same(TYPICAL, batch_of(1, rows=12, length=LENGTH + 7, version=10))
    check_same(TYPICAL, batch_of(2, rows=4, length=LENGTH - 5, version=11))

    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # of one size, then of any


def test_a_small_mismatch_is_not_rounding_noise() -> None:
    """exp - 1, inductor's own expm1 on a CPU, would be wrong by 1e-7 in every token: more than k3 itself."""
    correction = op.Correction(measure=("mismatch",), compiled=True)
    batch = batch_of(3, rows=32, length=256, noise=1e-4)

    stats = correction(batch).stats
    log_ratio = (batch.logps("old") - batch.logps("sampling")).double()
    log_ratio = log_ratio[batch.mask & log_ratio.isfinite()]
    exact = (log_ratio.expm1() - log_ratio).mean()
    assert float(stats["mismatch/kl_k3"]) == pytest.approx(float(exact), rel=0.02)


def test_said_in_a_configuration(make_args: Callable[..., Any]) -> None:
    options = {"preset": "paper/tis", "correction": {"compiled": True}}

    correction = resolve_preset(make_args(offpolicy=options), has_rollout_func=True).correction
    assert correction is not None and correction.compiled


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_term(name: str) -> None:
    check_same(CORRECTIONS[name], batch_of(4))


@pytest.mark.slow
def test_a_trainer_learns_the_same(build: Callable[..., Any]) -> None:
    """Row scope with log-probs that carry gradient, wide scope before the split, several optimizer steps a batch."""
    late = {"type": "divergence_band", "statistic": "k3", "high": 0.05, "low": None, "ratio": "current/sampling"}
    runs = []
    for compiled in (False, True):
        correction = {"normalize": "original", "keep": [late], "compiled": compiled}
        offpolicy = {"preset": "paper/tis", "correction": correction}
        trainer = build(Engine(noise=0.3), offpolicy=offpolicy, steps_per_generation=4, max_steps=4)
        trainer.train()
        runs.append(records(trainer))

    for plain, compiled in zip(*runs, strict=True):
        for key, value in plain.items():
            if (key.startswith("offpolicy/") or key in ("loss", "grad_norm")) and key not in TIMES:
                assert compiled[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
