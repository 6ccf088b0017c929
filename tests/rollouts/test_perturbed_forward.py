"""Noise on hidden states: what it adds, what learns its size, and when it is off."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from tiny_models import tiny_model
from torch import Tensor, nn

from trl_offpolicy.rollouts.model_parts import decoder_layers
from trl_offpolicy.rollouts.perturbed_forward import Perturbation, PerturbedForward, _rounded, parse_perturbation

IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def logps(model: Any) -> Tensor:
    found: Tensor = model(input_ids=IDS).logits.log_softmax(-1)[..., 5]
    return found


def loss_of(model: Any, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return (logps(model) * torch.linspace(-1, 1, IDS.shape[1])).sum()


def test_noise_of_the_size_of_the_hidden_state_is_added_to_the_layers_input() -> None:
    model = tiny_model(num_hidden_layers=1)
    plain = copy.deepcopy(model)
    noise = PerturbedForward(model, Perturbation(std=0.3))
    noise.learning()
    torch.manual_seed(1)
    found = model(input_ids=IDS).logits
    torch.manual_seed(1)
    hidden = plain.get_input_embeddings()(IDS)
    hidden = hidden + 0.3 * hidden.norm(dim=-1, keepdim=True) / hidden.shape[-1] ** 0.5 * torch.randn(hidden.shape)
    torch.testing.assert_close(found, plain(inputs_embeds=hidden).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_takes_its_own_scale_and_keeps_the_precision_however_it_is_called(dtype: torch.dtype) -> None:
    layer = nn.Identity()
    noise = PerturbedForward(tiny_model(), Perturbation(std=0.1))
    noise.learning()
    with torch.no_grad():
        noise._log_std[1] += 1.0
    given = torch.ones(1, 20_000, dtype=dtype)
    for place, size in ((0, 0.1), (1, 0.1 * math.e)):
        hook = noise._hook(place)
        (by_place, *rest), _ = hook(layer, (given, "mask"), {})
        _, named = hook(layer, (), {"hidden_states": given, "other": 3})
        assert rest == ["mask"] and set(named) == {"hidden_states", "other"}
        for found in (by_place, named["hidden_states"]):
            assert found.dtype == dtype
            assert (found - given).float().std().item() == pytest.approx(size, rel=0.03)


def test_it_is_off_until_it_learns_and_after() -> None:
    model = tiny_model()
    plain = logps(model)
    noise = PerturbedForward(model, Perturbation(std=0.1))
    assert torch.equal(logps(model), plain)
    noise.learning()
    one = logps(model)
    assert not torch.equal(one, plain) and not torch.equal(one, logps(model))
    noise.learning(False)
    assert torch.equal(logps(model), plain)
    noise.learning()
    noise.close()
    assert torch.equal(logps(model), plain)


def test_the_scales_learn_by_the_loss_and_each_layer_has_its_own() -> None:
    model = tiny_model()
    noise = PerturbedForward(model, Perturbation(std=0.05, learning_rate=0.01))
    noise.learning()
    before = noise._log_std.detach().clone()
    loss_of(model).backward()
    gradient = noise._log_std.grad.clone()
    for place in range(2):  # the gradient is that of the loss at the same draws
        values = []
        for side in (1, -1):
            with torch.no_grad():
                noise._log_std.copy_(before)
                noise._log_std[place] += side * 1e-2
                values.append(loss_of(model))
        torch.testing.assert_close(gradient[place], (values[0] - values[1]) / 2e-2, rtol=0.05, atol=1e-3)
    with torch.no_grad():
        noise._log_std.copy_(before)
    noise.step()
    torch.testing.assert_close(noise.std.log() - before, -0.01 * gradient.sign())  # Adam's first step
    assert noise._log_std.grad is None


def test_the_scales_are_bounded_and_stay_as_they_are_if_they_do_not_learn() -> None:
    model = tiny_model()
    noise = PerturbedForward(model, Perturbation(std=0.05, largest=0.051, learning_rate=1.0))
    noise.learning()
    noise._log_std.grad = torch.tensor([-1.0, 1.0])
    noise.step()
    assert noise.std[0].item() == pytest.approx(0.051) and noise.std[1].item() == pytest.approx(0.05 / torch.e)
    fixed = PerturbedForward(tiny_model(), Perturbation(std=0.05, learn=False))
    loss_of(model).backward()
    fixed.step()
    assert fixed.std.tolist() == pytest.approx([0.05, 0.05]) and fixed.state_dict() == {}


def test_gradients_of_ranks_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_offpolicy.rollouts.perturbed_forward.sum_ranks", lambda gradient: gradient - 2.0)
    noise = PerturbedForward(tiny_model(), Perturbation(std=0.05))
    noise._log_std.grad = torch.tensor([1.0, 1.0])
    noise.step()
    assert (noise.std > 0.05).all() and noise.stats()["offpolicy/perturbation/std"] > 0.05


def test_without_a_perturbation_nothing_happens() -> None:
    model = tiny_model()
    plain, noise = logps(model), PerturbedForward(model, None)
    noise.learning()
    assert torch.equal(logps(model), plain)
    noise.step()
    assert not noise.adds and (noise.state_dict(), noise.stats()) == ({}, {})


def test_a_checkpoint_goes_on_as_if_nothing_had_happened() -> None:
    one, two = (PerturbedForward(tiny_model(), Perturbation(std=0.05)) for _ in range(2))
    for noise in (one, two):
        noise._log_std.grad = torch.tensor([1.0, -0.2])
        noise.step()
    again = PerturbedForward(tiny_model(), Perturbation(std=0.05))
    again.load_state_dict(one.state_dict())
    for noise in (again, two):
        noise._log_std.grad = torch.tensor([0.1, 3.0])
        noise.step()
    assert torch.equal(again.std, two.std)
    again.load_state_dict({})


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_draws_the_same_noise_again(reentrant: bool) -> None:
    grads = []
    for checkpointing in (False, True):
        model = tiny_model()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.train()
        noise = PerturbedForward(model, Perturbation(std=0.1))
        noise.learning()
        loss_of(model).backward()
        grads.append((model.model.layers[0].mlp.up_proj.weight.grad, noise._log_std.grad))
    torch.testing.assert_close(*grads)


def test_what_it_takes() -> None:
    assert parse_perturbation(None) is None
    assert parse_perturbation({"std": 0.01, "learn": False}) == Perturbation(std=0.01, learn=False)
    with pytest.raises(ValueError, match="std must be positive"):
        parse_perturbation(-1.0)
    with pytest.raises(ValueError, match="perturbation must be a standard deviation or a mapping, but got 'a lot'"):
        parse_perturbation("a lot")
    assert parse_perturbation("1e-2") == Perturbation(std=0.01)
    with pytest.raises(ValueError, match="largest must be at least std"):
        parse_perturbation({"std": 0.1, "largest": 0.01})
    with pytest.raises(ValueError, match="names its layers"):
        PerturbedForward(nn.Linear(2, 2), Perturbation())


def test_a_step_that_a_gradient_scaler_skips_leaves_the_scales_finite() -> None:
    noise = PerturbedForward(tiny_model(), Perturbation(std=0.05))
    noise._log_std.grad = torch.tensor([torch.inf, 1.0])
    noise.step()
    assert noise.std.isfinite().all()
    assert noise.std[0] == pytest.approx(0.05) and noise.std[1] < 0.05


def test_bfloat16_does_not_round_small_noise_away() -> None:
    """A thousandth above 1, where bfloat16 has steps of 1/128: up or down at random, on average as drawn."""
    exact = torch.full((200_000,), 1.001)
    found = _rounded(exact, torch.bfloat16).float()
    assert set(found.tolist()) == {1.0, 1.0078125}
    assert float(found.mean()) == pytest.approx(1.001, abs=1e-4)
    below = _rounded(torch.tensor([-1.001, 0.0, torch.inf, -torch.inf, torch.nan]), torch.bfloat16).float()
    assert below[0] in (-1.0, -1.0078125) and below[1] == 0.0
    assert below[2:4].tolist() == [torch.inf, -torch.inf] and below[4].isnan()
    given = exact[:3].clone().requires_grad_()
    (_rounded(given, torch.bfloat16) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert given.grad is not None and given.grad.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("kind", ["mamba", "paligemma"])
def test_only_the_layers_of_the_language_model_are_perturbed(kind: str) -> None:
    """``_no_split_modules`` also names parts of a layer, embeddings and layers of an image encoder."""
    if kind == "mamba":
        config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
        model: Any = transformers.MambaForCausalLM(config)
        expected = list(model.backbone.layers)
    else:
        config = transformers.PaliGemmaConfig()
        config.text_config.num_hidden_layers = config.vision_config.num_hidden_layers = 2
        with torch.device("meta"):
            model = transformers.PaliGemmaForConditionalGeneration(config)
        expected = list(model.model.language_model.layers)
    assert list(map(id, decoder_layers(model))) == list(map(id, expected))
