"""Fifty steps in 16 bits: the Lightning module goes where the TRL trainer goes, as far as the precision can tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from both_trainers import run_lightning, run_trl, trl_side
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_runs import OwnMismatch, Rows, Watch, data, module, trainer
from tiny_models import tiny_model

from lightning_module import generation
from trl_offpolicy.rollouts.scoring import sequence_logps

STEPS, RATE = 50, 0.002
FULL, MIXED, WEIGHTS = "float32", "bf16-mixed", "bf16 weights"


def moved(weights: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """(parameters,) how far the weights went from the first step to the last."""
    first, last = weights[0], weights[-1]
    return torch.cat([(last[name].float() - first[name].float()).flatten() for name in first])


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Distance of two movements, relative to the second."""
    return float((one - other).norm() / other.norm())


def test_numbers_of_the_engine_stay_float32_under_bf16_true(tmp_path: Path) -> None:
    """Lightning makes bfloat16 the default of new tensors there: log-probs would be rounded, a mismatch of its own."""
    engine, rows = OwnMismatch(noise=0.1), Rows()
    owner = trainer(tmp_path, callbacks=[rows], max_steps=1, precision="bf16-true")
    owner.fit(module(engine, correction="paper/tis"), data(micro_batch_size=8))
    batch = rows.batches[0]
    floats = {name: value.dtype for name, value in batch.items() if getattr(value, "is_floating_point", bool)()}
    assert floats["sampling_per_token_logps"] == floats["rewards"] == floats["advantages"] == torch.float32
    said = torch.tensor(engine.calls[0]["logprobs"][0])
    assert batch["sampling_per_token_logps"][0, : len(said)].tolist() == said.tolist()
    assert torch.get_default_dtype() == torch.float32


class Answers(OwnMismatch):
    """Answers the probe."""

    def score(self, ids: Sequence[Sequence[int]]) -> list[list[float]]:
        return [self.words._score(self.source.model, row[:1], row[1:]) for row in ids]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_sync_is_proved_in_the_precision_of_training(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watched(*args: Any, **options: Any) -> list[list[float]]:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_default_dtype()))
        return sequence_logps(*args, **options)

    monkeypatch.setattr(generation, "sequence_logps", watched)
    owner = trainer(tmp_path, max_steps=1, precision=precision)
    owner.fit(module(Answers(), sync_check=True), data(micro_batch_size=8))
    assert set(seen) == {(precision == "bf16-mixed", torch.float32)}


@pytest.mark.slow
def test_fifty_steps(make_args: Any, fresh_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Two trainers that round independently are sqrt(2) times as far apart as one of them is from float32."""
    movements: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for case, dtype in ((FULL, torch.float32), (MIXED, torch.float32), (WEIGHTS, torch.bfloat16)):

        def in_dtype(kind: str, dtype: torch.dtype = dtype) -> Any:
            return fresh_model(kind).to(dtype)

        options = {"max_steps": STEPS, "learning_rate": RATE, "bf16": case == MIXED}
        theirs, rows, calls = run_trl(
            trl_side(make_args, in_dtype, tokenizer), gradient_accumulation_steps=1, **options
        )
        flags = {"steps": STEPS, "rate": RATE, "precision": MIXED if case == MIXED else "32-true"}
        ours, _ = run_lightning(tmp_path, calls, 1, {"model": tiny_model().to(dtype)}, {}, **flags)
        movements[case] = moved(ours.weights), moved(theirs.weights)
        for key in ("loss", "entropy", "offpolicy/mismatch/kl_k1"):  # no bias: 4 standard errors of the mean difference
            pairs = [(log[key], row[key]) for log, row in zip(ours.logs, rows, strict=True)]
            differences = torch.tensor(pairs, dtype=torch.float64).diff(dim=1).flatten()
            assert abs(differences.mean()) < 4 * differences.std() / STEPS**0.5 + 1e-6, (case, key)
    exact = movements[FULL][1]
    assert gap(*movements[FULL]) < 1e-3  # seen: 2e-5
    for case in (MIXED, WEIGHTS):  # seen: 0.11 with 0.09 to float32, and 0.35 with 0.77
        assert gap(*movements[case]) < 2 * gap(movements[case][1], exact), case


@pytest.mark.slow
def test_float16_with_a_scaled_loss(make_args: Any, fresh_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Lightning takes ``16-mixed`` on a GPU alone, so its plugin is handed over: autocast and the scaler work here."""
    options = {"max_steps": STEPS, "learning_rate": RATE, "bf16": False}
    theirs, _, calls = run_trl(trl_side(make_args, fresh_model, tokenizer), gradient_accumulation_steps=1, **options)

    def run(scale: float) -> Watch:
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))
        model = {"model": tiny_model()}
        return run_lightning(tmp_path, calls, 1, model, {}, steps=STEPS, rate=RATE, plugins=[plugin])[0]

    fitting, too_large = run(2.0**10), run(2.0**24)
    assert gap(moved(fitting.weights), moved(theirs.weights)) < 0.05  # seen: 0.02; bfloat16: 0.09
    # A step whose scaled gradient overflows is left out, and nothing else notices.
    left_out = [step for step, log in enumerate(too_large.logs) if not math.isfinite(log["grad_norm"])]
    assert 5 < len(left_out) < STEPS / 2
    for step in left_out[1:]:
        before, after = too_large.weights[step - 1 : step + 1]
        assert all(torch.equal(before[name], after[name]) for name in after)
    last = max(set(range(STEPS)) - set(left_out))
    assert all(math.isfinite(value) for value in too_large.logs[last].values())
