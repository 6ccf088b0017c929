"""The optimizer that the module makes is the one that transformers' trainer would make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

from lightning_module.optimization import decay_groups, optimizer_and_schedule

SETTINGS = {"optimizer": None, "learning_rate": 0.1, "weight_decay": 0.5, "lr_scheduler": "constant", "warmup_steps": 0}


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2))


@pytest.mark.parametrize("make", [tiny_model, gpt2])
def test_what_decays_is_what_transformers_trainer_lets_decay(make: Any) -> None:
    model = make()
    first, second = decay_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(one)] for one in first["params"]} == set(Trainer.get_decay_parameter_names(None, model)) & set(
        names.values()
    )
    assert second["weight_decay"] == 0.0 and any(
        "norm" in names[id(one)] or "ln_" in names[id(one)] for one in second["params"]
    )
    assert len(first["params"]) + len(second["params"]) == len(names)


def test_norms_stay_where_the_gradient_is_zero() -> None:
    model = tiny_model()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = optimizer_and_schedule(model, SETTINGS, total_steps=10)["optimizer"]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, value in model.named_parameters():
        factor = 1.0 if "norm" in name else 1 - 0.1 * 0.5
        assert torch.allclose(value, before[name] * factor), name


def test_frozen_parameters_are_in_no_group() -> None:
    model = tiny_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    (only,) = decay_groups(model, 0.1)
    assert len(only["params"]) == sum("q_proj" in name for name, _ in model.named_parameters())
    assert len(decay_groups(model, 0.0)) == 1
