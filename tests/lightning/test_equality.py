"""The TRL trainer and the Lightning module on the same rollouts: same loss, gradients, metrics and weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from both_trainers import ENGINE_ONLY, NOT_COMPARED, WatchTRL, distance
from datasets import Dataset
from lightning_runs import Played, Watch, data, module, trainer
from tiny_models import score_last_word
from trainer_runs import Engine, records

from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

STEPS, RATE = 3, 0.02
GRADIENT_LIMIT, METRIC_LIMIT, MOMENT_LIMIT = 1e-4, 2e-4, 2e-3
"""Largest differences allowed, absolute plus relative. The two sides put the rows into other batches, so float32
products differ in their last digits, by an amount that depends on the CPU. A log-prob of up to 16 nats is known to
1e-6, three optimizer steps carry that on, and a product over a response of six tokens squares and sums it: seen on
AVX-512, on AVX2 and under ``--other-digits`` are 2.5e-6 in gradients, 1.1e-5 in metrics. Chi-square, interval widths
and the squared norm of the gradient are differences of large moments, with 4.3e-5. Each limit is 20 times that or
more, and a hundredth of what a wrong sign gives (below)."""
LARGE_MOMENTS = ("chi2_token", "chi2_sequence", "_ci95", "gradient/signal", "gradient/noise", "grad_norm")
# of one length: TRL counts positions from the padding on, this kit from the first token, as engines do.
PROMPTS = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(32)]})

BAND = {"type": "ratio_band", "level": "sequence_mean", "low": 0.7, "high": 1.4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # TRL's options, the module's, the data's
    "aligned": ({"gradient_accumulation_steps": 1}, {}, {}),
    "accumulated": ({"gradient_accumulation_steps": 2}, {}, {"steps_per_generation": 2}),
    "several_iterations": ({"gradient_accumulation_steps": 1, "num_iterations": 2}, {}, {"num_iterations": 2}),
    "kl": (
        {"gradient_accumulation_steps": 1, "beta": 0.1},
        {"objective": {"kl": {"coef": 0.1, "ratio_weighted": True}}},
        {},
    ),
    "sequences": (
        {"gradient_accumulation_steps": 2, "loss_type": "grpo"},
        {"objective": {"aggregation": "seq_mean_token_mean"}},
        {},
    ),
    "wide_scope": (
        {
            "gradient_accumulation_steps": 1,
            "offpolicy": {
                "preset": "paper/tis",
                "correction": {"keep": [BAND, {"type": "group_rejection"}], "normalize": "kept"},
            },
        },
        {},
        {},
    ),
    "other_advantages": (
        {"gradient_accumulation_steps": 1, "offpolicy": {"preset": "paper/tis", "advantages": "rloo"}}, {}, {},
    ),
    "advantages_that_read_old": (  # no part of the correction is decided early, but old is scored
        {
            "gradient_accumulation_steps": 1,
            "offpolicy": {"preset": "paper/tis", "advantages": "optimal_token_baseline"},
        }, {}, {},
    ),
}  # fmt: skip


@pytest.fixture
def build(make_args: Any, fresh_model: Any, tokenizer: Any) -> Any:
    """``build(rollout_func, **options)``: TRL's side, with the optimizer of both."""
    same = {
        "optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "max_steps": STEPS,
        "max_grad_norm": 1e9, "shuffle_dataset": False,
    }  # fmt: skip

    def trl(rollout_func: Any, **options: Any) -> OffPolicyGRPOTrainer:
        return OffPolicyGRPOTrainer(
            fresh_model(),
            score_last_word,
            make_args(**same, **options),
            train_dataset=PROMPTS,
            processing_class=tokenizer,
            rollout_func=rollout_func,
        )

    return trl


def run_trl(build: Any, **options: Any) -> tuple[WatchTRL, list[dict[str, Any]], list[dict[str, Any]]]:
    """What TRL saw and logged, and the rollouts."""
    engine, calls = Engine(shift=0.2, noise=0.3), []

    def rollouts(prompts: list[str], owner: Any) -> dict[str, Any]:
        calls.append(engine(prompts, owner))
        return calls[-1]

    ours = build(rollouts, **{"offpolicy": "paper/tis", **options})
    watch = WatchTRL(ours.model)
    ours.add_callback(watch)
    ours.train()
    return watch, records(ours), calls


def run_lightning(folder: Path, calls: list[Any], accumulation: int, options: Any, sizes: Any) -> tuple[Watch, Played]:
    engine, watch = Played(calls), Watch()
    steps = {"max_steps": STEPS, "accumulate_grad_batches": accumulation}
    fit = trainer(folder, callbacks=[watch], **steps)
    settings = {"correction": "paper/tis", **options}
    fit.fit(module(engine, optimizer=partial(torch.optim.SGD, lr=RATE), **settings), data(PROMPTS, **sizes))
    return watch, engine


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_metrics_and_weights_are_those_of_trl(case: str, build: Any, tmp_path: Path) -> None:
    options, ours, sizes = CASES[case]
    theirs, rows, calls = run_trl(build, **options)
    settings = {"correction": options.get("offpolicy", "paper/tis"), **ours}
    watch, engine = run_lightning(tmp_path, calls, options["gradient_accumulation_steps"], settings, sizes)

    assert engine.prompts == [call["prompt_ids"] for call in calls]
    assert len(watch.logs) == len(rows) == STEPS
    assert max(float(g.abs().max()) for g in theirs.gradients[0].values()) > 1e-2  # something is compared
    for step in range(STEPS):
        assert distance(watch.gradients[step], theirs.gradients[step]) < GRADIENT_LIMIT
        assert distance(watch.weights[step], theirs.weights[step]) < GRADIENT_LIMIT
        assert_same_numbers(watch.logs[step], rows[step])


def assert_same_numbers(ours: dict[str, float], theirs: dict[str, Any]) -> None:
    assert set(ours) - ENGINE_ONLY - NOT_COMPARED == set(theirs) - NOT_COMPARED
    assert sum(key.startswith("offpolicy/") for key in theirs) > 60
    for key in set(theirs) - NOT_COMPARED:
        limit = MOMENT_LIMIT if any(part in key for part in LARGE_MOMENTS) else METRIC_LIMIT
        assert ours[key] == pytest.approx(theirs[key], rel=limit, abs=limit), key


def test_a_flipped_sign_of_the_advantage_is_seen(build: Any, tmp_path: Path) -> None:
    """The comparison above is not satisfied by gradients of the right size alone."""
    theirs, _, calls = run_trl(build, gradient_accumulation_steps=1)
    flipped = {"reward_weights": [-1.0]}
    watch, _ = run_lightning(tmp_path, calls, 1, flipped, {})
    assert distance(watch.gradients[0], theirs.gradients[0]) > 1e-2
