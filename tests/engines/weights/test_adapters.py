"""Which adapters are sent alone, which merged as PEFT itself merges them, and which are refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, VeloraConfig, get_peft_model
from tiny_models import tiny_model

from trl_offpolicy.engines.weights.source import ModelWeights

LAYER = "model.layers.0.self_attn.q_proj"


def adapted(shape: dict[str, Any] | None = None, **options: Any) -> Any:
    """A PEFT model of which every adapter weight, also the bias of B, has moved from its first value."""
    defaults = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "o_proj"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(tiny_model(**(shape or {})), LoraConfig(**{**defaults, **options}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def vllm_weight(model: Any, layer: str) -> torch.Tensor:
    """A weight as vLLM computes it of the checkpoint and an adapter that is sent alone: one scale for all layers."""
    adapter = ModelWeights(model).adapter()
    assert adapter is not None
    config, place = adapter.config, f"base_model.model.{layer}"
    root = math.sqrt(config["r"]) if config["use_rslora"] else config["r"]
    up, down = (adapter.tensors[f"{place}.lora_{kind}.weight"] for kind in "BA")
    return tiny_model().get_parameter(f"{layer}.weight") + config["lora_alpha"] / root * up @ down


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"init_lora_weights": False}, {"init_lora_weights": "orthogonal"},
     {"init_lora_weights": "gaussian"}, {"rank_pattern": {LAYER: 4}, "alpha_pattern": {LAYER: 12}}],
)  # fmt: skip
def test_alone_goes_what_the_engine_then_computes_as_peft_does(options: dict[str, Any]) -> None:
    model = adapted(**options)
    found = vllm_weight(model, LAYER)
    torch.testing.assert_close(found, model.merge_and_unload().get_parameter(f"{LAYER}.weight"), atol=1e-6, rtol=1e-5)


MERGED: list[dict[str, Any]] = [
    {"rank_pattern": {LAYER: 8}},
    {"alpha_pattern": {LAYER: 24}},
    {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 6}},  # the scale of the others, but another rank
    {"rank_pattern": {LAYER: 8}, "use_rslora": True},
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "pissa_niter_2"},
    {"init_lora_weights": "olora"},
    {"init_lora_weights": "mica"},
    {"velora_config": VeloraConfig(num_groups=4)},
    {"modules_to_save": ["lm_head"]},
]


@pytest.mark.parametrize("options", MERGED, ids=str)
def test_what_the_engine_would_scale_or_base_otherwise_is_merged_as_peft_merges_it(options: dict[str, Any]) -> None:
    model = adapted(**options)
    assert not ModelWeights(model).has_adapter and ModelWeights(model).adapter() is None
    sent = {name: tensor.clone() for name, tensor in ModelWeights(model).merged()}
    expected = dict(model.merge_and_unload().named_parameters())
    assert sent.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(sent[name], value.data, atol=2e-6, rtol=1e-5, msg=name)


def test_a_bias_of_lora_is_added_to_the_base_bias() -> None:
    model = adapted({"attention_bias": True}, lora_bias=True)
    assert not ModelWeights(model).has_adapter
    sent = {name: tensor.clone() for name, tensor in ModelWeights(model).merged()}
    before = tiny_model(attention_bias=True).get_parameter(f"{LAYER}.bias")
    up = model.base_model.model.get_submodule(LAYER).lora_B["default"]
    torch.testing.assert_close(sent[f"{LAYER}.bias"], before + 12 / 4 * up.bias.data)
    assert (sent[f"{LAYER}.bias"] - before).abs().max() > 0.1
    for name, value in model.merge_and_unload().named_parameters():
        torch.testing.assert_close(sent[name], value.data, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_bias": True}, "layers.0.self_attn.q_proj it is LoRA with lora_bias=True on a layer that has no bias"),
        ({"use_dora": True}, "variant DoraLinearVariant"),
        ({"alora_invocation_tokens": [5]}, "variant ALoraLinearVariant"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens it is a layer of type layer.Embedding"),
        ({"layer_replication": [(0, 2), (1, 2)]}, "in the model it is with layer_replication"),
        ({"trainable_token_indices": [1, 2]}, "token_adapter it is a layer of type layer.TrainableTokensLayer"),
    ],
)
def test_what_is_more_than_scale_b_a_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    model = adapted(**options)
    assert not ModelWeights(model).has_adapter
    with pytest.raises(NotImplementedError, match="adapter 'default' must be plain LoRA on linear layers") as error:
        next(ModelWeights(model).merged())
    assert said in str(error.value)


@pytest.mark.parametrize(
    "config", [IA3Config(task_type="CAUSAL_LM"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)]
)
def test_other_methods_are_refused(config: Any) -> None:
    model = get_peft_model(tiny_model(), config)
    with pytest.raises(NotImplementedError, match=f"in the model it is of type {config.peft_type.value}"):
        next(ModelWeights(model).merged())


def test_two_adapters_in_use_are_merged_and_one_that_is_not_stays_out() -> None:
    """As TRL's "ref": a second adapter beside the one that is trained, with its own copy of a saved module."""
    model = adapted(modules_to_save=["lm_head"])
    model.add_adapter("ref", LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.zero_()
    sent = [(name, tensor.clone()) for name, tensor in ModelWeights(model).merged()]
    assert [name for name, _ in sent] == [name for name, _ in tiny_model().named_parameters()]
    assert dict(sent)["lm_head.weight"].abs().max() == 0
    both = adapted()
    both.add_adapter("more", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    assert ModelWeights(both).has_adapter
    both.base_model.set_adapter(["default", "more"])
    assert not ModelWeights(both).has_adapter
    merged = {name: tensor.clone() for name, tensor in ModelWeights(both).merged()}
    for name, value in both.merge_and_unload().named_parameters():
        torch.testing.assert_close(merged[name], value.data, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("options", "heads"),
    [
        ({}, 0),
        ({"modules_to_save": ["lm_head"]}, 1),
        ({"modules_to_save": ["embed_tokens"]}, 1),
        ({"target_modules": ["q_proj", "lm_head"]}, 1),
        ({"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, 0),
    ],
)
def test_a_tied_head_is_sent_as_soon_as_it_is_another_tensor(options: dict[str, Any], heads: int) -> None:
    model = adapted({"tie_word_embeddings": True}, **options)
    sent = {name: tensor.clone() for name, tensor in ModelWeights(model).merged()}
    assert sum("lm_head" in name for name in sent) == heads
    if "lm_head" in options.get("target_modules", ()):
        layer = model.base_model.model.lm_head
        product = 3 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        torch.testing.assert_close(sent["lm_head.weight"] - sent["model.embed_tokens.weight"], product.detach())
