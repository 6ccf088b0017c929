"""Models with parts that the tests must respect, and models that lack what a test needs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trl_offpolicy.diagnosis.attribution.attribute import Attribution, attribute
from trl_offpolicy.diagnosis.attribution.bench import Bench
from trl_offpolicy.diagnosis.attribution.contexts.attention import replaceable, shown_attention
from trl_offpolicy.diagnosis.attribution.contexts.layouts import Layout, score_in_layout
from trl_offpolicy.diagnosis.attribution.distances import rank_correlation
from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence
from trl_offpolicy.diagnosis.attribution.hypotheses import STAGES, run_hypotheses
from trl_offpolicy.engines.hf import Head, sample_completions, score_completions
from trl_offpolicy.engines.rounding import round_integer

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
}  # fmt: skip
DRAWN = np.random.default_rng(0)
PROMPTS = [DRAWN.integers(3, 64, 4 + row % 4).tolist() for row in range(4) for _ in range(2)]


def built(model: type[Any], config: type[Any], *, attention: str = "eager", **settings: Any) -> Any:
    torch.manual_seed(0)
    return model._from_config(config(**{**SHAPE, **settings}), attn_implementation=attention).eval()


def answer(trainer: Any, engine: Any, head: Head | None = None, **bench: Any) -> Attribution:
    """What is said of an engine that has another model than the trainer."""
    ids, _ = sample_completions(
        engine, PROMPTS, max_tokens=16, stop_ids=[], head=head, generator=torch.Generator().manual_seed(0)
    )
    (mu,) = score_completions(engine, PROMPTS, ids, heads=[head or Head()])
    (old,) = score_completions(trainer, PROMPTS, ids)
    evidence = TokenEvidence(
        sampling_per_token_logps=mu.logps, old_per_token_logps=old.logps, completion_mask=np.isfinite(old.logps),
        entropies=old.entropies, token_ids=np.array(ids), group_ids=np.arange(len(ids)) // 2,
    )  # fmt: skip
    return attribute(run_hypotheses(evidence, Bench(trainer, PROMPTS, ids, **bench)))


def test_an_engine_without_the_soft_cap_of_the_scores() -> None:
    trainer = built(Gemma2ForCausalLM, Gemma2Config, attn_logit_softcapping=1.0, query_pre_attn_scalar=8)
    engine = copy.deepcopy(trainer)
    for layer in engine.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    found = answer(trainer, engine)
    assert (found.cause, found.detail) == ("model_config", "no soft cap on attention scores"), found.reasons


def test_an_engine_without_attention_sinks() -> None:
    trainer = built(GptOssForCausalLM, GptOssConfig, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)
    engine = copy.deepcopy(trainer)
    for side, value in ((trainer, 1.5), (engine, -1e4)):
        for name, sinks in side.named_parameters():
            if name.endswith(".sinks"):
                sinks.data.fill_(value)
    found = answer(trainer, engine)
    assert (found.cause, found.detail) == ("model_config", "no attention sinks"), found.reasons


@pytest.mark.parametrize(
    "model",
    [
        built(Gemma2ForCausalLM, Gemma2Config, attn_logit_softcapping=1.0, query_pre_attn_scalar=8),
        built(GptOssForCausalLM, GptOssConfig, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2),
        built(LlamaForCausalLM, LlamaConfig, attention="sdpa"),
    ],
    ids=["soft cap", "sinks", "plain"],
)
@torch.no_grad()
def test_attention_in_plain_steps_keeps_caps_and_sinks(model: Any) -> None:
    ids = torch.tensor([PROMPTS[0] * 4])
    plain = model(input_ids=ids).logits
    with shown_attention(model):
        torch.testing.assert_close(model(input_ids=ids).logits, plain)
    assert replaceable(model)


def test_attention_that_differs_in_plain_steps_is_left_alone() -> None:
    """Gemma's cap is not known to sdpa, which drops it."""
    assert not replaceable(built(Gemma2ForCausalLM, Gemma2Config, attention="sdpa", attn_logit_softcapping=0.1))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_rows_laid_out_by_hand_have_the_plain_scores(attention: str) -> None:
    model = built(LlamaForCausalLM, LlamaConfig, attention=attention)
    ids = [[5, 6, 7, 8]] * len(PROMPTS)
    (plain,) = score_completions(model, PROMPTS, ids)
    laid = score_in_layout(model, PROMPTS, ids, Layout(), prompt_width=12)
    np.testing.assert_allclose(laid, plain.logps, atol=1e-4)


def other_weights(model: Any) -> Any:
    engine = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for weight in engine.parameters():
        weight.data += 0.2 * weight.data.std() * torch.randn(weight.shape, generator=generator)
    return engine


def test_all_experts_in_use_are_no_reason_to_try_one_more() -> None:
    moe = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = built(Qwen3MoeForCausalLM, Qwen3MoeConfig, **moe)
    assert answer(model, other_weights(model)).cause in ("unknown", "other_weights")


def test_ids_beyond_the_vocabulary_are_not_used() -> None:
    """A model that was cut down keeps the settings of the whole one."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)).eval()
    assert model.config.eos_token_id == 50256
    bench = Bench(model, PROMPTS, PROMPTS)
    assert (bench.begins, bench.ends, bench.pads) == ((), (), (0,))
    assert answer(model, other_weights(model)).cause in ("unknown", "other_weights")


def test_the_transposed_weights_of_gpt2_are_rounded_by_row() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)).eval()
    engine = copy.deepcopy(model)
    for name, weight in engine.named_parameters():
        if weight.dim() == 2 and ("c_attn" in name or "c_proj" in name or "c_fc" in name):
            weight.data = round_integer(weight.data.T, bits=8).T.contiguous()
    found = answer(model, engine)
    assert (found.cause, found.detail) == ("precision", "int8 weights"), found.reasons


def test_a_model_of_16_bits_is_tested_in_float32() -> None:
    wide = built(LlamaForCausalLM, LlamaConfig, attention="sdpa")
    trainer = copy.deepcopy(wide).bfloat16()
    before = {name: value.clone() for name, value in trainer.named_parameters()}
    found = answer(trainer, copy.deepcopy(trainer).float())
    assert (found.cause, found.detail) == ("precision", "float32"), found.reasons
    assert all(torch.equal(value, before[name]) and value.dtype == torch.bfloat16
               for name, value in trainer.named_parameters())  # fmt: skip


def test_a_temperature_of_all_responses_is_not_one_of_each() -> None:
    model = built(LlamaForCausalLM, LlamaConfig, attention="sdpa").bfloat16()
    found = answer(model, model, Head(0.98))
    assert (found.cause, found.detail) == ("temperature", "0.98"), found.reasons


def test_a_test_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_search: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("trl_offpolicy.diagnosis.attribution.hypotheses.STAGES", (broken, *STAGES))
    model = built(LlamaForCausalLM, LlamaConfig, attention="sdpa")
    with pytest.warns(RuntimeWarning, match="broken was not tested: RuntimeError: no such kernel"):
        found = answer(model, model, Head(0.8))
    assert (found.cause, found.detail) == ("temperature", "0.8")


def test_equal_values_share_their_rank() -> None:
    assert rank_correlation(np.array([0.0, 1, 2, 3]), np.array([0.0, 0, 0, 1])) == pytest.approx(0.774597, abs=1e-6)
