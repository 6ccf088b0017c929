"""The learner's forward in the engine's precision, against a model that holds rounded weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from trl_offpolicy.engines.rounding import WeightRounding, round_weights
from trl_offpolicy.rollouts.rounded_forward import (
    parse_learner_rounding,
    round_forward,
    round_learner,
    rounded_while_fixed,
)

INT4 = WeightRounding("int4", group_size=16)
IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
LINEAR = "gate_proj"


def loss_of(model: Any) -> Tensor:
    """Any function of all logits."""
    logits = model(input_ids=IDS).logits
    return (logits.log_softmax(-1)[..., 5] * torch.linspace(-1, 1, IDS.shape[1])).sum()


def holding_rounded(model: Any, rounding: WeightRounding) -> Any:
    """A copy whose weights are those that the engine gets."""
    other = copy.deepcopy(model)
    other.load_state_dict(dict(round_weights(model.state_dict().items(), rounding)))
    return other


def with_adapter(*, attention_bias: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"target_modules": ["q_proj", LINEAR], **options}
    model = get_peft_model(tiny_model(attention_bias=attention_bias), LoraConfig(r=4, lora_alpha=6, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("rounding", [INT4, WeightRounding("int8"), WeightRounding("fp8"), WeightRounding("bf16")])
def test_logits_and_gradients_are_those_of_the_rounded_weights(rounding: WeightRounding) -> None:
    model = tiny_model()
    twin, before = holding_rounded(model, rounding), copy.deepcopy(model.state_dict())
    plain = loss_of(model).item()
    assert round_forward(model, rounding) == 7 * model.config.num_hidden_layers
    loss, expected = loss_of(model), loss_of(twin)
    assert loss.item() == expected.item() != plain
    loss.backward()
    expected.backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
        assert torch.equal(one, before[name]), "the weights that learn stay whole"


def test_a_layer_with_lora_rounds_the_sum() -> None:
    model = with_adapter()
    merged = holding_rounded(copy.deepcopy(model).merge_and_unload(), INT4).requires_grad_(True)
    round_forward(model, INT4)
    loss, expected = loss_of(model), loss_of(merged)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    layer = model.base_model.model.model.layers[0].mlp.gate_proj
    of_sum = merged.model.layers[0].mlp.gate_proj.weight.grad
    a, b, scale = layer.lora_A.default.weight, layer.lora_B.default.weight, layer.scaling["default"]
    torch.testing.assert_close(a.grad, scale * b.T @ of_sum)
    torch.testing.assert_close(b.grad, scale * of_sum @ a.T)


def test_a_layer_with_lora_keeps_its_bias() -> None:
    model = with_adapter(attention_bias=True)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    torch.nn.init.normal_(layer.base_layer.bias)
    merged = holding_rounded(copy.deepcopy(model).merge_and_unload(), INT4)
    round_forward(model, INT4)
    torch.testing.assert_close(loss_of(model), loss_of(merged))


def test_without_its_adapter_the_layer_rounds_its_own_weight() -> None:
    """The reference of a KL term is then the engine's at the start."""
    model, base = with_adapter(), holding_rounded(tiny_model(), INT4)
    round_forward(model, INT4)
    with model.disable_adapter():
        assert loss_of(model).item() == loss_of(base).item()
    model.merge_adapter()
    assert loss_of(model).item() != loss_of(base).item()


def test_a_copy_computes_with_its_own_weights() -> None:
    model = tiny_model()
    round_forward(model, INT4)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(2.0)
    assert loss_of(other).item() != loss_of(model).item()


def test_a_sampler_with_fixed_weights_rounds_what_an_engine_gets_and_puts_back_what_was_there() -> None:
    model, int8 = with_adapter(), WeightRounding("int8")
    engine = holding_rounded(copy.deepcopy(model).merge_and_unload(), INT4)
    plain = loss_of(model).item()
    with torch.no_grad(), rounded_while_fixed(model, INT4):
        torch.testing.assert_close(loss_of(model), loss_of(engine))
        assert loss_of(model).item() != plain
    assert loss_of(model).item() == plain
    round_forward(model, int8)  # a learner that rounds otherwise
    learner = loss_of(model).item()
    with torch.no_grad(), rounded_while_fixed(model, INT4):
        torch.testing.assert_close(loss_of(model), loss_of(engine))
    assert loss_of(model).item() == learner != plain
    message = r"^engine\.weight_rounding\.group_size must divide the \d+ columns"
    with pytest.raises(ValueError, match=message), rounded_while_fixed(model, WeightRounding("int4", group_size=7)):
        pass


def test_gradient_checkpointing_computes_the_same() -> None:
    models = [tiny_model(), tiny_model()]
    models[1].gradient_checkpointing_enable()
    grads = []
    for model in models:
        model.train()
        round_forward(model, INT4)
        loss_of(model).backward()
        grads.append(model.model.layers[0].mlp.up_proj.weight.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (
            lambda: GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2)),
            "transformer.h.0.attn.c_attn.weight",
        ),
        (lambda: tiny_model("qwen3_moe"), "mlp.experts.gate_up_proj"),
        (lambda: with_adapter(lora_dropout=0.1), "lora_dropout must be 0"),
        (lambda: with_adapter(use_dora=True), "must be plain LoRA"),
        (lambda: with_adapter(alora_invocation_tokens=[1], task_type="CAUSAL_LM"), "must be plain LoRA"),
        (lambda: with_adapter(attention_bias=True, target_modules=["q_proj"], lora_bias=True), "must be plain LoRA"),
        (lambda: nn.LayerNorm(4), "LayerNorm has no linear layer"),
    ],
)
def test_what_cannot_follow_the_engine_is_refused_by_name(model: Any, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        round_forward(model(), INT4)


def test_a_group_size_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"group_size must divide the .* columns of model\.layers\.0"):
        round_forward(tiny_model(), WeightRounding("int4", group_size=7))


def test_the_learners_rounding_is_the_engines_or_one_of_its_own() -> None:
    assert parse_learner_rounding(None, {"weight_rounding": "int8"}) is None
    assert parse_learner_rounding("engine", {"weight_rounding": {"type": "int4", "group_size": 16}}) == INT4
    assert parse_learner_rounding("fp8", {"quantization": "fp8"}) == WeightRounding("fp8")
    with pytest.raises(ValueError, match=r"engine\.weight_rounding must be given"):
        parse_learner_rounding("engine", {"quantization": "fp8"})
    with pytest.raises(ValueError, match="learner_rounding"):
        parse_learner_rounding("int5", None)


def test_the_policy_and_its_reference_are_rounded_as_configured() -> None:
    policy, reference = tiny_model(), tiny_model()
    plain, rounded = loss_of(policy).item(), loss_of(holding_rounded(policy, INT4)).item()
    engine = {"weight_rounding": {"type": "int4", "group_size": 16}}
    round_learner(None, engine, policy, None)
    assert loss_of(policy).item() == plain
    round_learner("engine", engine, policy, reference, None)
    assert loss_of(policy).item() == loss_of(reference).item() == rounded != plain
