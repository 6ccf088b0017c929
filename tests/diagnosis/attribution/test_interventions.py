"""Each table of interventions finds what it is for: a fault of a tiny model, and what the right test leaves."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from trl_offpolicy.diagnosis.attribution.attribute import attribute
from trl_offpolicy.diagnosis.attribution.bench import Bench
from trl_offpolicy.diagnosis.attribution.contexts import attention, changes, precision
from trl_offpolicy.diagnosis.attribution.contexts.layouts import Layout, score_in_layout
from trl_offpolicy.diagnosis.attribution.contexts.parts import best_sets, captured, divisions, holding
from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence, padded
from trl_offpolicy.diagnosis.attribution.hypotheses import run_hypotheses
from trl_offpolicy.diagnosis.attribution.traces.features import extract
from trl_offpolicy.diagnosis.attribution.trials.edits import PromptSearch, search_prompts
from trl_offpolicy.diagnosis.attribution.trials.heads import logits_of, processor_tests
from trl_offpolicy.diagnosis.attribution.trials.interventions import Intervention, minimise, predicted
from trl_offpolicy.diagnosis.attribution.trials.spellings import respelled
from trl_offpolicy.engines.hf import Head, score_completions

LENGTH = 12
GENERATOR = np.random.default_rng(0)
PROMPTS = [[2, *GENERATOR.integers(3, 90, 9 + group).tolist()] for group in range(4) for _ in range(2)]
IDS = [GENERATOR.integers(3, 90, LENGTH).tolist() for _ in PROMPTS]


def scored(model: Any, *, prompts: Any = PROMPTS, ids: Any = IDS) -> Any:
    return score_completions(model, prompts, ids)[0]


def evidence_of(engine: Any, trainer: Any) -> TokenEvidence:
    """Without entropies: the tokens are given, not drawn."""
    return TokenEvidence(
        sampling_per_token_logps=engine, old_per_token_logps=trainer, completion_mask=np.ones(engine.shape, bool),
        token_ids=np.array(IDS), group_ids=np.arange(len(IDS)) // 2,
    )  # fmt: skip


def answer(model: Any, engine: Any, trainer: Any = None, **bench: Any) -> Any:
    plain = scored(model)
    evidence = evidence_of(engine, plain.logps if trainer is None else trainer)
    given = {"stop_ids": [1], "pad_ids": [0], "rows": 4, **bench}
    return attribute(run_hypotheses(evidence, Bench(model, PROMPTS, IDS, **given)))


# ----------------------------------------------------------------------------------------------- the search of a number


def test_a_minimum_is_refined_only_where_a_value_helps() -> None:
    asked: list[float] = []

    def loss(x: float) -> float:
        asked.append(x)
        return abs(x - 3.1)

    assert minimise(loss, (0.0, 1.0, 2.0), open_ends=True, steps=30) == pytest.approx(3.0, abs=0.01)
    assert minimise(loss, (0.0, 2.0, 4.0), steps=30) == pytest.approx(3.1, abs=0.01)
    asked.clear()
    assert minimise(lambda x: loss(-x), (0.0, 1.0, 2.0), neutral=0.0) == 0.0 and len(asked) == 3
    asked.clear()
    assert minimise(loss, (1.0, 3.0, 4.0), enough=0.5) == 3.0 and len(asked) == 3


def test_values_lie_on_the_axis_of_their_scale() -> None:
    score = lambda _value, _rows: np.zeros((1, 1))  # noqa: E731
    whole = Intervention("model_config", str, score, (8.0,), "whole")
    assert whole.at(whole.place(17.2)) == 17.0
    linear = Intervention("model_config", str, score, (8.0,), "linear")
    assert linear.at(linear.place(-2.5)) == -2.5
    direction = np.array([1.0, -2.0, 0.01])
    assert predicted(direction, -0.4 * direction) == pytest.approx(-0.4)


# -------------------------------------------------------------------------------------------------------------- prompts


def prompt_search(model: Any, prompts: Any, ids: Any = IDS) -> Any:
    plain, wrong = scored(model).logps, scored(model, prompts=prompts, ids=ids).logps
    bench = Bench(model, PROMPTS, IDS, stop_ids=[1], pad_ids=[0])
    use = np.ones(plain.shape, bool)
    search = PromptSearch(bench, plain, wrong, use)
    differs = np.abs(plain - wrong).max(1) > 1e-3
    worst = int(np.abs(plain - wrong).max(1).argmax())
    found = search_prompts(search, range(len(PROMPTS)), worst, differs)
    return None if found is None else (found[0], float(np.abs(found[1] - wrong).max()))


OTHERS = {
    "cut to its last 4 tokens": [ids[-4:] for ids in PROMPTS],
    "last two tokens missing": [ids[:-2] for ids in PROMPTS],
    "the beginning missing (3 to 4 tokens)": [ids[len(ids) // 3 :] for ids in PROMPTS],
    "tokens 4 to 6": [[*ids[:4], *ids[7:]] for ids in PROMPTS],
    "first token doubled": [[ids[0], *ids] for ids in PROMPTS],
    "the last 3 tokens twice": [[*ids, *ids[-3:]] for ids in PROMPTS],
    "a token 1 more at the end": [[*ids, 1] for ids in PROMPTS],
    "that of another group, in 4 of the rows": [PROMPTS[row] for row in (2, 3, 0, 1, 4, 5, 6, 7)],
    "the row before": [
        ids if row % 2 == 0 else [*PROMPTS[row - 1], *IDS[row - 1], *ids] for row, ids in enumerate(PROMPTS)
    ],
}


@pytest.mark.parametrize("text", OTHERS)
def test_the_edit_of_the_prompts_is_found(model: Any, text: str) -> None:
    name, gap = prompt_search(model, OTHERS[text])
    cause = "padding" if "row before" in text else "prompt_difference"
    assert name.startswith(f"{cause}:") and text in name, name
    assert gap < 1e-4


def test_other_weights_are_no_edit_of_the_prompts(model: Any) -> None:
    plain = scored(model).logps
    with changed(model, "layers.0.mlp"):
        wrong = scored(model).logps
    bench = Bench(model, PROMPTS, IDS, stop_ids=[1], pad_ids=[0])
    search = PromptSearch(bench, plain, wrong, np.ones(plain.shape, bool))
    assert search_prompts(search, [0, 2, 4], 0, np.ones(len(plain), bool)) is None


# -------------------------------------------------------------------------------------------------------------- weights


@contextmanager
def changed(model: Any, *parts: str, size: float = 0.05) -> Any:
    """Parameters whose names hold one of some parts have moved, by the same amounts each time."""
    with ExitStack() as stack, torch.no_grad():
        for number, (name, weight) in enumerate(model.named_parameters()):
            if any(part in name for part in parts):
                before = weight.detach().clone()
                stack.callback(lambda weight=weight, before=before: weight.data.copy_(before))
                generator = torch.Generator().manual_seed(number)
                weight += size * torch.randn(weight.shape, generator=generator)
        yield


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (("layers.1.",), "layer 1"),
        (("q_proj", "k_proj", "v_proj"), "queries, keys and values"),
        (("embed_tokens", "mlp"), "MLPs"),
    ],
)
def test_the_parts_of_the_weights_that_are_older_are_named(model: Any, parts: Any, words: str) -> None:
    with changed(model, *parts):
        engine = scored(model).logps
    found = answer(model, engine, precisions={}, weights={"stale_weights:version 1": lambda: changed(model, "weight")})
    assert found.cause == "stale_weights" and words in found.detail, (found.detail, found.reasons)
    assert found.explained > 0.99 and found.confidence > 0.9


def test_weights_on_the_way_are_measured(model: Any) -> None:
    with changed(model, "weight", size=0.02):
        engine = scored(model).logps
    found = answer(model, engine, precisions={}, weights={"stale_weights:version 1": lambda: changed(model, "weight")})
    assert found.cause == "stale_weights" and float(found.detail.split()[0]) == pytest.approx(0.4, abs=0.02)


def test_captured_weights_are_held_in_part_and_put_back(model: Any) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    held = captured(model, lambda: changed(model, "layers.0.mlp"))
    assert held and all("layers.0.mlp" in name for name in held)
    name = next(iter(held))
    with holding(model, held, 0.25):
        moved = dict(model.named_parameters())[name]
        torch.testing.assert_close(moved.data, before[name] + 0.25 * (held[name] - before[name]))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_sets_of_parts_add_up() -> None:
    effects = {name: GENERATOR.normal(size=200) for name in "abc"}
    (first, left), *_ = best_sets(effects, effects["a"] + effects["c"])
    assert first == {"a", "c"} and left < 0.05
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"]
    kinds, depth = divisions(names)
    assert set(kinds.parts) == {"MLPs", "queries, keys and values", "output head"}
    assert depth.parts["layer 1"] == {names[1]} and depth.union(["layer 0", "layer 1"]) == set(names[:2])


# ------------------------------------------------------------------------------------------ configuration and precision

SETTINGS = {
    "attention scores soft-capped at 0.3": (lambda m: attention.attention_cap(m, 0.3), "model_config"),
    "RoPE on neighbours": (attention.interleaved_rope, "model_config"),
    "activation relu": (lambda m: changes.activation(m, "relu"), "model_config"),
    "RoPE of type llama3, factor 8": (lambda m: changes.rope_type(m, "llama3", 8.0), "model_config"),
    "bf16 weights of the output head": (
        lambda m: changes.rounded_head(m, "bf16", inputs=False, logits=False), "precision"
    ),
    "bf16 output head with float32 logits": (lambda m: changes.rounded_head(m, "bf16", logits=False), "precision"),
    "attention scores and shares in bf16": (
        lambda m: changes.cache_changes(m)["precision:attention scores and shares in bf16"](), "precision"
    ),
    "fp8 (e5m2) KV cache": (lambda m: changes.rounded_cache("fp8 (e5m2)"), "precision"),
    "int4 weights in groups of 32": (
        lambda m: precision.changed_weights(m, lambda w: precision.round_int4(w, group=32)), "precision"
    ),
    "nf4 weights": (lambda m: precision.changed_weights(m, precision.round_nf4), "precision"),
    "fp8 activations": (lambda m: precision.rounded_inputs(m, precision.scaled_fp8), "precision"),
    "attention in TF32": (attention.tf32_attention, "precision"),
    "norms in bf16": (lambda m: precision.part_roundings(m)["precision:norms in bf16"](), "precision"),
    "residual stream in bf16": (
        lambda m: precision.part_roundings(m)["precision:residual stream in bf16"](), "precision"
    ),
    "RoPE cosines and sines in bf16": (
        lambda m: precision.part_roundings(m)["precision:RoPE cosines and sines in bf16"](), "precision"
    ),
    "matrix products in bf16 (autocast)": (lambda m: precision.rounded_products(m, "bf16"), "precision"),
    "mxfp4 weights": (lambda m: precision.weight_roundings(m)["precision:mxfp4 weights"](), "precision"),
    "nvfp4 weights": (lambda m: precision.weight_roundings(m)["precision:nvfp4 weights"](), "precision"),
    "weights of the norms +1 (Gemma's norms)": (lambda m: changes.norm_offset(m, 1.0), "model_config"),
}  # fmt: skip


@pytest.mark.parametrize("detail", SETTINGS)
def test_rarer_settings_and_roundings_are_named(model: Any, detail: str) -> None:
    context, cause = SETTINGS[detail]
    plain = scored(model).logps
    with context(model):
        engine = scored(model).logps
    assert np.array_equal(scored(model).logps, plain) and np.abs(engine - plain).max() > 1e-5
    found = answer(model, engine)
    assert found.cause == cause and found.confidence >= 0.9, (found.cause, found.detail, found.reasons)
    assert found.detail.startswith(detail), found.detail


def test_a_kernel_that_cuts_its_shares_elsewhere_is_still_tf32(model: Any) -> None:
    """Flash attention multiplies by exp(score - largest score) and divides at the end."""
    cut = partial(precision.round_significant, bits=11, to_zero=True)

    def cut_before_the_sum(shares: torch.Tensor) -> torch.Tensor:
        largest = shares.amax(-1, keepdim=True)
        return cut(shares / largest) * largest

    with attention.shown_attention(model, inputs=cut, shares=cut_before_the_sum):
        engine = scored(model).logps
    found = answer(model, engine)
    assert (found.cause, found.detail) == ("precision", "attention in TF32"), found.reasons
    assert found.confidence >= 0.7


def test_a_model_in_16_bits_has_nothing_for_tf32_to_cut() -> None:
    small = tiny_model()
    assert "precision:attention in TF32" in changes.cache_changes(small)
    assert "precision:attention in TF32" not in changes.cache_changes(small.to(torch.bfloat16))


def test_attention_in_plain_steps_is_the_models_own(model: Any) -> None:
    plain = scored(model).logps
    with attention.shown_attention(model):
        np.testing.assert_allclose(scored(model).logps, plain, atol=1e-4)


def test_four_bit_floats_have_their_levels() -> None:
    weight = torch.tensor([[6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0] * 4])
    torch.testing.assert_close(precision.round_fp4(weight, block=32, powers=True), weight)  # scale 1 represents all
    torch.testing.assert_close(precision.round_fp4(weight, block=16, powers=False), weight, rtol=0.1, atol=1e-3)
    # MXFP4 cuts off what is beyond 6 times its power of two: 7 is in [4, 8), so that the scale is 1
    assert precision.round_fp4(torch.full((1, 32), 7.0), block=32, powers=True).max() == 6.0


def test_blocks_of_fp8_have_a_scale_each() -> None:
    weight = torch.randn(200, 130, generator=torch.Generator().manual_seed(0))
    weight[:128, :128] *= 1e-6  # below the smallest number of one scale for all
    near = precision.round_fp8_blocks(weight)
    assert near.shape == weight.shape and float(((near - weight).abs() / weight.abs()).max()) < 0.1
    assert float(precision.scaled_fp8(weight, whole=True)[:128, :128].abs().max()) == 0.0


def test_nf4_keeps_the_largest_of_each_block() -> None:
    weight = torch.linspace(-3.0, 3.0, 128).reshape(2, 64)
    near = precision.round_nf4(weight)
    assert near[0, 0] == -3.0 and near[1, -1] == 3.0
    assert float((near - weight).abs().max()) <= 0.16 * 3.0 and len(near.unique()) <= 32


def test_chunks_of_attention_are_measured(model: Any) -> None:
    engine = score_in_layout(model, PROMPTS, IDS, Layout(chunk=8), prompt_width=0)
    found = answer(model, engine)
    assert (found.cause, found.detail) == ("model_config", "attention in chunks of 8 tokens"), found.detail


def test_padding_between_that_is_neither_attended_nor_counted_changes_nothing(model: Any) -> None:
    apart = score_in_layout(model, PROMPTS, IDS, Layout(between=True), prompt_width=20)
    np.testing.assert_allclose(apart, scored(model).logps, atol=1e-4)


def test_an_attention_window_is_measured(model: Any) -> None:
    engine = score_in_layout(model, PROMPTS, IDS, Layout(window=11), prompt_width=12)
    found = answer(model, engine)
    assert (found.cause, found.detail) == ("model_config", "attention window of 11 tokens"), found.detail


@pytest.mark.parametrize(
    "layout",
    [
        Layout(gap=True),
        Layout(reset=True),
        Layout(between=True, counted=True),
        Layout(moved=1),
        Layout(moved=-1),
    ],
    ids=["gap", "reset", "between", "too high", "too low"],
)
def test_positions_that_do_not_go_on_are_padding(model: Any, layout: Layout) -> None:
    trainer = score_in_layout(model, PROMPTS, IDS, layout, prompt_width=max(map(len, PROMPTS)))
    plain = scored(model).logps
    found = answer(model, plain, trainer)
    assert found.cause == "padding" and "positions" in found.detail, (found.cause, found.detail)


# --------------------------------------------------------------------------------------------------------- book-keeping


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda x: np.repeat(x.mean(1, keepdims=True), x.shape[1], 1), "the mean of the response at every token"),
        (lambda x: x.round(2), "log-probs rounded to 2 decimals"),
        (lambda x: x[:, ::-1].copy(), "reverse order"),
        (lambda x: -x, "negative log-probs"),
        (lambda x: x / np.log(2), "log-probs in base 2"),
        (lambda x: x / 0.7, "log-probs times 1.43"),  # divided by a temperature, not the log-probs under it
        (lambda x: x / 2, "log-probs times 0.5"),
    ],
)
def test_log_probs_that_were_written_down_wrongly_are_named(model: Any, change: Any, detail: str) -> None:
    found = answer(model, change(scored(model).logps))
    assert found.cause == "misalignment" and detail in found.detail, (found.cause, found.detail)


def test_a_trainer_that_lost_the_first_token_is_named(model: Any) -> None:
    plain = scored(model).logps
    trainer = np.full_like(plain, np.nan)
    trainer[:, :-1] = scored(model, ids=[ids[1:] for ids in IDS]).logps
    found = answer(model, plain, trainer)
    assert found.cause == "misalignment" and "lost" in found.detail, (found.cause, found.detail)


def test_a_token_that_is_spelled_with_two_is_found(model: Any) -> None:
    plain = scored(model).logps
    split = [[*ids[:3], 91, 92, *ids[4:]] for ids in IDS]
    trainer = scored(model, ids=split).logps[:, :LENGTH]
    bench = Bench(model, PROMPTS, IDS, spellings=lambda ids: [[91, 92], [93, 94]] if len(ids) == 1 else [])
    found = respelled(bench, [0, 3], plain, trainer, 1e-5)
    assert found is not None
    np.testing.assert_allclose(found[[0, 3]], trainer[[0, 3]], atol=1e-4)
    assert np.isnan(found[1]).all() and respelled(Bench(model, PROMPTS, IDS), [0], plain, trainer, 1e-5) is None


# --------------------------------------------------------------------------------------------- logits, and traces alone


def test_biases_must_hold_for_rows_on_which_they_were_not_fitted(model: Any) -> None:
    logits = logits_of(model, PROMPTS, IDS, range(8), Head())
    plain = logits.plain.double().numpy()
    changed_logits = logits.values.clone()
    changed_logits[:, 17] += 3.0
    real = processor_tests(logits, logits.chosen(changed_logits).double().numpy())
    assert any("on token 17" in name for name in real)
    one = plain.copy()
    one[5] += 2.0  # a single token that is off fits a bias on it, and nothing else does
    assert not any("bias" in name for name in processor_tests(logits, one))


def test_bans_of_the_end_and_of_repeated_n_grams_are_named(model: Any) -> None:
    logits = logits_of(model, PROMPTS, IDS, range(8), Head())
    values = logits.values.clone()
    values[logits.places < 5, 1] = -torch.inf
    target = logits.chosen(values).double().numpy()
    found = processor_tests(logits, target, stop_ids=[1])
    name = "logit_processors:no end before token 5 (min_tokens)"
    np.testing.assert_allclose(found[name].numpy(), target, atol=1e-5)


def sampled_evidence(reported: str) -> TokenEvidence:
    """Tokens drawn from random distributions, and the log-probs of the drawn or of the most likely token."""
    chance = np.random.default_rng(3)
    logits = chance.normal(0, 2.0, (12, 20, 30))
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropies = -(np.exp(logps) * logps).sum(-1)
    drawn = (logps + chance.gumbel(size=logps.shape)).argmax(-1)
    own = np.take_along_axis(logps, drawn[..., None], -1)[..., 0]
    engine = logps.max(-1) if reported == "top" else np.where(chance.random(own.shape) < 0.5, own, own - 0.3)
    if reported == "elsewhere":
        engine = own.reshape(-1)[chance.permutation(own.size)].reshape(own.shape)
    return TokenEvidence(
        sampling_per_token_logps=engine, old_per_token_logps=own, completion_mask=np.ones(own.shape, bool),
        entropies=entropies, token_ids=drawn, group_ids=np.arange(12),
    )  # fmt: skip


def test_the_most_likely_tokens_log_prob_is_no_truncated_sampling() -> None:
    found = attribute(sampled_evidence("top"))
    assert found.cause == "misalignment" and found.features.above_entropy == 0.0
    assert extract(sampled_evidence("half")).above_entropy > 0.2


def test_numbers_of_other_tokens_are_misaligned_without_the_model() -> None:
    found = attribute(sampled_evidence("elsewhere"))
    assert found.cause == "misalignment" and found.features.elsewhere > 0.9
    assert not extract(sampled_evidence("half")).elsewhere > 0.2


def test_rows_that_agree_exactly_rule_dropout_out() -> None:
    chance = np.random.default_rng(0)
    own = -chance.gamma(1.0, 1.0, (10, 20))
    noise = chance.normal(0, 0.3, (2, *own.shape))
    engine = padded(own.tolist())

    def with_noise(rows: Any) -> Any:
        old, again = own + rows * noise[0], own + rows * noise[1]
        return attribute(
            TokenEvidence(
                sampling_per_token_logps=engine, old_per_token_logps=old, completion_mask=np.ones(own.shape, bool),
                rescored_per_token_logps=again,
            )
        )  # fmt: skip

    assert with_noise(np.ones((10, 1))).cause == "dropout"
    spared = with_noise((np.arange(10) >= 3)[:, None].astype(float))
    assert spared.cause != "dropout" and spared.features.exact_rows == pytest.approx(0.3)
