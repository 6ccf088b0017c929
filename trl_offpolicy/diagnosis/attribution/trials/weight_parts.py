"""Tests of other weights in a part of the model, or for a part of the way: the search over ``contexts/parts.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from trl_offpolicy.diagnosis.attribution.contexts.parts import (
    PART,
    WAY,
    Division,
    best_sets,
    captured,
    divisions,
    holding,
)
from trl_offpolicy.diagnosis.attribution.distances import MAX_LOG_RATIO
from trl_offpolicy.diagnosis.attribution.evidence import Array, Floats
from trl_offpolicy.diagnosis.attribution.trials.interventions import Intervention
from trl_offpolicy.diagnosis.attribution.trials.search import PROMISING, Change, Search, of_change
from trl_offpolicy.diagnosis.attribution.trials.shares import left_in_part

MOST_CONTEXTS, WAYS = 8, 2
"""Weights at hand of which parts are tested, and of which points on the way are."""
TOKENS_PER_CHOICE = 2
"""Tokens that a response must have for each set of weights that is chosen from."""
SETS, CLIMBS = 3, 4
"""Sets of parts of the weights that are scored, and steps from the best of them."""


def search_versions(search: Search) -> None:
    """Weights that differ between responses, or change within one: several replicas, updates amid a response."""
    weights = search.bench.weights
    names = sorted(weights, key=lambda name: search.left.get(name, 1.0))[:MOST_CONTEXTS]
    observed = search.evidence.observed & np.isfinite(search.plain.logps)
    lengths = observed.sum(1)[observed.any(1)]
    if not names or not len(lengths) or np.median(lengths) < TOKENS_PER_CHOICE * (1 + len(names)):
        return  # in a few tokens one of many fits by chance
    search.note("other weights in each response, or in a part of it")
    held = {"the trainer's": search.plain.logps}
    held |= {name.partition(":")[2]: Change(weights[name]).score(search) for name in names}
    target = np.where(observed, search.target, np.nan)
    whole, within = chosen_versions(list(held.values()), target)
    for words, chosen in (("each response", whole), ("parts of the responses", within)):
        used = np.unique(chosen[np.isfinite(search.plain.logps)])
        if len(used) > 1:
            versions = ", ".join(np.array(list(held))[used])
            search.add(f"stale_weights:{words}{PART}{versions}", np.choose(chosen, list(held.values())))


def chosen_versions(scored: Sequence[Floats], target: Floats) -> tuple[Array, Array]:
    """Which of K scores fits: (B, T) one for each row, and (B, T) one for the beginning and one for the rest of a row.

    Args:
        scored: K arrays (B, T) of log-probs under other weights, nats; NaN = not scored.
        target: (B, T) log-probs to be explained, nats.

    Example:
        >>> whole, within = chosen_versions([np.zeros((1, 4)), np.ones((1, 4))], np.array([[0.0, 0.0, 1.0, 1.0]]))
        >>> within
        array([[0, 0, 1, 1]])
    """
    gaps = np.nan_to_num(np.clip(np.stack(scored) - target, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    cost = 2 * (np.sqrt(1 + gaps**2) - 1)  # (K, B, T), as distances.distance weighs them
    rows, tokens = target.shape
    whole = np.broadcast_to(cost.sum(2).argmin(0)[:, None], target.shape)
    begun = np.concatenate([np.zeros((len(scored), rows, 1)), cost.cumsum(2)], 2)  # (K, B, T + 1)
    rest = begun[:, :, -1:] - begun
    at = (begun.min(0) + rest.min(0)).argmin(1)  # (B,) where the weights change
    first = begun.argmin(0)[np.arange(rows), at]
    second = rest.argmin(0)[np.arange(rows), at]
    within = np.where(np.arange(tokens) < at[:, None], first[:, None], second[:, None])
    return whole, within


def search_parts(search: Search) -> None:
    """Weights at hand in a part of the model, and all of them for a part of the way."""
    weights = search.bench.weights
    contexts = sorted(weights, key=lambda name: search.left.get(name, 1.0))[:MOST_CONTEXTS]
    parts = _Parts(search)
    for context in contexts:
        parts.score_single(context)
        if search.solved:
            return
    for division in parts.divisions:
        parts.climb(division)
        if search.solved:
            return
    tested = [name for name in contexts if name in search.left]
    for context in sorted(tested, key=lambda name: left_in_part(*search.alone(name)))[:WAYS]:
        if held := parts.values(context):
            search.turn(_on_the_way(search, context, held))


class _Parts:
    """Looks for the parts of the weights that are other ones: first by sums of their effects, then by single changes.

    Args:
        search: the search.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.divisions: list[Division] = []
        self._held: tuple[str, dict[str, Any]] = ("", {})
        self._effects: dict[tuple[int, str], dict[str, Floats]] = {}

    def values(self, context: str) -> dict[str, Any]:
        """The parameters that a context changes; those of one context are held at a time."""
        if self._held[0] != context:
            self._held = ("", {})
            self._held = (context, captured(self.search.bench.model, self.search.bench.weights[context]))
        return self._held[1]

    def score_single(self, context: str) -> None:
        """Score every part alone."""
        held = self.values(context)
        self.divisions = self.divisions or [one for one in divisions(list(held)) if len(one.parts) > 1]
        for number, division in enumerate(self.divisions):
            for name in division.parts:
                logps = self.score(division, frozenset([name]), context)[1]
                self._effects.setdefault((number, context), {})[name] = logps - self.search.plain.logps

    def climb(self, division: Division) -> None:
        """Score the sets that add up best, and then change the best one by a part each time."""
        number = self.divisions.index(division)
        contexts = [context for at, context in self._effects if at == number]
        starts = [
            (left, sorted(chosen), context) for context in contexts for chosen, left in self._sums(number, context)
        ]
        tried = [(self.score(division, frozenset(names), context)[0], names, context)
                 for left, names, context in sorted(starts)[:SETS] if left < PROMISING]  # fmt: skip
        if not tried:
            return
        best = min(tried)
        for _ in range(CLIMBS):
            _, names, context = best
            near = [frozenset(names) ^ {name} for name in division.parts]
            found = [(self.score(division, one, context)[0], sorted(one), context) for one in near if one]
            if self.search.solved or min(found)[0] >= best[0]:
                return
            best = min(found)

    def _sums(self, number: int, context: str) -> list[tuple[frozenset[str], float]]:
        search, effects = self.search, self._effects[number, context]
        change = np.clip(search.target - search.plain.logps, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        use = search.evidence.observed & np.isfinite(change)
        use[[row for row in range(len(use)) if row not in search.first_rows]] = False
        return best_sets({name: effect[use] for name, effect in effects.items()}, change[use])[:SETS]

    def score(self, division: Division, chosen: frozenset[str], context: str) -> tuple[float, Floats]:
        """Share left with some parts as in a context, and the log-probs."""
        search, names = self.search, division.union(chosen)
        part = {name: value for name, value in self.values(context).items() if name in names}
        words = " and ".join(name for name in division.parts if name in chosen)
        detail = f"{words}{PART}{context.partition(':')[2]}"
        one = of_change(search, f"stale_weights:{detail}", Change(partial(holding, search.bench.model, part)))
        return search.try_value(one, 1.0)


def _on_the_way(search: Search, name: str, held: Mapping[str, Any]) -> Intervention:
    """All weights between those of the trainer and others at hand, or beyond."""
    cause, _, detail = name.partition(":")
    return Intervention(
        cause, lambda share: f"{share:.3g}{WAY}{detail}",
        lambda share, rows: Change(partial(holding, search.bench.model, held, share)).score(search, rows),
        (-1.0, 0.5), "linear", 0.0,
    )  # fmt: skip
