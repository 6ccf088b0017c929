"""Scoring, simulated precisions and the search of hypotheses, with tiny models."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from trl_offpolicy.diagnosis.attribution.attribute import attribute
from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence, padded
from trl_offpolicy.diagnosis.attribution.hypotheses import Bench, run_hypotheses, sampling_candidates
from trl_offpolicy.diagnosis.attribution.precision import (
    round_significant,
    rounded_routers,
    rounded_weights,
    simulated_dtype,
)
from trl_offpolicy.engines.hf import Head, sample_completions, score_completions
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


def test_rounded_weights_are_found() -> None:
    model = tiny_model().eval()
    with rounded_weights(model, "int8"):
        ids, logps = sampled(model)
    found = attribute(run_hypotheses(evidence_of(model, ids, logps), Bench(model, PROMPTS, ids)))
    assert (found.cause, found.detail) == ("precision", "int8 weights")


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
        assert (found.cause, found.detail) == ("stale_weights", "version 1")


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


def test_a_clean_batch_offers_no_sampling_options_to_test_beyond_the_noise() -> None:
    model = tiny_model().eval()
    ids, logps = sampled(model)
    evidence = evidence_of(model, ids, logps)
    (plain,) = score_completions(model, PROMPTS, ids)
    found = sampling_candidates(replace(evidence, sampling_per_token_logps=plain.logps), plain)
    assert not any(name.startswith("truncated_sampling:top_p") for name in found)
    assert attribute(evidence).cause == "none"
