"""Log-probs alone, of few tokens or of a flat distribution: nothing is named that they cannot show."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import FIRST_WORD, tiny_model

from trl_offpolicy.diagnosis.attribution.attribute import Attribution, attribute
from trl_offpolicy.diagnosis.attribution.contexts.precision import rounded_weights
from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence, padded
from trl_offpolicy.engines.hf import Head, sample_completions, score_completions
from trl_offpolicy.functional.truncated_sampling import Truncation

SIZES = [(1, 1), (2, 5), (4, 8), (2, 24), (16, 48)]
"""Rows and tokens of each."""
FLAT, PEAKED = 0.03, 0.25
"""Standard deviation of the seeded weights."""


@cache
def model_of(vocabulary: int, scale: float) -> Any:
    return tiny_model(vocab_size=vocabulary, initializer_range=scale).eval()


def answer(model: Any, rows: int, length: int, head: Head | None = None, *, weights: str | None = None) -> Attribution:
    """What the log-probs of an engine with another head, or with rounded weights, are said to come from."""
    prompts = [[FIRST_WORD + 7 * row % 50, FIRST_WORD + row] for row in range(rows)]
    draw = lambda: sample_completions(  # noqa: E731
        model, prompts, max_tokens=length, stop_ids=[], head=head, generator=torch.Generator().manual_seed(0)
    )
    if weights is None:
        ids, logps = draw()
    else:
        with rounded_weights(model, weights):
            ids, logps = draw()
    (scores,), (again,) = score_completions(model, prompts, ids), score_completions(model, prompts, ids, rows=3)
    return attribute(
        TokenEvidence(
            sampling_per_token_logps=padded(logps), old_per_token_logps=scores.logps,
            completion_mask=np.isfinite(scores.logps), rescored_per_token_logps=again.logps,
            entropies=scores.entropies, token_ids=padded(ids, fill=0).astype(np.int64),
            group_ids=np.arange(rows),
        )
    )  # fmt: skip


HEADS = {
    "temperature": [Head(0.8), Head(1.2)],
    "truncated_sampling": [
        Head(1.0, Truncation(top_p=0.9)), Head(1.0, Truncation(top_p=0.6)),
        Head(1.0, Truncation(top_k=20)), Head(1.0, Truncation(min_p=0.1)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("vocabulary", [64, 1000])
@pytest.mark.parametrize("scale", [FLAT, PEAKED])
def test_no_wrong_cause(scale: float, vocabulary: int, size: tuple[int, int]) -> None:
    model = model_of(vocabulary, scale)
    for cause, heads in HEADS.items():
        for head in heads:
            found = answer(model, *size, head)
            assert found.cause in (cause, "unknown", "none"), (head, found.cause, found.reasons)
    found = answer(model, *size, weights="int4")
    assert found.cause in ("precision", "other_weights", "unknown", "none"), (found.cause, found.reasons)


@pytest.mark.parametrize("scale", [FLAT, PEAKED])
def test_a_thousand_tokens_name_top_p(scale: float) -> None:
    """Where no token is likely, the kept mass is nearly the same everywhere; it is no constant for that."""
    found = answer(model_of(1000, scale), 16, 48, Head(1.0, Truncation(top_p=0.9)))
    assert found.cause == "truncated_sampling", (found.cause, found.reasons)
