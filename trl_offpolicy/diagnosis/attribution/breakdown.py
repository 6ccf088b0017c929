"""Shows where a mismatch is: by probability, position, length and kind of token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trl_offpolicy.diagnosis.attribution.distances import kl_k3, token_k3
from trl_offpolicy.diagnosis.attribution.evidence import Array, TokenEvidence
from trl_offpolicy.run_folder.rollouts import RecordedRollouts

POSITIONS = 8
LENGTHS = 4


@dataclass(frozen=True)
class Bin:
    """A part of the tokens.

    Args:
        label: which tokens.
        tokens: number of tokens.
        k3: KL(mu || old), nats per token.
        logp_diff: mean |log old - log mu|, nats.
        share: the bin's share of the sum of k3 over all tokens.
    """

    label: str
    tokens: int
    k3: float
    logp_diff: float
    share: float


@dataclass(frozen=True)
class Breakdown:
    """All tokens in bins of one kind; ``title`` names the quantity that defines the bins."""

    title: str
    bins: tuple[Bin, ...]


def break_down(
    evidence: TokenEvidence, *, decode: Callable[[int], str] | None = None, special: frozenset[int] = frozenset()
) -> list[Breakdown]:
    """Breakdowns by probability, position, length and kind of token; the last one needs ids and ``decode``.

    Args:
        evidence: the batch.
        decode: returns the text of a token id.
        special: ids of special tokens.
    """
    seen = evidence.observed
    d = (evidence.old_per_token_logps - evidence.sampling_per_token_logps)[seen]
    places = np.broadcast_to(np.arange(seen.shape[1]), seen.shape)[seen]
    lengths = np.broadcast_to(seen.sum(1, keepdims=True), seen.shape)[seen]
    probability = np.exp(evidence.sampling_per_token_logps[seen])
    found = [
        Breakdown("probability under the sampler, tenths of the tokens", _by_tenth(d, probability)),
        Breakdown("position in the response", _by_range(d, places, POSITIONS)),
        Breakdown("length of the response, tokens", _by_range(d, lengths, LENGTHS)),
    ]
    if evidence.token_ids is not None and decode is not None:
        kinds = token_kinds(evidence.token_ids[seen], decode, special)
        names = sorted(set(kinds.tolist()))
        found.append(Breakdown("kind of token", tuple(_bin(d, kinds == name, name) for name in names)))
    return found


def _by_tenth(d: Array, values: Array) -> tuple[Bin, ...]:
    """Bins that hold a tenth of the tokens each, by ``values``; bins with equal edges are merged."""
    # Quantiles that coincide (many tokens of probability 1) leave fewer, larger bins; the last one is closed.
    edges = np.unique(np.quantile(values, np.linspace(0, 1, 11)))
    index = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, max(0, len(edges) - 2))
    ends = [*edges.tolist(), edges[-1]]
    return tuple(
        _bin(d, index == place, f"{ends[place]:.3g} to {ends[place + 1]:.3g}") for place in np.unique(index).tolist()
    )


def _by_range(d: Array, values: Array, count: int) -> tuple[Bin, ...]:
    """At most ``count`` spans of equal width of whole numbers."""
    first = int(values.min())
    width = max(1, -(-(int(values.max()) + 1 - first) // count))  # rounded up
    index = (values - first) // width
    found = []
    for place in np.unique(index).tolist():
        low, high = first + place * width, min(first + (place + 1) * width - 1, int(values.max()))
        found.append(_bin(d, index == place, str(low) if low == high else f"{low} to {high}"))
    return tuple(found)


def _bin(d: Array, chosen: Array, label: str) -> Bin:
    total = float(np.sum(token_k3(np.clip(d, -20, 20))))
    part = d[chosen]
    inside = float(np.sum(token_k3(np.clip(part, -20, 20))))
    return Bin(label, len(part), kl_k3(part), float(np.mean(np.abs(part))), inside / total if total else 0.0)


def token_kinds(ids: Array, decode: Callable[[int], str], special: frozenset[int]) -> Array:
    """Kind of each token: special, number, word (a new one), inside a word, line break, space, punctuation, other."""
    unique, index = np.unique(ids, return_inverse=True)
    kinds = np.array([_kind("" if token in special else decode(token)) for token in unique.tolist()])
    found: Array = kinds[index.ravel()]
    return found


def _kind(text: str) -> str:
    core = text.strip()
    if not text:
        return "special"
    if not core:
        return "line break" if "\n" in text else "space"
    if any(letter.isdigit() for letter in core):
        return "number"
    if core.isalpha():
        return "word" if text[0].isspace() else "inside a word"
    return "punctuation" if not any(letter.isalnum() for letter in core) else "other"


def as_rollouts(evidence: TokenEvidence) -> RecordedRollouts:
    """The batch in the form that the rollout figures take: step 0, nothing dropped, no weights."""
    seen = evidence.observed
    row, position = np.nonzero(seen)
    log_ratio = (evidence.old_per_token_logps - evidence.sampling_per_token_logps)[seen]
    trainable = evidence.completion_mask.sum(1).astype(np.int64)
    return RecordedRollouts(
        steps=np.zeros(len(seen), np.int64),
        trainable=trainable,
        kept=trainable,
        row=row.astype(np.int32),
        position=position.astype(np.int32),
        sampling_logp=evidence.sampling_per_token_logps[seen].astype(np.float32),
        log_ratio=log_ratio.astype(np.float32),
        weight=np.full(len(row), np.nan, np.float32),
        keep=np.ones(len(row), bool),
        chunks=(),
    )
