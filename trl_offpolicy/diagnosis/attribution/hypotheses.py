"""Tests causes with the model: the same tokens are scored again under the conditions of each cause.

A cause that removes the mismatch is no longer a guess. First the tokens are scored plainly. The side that is further
from these scores is at fault, and its log-probs are the target. Then tables of interventions follow in the order of
their cost, until one explains the mismatch: book-keeping needs no forward, everything between logits and log-probs
shares one, the others need one each. Two rows are scored at first, and the others if that helps. If a test explains a
part, it is combined with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from trl_offpolicy.diagnosis.attribution.attention import replaceable
from trl_offpolicy.diagnosis.attribution.bench import Bench
from trl_offpolicy.diagnosis.attribution.bookkeeping import Books, bookkeeping
from trl_offpolicy.diagnosis.attribution.caches import capacity, evicting
from trl_offpolicy.diagnosis.attribution.changes import (
    Setting,
    adapter_changes,
    adapter_scale,
    cache_changes,
    expert_changes,
    head_changes,
    part_changes,
    position_changes,
    settings,
)
from trl_offpolicy.diagnosis.attribution.edits import PromptSearch, search_prompts
from trl_offpolicy.diagnosis.attribution.evidence import Floats, TokenEvidence
from trl_offpolicy.diagnosis.attribution.features import (
    MAX_LOG_RATIO,
    distance,
    noise_rms,
)
from trl_offpolicy.diagnosis.attribution.heads import logits_of, processor_tests, sampling_tests
from trl_offpolicy.diagnosis.attribution.interventions import (
    SMALL_TURN,
    Intervention,
    minimise,
    predicted,
    switch,
)
from trl_offpolicy.diagnosis.attribution.layouts import Layout, layouts, windows
from trl_offpolicy.diagnosis.attribution.parts import PART, Division, best_sets, captured, divisions, holding
from trl_offpolicy.diagnosis.attribution.precision import (
    SIGNIFICANT_BITS,
    Inside,
    activation_roundings,
    rounded_routers,
    rounded_weights,
    routers,
    simulated_dtype,
    weight_roundings,
)
from trl_offpolicy.diagnosis.attribution.shares import REFERENCE, at_fault, left_in_part, left_share
from trl_offpolicy.diagnosis.attribution.spellings import respelled
from trl_offpolicy.engines.hf import Head, Ids
from trl_offpolicy.engines.kv_cache import with_kv_cache
from trl_offpolicy.functional.truncated_sampling import Truncation

__all__ = ["REFERENCE", "Bench", "at_fault", "left_share", "run_hypotheses"]

FOUND = 1e-4
"""Share of the mismatch at which a fitted number is known well enough."""
EXPLAINED = 0.03
"""Share of the mismatch left at which the search stops: nothing else can do much better."""
EXACT = 1e-3
"""The same for tests with so many numbers that they fit other faults in part."""
FLEXIBLE = ("logit_processors:",)
"""Names of such tests."""
PARTIAL = (0.15, 0.85)
"""Share left by the best test within which it is tested together with others."""
PROMISING = 0.9
"""Share left by the best value of a number from which its value is refined, and other rows are scored."""
MOST_PAIRS = 6
"""Tests that are combined with the best one."""
MOST_CONTEXTS, WAYS = 8, 2
"""Weights at hand of which parts are tested, and of which points on the way are."""
SETS, CLIMBS = 3, 4
"""Sets of parts of the weights that are scored, and steps from the best of them."""
FIRST_TOKENS_SCORED = 32
"""Tokens of the rows that are scored at first."""
REFINED = 5
"""Golden sections of a number that costs a forward for each value."""


# ------------------------------------------------------------------------------------------------------- the search


class _Search:
    """The tests that were made, and the best of them."""

    def __init__(self, evidence: TokenEvidence, bench: Bench, note: Callable[[str], None]) -> None:
        self.bench, self.note = bench, note
        self.rows = _telling_rows(evidence, bench.rows)
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

    def add(self, name: str, logps: Floats) -> float:
        """Keep a result; returns the share of the mismatch that it leaves."""
        self.tested[f"{self.side}:{name}"] = logps
        self.left[name] = left_share(*self.alone(name))
        return self.left[name]

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
        share, name = self.best()
        return share <= (EXACT if name.startswith(FLEXIBLE) else EXPLAINED)

    def try_value(self, one: Intervention, value: float) -> tuple[float, Floats]:
        """Share left by an intervention at a value, and its log-probs: on a few rows, and on all if that helps."""
        name = f"{one.cause}:{one.text(value)}"
        self.note(name)
        rows = self.first_rows if one.forwards else self.rows
        logps = one.score(value, rows)
        share = self.add(name, logps)
        others = [row for row in self.rows if row not in rows]
        if others and share < PROMISING:
            rest = one.score(value, others)
            logps = np.where(np.isfinite(rest) | np.isneginf(rest), rest, logps)
            share = self.add(name, logps)
        return share, logps

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
        grid = [one.place(value) for value in one.values]
        if one.neutral is not None:
            grid += self._guesses(one, share, tried)
        grid = sorted({*grid, *(one.place(value) for value in tried)})
        neutral = None if one.neutral is None else one.place(one.neutral)
        minimise(
            share, grid, neutral=neutral, steps=REFINED, hopeless=PROMISING, enough=FOUND, open_ends=True
        )  # fmt: skip
        best = min(tried, key=lambda value: tried[value][0])
        if tried[best][0] <= EXPLAINED:  # settings are round numbers, and the right one leaves nothing
            for value in {float(f"{best:.{digits}g}") for digits in (1, 2, 3)} - set(tried):
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


def run_hypotheses(
    evidence: TokenEvidence, bench: Bench, *, note: Callable[[str], None] | None = None
) -> TokenEvidence:
    """The evidence with ``tested`` filled, by testing hypotheses until one explains the mismatch.

    Args:
        evidence: evidence of the batch that ``bench`` holds.
        bench: the model and what can be changed about it.
        note: called with the name of what is being tested.
    """
    search = _Search(evidence, bench, note or (lambda _text: None))
    for stage in STAGES:
        stage(search)
        if search.solved:
            break
    return replace(evidence, tested=search.tested)


def _telling_rows(evidence: TokenEvidence, count: int) -> list[int]:
    """The rows with most disagreement and, for a quarter of ``count``, rows that are spread over the batch."""
    size = np.nansum(np.clip(evidence.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO) ** 2, axis=1)
    # The spread rows show what is the same everywhere. The rows with most disagreement show the fault.
    order = np.argsort(-size, kind="stable").tolist()
    spread = np.linspace(0, len(size) - 1, max(1, count // 4)).astype(int).tolist()
    chosen = [*spread, *(row for row in order if row not in spread)][:count]
    return sorted(set(chosen))


# ------------------------------------------------------------------------------------------------- tables of tests


def _bookkeeping(search: _Search) -> Iterator[Intervention]:
    whole = search.evidence.old_per_token_logps
    if search.side == "trainer":
        whole = search.evidence.sampling_per_token_logps
    return bookkeeping(Books(search.evidence, search.plain, search.target, whole))


def _common(search: _Search) -> Iterator[Intervention]:
    """Weights at hand, usual precisions, prompts and layouts: switches of a forward each, the most common first."""
    bench = search.bench
    for name, change in common_changes(bench).items():
        yield _of_change(search, name, change)
    yield Intervention(
        "misalignment", lambda count: f"the first {count:.0f} of the response's tokens lost",
        lambda count, rows: bench.score_without(rows, int(count), width=search.width), (1.0, 2.0),
    )  # fmt: skip
    for name, layout in layouts(bench.prompt_ids, search.rows, pad_ids=bench.pads).items():
        yield _of_change(search, name, _Change(layout=layout))


def _caches(search: _Search) -> Iterator[Intervention]:
    """Caches that evict keys and values, if tokens differ from one length of their context on."""
    bench = search.bench
    if not replaceable(bench.model):
        return
    gap = np.where(search.evidence.observed, search.plain.logps - search.target, np.nan)
    held = capacity(gap, [len(ids) for ids in bench.prompt_ids], noise_rms(search.evidence))
    rules = {} if held is None else evicting(held)
    if rules:
        yield Intervention(
            "compressed_cache", lambda first: f"KV cache of {rules[int(first)].text}",
            lambda first, rows: _Change(partial(with_kv_cache, bench.model, rules[int(first)])).score(search, rows),
            tuple(float(first) for first in rules),
        )  # fmt: skip


def _rare(search: _Search) -> Iterator[Intervention]:
    """Other parts, kinds of RoPE and roundings."""
    bench = search.bench
    if bench.precisions is not None:
        return
    for name, inside in rare_contexts(bench.model).items():
        yield _of_change(search, name, _Change(inside))


def _numbers(search: _Search) -> Iterator[Intervention]:
    """Settings of the configuration that are one number each."""
    bench = search.bench
    for setting in settings(bench.model).values():
        yield _of_setting(search, setting)
    sizes = windows(bench.prompt_ids, bench.completion_ids, search.rows)
    if sizes:
        widest = max(len(ids) for ids in bench.prompt_ids)

        def windowed(size: float, rows: Sequence[int]) -> Floats:
            return bench.score_layout(rows, Layout(window=int(size)), widest, width=search.width)

        yield Intervention(
            "model_config", lambda size: f"attention window of {size:.0f} tokens", windowed, sizes, "whole"
        )
    if not bench.weights and adapter_changes(bench.model):
        yield Intervention(
            "wrong_adapter", lambda factor: f"adapter at {factor:.3g} times its scale",
            lambda factor, rows: _Change(partial(adapter_scale, bench.model, factor)).score(search, rows),
            (1.5, 3.0), "linear", 1.0,
        )  # fmt: skip


def _of_setting(search: _Search, setting: Setting) -> Intervention:
    return Intervention(
        "model_config", setting.text,
        lambda value, rows: _Change(partial(setting.context, value)).score(search, rows),
        setting.values, "log", setting.neutral,
    )  # fmt: skip


def _of_change(search: _Search, name: str, change: _Change) -> Intervention:
    cause, _, detail = name.partition(":")
    return switch(cause, detail, lambda rows: change.score(search, rows))


Table = Callable[[_Search], Iterable[Intervention]]


def _table(table: Table) -> Callable[[_Search], None]:
    """A stage of the search: every intervention of a table, until one explains the mismatch."""

    def stage(search: _Search) -> None:
        for one in table(search):
            search.turn(one)
            if search.solved:
                return

    return stage


# ------------------------------------------------------------------------------------------------ changes of a forward


@dataclass(frozen=True)
class _Change:
    """A way to score again: a context, other prompts, or another layout."""

    inside: Inside = nullcontext
    prompts: Ids | None = None
    layout: tuple[Layout, int] | None = None

    def score(self, search: _Search, rows: Sequence[int] | None = None) -> Floats:
        bench, chosen = search.bench, search.rows if rows is None else rows
        if self.layout is not None:
            with self.inside():
                return bench.score_layout(chosen, *self.layout, width=search.width)
        return bench.score(chosen, prompts=self.prompts, inside=self.inside, width=search.width)[0].logps


def common_changes(bench: Bench) -> dict[str, _Change]:
    """Weights and prompts at hand, and the usual precisions, by ``cause:detail``."""
    contexts: dict[str, Inside] = {**usual_routers(bench.model), **bench.weights}
    if not bench.weights:
        contexts |= adapter_changes(bench.model)
    contexts |= usual_precisions(bench.model) if bench.precisions is None else bench.precisions
    found = {name: _Change(inside) for name, inside in contexts.items()}
    return found | {f"prompt_difference:{detail}": _Change(prompts=ids) for detail, ids in bench.prompts.items()}


def rare_contexts(model: Any) -> dict[str, Inside]:
    """Contexts of faults that are seldom, by ``cause:detail``."""
    return {
        **expert_changes(model), **part_changes(model), **position_changes(model), **weight_roundings(model),
        **activation_roundings(model),
    }  # fmt: skip


def usual_routers(model: Any) -> dict[str, Inside]:
    """Contexts in which routers see a less precise input; empty for a dense model."""
    if not routers(model):
        return {}
    return {
        f"routing:router in {name}": partial(rounded_routers, model, SIGNIFICANT_BITS[name])
        for name in ("bf16", "fp16")
    }


def usual_precisions(model: Any) -> dict[str, Inside]:
    """Contexts for the precisions that engines run in: 16 bits, rounded weights, KV cache, attention, output head."""
    simulated: dict[str, Inside] = {
        f"precision:{name}": partial(simulated_dtype, model, name) for name in ("bf16", "fp16")
    }
    rounded: dict[str, Inside] = {
        f"precision:{name} weights": partial(rounded_weights, model, name)
        for name in ("int8", "fp8", "int4", "bf16", "fp16")
    }
    return {**simulated, **rounded, **cache_changes(model), **head_changes(model)}


# --------------------------------------------------------------------------------------------- tests of one forward


def _test_heads(search: _Search) -> None:
    """What happens between logits and log-probs."""
    search.note("temperature, truncation, penalties, biases and caps")
    bench = search.bench
    logits = logits_of(bench.model, bench.prompt_ids, bench.completion_ids, search.rows, bench.head)
    rows, places = logits.rows.numpy(), logits.places.numpy()
    inside = places < search.width
    use = np.zeros(len(rows), bool)
    use[inside] = search.evidence.observed[rows[inside], places[inside]]
    if not use.any():
        return
    part = replace(
        logits, values=logits.values[use], ids=logits.ids[use], rows=logits.rows[use], places=logits.places[use],
        contexts=[context for context, keep in zip(logits.contexts, use, strict=True) if keep],
    )  # fmt: skip
    at = (rows[use], places[use])
    target = search.target[at]
    for make in (
        partial(sampling_tests, ranks=search.plain.ranks[at], top_logps=search.plain.top_logps[at]),
        partial(processor_tests, stop_ids=bench.ends),
    ):
        for name, logps in make(part, target).items():
            placed = np.full_like(search.plain.logps, np.nan)
            placed[at] = logps.double().numpy()
            search.add(name, placed)
        if search.solved:
            return


# ----------------------------------------------------------------------------------------- prompts and parts of weights


def _test_spellings(search: _Search) -> None:
    """The same text in other tokens."""
    search.note("the text in other tokens")
    noise = min(noise_rms(search.evidence), 1e-3)
    found = respelled(search.bench, search.rows, search.plain.logps, search.target, noise)
    if found is not None:
        search.add("misalignment:the text in other tokens (decoded and tokenised again)", found)


def _test_prompts(search: _Search) -> None:
    """The edit of the prompts that explains the rows."""
    observed = search.evidence.observed & np.isfinite(search.plain.logps)
    whole = Books(search.evidence, search.plain, search.target, search.target)
    worst = max(search.rows, key=lambda row: _size(search, row))
    search.note("prompts that are cut, swapped or edited")
    prompts = PromptSearch(search.bench, search.plain.logps, search.target, observed)
    found = search_prompts(prompts, search.rows, worst, whole.differs)
    if found is not None:
        search.add(*found)


def _size(search: _Search, row: int) -> float:
    """Disagreement of a row's first tokens, per token."""
    gap = np.clip(search.plain.logps[row] - search.target[row], -MAX_LOG_RATIO, MAX_LOG_RATIO)[:FIRST_TOKENS_SCORED]
    return distance(gap)


def _test_parts(search: _Search) -> None:
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
    for context in sorted(contexts, key=lambda name: left_in_part(*search.alone(name)))[:WAYS]:
        if held := parts.values(context):
            search.turn(_on_the_way(search, context, held))


class _Parts:
    """Looks for the parts of the weights that are other ones: first by sums of their effects, then by single changes.

    Args:
        search: the search.
    """

    def __init__(self, search: _Search) -> None:
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
        one = _of_change(search, f"stale_weights:{detail}", _Change(partial(holding, search.bench.model, part)))
        return search.try_value(one, 1.0)


def _on_the_way(search: _Search, name: str, held: Mapping[str, Any]) -> Intervention:
    """All weights between those of the trainer and others at hand, or beyond."""
    cause, _, detail = name.partition(":")
    return Intervention(
        cause, lambda share: f"{share:.3g} of the way to {detail}",
        lambda share, rows: _Change(partial(holding, search.bench.model, held, share)).score(search, rows),
        (-1.0, 0.5), "linear", 0.0,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------- two causes at once


def _test_pairs(search: _Search) -> None:
    """The best test together with each test of another kind that explains something by itself."""
    share, name = search.best()
    if not PARTIAL[0] < share < PARTIAL[1]:
        return
    changes, head = _combinable(search), _head_of(name, search.bench.head)
    if head is None and (name not in changes or changes[name].layout is not None):
        return
    left = {
        other: search.left[other]
        for other, change in changes.items()
        if other in search.left and other.split(":")[0] != name.split(":")[0] and change.layout is None
    }
    for other in [one for one in sorted(left, key=lambda one: left[one]) if left[one] < 1.0][:MOST_PAIRS]:
        search.note(f"{name} with {other}")
        logps = _score_both(search, changes.get(name), head, changes[other])
        if logps is not None and search.add(f"{name} + {other}", logps) <= EXPLAINED:
            return


def _combinable(search: _Search) -> dict[str, _Change]:
    bench = search.bench
    rare = rare_contexts(bench.model) if bench.precisions is None else {}
    return common_changes(bench) | {name: _Change(inside) for name, inside in rare.items()}


def _score_both(search: _Search, first: _Change | None, head: Head | None, second: _Change) -> Floats | None:
    """Log-probs under a head or a change and another change; None if both change the prompts."""
    first = first or _Change()
    if first.prompts is not None and second.prompts is not None:
        return None

    @contextmanager
    def both() -> Iterator[None]:
        with first.inside(), second.inside():
            yield

    prompts = first.prompts or second.prompts
    heads = None if head is None else [head]
    return search.bench.score(search.rows, prompts=prompts, inside=both, heads=heads, width=search.width)[0].logps


def _head_of(name: str, head: Head) -> Head | None:
    """The head of a test of temperature or truncation; None for any other test."""
    cause, _, detail = name.partition(":")
    if cause == "truncated_sampling":
        option, value = detail.split()
        options: dict[str, Any] = {option: int(value) if option == "top_k" else float(value)}
        return replace(head, truncation=Truncation(**options))
    if cause != "temperature":
        return None
    return Head() if "before" in detail else replace(head, temperature=float(detail))


STAGES: Sequence[Callable[[_Search], None]] = (
    _table(_bookkeeping), _test_heads, _table(_common), _table(_caches), _test_spellings, _test_prompts,
    _table(_numbers), _test_parts,
    _table(_rare), _test_pairs,
)  # fmt: skip
"""The search: tables of interventions, and the tests with a search of their own, in the order of cost and use."""
