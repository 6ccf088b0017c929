"""The search for a cause by tests: what was scored under which hypothesis, and how much of the mismatch each leaves.

:class:`Search` holds the results for one batch, and :class:`Change` is a way to score it again. :func:`differing` finds
the part of a batch that is at fault. The tables of hypotheses are in ``hypotheses.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from trl_offpolicy.diagnosis.attribution.bench import Bench
from trl_offpolicy.diagnosis.attribution.contexts.layouts import Layout
from trl_offpolicy.diagnosis.attribution.contexts.precision import Inside
from trl_offpolicy.diagnosis.attribution.distances import MAX_LOG_RATIO, distance
from trl_offpolicy.diagnosis.attribution.evidence import Bools, Floats, TokenEvidence
from trl_offpolicy.diagnosis.attribution.traces.noise import noise_rms
from trl_offpolicy.diagnosis.attribution.trials.interventions import (
    SMALL_TURN,
    Intervention,
    minimise,
    predicted,
    round_numbers,
    switch,
)
from trl_offpolicy.diagnosis.attribution.trials.shares import REFERENCE, at_fault, left_share
from trl_offpolicy.engines.hf import Ids

FOUND = 1e-4
"""Share of the mismatch at which a fitted number is known well enough."""
EXPLAINED = 0.03
"""Share of the mismatch left at which the search stops: nothing else can do much better."""
EXACT = 1e-3
"""The same for tests with so many numbers that they fit other faults in part."""
FLEXIBLE = ("logit_processors:",)
"""Names of such tests."""
PROMISING = 0.9
"""Share left by the best value of a number from which its value is refined, and other rows are scored."""
FIRST_TOKENS_SCORED = 32
"""Tokens of the rows that are scored at first."""
REFINED = 5
"""Golden sections of a number that costs a forward for each value."""
SAME_PLACE = 1e-9
"""Distance on the axis of a number up to which two values are one."""
COVERED = 0.6
"""Share of a row's tokens that a test must score for the row to count: what is left out is not explained."""
FAR = 20.0
"""Times the noise from which a token differs, where only a part of a batch does."""
NEAR_NOTHING = 1e-3
"""Share of the largest difference up to which a token agrees."""
PART_OF_TOKENS = 0.7
"""Share of the tokens that differ, up to which they are tested alone."""
SAME_LAYOUT, NOISE = 0.1, 1e-4
"""Share of the mismatch, and nats, by which a row in the plain layout may differ from the plain scores."""
REFUSED = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError)
"""What a model may raise at a test that does not suit it."""
LEAST_TOKENS = 16
"""Tokens that must differ to be tested alone."""


class Search:
    """The tests that were made, and the best of them."""

    def __init__(self, evidence: TokenEvidence, bench: Bench, note: Callable[[str], None]) -> None:
        self.bench, self.note = bench, note
        self.rows = telling_rows(evidence, bench.rows)
        self.width = evidence.completion_mask.shape[1]
        note("plain scoring")
        (self.plain,) = bench.score(self.rows, width=self.width)
        self.tested: dict[str, Floats] = {REFERENCE: self.plain.logps}
        self.left: dict[str, float] = {}
        """Share of the mismatch that each test leaves, by its name without the side."""
        self.evidence = evidence
        self.side = at_fault(evidence, self.plain.logps)
        self.target = evidence.sampling_per_token_logps
        if self.side == "trainer":
            self.target = evidence.old_per_token_logps

    @cached_property
    def first_rows(self) -> list[int]:
        """Some of the rows, those with most disagreement: they decide whether a test is worth the others."""
        size = np.nansum(np.clip(self.evidence.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO) ** 2, axis=1)
        order = sorted(self.rows, key=lambda row: -size[row])
        counts = np.cumsum(self.evidence.observed.sum(1)[order])
        enough = max(2, int(np.searchsorted(counts, FIRST_TOKENS_SCORED)) + 1)
        return sorted(order[:enough])

    @cached_property
    def laid_out(self) -> bool:
        """Whether rows that are laid out by hand have the plain scores where nothing is changed.

        They do not where a model makes masks of its own, as one with windows in some layers.
        """
        row = min(self.rows, key=lambda one: int(self.evidence.observed[one].sum()) or self.width + 1)
        try:
            laid = self.bench.score_layout([row], Layout(), 0, width=self.width)[row]
        except REFUSED as error:
            self.give_up("other layouts of padding and masks", error)
            return False
        plain, target = self.plain.logps[row], self.target[row]
        use = self.evidence.observed[row] & np.isfinite(plain)
        moved, mismatch = (distance(np.clip(one[use], -MAX_LOG_RATIO, MAX_LOG_RATIO))
                           for one in (laid - plain, target - plain))  # fmt: skip
        return moved <= max(SAME_LAYOUT * mismatch, NOISE**2)

    def add(self, name: str, logps: Floats, *, cut: bool = False) -> float:
        """Keep a result; returns the share of the mismatch that it leaves. ``cut``: rows were cut to save memory."""
        self.tested[f"{self.side}:{name}"] = logps if cut else self._covering(logps)
        self.left[name] = left_share(*self.alone(name))
        return self.left[name]

    def _covering(self, logps: Floats) -> Floats:
        """The rows of which most tokens are scored; the others are left out."""
        known = self.evidence.observed & np.isfinite(self.plain.logps)
        scored = np.isfinite(logps) | np.isneginf(logps)
        enough = (known & scored).sum(1) >= COVERED * known.sum(1)
        return np.where(enough[:, None], logps, np.nan)

    def alone(self, name: str) -> tuple[TokenEvidence, str]:
        """A test alone beside the plain scores: the others do not change what it leaves."""
        key = f"{self.side}:{name}"
        return replace(self.evidence, tested={REFERENCE: self.plain.logps, key: self.tested[key]}), key

    def best(self) -> tuple[float, str]:
        """Share left by the best test, and its name without the side."""
        name = min(self.left, key=lambda one: self.left[one], default="")
        return self.left.get(name, 1.0), name

    @property
    def solved(self) -> bool:
        """True if the best test explains all but a rest in which nothing else can be seen."""
        share, name = self.best()
        return share <= (EXACT if name.startswith(FLEXIBLE) else EXPLAINED)

    def try_value(self, one: Intervention, value: float) -> tuple[float, Floats]:
        """Share left by an intervention at a value, and its log-probs: on a few rows, and on all if that helps."""
        name = f"{one.cause}:{one.text(value)}"
        self.note(name)
        rows = self.first_rows if one.forwards else self.rows
        others = [row for row in self.rows if row not in rows]
        try:
            logps = one.score(value, rows)
            share = self.add(name, logps)
            if others and share < PROMISING:
                rest = one.score(value, others)
                logps = np.where(np.isfinite(rest) | np.isneginf(rest), rest, logps)
                share = self.add(name, logps)
        except REFUSED as error:  # attention in plain steps holds all scores; some models lack what a test needs
            self.give_up(name, error)
            return float("inf"), np.full_like(self.plain.logps, np.nan)
        return share, logps

    def give_up(self, what: str, error: Exception) -> None:
        """Say that something was not tested, and why; the other tests go on."""
        reason = "out of memory" if isinstance(error, torch.OutOfMemoryError) else f"{type(error).__name__}: {error}"
        self.note(f"{what}: not tested, {reason}")
        if not isinstance(error, torch.OutOfMemoryError):
            warnings.warn(f"{what} was not tested: {reason}", RuntimeWarning, stacklevel=2)

    def turn(self, one: Intervention) -> None:
        """Try the values of an intervention, and refine the best one if it helps."""
        tried: dict[float, tuple[float, Floats]] = {}
        if one.neutral is not None:
            tried[one.neutral] = (1.0, self.plain.logps)

        def share(x: float) -> float:
            value = one.at(x)
            if value not in tried:
                tried[value] = self.try_value(one, value)
            return tried[value][0]

        if one.scale == "switch":
            for value in one.values:
                share(value)
            return
        neutral = None if one.neutral is None else one.place(one.neutral)
        grid = {one.place(value) for value in one.values} | ({neutral} if neutral is not None else set())
        for x in [] if neutral is None else self._guesses(one, share, tried):
            if min(abs(x - known) for known in grid) > SAME_PLACE:  # a twin would be the neighbour of the best
                grid.add(x)
        minimise(
            share, sorted(grid), neutral=neutral, steps=REFINED, hopeless=PROMISING, enough=FOUND, open_ends=True
        )  # fmt: skip
        best = min(tried, key=lambda value: tried[value][0])
        if tried[best][0] <= EXPLAINED:  # settings are round numbers, and the right one leaves nothing
            for value in set(round_numbers(best)) - set(tried):
                self.try_value(one, value)

    def _guesses(
        self, one: Intervention, share: Callable[[float], float], tried: Mapping[float, tuple[float, Floats]]
    ) -> list[float]:
        """A small step gives the direction of the change; how far it goes follows from the mismatch."""
        assert one.neutral is not None
        start = one.place(one.neutral)
        share(start + SMALL_TURN)
        moved = tried[one.at(start + SMALL_TURN)][1] - self.plain.logps
        step = predicted(moved / SMALL_TURN, self.target - self.plain.logps)
        share(start + step)
        return [start + SMALL_TURN, start + step]


@dataclass(frozen=True)
class Change:
    """A way to score again: a context, other prompts, or another layout."""

    inside: Inside = nullcontext
    prompts: Ids | None = None
    layout: tuple[Layout, int] | None = None

    def score(self, search: Search, rows: Sequence[int] | None = None) -> Floats:
        """Log-probs (B, T) of some rows, or of all that are tested, NaN elsewhere."""
        bench, chosen = search.bench, search.rows if rows is None else rows
        if self.layout is not None:
            with self.inside():
                return bench.score_layout(chosen, *self.layout, width=search.width)
        return bench.score(chosen, prompts=self.prompts, inside=self.inside, width=search.width)[0].logps


def of_change(search: Search, name: str, change: Change) -> Intervention:
    """The switch of a change, by ``cause:detail``."""
    cause, _, detail = name.partition(":")
    return switch(cause, detail, lambda rows: change.score(search, rows))


def telling_rows(evidence: TokenEvidence, count: int) -> list[int]:
    """The rows with most disagreement and, for a quarter of ``count``, rows that are spread over the batch."""
    size = np.nansum(np.clip(evidence.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO) ** 2, axis=1)
    # The spread rows show what is the same everywhere. The rows with most disagreement show the fault.
    order = np.argsort(-size, kind="stable").tolist()
    spread = np.linspace(0, len(size) - 1, max(1, count // 4)).astype(int).tolist()
    chosen = [*spread, *(row for row in order if row not in spread)][:count]
    return sorted(set(chosen))


def differing(evidence: TokenEvidence) -> Bools | None:
    """(B, T) bool: the part of each row from its first to its last token that differs; None = that is nearly all.

    A setting may reach some requests only, one of several replicas may be at fault, or weights may arrive within a
    response. Then the rest agrees, and a test of everything would find it wrong there.
    """
    gap = np.abs(np.nan_to_num(np.clip(evidence.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)))
    differs = gap > max(FAR * noise_rms(evidence), NEAR_NOTHING * gap.max())
    # not after the last one that differs, and not before the first
    inside: Bools = np.logical_or.accumulate(differs, 1) & np.logical_or.accumulate(differs[:, ::-1], 1)[:, ::-1]
    inside &= evidence.observed
    few = inside.sum() <= PART_OF_TOKENS * evidence.observed.sum()
    return inside if few and differs.sum() >= LEAST_TOKENS else None
