"""Weights that never arrive are found by what adds up, and a healthy run is left alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from trl_offpolicy.engines.rounding import WeightRounding
from trl_offpolicy.engines.sync_trend import Drift, SyncTrend

TOKENS = 48


def simulated(
    seed: int, kind: str, *, noise: float, step: float, follow: float = 1.0, syncs: int = 50, growth: float = 1.0
) -> tuple[int, Drift] | None:
    """(sync, drift) of the first alarm of a run; None = no alarm.

    The trainer moves ``step`` nats a sync: all tokens alike ("uniform") or each by itself ("walk"). The engine makes
    ``follow`` of each move. Its noise stays nearly as it is from sync to sync, as that of rounded weights does, has a
    part that all tokens share, and grows to ``growth`` times its size.
    """
    draw = random.Random(seed)
    trainer = [-1.5 + draw.gauss(0, 1) for _ in range(TOKENS)]
    missing, errors = [0.0] * TOKENS, [draw.gauss(0, 1) for _ in range(TOKENS + 1)]
    trend = SyncTrend()
    for sync in range(syncs):
        moves = [0.0 if sync == 0 else step if kind == "uniform" else draw.gauss(0, step) for _ in range(TOKENS)]
        trainer = [old + move for old, move in zip(trainer, moves, strict=True)]
        missing = [old + (1 - follow) * move for old, move in zip(missing, moves, strict=True)]
        errors = [0.7 * old + 0.51**0.5 * draw.gauss(0, 1) for old in errors]
        size = noise * (1 + (growth - 1) * sync / syncs)
        engine = [
            x - lost + size * (own + 0.5 * errors[-1])
            for x, lost, own in zip(trainer, missing, errors[:-1], strict=True)
        ]
        if (drift := trend.observe(engine=engine, trainer=trainer)) is not None:
            return sync, drift
    return None


@pytest.mark.parametrize("kind", ["uniform", "walk"])
@pytest.mark.parametrize("step", [0.0, 1e-3, 1e-2, 5e-2])
@pytest.mark.parametrize("noise", [1e-6, 1e-3, 0.03])
def test_a_healthy_run_has_no_drift_even_if_its_noise_doubles(kind: str, step: float, noise: float) -> None:
    for seed in range(8):
        assert simulated(seed, kind, noise=noise, step=step, growth=2.0) is None


@pytest.mark.parametrize(
    ("kind", "noise", "step", "latest"),
    [("uniform", 1e-6, 1e-2, 15), ("walk", 1e-6, 1e-2, 25), ("uniform", 0.03, 5e-2, 25), ("walk", 1e-3, 1e-2, 30)],
)
def test_an_engine_that_follows_only_a_part_of_each_move_is_found(
    kind: str, noise: float, step: float, latest: int
) -> None:
    """Although every distance stays below four times the median of those before it, and below a fifth of a move."""
    for seed in range(5):
        found = simulated(seed, kind, noise=noise, step=step, follow=0.85)
        assert found is not None and found[0] <= latest
        assert found[1].lag == pytest.approx(0.15, abs=0.05)
        assert "15% of what" in str(found[1]) or found[1].lag != pytest.approx(0.15, abs=0.004)


def test_an_engine_that_goes_too_far_is_no_lag() -> None:
    found = simulated(0, "uniform", noise=1e-6, step=1e-2, follow=1.15)
    assert found is not None and found[1].lag is None  # it differs more and more, but nothing is missing


def test_a_part_whose_effect_has_another_direction_shows_by_its_size() -> None:
    """Each token's missing part is a fifth of its move, ahead of it as often as behind."""
    trend, found = SyncTrend(), None
    for sync in range(50):
        trainer = [0.01 * sync] * TOKENS
        engine = [x + 0.2 * x * (-1) ** token for token, x in enumerate(trainer)]
        found = found or trend.observe(engine=engine, trainer=trainer)
    assert found is not None and found.lag is None and found.grown == pytest.approx(0.2 * found.moved)


def test_a_probe_of_a_few_tokens_says_nothing() -> None:
    trend = SyncTrend()
    assert all(trend.observe(engine=[0.5 * k] * 15, trainer=[1.0 * k] * 15) is None for k in range(20))
    more = SyncTrend()
    assert any(more.observe(engine=[0.5 * k] * 16, trainer=[1.0 * k] * 16) is not None for k in range(20))


def test_a_difference_from_the_start_that_stays_is_no_drift() -> None:
    trend, draw = SyncTrend(), random.Random(0)
    gap = [draw.gauss(0, 0.1) for _ in range(TOKENS)]
    for sync in range(100):
        trainer = [-1.0 + 0.01 * sync] * TOKENS
        engine = [x + y for x, y in zip(trainer, gap, strict=True)]
        assert trend.observe(engine=engine, trainer=trainer) is None


def bf16(weight: Tensor) -> Tensor:
    return weight.bfloat16().float()


@torch.no_grad()
def trained(held: Callable[[Tensor], Tensor], *, step: float, stale: str | None = None) -> Drift | None:
    """The first drift in 50 syncs of a model whose weights all move; the engine holds them in its own way.

    The matrix named ``stale`` stays in the engine as it was at the first sync.
    """
    generator = torch.Generator().manual_seed(0)
    trainer = tiny_model(initializer_range=0.1)
    engine, trend = copy.deepcopy(trainer), SyncTrend()
    ids = torch.randint(3, 128, (4, 32), generator=generator)
    directions = [torch.randn(weight.shape, generator=generator) for weight in trainer.parameters()]

    def scores(model: torch.nn.Module) -> list[float]:
        logps = torch.log_softmax(model(ids).logits.float(), -1)[:, :-1]
        found: list[float] = logps.gather(-1, ids[:, 1:, None]).flatten().tolist()
        return found

    for sync in range(50):
        for (name, weight), kept, direction in zip(
            trainer.named_parameters(), engine.parameters(), directions, strict=True
        ):
            if sync:  # half of each step goes the same way as the others
                weight += step / 2 * (direction + torch.randn(weight.shape, generator=generator))
            if not (sync and stale and stale in name):
                kept.copy_(held(weight) if weight.dim() == 2 else weight)
        if (drift := trend.observe(engine=scores(engine), trainer=scores(trainer))) is not None:
            return drift
    return None


@pytest.mark.parametrize("held", [torch.clone, bf16, WeightRounding("fp8"), WeightRounding("int4")])
@pytest.mark.parametrize("step", [1e-4, 4e-3])
def test_an_engine_that_rounds_has_no_drift(held: Callable[[Tensor], Tensor], step: float) -> None:
    """At the large step its weights double, and the noise of rounding with them."""
    assert trained(held, step=step) is None


@pytest.mark.parametrize(
    ("held", "step", "stale"),
    [(torch.clone, 1e-4, "layers.1.mlp.up_proj"), (bf16, 1e-3, "layers.0.self_attn.v_proj")],
)
def test_one_matrix_that_never_arrives_is_found(held: Callable[[Tensor], Tensor], step: float, stale: str) -> None:
    drift = trained(held, step=step, stale=stale)
    assert drift is not None and drift.syncs < 20 and drift.grown > 0.1 * drift.moved
