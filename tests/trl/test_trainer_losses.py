"""One optimizer step of every policy loss through ``OffPolicyGRPOTrainer``, named in YAML form."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from trainer_runs import Engine, records
from trainer_specs import spec_of

from trl_offpolicy.presets.parsing import LOSS_TYPES
from trl_offpolicy.trl.checks import stages_of
from trl_offpolicy.trl.config import resolve_preset
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

Build = Callable[..., OffPolicyGRPOTrainer]


def test_every_loss_gives_a_gradient(build: Build, make_args: Any) -> None:
    """One trainer; the loss is changed as a configuration would, batchwide decisions included."""
    presets = {
        name: resolve_preset(make_args(offpolicy=spec_of(name)), has_rollout_func=True) for name in LOSS_TYPES
    }  # before the trainer: transformers' arguments reset the state of accelerate
    trainer = build(Engine(noise=0.3), scale_rewards="none")
    trainer.current_gradient_accumulation_steps = 1  # transformers sets it in its training loop
    prompts = next(iter(trainer.get_train_dataloader()))
    for name, preset in presets.items():
        trainer.objective, trainer._stages = preset.objective, stages_of(trainer.args, preset)
        assert type(trainer._current_objective().policy_loss) is LOSS_TYPES[name]

        trainer.model.zero_grad()
        value = trainer._compute_loss(trainer.model, trainer._generate_and_score_completions(prompts))
        value.backward()

        gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        assert value.isfinite() and all(gradient.isfinite().all() for gradient in gradients), name
        assert any(gradient.any() for gradient in gradients), name


@pytest.mark.integration
@pytest.mark.parametrize("name", ["ppo_clip", "quatro"])
def test_one_step_is_logged(build: Build, name: str) -> None:
    trainer = build(Engine(noise=0.3), offpolicy=spec_of(name), max_steps=1, scale_rewards="none")
    before = {key: value.clone() for key, value in trainer.model.named_parameters()}
    trainer.train()
    (row,) = records(trainer)
    assert math.isfinite(row["loss"]) and row["grad_norm"] > 0
    assert math.isfinite(row["offpolicy/loss/policy"])
    assert any(not torch.equal(before[key], value) for key, value in trainer.model.named_parameters())


@pytest.mark.integration
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
