"""The kept set of top-p, top-k and min-p: by hand, and against vLLM's own sampler."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trl_offpolicy.engines import truncation as engine_truncation
from trl_offpolicy.engines.environment import engine_has_triton
from trl_offpolicy.engines.truncation import as_vllm_keeps
from trl_offpolicy.functional.truncated_sampling import KeptIds, Truncation, listed_weights, truncated_support

OPTIONS = [
    Truncation(top_p=0.8),
    Truncation(top_p=0.05),
    Truncation(top_p=0.999),
    Truncation(top_k=1),
    Truncation(top_k=20),
    Truncation(top_k=10_000),
    Truncation(min_p=0.05),
    Truncation(min_p=1.0),
    Truncation(top_p=0.8, top_k=20),
    Truncation(top_p=0.9, min_p=0.1),
    Truncation(top_k=5, min_p=0.01),
    Truncation(top_p=0.7, top_k=20, min_p=0.05),
]


def by_the_book(probs: list[float], truncation: Truncation) -> list[bool]:
    """Plain Python, for distinct probabilities: min-p, top-k, renormalise, top-p."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = [i for i in order if probs[i] >= truncation.min_p * probs[order[0]]]
    kept = kept[: truncation.top_k or None]
    total, mass, last = sum(probs[i] for i in kept), 0.0, []
    for i in kept:
        if mass >= truncation.top_p * total:
            break
        mass += probs[i]
        last.append(i)
    return [i in last for i in range(len(probs))]


@pytest.mark.parametrize("truncation", OPTIONS, ids=str)
def test_kept_set_is_that_of_the_definition(truncation: Truncation) -> None:
    torch.manual_seed(0)
    logits = 2.0 * torch.randn(50, 60, dtype=torch.float64)
    weights = truncated_support(logits, truncation).weights(logits)
    expected = [by_the_book(row, truncation) for row in logits.softmax(-1).tolist()]
    assert torch.equal(weights, torch.tensor(expected).double())


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (Truncation(top_p=0.5), [1, 0, 0, 0]),  # exactly reached: the second is not needed
        (Truncation(top_p=0.51), [1, 1, 0, 0]),
        (Truncation(min_p=0.5), [1, 1, 0, 0]),  # exactly half as likely: kept
        (Truncation(min_p=0.500001), [1, 0, 0, 0]),
        (Truncation(top_k=3), [1, 1, 1, 1]),  # the fourth is tied with the third
        (Truncation(top_k=3, top_p=0.76), [1, 1, 0.5, 0.5]),  # one of two tied is enough
        (Truncation(top_k=2, top_p=0.6), [1, 0, 0, 0]),  # 0.5 of 0.75 is more than 0.6
        (Truncation(), [1, 1, 1, 1]),
    ],
)
def test_edges(truncation: Truncation, kept: list[float]) -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log2()  # exact
    logits = logits * math.log(2)
    assert truncated_support(logits, truncation).weights(logits).tolist() == [kept]


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (Truncation(top_k=3), [1, 1, 0.5, 0.5]),
        (Truncation(top_k=4), [1, 1, 1, 1]),
        (Truncation(top_k=1), [1, 0, 0, 0]),
        (Truncation(top_k=3, top_p=0.99), [1, 1, 0.5, 0.5]),  # of what top-k left, all
        (Truncation(top_k=3, top_p=0.8), [1, 1, 0, 0]),  # 0.75 of 0.875 is 0.857
        (Truncation(top_k=3, min_p=0.25), [1, 1, 0.5, 0.5]),
        (Truncation(top_k=3, min_p=0.5), [1, 1, 0, 0]),  # min-p left fewer than three
        (Truncation(top_k=10_000), [1, 1, 1, 1]),
        (Truncation(top_k=10_000, top_p=0.7), [1, 1, 0, 0]),
        (Truncation(top_p=0.7), [1, 1, 0, 0]),
    ],
)
def test_exactly_k_where_the_engine_counts(truncation: Truncation, kept: list[float]) -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log2() * math.log(2)
    exact = replace(truncation, exact_top_k=True)
    assert truncated_support(logits, exact).weights(logits).tolist() == [kept]


def test_how_ties_are_counted_is_no_cut() -> None:
    assert not Truncation(exact_top_k=True) and Truncation(top_k=1) and Truncation(top_p=0.5) and Truncation(min_p=0.1)


@pytest.mark.parametrize(("triton", "exact"), [(False, False), (True, True)])
def test_vllms_rule_is_that_of_its_sampler_here(monkeypatch: pytest.MonkeyPatch, triton: bool, exact: bool) -> None:
    monkeypatch.setattr(engine_truncation, "engine_has_triton", lambda: triton)
    assert as_vllm_keeps(Truncation(top_k=5)) == Truncation(top_k=5, exact_top_k=exact)
    assert as_vllm_keeps(Truncation(top_p=0.5)) == Truncation(top_p=0.5)


def vllm_keeps(logits: Tensor, truncation: Truncation) -> Tensor:
    """(N, V) bool through vLLM's own functions, in the order of its sampler (Triton's with ``--vllm-v2``)."""
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor

    rows, logits = len(logits), logits.clone()
    if truncation.min_p:
        processor = MinPLogitsProcessor.__new__(MinPLogitsProcessor)
        processor.min_p_count, processor.min_p = rows, torch.full((rows, 1), truncation.min_p)
        logits = processor.apply(logits)
    top_k = min(truncation.top_k, logits.shape[1]) or None
    top_k = None if top_k is None else torch.full((rows,), top_k, dtype=torch.int32)
    top_p = None if truncation.top_p == 1.0 else torch.full((rows,), truncation.top_p)
    return sampler.apply_top_k_top_p(logits, top_k, top_p) > -torch.inf


ROWS = 16 if os.environ.get("TRITON_INTERPRET") else 200
"""The interpreter is slow."""


def skip_what_triton_cuts_otherwise(truncation: Truncation) -> None:
    """vLLM's Triton kernel drops the least likely that min-p left where top-p needs them all (docs/engines.md)."""
    if truncation.min_p and truncation.top_p < 1.0 and engine_has_triton():
        pytest.skip("not mirrored")


@pytest.mark.vllm
@pytest.mark.parametrize("truncation", OPTIONS, ids=str)
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_kept_set_is_vllms(truncation: Truncation, scale: float) -> None:
    skip_what_triton_cuts_otherwise(truncation)
    torch.manual_seed(0)
    logits = scale * torch.randn(ROWS, 997)
    weights = truncated_support(logits, as_vllm_keeps(truncation)).weights(logits)
    kept = vllm_keeps(logits, truncation)
    if truncation.top_p < 1.0 and engine_has_triton():  # it bisects 18 times for the edge
        probs = logits.softmax(-1)
        torch.testing.assert_close((weights * probs).sum(1), (kept * probs).sum(1), rtol=2e-3, atol=0)
        return
    assert torch.equal(weights > 0, kept)
    assert set(weights.unique().tolist()) <= {0.0, 1.0}


@pytest.mark.vllm
@pytest.mark.parametrize("truncation", OPTIONS, ids=str)
def test_normaliser_is_vllms_with_ties_everywhere(truncation: Truncation, request: pytest.FixtureRequest) -> None:
    """Logits in steps of a half: nearly every edge is tied, and vLLM keeps an arbitrary part of the tied tokens."""
    if request.config.getoption("--other-digits") is not None:
        pytest.skip("there are no ties where digits are perturbed")
    skip_what_triton_cuts_otherwise(truncation)
    torch.manual_seed(0)
    logits = (4.0 * torch.randn(ROWS, 300)).round() / 2
    support = truncated_support(logits, as_vllm_keeps(truncation))
    ours = (support.weights(logits) * logits.exp()).sum(1)
    torch.testing.assert_close(ours, (vllm_keeps(logits, truncation) * logits.exp()).sum(1), rtol=1e-5, atol=0)
    assert truncation.top_p in (1.0, 0.05) or (support.share < 1).any()


def test_no_gradient_and_no_change_of_the_input() -> None:
    logits = torch.randn(3, 9, requires_grad=True)
    before = logits.detach().clone()
    support = truncated_support(logits, Truncation(top_p=0.5, top_k=4, min_p=0.1))
    assert not support.lowest.requires_grad and not support.share.requires_grad
    assert torch.equal(logits.detach(), before)


def test_the_most_likely_token_always_stays() -> None:
    logits = torch.tensor([[100.0, 0.0, -100.0], [0.0, 0.0, 0.0]])
    for truncation in OPTIONS:
        weights = truncated_support(logits, truncation).weights(logits)
        assert weights[0, 0] == 1 and weights.sum(1).min() > 0.99, truncation


SETS = [[3, 0], [], [2], [1, 2, 3], [0]]


def test_listed_ids() -> None:
    assert listed_weights(KeptIds.of(SETS[:3]), 4).tolist() == [[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]]
    assert listed_weights(KeptIds.of([]), 4).shape == (0, 4)


def test_kept_ids_are_cut_joined_and_picked_as_lists_are() -> None:
    kept = KeptIds.of(SETS)
    assert kept.ids.dtype == kept.counts.dtype == torch.int32 and len(kept) == 5
    assert kept.tolist() == SETS and kept.unknown.tolist() == [1]
    for cut in (slice(0, 0), slice(1, 4), slice(3, None), slice(None, 2), slice(-2, None), slice(4, 9)):
        assert kept[cut].tolist() == SETS[cut]
    assert KeptIds.joined([kept[3:], kept[:3]]).tolist() == SETS[3:] + SETS[:3]
    assert KeptIds.joined([]).tolist() == []
    places = torch.tensor([True, True, False, False, True])
    assert kept.at(places).tolist() == [SETS[0], SETS[1], SETS[4]]
    with pytest.raises(ValueError, match=r"^counts must be \(N,\) and add up to the \(2,\) ids, but got"):
        KeptIds(torch.tensor([1, 2]), torch.tensor([3]))
    with pytest.raises(ValueError, match=r"^positions must follow each other, but got a step of 2\.$"):
        kept[::2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.0}, r"^top_p must be in \(0, 1\], but got 0\.0\.$"),
        ({"top_p": 1.1}, r"^top_p must be"),
        ({"top_k": -1}, r"^top_k must be a whole number >= 0 .*, but got -1\.$"),
        ({"top_k": 2.0}, r"^top_k must be"),
        ({"min_p": -0.1}, r"^min_p must be in \[0, 1\], but got -0\.1\.$"),
        ({"min_p": float("nan")}, r"^min_p must be"),
    ],
)
def test_refusals(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Truncation(**options)


def test_truth_says_whether_anything_is_cut() -> None:
    assert not Truncation() and all(OPTIONS)
