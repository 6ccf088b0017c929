"""The TRL trainer and the Lightning module on the same rollouts: both sides of a comparison, and its limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from lightning_runs import Played, Watch, data, module, trainer
from tiny_models import score_last_word
from torch import Tensor
from trainer_runs import TIMES, Engine, records
from transformers import TrainerCallback

from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

STEPS, RATE = 3, 0.02
GRADIENT_LIMIT, METRIC_LIMIT, MOMENT_LIMIT = 1e-4, 2e-4, 2e-3
"""Largest differences allowed, absolute plus relative. The two sides put the rows into other batches, so float32
products differ in their last digits, by an amount that depends on the CPU. A log-prob of up to 16 nats is known to
1e-6, three optimizer steps carry that on, and a product over a response of six tokens squares and sums it: seen on
AVX-512, on AVX2 and under ``--other-digits`` are 2.5e-6 in gradients, 1.1e-5 in metrics. Chi-square, interval widths
and the squared norm of the gradient are differences of large moments, with 4.3e-5. Each limit is 20 times that or
more, and a hundredth of what a wrong sign gives (test_equality.py)."""
LARGE_MOMENTS = ("chi2_token", "chi2_sequence", "_ci95", "gradient/signal", "gradient/noise", "grad_norm")
# of one length: TRL counts positions from the padding on, this kit from the first token, as engines do.
PROMPTS = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(32)]})
NOT_COMPARED = {"step", "epoch", *TIMES}
ENGINE_ONLY = {f"offpolicy/rollout/sync_{name}" for name in ("seconds", "bytes", "changed_fraction")}
ENGINE_ONLY |= {"offpolicy/rollout/retokenised_fraction"}  # of a rollout_func it is not known what its engine sampled


def keep_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both trainers then split a generation batch in the order of its rows; each draws an order of its own otherwise.

    Several optimizer steps on one generation, and losses that are not a sum over rows, cannot be compared without this.
    """
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda rows: rows)
    monkeypatch.setattr(torch, "randperm", lambda count, **_: torch.arange(count))


def trl_side(make_args: Any, fresh_model: Any, tokenizer: Any, *, kind: str = "llama") -> Any:
    """``build(rollout_func, **options)``: TRL's side, with the optimizer of both."""
    same = {
        "optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "max_steps": STEPS,
        "max_grad_norm": 1e9, "shuffle_dataset": False,
    }  # fmt: skip

    def build(rollout_func: Any, **options: Any) -> OffPolicyGRPOTrainer:
        return OffPolicyGRPOTrainer(
            fresh_model(kind),
            score_last_word,
            make_args(**{**same, **options}),
            train_dataset=PROMPTS,
            processing_class=tokenizer,
            rollout_func=rollout_func,
        )

    return build


class WatchTRL(TrainerCallback):
    """Gradients and weights of every optimizer step."""

    def __init__(self, model: Any) -> None:
        self.model, self.gradients, self.weights = model, [], []

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        named = self.model.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.weights.append({name: p.detach().clone() for name, p in self.model.named_parameters()})


def run_trl(
    build: Any, *, engine: Engine | None = None, prepare: Callable[[Any], None] | None = None, **options: Any
) -> tuple[WatchTRL, list[dict[str, Any]], list[dict[str, Any]]]:
    """What TRL saw and logged, and the rollouts. ``prepare`` may change the built trainer."""
    engine, calls = engine or Engine(shift=0.2, noise=0.3), []

    def rollouts(prompts: list[str], owner: Any) -> dict[str, Any]:
        calls.append(engine(prompts, owner))
        return {name: value for name, value in calls[-1].items() if name != "routed_experts"}

    ours = build(rollouts, **{"offpolicy": "paper/tis", **options})
    if prepare is not None:
        prepare(ours)
    watch = WatchTRL(ours.model)
    ours.add_callback(watch)
    ours.train()
    return watch, records(ours), calls


def run_lightning(
    folder: Path, calls: list[Any], accumulation: int, options: Any, sizes: Any, *, steps: int = STEPS,
    rate: float = RATE, engine: Played | None = None, prompts: Any = PROMPTS, **flags: Any,
) -> tuple[Watch, Played]:  # fmt: skip
    """What Lightning saw and logged on the same rollouts. ``engine`` plays them back, if not a plain ``Played``."""
    engine, watch = engine or Played(calls), Watch()
    fit = trainer(folder, callbacks=[watch], max_steps=steps, accumulate_grad_batches=accumulation, **flags)
    settings = {"correction": "paper/tis", **options}
    fit.fit(module(engine, optimizer=partial(torch.optim.SGD, lr=rate), **settings), data(prompts, **sizes))
    return watch, engine


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference, absolute plus relative to the largest entry of all, as in test_trainer_parity."""
    assert one.keys() == other.keys()
    largest = max(float(value.abs().max()) for value in other.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / (1 + largest)


def assert_same_numbers(ours: dict[str, float], theirs: dict[str, Any]) -> None:
    apart = (set(ours) ^ set(theirs)) - NOT_COMPARED - ENGINE_ONLY
    assert not apart, sorted(apart)
    assert sum(key.startswith("offpolicy/") for key in theirs) > 60
    for key in set(ours) & set(theirs) - NOT_COMPARED:
        limit = MOMENT_LIMIT if any(part in key for part in LARGE_MOMENTS) else METRIC_LIMIT
        assert ours[key] == pytest.approx(theirs[key], rel=limit, abs=limit), key
