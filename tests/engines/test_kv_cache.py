"""A compressed KV cache inside a model, against one that really evicts and really holds 8-bit numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from torch import Tensor
from transformers import DynamicCache

from trl_offpolicy.engines.kv_cache import KVCache, kv_cache_of, parse_kv_cache, set_kv_cache, with_kv_cache

SPARSE = KVCache(keep_first=2, keep_last=3)
IDS = torch.randint(3, 128, (1, 14), generator=torch.Generator().manual_seed(0))
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def held_in_fp8(values: Tensor, scale: float) -> Tensor:
    """The nearest number of e4m3, by search in the list of all of them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].unique()
    flat = (values / scale).flatten()
    return (numbers[(flat[:, None] - numbers[None]).abs().argmin(1)] * scale).view_as(values)


class Evicting(DynamicCache):
    """A cache of one sequence that drops the keys and values between the first and the last, after each token."""

    def __init__(self, rule: KVCache) -> None:
        super().__init__()
        self.rule, self.lengths = rule, []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self.rule.rounding is not None:
            key_states, value_states = (held_in_fp8(one, self.rule.scale) for one in (key_states, value_states))
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.rule.keep_last is not None:
            first, last, length = self.rule.keep_first, self.rule.keep_last, keys.shape[2]
            if length > first + last:
                keys, values = (torch.cat([one[:, :, :first], one[:, :, -last:]], 2) for one in (keys, values))
                self.layers[layer_idx].keys, self.layers[layer_idx].values = keys, values
        self.lengths.append(keys.shape[2])
        return keys, values


@torch.no_grad()
def by_eviction(model: Any, ids: Tensor, rule: KVCache) -> Tensor:
    """(L, V) logits, one token at a time."""
    cache, logits = Evicting(rule), []
    for place in range(ids.shape[1]):
        # no mask: all that the cache returns is seen
        one = {"input_ids": ids[:, place : place + 1], "position_ids": torch.tensor([[place]])}
        mask = torch.ones(1, 1, 1, min(place + 1, rule.keep_first + rule.keep_last) if rule.evicts else place + 1)
        logits.append(model(**one, attention_mask=mask.bool(), past_key_values=cache).logits[0, -1])
    if rule.evicts:
        assert max(cache.lengths) == rule.keep_first + rule.keep_last
    return torch.stack(logits)


@pytest.mark.parametrize("rule", [SPARSE, KVCache(rounding="fp8", scale=0.01), KVCache(keep_first=0, keep_last=1)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_whole_forward_is_that_of_a_cache_that_evicts(rule: KVCache, attention: str) -> None:
    model = tiny_model(**SHAPE)
    model.set_attn_implementation(attention)
    expected, plain = by_eviction(model, IDS, rule), model(input_ids=IDS).logits[0]
    assert (expected - plain).abs().max() > 0.05
    with with_kv_cache(model, rule):
        assert kv_cache_of(model) == rule
        found = model(input_ids=IDS).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    assert kv_cache_of(model) is None and model.config._attn_implementation == attention
    assert torch.equal(model(input_ids=IDS).logits[0], plain)  # as before


@pytest.mark.parametrize("rule", [SPARSE, KVCache(keep_first=1, keep_last=4, rounding="fp8", scale=0.01)])
def test_padding_and_steps_with_a_cache_change_nothing(rule: KVCache) -> None:
    """Rows of two lengths, padded left and right, in one forward and token by token as ``generate`` does."""
    model = tiny_model(**SHAPE)
    set_kv_cache(model, rule)
    alone = [model(input_ids=IDS[:, :length]).logits[0] for length in (9, 14)]
    ids, mask = torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long)
    for row, (length, start) in enumerate([(9, 5), (14, 1)]):  # columns left over on both sides
        ids[row, start : start + length], mask[row, start : start + length] = IDS[0, :length], 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(padded[0, 5:14], alone[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(padded[1, 1:15], alone[1], rtol=0, atol=1e-4)
    cache, steps = DynamicCache(), []
    for place in range(14):
        steps.append(model(input_ids=IDS[:, place : place + 1], past_key_values=cache).logits[0, -1])
    torch.testing.assert_close(torch.stack(steps), alone[1], rtol=0, atol=1e-4)


def test_a_short_sequence_loses_nothing_and_a_long_one_only_behind_the_window() -> None:
    model = tiny_model()
    plain = model(input_ids=IDS).logits[0]
    with with_kv_cache(model, SPARSE):
        found = model(input_ids=IDS).logits[0]
    differs = (found - plain).abs().amax(1) > 1e-4
    assert differs.tolist() == [place >= 5 for place in range(14)]


def test_the_gradient_is_that_of_masked_attention_and_passes_the_rounding() -> None:
    model = tiny_model()
    twin = copy.deepcopy(model)
    set_kv_cache(model, SPARSE)
    place = torch.arange(14)
    seen = (place[None] <= place[:, None]) & ((place[None] < 2) | (place[:, None] - place[None] < 3))
    weights = torch.linspace(-1, 1, 14)
    for one, given in ((model, {}), (twin, {"attention_mask": seen[None, None]})):
        (one(input_ids=IDS, **given).logits.log_softmax(-1)[0, :, 5] * weights).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    rounded, values = KVCache(rounding="fp8"), torch.tensor([0.3, 1.06, 500.0], requires_grad=True)
    (rounded.held(values) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert rounded.held(values).tolist() == [0.3125, 1.0, 448.0] and values.grad.tolist() == [1.0, 2.0, 3.0]


def test_gradient_checkpointing_and_adapters_see_the_cache() -> None:
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False))
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        model.train()
        set_kv_cache(model, SPARSE)
        model(input_ids=IDS).logits.log_softmax(-1)[..., 5].sum().backward()
        grads.append(model.base_model.model.model.layers[0].self_attn.k_proj.lora_A.default.weight.grad)
    assert torch.equal(*grads) and grads[0].abs().max() > 0


def test_contexts_nest_and_a_copy_keeps_its_cache() -> None:
    model, fp8 = tiny_model(), KVCache(rounding="fp8")
    set_kv_cache(model, SPARSE)
    with with_kv_cache(model, fp8):
        assert kv_cache_of(model) == fp8
        with with_kv_cache(model, None):
            assert kv_cache_of(model) is None and model.config._attn_implementation == "sdpa"
        assert kv_cache_of(model) == fp8
    assert kv_cache_of(model) == kv_cache_of(copy.deepcopy(model)) == SPARSE
    assert "offpolicy" not in str(model.config.to_dict())  # what is saved is a plain model


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"keep_first": 4}, r"^engine\.kv_cache\.keep_first and keep_last must be given together, but got .* None\.$"),
        ({"keep_first": -1, "keep_last": 2}, r"^engine\.kv_cache\.keep_first must be"),
        ({"keep_first": 0, "keep_last": 0}, r"^engine\.kv_cache\.keep_last must be"),
        ({"rounding": "int8"}, r"^engine\.kv_cache\.rounding must be 'fp8', but got 'int8'\.$"),
        ({"rounding": "fp8", "scale": 0.0}, r"^engine\.kv_cache\.scale must be above 0, but got 0\.0\.$"),
        ({"keep_first": 1, "keep_last": 2, "scale": 2.0}, r"scale must be left out without rounding, but got 2\.0"),
        ({}, r"^engine\.kv_cache\.keep_last or rounding must be given"),
        ({"keep_frist": 1}, r"^engine\.kv_cache\.keep_frist must be one of .*keep_first"),
        (4, r"^engine\.kv_cache must be one of \['fp8'\] or a mapping, but got 4\.$"),
    ],
)
def test_wrong_values_are_named(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_kv_cache(spec)


def test_models_that_cannot_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no attention layer"):
        set_kv_cache(torch.nn.Linear(2, 2), SPARSE)
    model = tiny_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="must be 'sdpa' or 'eager' with kv_cache, but got 'flash_attention_2'"):
        set_kv_cache(model, SPARSE)
    model = tiny_model()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match=r"without keys of each token \(linear_attention\)"):
        set_kv_cache(model, SPARSE)
