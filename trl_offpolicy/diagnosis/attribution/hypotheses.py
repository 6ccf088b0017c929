"""Tests causes with the model: the same tokens are scored again under the conditions of each cause.

A cause that removes the mismatch is no longer a guess. First the tokens are scored plainly. The side that is further
from these scores is at fault, and its log-probs are the target. Then tables of interventions follow in the order of
their cost, until one explains the mismatch: book-keeping needs no forward, everything between logits and log-probs
shares one, the others need one each. Two rows are scored at first, and the others if that helps. If a test explains a
part, it is combined with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trl_offpolicy.diagnosis.attribution.bench import Bench
from trl_offpolicy.diagnosis.attribution.contexts.attention import replaceable
from trl_offpolicy.diagnosis.attribution.contexts.changes import (
    Setting,
    adapter_changes,
    adapter_parts,
    adapter_scale,
    cache_changes,
    expert_changes,
    head_changes,
    part_changes,
    position_changes,
    settings,
)
from trl_offpolicy.diagnosis.attribution.contexts.layouts import Layout, layouts, windows
from trl_offpolicy.diagnosis.attribution.contexts.parts import PART
from trl_offpolicy.diagnosis.attribution.contexts.precision import (
    SIGNIFICANT_BITS,
    Inside,
    activation_roundings,
    part_roundings,
    rounded_router_weights,
    rounded_routers,
    rounded_weights,
    routers,
    simulated_dtype,
    weight_roundings,
    widened,
)
from trl_offpolicy.diagnosis.attribution.contexts.prefixes import blocks, score_after
from trl_offpolicy.diagnosis.attribution.distances import MAX_LOG_RATIO, distance
from trl_offpolicy.diagnosis.attribution.evidence import Array, Bools, Floats, TokenEvidence
from trl_offpolicy.diagnosis.attribution.traces.noise import noise_rms
from trl_offpolicy.diagnosis.attribution.trials.bookkeeping import Books, bookkeeping
from trl_offpolicy.diagnosis.attribution.trials.caches import capacity, evicting
from trl_offpolicy.diagnosis.attribution.trials.edits import PromptSearch, search_prompts
from trl_offpolicy.diagnosis.attribution.trials.heads import (
    Logits,
    fitted_sampling,
    logits_of,
    processor_tests,
    sampling_tests,
)
from trl_offpolicy.diagnosis.attribution.trials.interventions import Intervention, switch
from trl_offpolicy.diagnosis.attribution.trials.other_token import other_token_tests
from trl_offpolicy.diagnosis.attribution.trials.search import (
    EXACT,
    EXPLAINED,
    FIRST_TOKENS_SCORED,
    FLEXIBLE,
    REFUSED,
    Change,
    Search,
    differing,
    of_change,
)
from trl_offpolicy.diagnosis.attribution.trials.shares import REFERENCE, at_fault, left_share
from trl_offpolicy.diagnosis.attribution.trials.spellings import respelled
from trl_offpolicy.diagnosis.attribution.trials.weight_parts import search_parts, search_versions
from trl_offpolicy.engines.hf import Head
from trl_offpolicy.engines.kv_cache import with_kv_cache
from trl_offpolicy.functional.truncated_sampling import Truncation

__all__ = ["FLEXIBLE", "REFERENCE", "Bench", "at_fault", "left_share", "run_hypotheses"]

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PARTIAL = (0.15, 0.85)
"""Share left by the best test within which it is tested together with others."""
MOST_PAIRS = 6
"""Tests that are combined with the best one."""
MOST_PREFIXES = 3
"""Weights at hand that are tested in a prefix cache."""
MOST_REFITTED, HELPS = 4, 0.95
"""Tests under which temperature and truncation are fitted again, and the share that each leaves at most."""
IN_PART, CLEARLY = 0.1, 0.5
"""Share of the mismatch of a part of the tokens that a test of this part may leave, and times what the best test of all
tokens leaves; else the tests of all are kept."""


def run_hypotheses(
    evidence: TokenEvidence, bench: Bench, *, note: Callable[[str], None] | None = None
) -> TokenEvidence:
    """The evidence with ``tested`` filled, by testing hypotheses until one explains the mismatch.

    Args:
        evidence: evidence of the batch that ``bench`` holds.
        bench: the model and what can be changed about it.
        note: called with the name of what is being tested.
    """
    say = note or (lambda _text: None)
    search = _searched(evidence, bench, say)
    part = None if search.solved else differing(evidence)
    if part is not None:
        say("the same in those tokens alone that differ")
        here = _searched(replace(evidence, completion_mask=part), bench, say)
        share, name = here.best()
        limit = EXACT if name.startswith(FLEXIBLE) else IN_PART
        if share <= limit and share < CLEARLY * search.best()[0]:
            return replace(evidence, tested=_of_part(here, part))
    return replace(evidence, tested=search.tested)


def _searched(evidence: TokenEvidence, bench: Bench, note: Callable[[str], None]) -> Search:
    """Every stage until one explains the mismatch."""
    search = Search(evidence, bench, note)
    for stage in STAGES:
        try:
            stage(search)
        except REFUSED as error:
            search.give_up(stage.__name__.strip("_").replace("_", " "), error)
        if search.solved:
            break
    return search


def _of_part(search: Search, part: Bools) -> dict[str, Floats]:
    """The tests of a part of the tokens, with that part in their names."""
    rows, tokens = int(part.any(1).sum()), int(part.sum())
    words = f" (in {rows} of {len(part)} responses, where {tokens} tokens differ)"
    return {
        name if name == REFERENCE else name + words: np.where(part, logps, np.nan)
        for name, logps in search.tested.items()
    }


# ------------------------------------------------------------------------------------------------- tables of tests


def _bookkeeping(search: Search) -> Iterator[Intervention]:
    whole = search.evidence.old_per_token_logps
    if search.side == "trainer":
        whole = search.evidence.sampling_per_token_logps
    return bookkeeping(Books(search.evidence, search.plain, search.target, whole))


def _common(search: Search) -> Iterator[Intervention]:
    """Weights at hand, usual precisions, prompts and layouts: switches of a forward each, the most common first."""
    bench = search.bench
    for name, change in common_changes(bench).items():
        if search.side == "engine" or not name.endswith("KV cache"):  # a trainer has none
            yield of_change(search, name, change)
    yield Intervention(
        "misalignment", lambda count: f"the first {count:.0f} of the response's tokens lost",
        lambda count, rows: bench.score_without(rows, int(count), width=search.width), (1.0, 2.0),
    )  # fmt: skip
    if search.laid_out:
        for name, layout in layouts(bench.prompt_ids, search.rows, pad_ids=bench.pads).items():
            yield of_change(search, name, Change(layout=layout))
        yield switch(
            "padding", "the row before is attended, and positions begin again (packing without a border)",
            lambda rows: bench.score_packed(rows, width=search.width),
        )  # fmt: skip


def _caches(search: Search) -> Iterator[Intervention]:
    """Caches that evict keys and values, if tokens differ from one length of their context on."""
    bench = search.bench
    if search.side == "trainer" or not replaceable(bench.model):
        return  # a trainer has no cache
    gap = np.where(search.evidence.observed, search.plain.logps - search.target, np.nan)
    held = capacity(gap, [len(ids) for ids in bench.prompt_ids], noise_rms(search.evidence))
    rules = {} if held is None else evicting(held)
    if rules:
        yield Intervention(
            "compressed_cache", lambda first: f"KV cache of {rules[int(first)].text}",
            lambda first, rows: Change(partial(with_kv_cache, bench.model, rules[int(first)])).score(search, rows),
            tuple(float(first) for first in rules),
        )  # fmt: skip


def _prefixes(search: Search) -> Iterator[Intervention]:
    """Weights at hand in the keys and values of the prompts alone: a prefix cache that was kept over a sync."""
    bench = search.bench
    if search.side == "trainer" or getattr(bench.model, "_is_stateful", False):
        return  # a trainer has no cache, and a state (Mamba) is no keys and values
    contexts = sorted(bench.weights, key=lambda name: search.left.get(name, 1.0))[:MOST_PREFIXES]
    for name in contexts:
        detail = name.partition(":")[2]

        def score(block: float, rows: Sequence[int], inside: Inside = bench.weights[name]) -> Floats:
            return score_after(search, inside, int(block), rows)

        yield Intervention(
            "stale_weights",
            lambda block, detail=detail: (  # type: ignore[misc]
                f"keys and values of the prompts{PART}{detail} (prefix cache, blocks of {block:.0f})"
            ),
            score, blocks(search),
        )  # fmt: skip


def _rare(search: Search) -> Iterator[Intervention]:
    """Other parts, kinds of RoPE and roundings."""
    bench = search.bench
    if bench.precisions is not None:
        return
    for name, inside in rare_contexts(bench.model).items():
        yield of_change(search, name, Change(inside))


def _numbers(search: Search) -> Iterator[Intervention]:
    """Settings of the configuration that are one number each."""
    bench = search.bench
    for setting in settings(bench.model).values():
        yield _of_setting(search, setting)
    sizes = windows(bench.prompt_ids, bench.completion_ids, search.rows)
    if sizes and search.laid_out:
        widest = max(len(ids) for ids in bench.prompt_ids)

        def windowed(size: float, rows: Sequence[int]) -> Floats:
            return bench.score_layout(rows, Layout(window=int(size)), widest, width=search.width)

        yield Intervention(
            "model_config", lambda size: f"attention window of {size:.0f} tokens", windowed, sizes, "whole"
        )

        def chunked(size: float, rows: Sequence[int]) -> Floats:
            return bench.score_layout(rows, Layout(chunk=int(size)), 0, width=search.width)

        yield Intervention("model_config", lambda size: f"attention in chunks of {size:.0f} tokens", chunked, sizes)
    if not bench.weights and adapter_changes(bench.model):
        yield Intervention(
            "wrong_adapter", lambda factor: f"adapter at {factor:.3g} times its scale",
            lambda factor, rows: Change(partial(adapter_scale, bench.model, factor)).score(search, rows),
            (1.5, 3.0), "linear", 1.0,
        )  # fmt: skip


def _of_setting(search: Search, setting: Setting) -> Intervention:
    return Intervention(
        "model_config", setting.text,
        lambda value, rows: Change(partial(setting.context, value)).score(search, rows),
        setting.values, "log", setting.neutral,
    )  # fmt: skip


Places = tuple[Array, Array]
"""Rows and places of N tokens in a batch."""
Table = Callable[[Search], Iterable[Intervention]]


def _table(table: Table) -> Callable[[Search], None]:
    """A stage of the search: every intervention of a table, until one explains the mismatch."""

    def stage(search: Search) -> None:
        for one in table(search):
            search.turn(one)
            if search.solved:
                return

    stage.__name__ = table.__name__
    return stage


def common_changes(bench: Bench) -> dict[str, Change]:
    """Weights and prompts at hand, and the usual precisions, by ``cause:detail``."""
    contexts: dict[str, Inside] = {**usual_routers(bench.model), **bench.weights}
    if not bench.weights:
        contexts |= adapter_changes(bench.model)
    contexts |= usual_precisions(bench.model) if bench.precisions is None else bench.precisions
    found = {name: Change(inside) for name, inside in contexts.items()}
    return found | {f"prompt_difference:{detail}": Change(prompts=ids) for detail, ids in bench.prompts.items()}


def rare_contexts(model: Any) -> dict[str, Inside]:
    """Contexts of faults that are seldom, by ``cause:detail``."""
    return {
        **adapter_parts(model), **expert_changes(model), **part_changes(model), **position_changes(model),
        **weight_roundings(model), **activation_roundings(model), **part_roundings(model),
    }  # fmt: skip


def usual_routers(model: Any) -> dict[str, Inside]:
    """Contexts in which routers see a less precise input, or hold less precise weights; empty for a dense model."""
    if not routers(model):
        return {}
    found: dict[str, Inside] = {}
    for name, dtype in HALVES.items():
        found[f"routing:router in {name}"] = partial(rounded_routers, model, SIGNIFICANT_BITS[name])
        found[f"routing:weights of the router in {name}"] = partial(rounded_router_weights, model, dtype)
    return found


def usual_precisions(model: Any) -> dict[str, Inside]:
    """Contexts for the precisions that engines run in: 16 bits, rounded weights, KV cache, attention, output head."""
    wide: dict[str, Inside] = {"precision:float32": partial(widened, model)} if model.dtype in HALVES.values() else {}
    simulated: dict[str, Inside] = {f"precision:{name}": partial(simulated_dtype, model, name) for name in HALVES}
    rounded: dict[str, Inside] = {
        f"precision:{name} weights": partial(rounded_weights, model, name)
        for name in ("int8", "fp8", "int4", "bf16", "fp16")
    }
    return {**wide, **simulated, **rounded, **cache_changes(model), **head_changes(model)}


# --------------------------------------------------------------------------------------------- tests of one forward


def _test_heads(search: Search) -> None:
    """What happens between logits and log-probs."""
    search.note("temperature, truncation, penalties, biases and caps")
    logits, at = _observed_logits(search)
    if not at[0].size:
        return
    target = search.target[at]
    makers: tuple[Callable[..., dict[str, Tensor]], ...] = (
        partial(sampling_tests, ranks=search.plain.ranks[at], top_logps=search.plain.top_logps[at]),
        partial(other_token_tests, noise=noise_rms(search.evidence)),
        partial(processor_tests, stop_ids=search.bench.ends),
    )
    for make in makers:
        for name, logps in make(logits, target).items():
            search.add(name, _placed(search, at, logps), cut=True)
        if search.solved:
            return


def _observed_logits(search: Search, change: Change | None = None) -> tuple[Logits, Places]:
    """The logits of the observed tokens, under a change that keeps the prompts, with their rows and places."""
    bench = search.bench
    with nullcontext() if change is None else change.inside():
        logits = logits_of(bench.model, bench.prompt_ids, bench.completion_ids, search.rows, bench.head)
    rows, places = logits.rows.numpy(), logits.places.numpy()
    inside = places < search.width
    use = np.zeros(len(rows), bool)
    use[inside] = search.evidence.observed[rows[inside], places[inside]]
    part = replace(
        logits, values=logits.values[use], ids=logits.ids[use], rows=logits.rows[use], places=logits.places[use],
        contexts=[context for context, keep in zip(logits.contexts, use, strict=True) if keep],
    )  # fmt: skip
    return part, (rows[use], places[use])


def _placed(search: Search, at: Places, logps: Tensor) -> Floats:
    """(B, T) log-probs of the tokens ``at``, NaN elsewhere."""
    out = np.full_like(search.plain.logps, np.nan)
    out[at] = logps.double().numpy()
    return out


# ----------------------------------------------------------------------------------------- prompts and parts of weights


def _test_spellings(search: Search) -> None:
    """The same text in other tokens."""
    search.note("the text in other tokens")
    noise = min(noise_rms(search.evidence), 1e-3)
    found = respelled(search.bench, search.rows, search.plain.logps, search.target, noise)
    if found is not None:
        search.add("misalignment:the text in other tokens (decoded and tokenised again)", found)


def _test_prompts(search: Search) -> None:
    """The edit of the prompts that explains the rows."""
    observed = search.evidence.observed & np.isfinite(search.plain.logps)
    whole = Books(search.evidence, search.plain, search.target, search.target)
    worst = max(search.rows, key=lambda row: _size(search, row))
    search.note("prompts that are cut, swapped or edited")
    prompts = PromptSearch(search.bench, search.plain.logps, search.target, observed)
    found = search_prompts(prompts, search.rows, worst, whole.differs)
    if found is not None:
        search.add(*found)


def _size(search: Search, row: int) -> float:
    """Disagreement of a row's first tokens, per token."""
    gap = np.clip(search.plain.logps[row] - search.target[row], -MAX_LOG_RATIO, MAX_LOG_RATIO)[:FIRST_TOKENS_SCORED]
    return distance(gap)


# -------------------------------------------------------------------------------------------------- two causes at once


def _test_pairs(search: Search) -> None:
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


def _test_sampling_under_changes(search: Search) -> None:
    """The changes that explain something, each with the temperature or truncation that fits best under it."""
    if search.best()[0] < PARTIAL[0]:
        return
    changes = {name: one for name, one in _combinable(search).items() if one.layout is None and one.prompts is None}
    left = {name: search.left[name] for name in changes if search.left.get(name, 1.0) < HELPS}
    for name in sorted(left, key=lambda one: left[one])[:MOST_REFITTED]:
        search.note(f"{name} with a temperature or a truncation")
        logits, at = _observed_logits(search, changes[name])
        if not at[0].size:
            return
        for other, logps in fitted_sampling(logits, search.target[at]).items():
            search.add(f"{name} + {other}", _placed(search, at, logps), cut=True)
        if search.solved:
            return


def _combinable(search: Search) -> dict[str, Change]:
    bench = search.bench
    rare = rare_contexts(bench.model) if bench.precisions is None else {}
    return common_changes(bench) | {name: Change(inside) for name, inside in rare.items()}


def _score_both(search: Search, first: Change | None, head: Head | None, second: Change) -> Floats | None:
    """Log-probs under a head or a change and another change; None if both change the prompts."""
    first = first or Change()
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
        if "without" in detail or " + " in detail:
            return None
        pairs = [one.split() for one in detail.split(", ")]
        options: dict[str, Any] = {one: int(value) if one == "top_k" else float(value) for one, value in pairs}
        return replace(head, truncation=Truncation(**options))
    if cause != "temperature":
        return None
    if "before" in detail:
        return Head()
    try:
        return replace(head, temperature=float(detail))
    except ValueError:  # in words: greedy, or another one in each response
        return None


STAGES: Sequence[Callable[[Search], None]] = (
    _table(_bookkeeping), _test_heads, _table(_common), _table(_caches), _test_spellings, _test_prompts,
    _table(_numbers), _table(_prefixes), search_versions, search_parts,
    _table(_rare), _test_pairs, _test_sampling_under_changes,
)  # fmt: skip
"""The search: tables of interventions, and the tests with a search of their own, in the order of cost and use."""
