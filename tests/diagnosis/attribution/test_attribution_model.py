"""Scoring, simulated precisions and the search of hypotheses, with tiny models."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from trl_offpolicy.diagnosis.attribution.attribute import attribute
from trl_offpolicy.diagnosis.attribution.contexts import changes
from trl_offpolicy.diagnosis.attribution.contexts.layouts import Layout, score_in_layout
from trl_offpolicy.diagnosis.attribution.contexts.parts import holding
from trl_offpolicy.diagnosis.attribution.contexts.precision import (
    round_int4,
    round_significant,
    rounded_router_weights,
    rounded_routers,
    rounded_weights,
    simulated_dtype,
)
from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence, padded
from trl_offpolicy.diagnosis.attribution.hypotheses import Bench, left_share, run_hypotheses
from trl_offpolicy.diagnosis.attribution.trials.heads import logits_of, sampling_tests
from trl_offpolicy.engines.hf import Head, sample_completions, score_completions
from trl_offpolicy.engines.rounding import round_integer
from trl_offpolicy.functional.truncated_sampling import Truncation

PROMPTS = [[3 + i, 9, 40 + i][: 1 + i % 3] for i in range(6) for _ in range(4)]


def sampled(model: Any, head: Head | None = None, *, seed: int = 0, length: int = 16) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    return sample_completions(model, PROMPTS, max_tokens=length, stop_ids=[1], head=head, generator=generator)


def evidence_of(model: Any, ids: Any, logps: Any, **changes: Any) -> TokenEvidence:
    (scores,) = score_completions(model, PROMPTS, ids)
    (again,) = score_completions(model, PROMPTS, ids, rows=3)
    mask = np.isfinite(scores.logps)
    given = {
        "sampling_per_token_logps": padded(logps), "old_per_token_logps": scores.logps, "completion_mask": mask,
        "rescored_per_token_logps": again.logps, "entropies": scores.entropies,
        "token_ids": padded(ids, fill=0).astype(np.int64), "group_ids": np.arange(len(ids)) // 4,
    }  # fmt: skip
    return TokenEvidence(**{**given, **changes})


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("head", [Head(), Head(0.7, Truncation(top_p=0.8)), Head(1.3, Truncation(top_k=5, min_p=0.05))])
def test_scoring_gives_the_log_probs_that_were_sampled_from(kind: Any, head: Head) -> None:
    model = tiny_model(kind).eval()
    ids, logps = sampled(model, head)
    (scores,) = score_completions(model, PROMPTS, ids, heads=[head], rows=5)
    np.testing.assert_allclose(scores.logps, padded(logps), atol=3e-5)


def test_scores_equal_those_of_one_plain_forward() -> None:
    model = tiny_model().eval()
    ids, _ = sampled(model)
    (scores,) = score_completions(model, PROMPTS, ids)
    for row in (0, 5, 23):
        prompt = PROMPTS[row]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids[row]])).logits[0, len(prompt) - 1 : -1]
        logps = logits.log_softmax(-1)
        chosen = logps.gather(1, torch.tensor(ids[row]).unsqueeze(1)).squeeze(1)
        length = len(ids[row])
        np.testing.assert_allclose(scores.logps[row, :length], chosen.numpy(), atol=3e-5)
        np.testing.assert_allclose(scores.entropies[row, :length], -(logps.exp() * logps).sum(1).numpy(), atol=1e-4)
        np.testing.assert_allclose(scores.top_logps[row, :length], logps.amax(1).numpy(), atol=3e-5)
        assert scores.ranks[row, :length].tolist() == (logps > chosen.unsqueeze(1)).sum(1).tolist()
        assert np.isnan(scores.logps[row, length:]).all()


def test_simulated_precisions_round_and_put_everything_back() -> None:
    for kind in ("llama", "qwen3_moe"):
        model = tiny_model(kind).eval()  # type: ignore[arg-type]
        before = {name: value.clone() for name, value in model.state_dict().items()}
        ids = torch.tensor([[3, 9, 40, 7]])
        with torch.no_grad():
            plain = model(ids).logits
            sizes = []
            for context in (
                simulated_dtype(model, "bf16"),
                simulated_dtype(model, "fp16"),
                rounded_weights(model, "int4"),
            ):
                with context:
                    sizes.append(float((model(ids).logits - plain).abs().mean()))
            assert sizes[0] > 3 * sizes[1] > 0 and sizes[2] > sizes[1]
            assert torch.equal(model(ids).logits, plain)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_experts_are_rounded_each_for_itself_and_routers_and_embeddings_not_at_all() -> None:
    model = tiny_model("qwen3_moe").eval()
    before = {name: value.clone() for name, value in model.named_parameters()}
    stacks = [name for name in before if "experts" in name]
    assert stacks and all(before[name].dim() == 3 for name in stacks)
    with rounded_weights(model, "int8"):
        inside = {name: value.detach().clone() for name, value in model.named_parameters()}
    for name in stacks:
        for expert, value in enumerate(before[name]):
            assert torch.equal(inside[name][expert], round_integer(value, bits=8)), name
    changed = {name for name in before if not torch.equal(before[name], inside[name])}
    assert changed == {*stacks, *(name for name in before if name.endswith("_proj.weight"))}


def test_round_significant_is_bfloat16_at_8_digits() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    near = round_significant(values, 8)
    assert float((near - values.bfloat16().float()).abs().max()) <= float((values.abs().max()) / 128)
    assert float(((near - values) / values).abs().max()) <= 2**-8
    assert torch.equal(round_significant(values, 24), values)


def test_rounded_routers_change_only_what_a_router_sees() -> None:
    moe, dense = tiny_model("qwen3_moe").eval(), tiny_model().eval()
    ids = torch.tensor([[3, 9, 40, 7, 8, 11]])
    with torch.no_grad(), rounded_routers(moe, 3), rounded_routers(dense, 3):
        rough, same = moe(ids).logits, dense(ids).logits
    with torch.no_grad():
        assert not torch.equal(moe(ids).logits, rough) and torch.equal(dense(ids).logits, same)


def test_routers_whose_weights_are_rounded_are_found() -> None:
    model = tiny_model("qwen3_moe").eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("gate.weight"):
                value.mul_(8.0)  # so that rounding sends some tokens elsewhere
    before = {name: value.clone() for name, value in model.named_parameters()}
    with rounded_router_weights(model, torch.bfloat16):
        changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
        assert changed and all(name.endswith("gate.weight") for name in changed)
        ids, logps = sampled(model, Head())
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    found = attribute(run_hypotheses(evidence_of(model, ids, logps), Bench(model, PROMPTS, ids)))
    assert (found.cause, found.detail) == ("routing", "weights of the router in bf16"), found.reasons


@pytest.mark.parametrize(
    ("cause", "detail", "head"),
    [
        ("temperature", "0.9", Head(0.9)),
        ("temperature", "1.2", Head(1.2)),
        ("truncated_sampling", "top_k 6", Head(1.0, Truncation(top_k=6))),
        ("truncated_sampling", "top_p 0.8", Head(1.0, Truncation(top_p=0.8))),
    ],
)
def test_sampling_options_are_found_and_measured(cause: str, detail: str, head: Head) -> None:
    model = tiny_model().eval()
    ids, logps = sampled(model, head)
    evidence = run_hypotheses(evidence_of(model, ids, logps), Bench(model, PROMPTS, ids))
    found = attribute(evidence)
    assert found.cause == cause and found.level == "logps+model"
    number = lambda text: float(text.split()[-1])  # noqa: E731
    assert number(found.detail) == pytest.approx(number(detail), rel=0.03)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_rounded_weights_are_found(kind: Any) -> None:
    model = tiny_model(kind).eval()
    rounded = {
        name: torch.stack([round_integer(one, bits=8) for one in (value if value.dim() == 3 else value[None])])
        for name, value in model.named_parameters()
        if "_proj" in name
    }
    with holding(model, {name: value if "experts" in name else value[0] for name, value in rounded.items()}):
        ids, logps = sampled(model)
    found = attribute(run_hypotheses(evidence_of(model, ids, logps), Bench(model, PROMPTS, ids)))
    assert (found.cause, found.detail) == ("precision", "int8 weights")


def test_experts_alone_in_four_bits_are_found() -> None:
    model = tiny_model("qwen3_moe").eval()
    stacks = {name: value for name, value in model.named_parameters() if "experts" in name}
    rounded = {name: torch.stack([round_int4(one, group=32) for one in value]) for name, value in stacks.items()}
    with holding(model, rounded):
        ids, logps = sampled(model)
    found = attribute(run_hypotheses(evidence_of(model, ids, logps), Bench(model, PROMPTS, ids)))
    assert (found.cause, found.detail) == ("precision", "int4 weights in groups of 32, experts only")


@contextmanager
def moved(model: Any, share: float) -> Any:
    weight = model.model.layers[1].mlp.down_proj.weight
    before = weight.data.clone()
    weight.data += share * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    yield
    weight.data = before


def test_other_weights_are_found_also_in_part() -> None:
    model = tiny_model().eval()
    weights = {"stale_weights:version 1": lambda: moved(model, 0.1)}
    for share in (0.1, 0.01):
        with moved(model, share):
            ids, logps = sampled(model)
        bench = Bench(model, PROMPTS, ids, weights=weights, precisions={})
        found = attribute(run_hypotheses(evidence_of(model, ids, logps), bench))
        assert found.cause == "stale_weights" and found.detail.endswith("version 1")


def test_a_trainer_that_sees_other_prompts_is_found() -> None:
    model = tiny_model().eval()
    ids, logps = sampled(model)
    others = [[5, *prompt] for prompt in PROMPTS]
    (wrong,) = score_completions(model, others, ids)
    evidence = evidence_of(model, ids, logps, old_per_token_logps=wrong.logps, rescored_per_token_logps=wrong.logps)
    bench = Bench(model, PROMPTS, ids, prompts={"with a bos token": others})
    found = attribute(run_hypotheses(evidence, bench))
    assert (found.cause, found.detail) == ("prompt_difference", "with a bos token")


def test_dropout_is_told_from_other_trainer_faults() -> None:
    model = tiny_model().eval()
    ids, logps = sampled(model)
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    evidence = evidence_of(model, ids, logps)
    model.eval()
    assert attribute(run_hypotheses(evidence, Bench(model, PROMPTS, ids))).cause == "dropout"


def answer(model: Any, ids: Any, logps: Any, *, base: Head | None = None, **changed: Any) -> Any:
    """The attribution with tests of the model, as the probe makes it; ``changed`` replaces fields of the evidence."""
    head = base or Head()
    (plain,) = score_completions(model, PROMPTS, ids, heads=[head])
    given = {"old_per_token_logps": plain.logps, "entropies": plain.entropies, "rescored_per_token_logps": None}
    evidence = evidence_of(model, ids, logps, **{**given, **changed})
    bench = Bench(model, PROMPTS, ids, head=head, stop_ids=[1], pad_ids=[0])
    return attribute(run_hypotheses(evidence, bench))


CONTEXTS = {
    "rope base": (lambda m: changes.rope_base(m, 7.0), "model_config", "RoPE base"),
    "rope scaling": (lambda m: changes.rope_scaling(m, 3.0), "model_config", "RoPE"),
    "norm epsilon": (lambda m: changes.norm_eps(m, 5e-3), "model_config", "norm epsilon"),
    "attention scale": (lambda m: changes.attention_scale(m, 0.6), "model_config", "attention scores"),
    "embedding scale": (lambda m: changes.embedding_scale(m, 1.3), "model_config", "embeddings times 1.3"),
    "fp8 cache": (lambda m: changes.rounded_cache("fp8"), "precision", "fp8 KV cache"),
    "int8 head": (lambda m: changes.rounded_head(m, "int8"), "precision", "int8 output head"),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_what_a_context_changes_is_named_and_put_back(name: str) -> None:
    context, cause, detail = CONTEXTS[name]
    model = tiny_model().eval()
    before = score_completions(model, PROMPTS, [[5, 6, 7]] * len(PROMPTS))[0].logps
    with context(model):
        ids, logps = sampled(model)
    assert np.array_equal(score_completions(model, PROMPTS, [[5, 6, 7]] * len(PROMPTS))[0].logps, before)
    found = answer(model, ids, logps)
    assert found.cause == cause and found.detail.startswith(detail), (found.cause, found.detail, found.reasons)
    assert found.basis == "tested" and found.explained > 0.75 and found.confidence >= 0.9


@dataclass(frozen=True)
class Changed(Head):
    """A head that changes logits first, as a sampler with penalties does; ``seen`` are the tokens that it punishes."""

    change: Any = None

    def logps(self, logits: Any) -> Any:
        return super().logps(self.change(logits))


def biased(logits: Any) -> Any:
    return logits + 1.5 * (torch.arange(logits.shape[1]) == 9)


def banned(logits: Any) -> Any:
    return logits.masked_fill(torch.arange(logits.shape[1]) == 1, -torch.inf)


@pytest.mark.parametrize(
    ("change", "cause", "detail"),
    [
        (biased, "logit_processors", "on token 9"),
        (banned, "logit_processors", "token 1 banned"),
        (lambda z: 6.0 * torch.tanh(z / 6.0), "model_config", "soft-capped at 6"),
        (lambda z: torch.cat([z, torch.full((len(z), 40), 0.3)], 1), "model_config", "padding of the vocabulary"),
    ],
)
def test_changes_of_the_logits_are_named(change: Any, cause: str, detail: str) -> None:
    model = tiny_model().eval()
    if "capped" in detail:
        model.lm_head.weight.data *= 10  # a cap needs large logits
    ids, _ = sampled(model, seed=3)
    ids = [[token for token in row if token != 1] for row in ids]  # no end of sequence where it is banned
    (scores,) = score_completions(model, PROMPTS, ids, heads=[Changed(change=change)])
    found = answer(model, ids, [row[np.isfinite(row)] for row in scores.logps])
    assert found.cause == cause and detail in found.detail, (found.cause, found.detail, found.reasons)


def test_log_probs_moved_by_tokens_or_rows_are_misaligned() -> None:
    model = tiny_model().eval()
    ids, logps = sampled(model)
    for step in (1, -2, 3):
        moved = [np.roll(row, step).tolist() for row in logps]
        found = answer(model, ids, moved)
        assert found.cause == "misalignment", (step, found.reasons)
    order = [*range(1, len(logps)), 0]
    full = [row for row, tokens in enumerate(ids) if len(tokens) == 16]
    assert len(full) > 4
    swapped = list(logps)
    swapped[full[0]], swapped[full[-1]] = logps[full[-1]], logps[full[0]]
    assert answer(model, ids, swapped).cause == "misalignment" and order
    running = [np.cumsum(row).tolist() for row in logps]
    found = answer(model, ids, running)
    assert found.cause == "misalignment" and "running sums" in found.detail


LONG = [[3 + i, 9, 40 + i, 7, 8, 11, 30, 31, 32, 33][: 7 + i % 4] for i in range(6) for _ in range(4)]


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda ids: ids[:1] + ids, "first token doubled"),
        (lambda ids: ids[:-1], "last token missing"),
        (lambda ids: ids[-8:], "cut to its last 8 tokens"),
    ],
)
def test_prompts_that_follow_from_the_ids_are_tested(change: Any, detail: str) -> None:
    model = tiny_model().eval()
    with moved(model, 0.5):  # larger attention to the context than at random
        ids, logps = sample_completions(
            model, [change(p) for p in LONG], max_tokens=12, stop_ids=[1], generator=torch.Generator().manual_seed(0)
        )
        (plain,) = score_completions(model, LONG, ids)
        evidence = evidence_of(
            model, ids, logps, old_per_token_logps=plain.logps, entropies=plain.entropies,
            rescored_per_token_logps=None, completion_mask=np.isfinite(plain.logps),
        )  # fmt: skip
        found = attribute(run_hypotheses(evidence, Bench(model, LONG, ids, stop_ids=[1], pad_ids=[0])))
    assert (found.cause, found.detail) == ("prompt_difference", detail), found.reasons


@pytest.mark.parametrize("layout", [Layout(attended=True), Layout(attended=True, counted=True)])
def test_padding_that_the_trainer_sees_is_named(layout: Layout) -> None:
    model = tiny_model().eval()
    prompts = [row if n % 3 else row[:2] for n, row in enumerate(LONG)]
    ids, logps = sample_completions(
        model, prompts, max_tokens=12, stop_ids=[1], generator=torch.Generator().manual_seed(0)
    )
    old = score_in_layout(model, prompts, ids, layout, prompt_width=10)
    (plain,) = score_completions(model, prompts, ids)
    np.testing.assert_allclose(
        score_in_layout(model, prompts, ids, Layout(), prompt_width=10), plain.logps, atol=1e-4
    )  # the plain layout is the plain scoring
    evidence = evidence_of(
        model, ids, logps, old_per_token_logps=old, entropies=plain.entropies, rescored_per_token_logps=None,
        completion_mask=np.isfinite(plain.logps),
    )  # fmt: skip
    found = attribute(run_hypotheses(evidence, Bench(model, prompts, ids, stop_ids=[1], pad_ids=[0])))
    assert found.cause == "padding" and "attended" in found.detail, found.reasons


def test_an_adapter_at_another_scale_is_named() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    with changes.adapter_scale(model, 0.5):
        ids, logps = sampled(model)
    found = answer(model, ids, logps)
    assert (found.cause, found.detail) == ("wrong_adapter", "adapter at half its scale"), found.reasons


def test_temperature_and_truncation_together_are_both_named_with_their_shares() -> None:
    model = tiny_model().eval()
    ids, logps = sampled(model, Head(0.6, Truncation(top_k=4)), length=24)
    found = answer(model, ids, logps)
    assert {cause for cause, _ in found.parts} == {"temperature", "truncated_sampling"}, found.reasons
    assert sum(share for _, share in found.parts) == pytest.approx(found.explained) and found.explained > 0.9


def test_weights_that_nobody_has_at_hand_are_unknown_and_not_a_default() -> None:
    model = tiny_model().eval()
    with moved(model, 0.1):
        ids, logps = sampled(model)
    found = answer(model, ids, logps)
    assert found.cause == "unknown" and found.confidence == 0.0
    assert found.next_test and found.runner_up and "closest" in found.reasons[0]


def test_a_trainer_that_scores_at_another_temperature_is_mirrored() -> None:
    """The trainer's own head is the plain scoring: nothing is blamed that both sides share."""
    model = tiny_model().eval()
    ids, logps = sampled(model, Head(0.7))
    assert answer(model, ids, logps, base=Head(0.7)).cause == "none"
    raw = answer(model, ids, logps, base=Head(1.0))
    assert raw.cause == "temperature" and float(raw.detail) == pytest.approx(0.7, rel=0.01)


def test_one_token_that_fits_does_not_explain_a_batch() -> None:
    model = tiny_model().eval()
    ids, logps = sampled(model)
    evidence = evidence_of(model, ids, logps)
    old = evidence.old_per_token_logps
    generator = np.random.default_rng(0)
    mu = old + generator.normal(0, 0.05, old.shape)
    mu[0, 0] = old[0, 0] - 5.0  # nearly the whole distance
    fits_one = np.where(np.arange(old.size).reshape(old.shape) == 0, mu, old)
    tested = {"reference": old, "engine:model_config:one token": fits_one}
    shown = replace(evidence, sampling_per_token_logps=mu, tested=tested)
    assert left_share(shown, "engine:model_config:one token") > 0.9


def test_a_clean_batch_offers_no_truncation_beyond_the_noise() -> None:
    model = tiny_model().eval()
    ids, logps = sampled(model)
    evidence = evidence_of(model, ids, logps)
    (plain,) = score_completions(model, PROMPTS, ids)
    logits = logits_of(model, PROMPTS, ids, range(len(ids)), Head())
    at = (logits.rows.numpy(), logits.places.numpy())
    found = sampling_tests(logits, plain.logps[at], plain.ranks[at], plain.top_logps[at])
    assert not any(name.startswith("truncated_sampling:top_p") for name in found)
    assert attribute(evidence).cause == "none"
