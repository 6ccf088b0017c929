"""One optimizer step of every policy loss through ``OffPolicyGRPOTrainer``, named in YAML form."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY
from trainer_runs import Engine, records

from trl_offpolicy.presets.parsing import LOSS_TYPES
from trl_offpolicy.trainer import OffPolicyGRPOTrainer

Build = Callable[..., OffPolicyGRPOTrainer]

NEEDED: dict[str, dict[str, Any]] = {
    "dispo": {
        "correct_threshold": 0.5,
        "low_correct": 0.5,
        "high_correct": 3.0,
        "low_incorrect": 0.2,
        "high_incorrect": 0.2,
    },
    "dro": {"beta": 0.1},
    "espo": {"vocab_size": len(VOCABULARY)},
    "oapl": {"beta": 0.1, "scope": "micro_batch"},
    "quatro": {"scope": "micro_batch"},
}
"""Options without a default, and those without which the trainer's batch does not do."""

HOLDS_SAMPLING = ("ppo_is", "topr", "oapl")


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_one_step_of_every_loss(build: Build, name: str) -> None:
    loss = LOSS_TYPES[name]
    trainer = build(
        Engine(noise=0.3),
        offpolicy={
            "preset": "measure" if name in HOLDS_SAMPLING else "paper/tis",
            "objective": {
                "policy_loss": {"type": name, **NEEDED.get(name, {})},
                "aggregation": loss.aggregation,  # type: ignore[attr-defined]
            },
        },
        max_steps=1,
        scale_rewards="none",
    )
    assert type(trainer.objective.policy_loss) is loss
    before = {key: value.clone() for key, value in trainer.model.named_parameters()}
    trainer.train()
    (row,) = records(trainer)
    assert math.isfinite(row["loss"]) and row["grad_norm"] > 0
    assert math.isfinite(row["offpolicy/loss/policy"])
    assert any(not torch.equal(before[key], value) for key, value in trainer.model.named_parameters())


def test_the_losses_differ_where_the_policy_has_moved(build: Build) -> None:
    """Two optimizer steps on one generation: the second step's loss is each objective's own."""
    seen = {}
    for name in ("ppo_clip", "gspo", "gmpo", "cispo", "m2po", "dppo", "aspo"):
        policy_loss = {"type": name}
        spec = {"preset": "measure", "objective": {"policy_loss": policy_loss, "aggregation": "seq_mean_token_mean"}}
        trainer = build(Engine(), offpolicy=spec, steps_per_generation=4, max_steps=2, learning_rate=3e-2)
        trainer.train()
        seen[name] = records(trainer)[1]["loss"]
    assert len(set(seen.values())) == len(seen), seen


def test_a_kl_term_of_the_objective_has_its_reference_model(build: Build) -> None:
    """TRL loads one only with beta, which the KL term sets."""
    kl = {"coef": 0.1, "estimator": "k3+"}
    trainer = build(Engine(noise=0.3), offpolicy={"objective": {"kl": kl}})
    trainer.train()
    assert trainer.args.beta == trainer.beta == 0.1
    assert trainer.objective.kl.estimator == "k3+"
    rows = records(trainer)
    assert rows[0]["offpolicy/loss/kl"] == pytest.approx(0.0, abs=1e-6)
    assert rows[1]["offpolicy/loss/kl"] > 1e-5
