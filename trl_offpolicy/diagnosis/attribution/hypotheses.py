"""Tests causes with the model: the same tokens are scored again under the conditions of each cause.

A cause that removes the mismatch is no longer a guess. First the tokens are scored plainly. The side that is further
from these scores is at fault, and its log-probs are the target. Tests follow in the order of their cost. Shifts,
swapped rows and other units need no forward. Everything between logits and log-probs shares one. Weights, precision,
model configuration, prompts and layouts need one each. If a test explains a part, it is combined with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from trl_offpolicy.diagnosis.attribution.changes import (
    Dial,
    Inside,
    adapter_changes,
    cache_changes,
    dials,
    expert_changes,
    head_changes,
    part_changes,
)
from trl_offpolicy.diagnosis.attribution.evidence import Array, Floats, TokenEvidence
from trl_offpolicy.diagnosis.attribution.features import (
    MAX_LOG_RATIO,
    disagreeing_rows,
    distance,
    noise_rms,
    rank_correlation,
)
from trl_offpolicy.diagnosis.attribution.heads import logits_of, processor_tests, sampling_tests
from trl_offpolicy.diagnosis.attribution.layouts import Layout, layouts, score_in_layout
from trl_offpolicy.diagnosis.attribution.precision import (
    SIGNIFICANT_BITS,
    int8_activations,
    rounded_routers,
    rounded_weights,
    routers,
    simulated_dtype,
)
from trl_offpolicy.diagnosis.attribution.signatures import MEMBERS
from trl_offpolicy.engines.hf import Head, Ids, TokenScores, score_completions
from trl_offpolicy.functional.truncated_sampling import Truncation

Side = Literal["engine", "trainer"]
REFERENCE = "reference"
"""Name of the plain scoring."""
OUTLIERS = 0.1
"""Share of the tokens, those of the largest differences, without which a hypothesis must hold too."""
LEAST_REST = 1e-3
"""Share of the mismatch that the other tokens must have to be asked."""
EXPLAINED = 0.03
"""Share of the mismatch left at which the search stops: nothing else can do much better."""
PARTIAL = (0.15, 0.85)
"""Share left by the best test within which it is tested together with others."""
PROMISING = 0.9
"""Share left by the best value of a dial from which its value is refined."""
PRECISION_SCALE = (0.5, 2.0)
"""Times the simulated rounding errors that an engine's may be."""
MOST_PAIRS = 6
"""Tests that are combined with the best one."""
WEIGHTS_SCALE = (0.003, 5.0)
"""Times a known change of the weights that the engine's may be: a part of an update, or several."""


@dataclass(frozen=True)
class Bench:
    """A model and what can be changed about it.

    Args:
        model: the trainer's model, in eval mode and with the trainer's weights.
        prompt_ids: B prompts as the engine got them.
        completion_ids: B completions as the engine returned them.
        weights: contexts in which the model holds other weights, by ``cause:detail``, e.g. "wrong_adapter:no adapter".
        precisions: contexts in which it computes in another precision, by ``precision:detail``; None = the usual ones.
        prompts: other renderings of the prompts, by name; those that follow from the ids are added.
        rows: number of completions that are scored under each hypothesis.
        head: temperature and truncation under which the trainer scores.
        stop_ids: tokens that end a completion.
        pad_ids: ids that may pad; the first comes first.
    """

    model: Any
    prompt_ids: Ids
    completion_ids: Ids
    weights: Mapping[str, Inside] = field(default_factory=dict)
    precisions: Mapping[str, Inside] | None = None
    prompts: Mapping[str, Ids] = field(default_factory=dict)
    rows: int = 8
    head: Head = Head()  # noqa: RUF009  frozen
    stop_ids: Sequence[int] | None = None
    pad_ids: Sequence[int] | None = None

    def score(self, rows: Sequence[int], *, prompts: Ids | None = None, inside: Inside = nullcontext,
              heads: Sequence[Head] | None = None, width: int) -> list[TokenScores]:  # fmt: skip
        """Scores (B, ``width``) of some completions; NaN in the other rows."""
        chosen = [(prompts or self.prompt_ids)[row] for row in rows]
        completions = [self.completion_ids[row] for row in rows]
        with inside():
            found = score_completions(self.model, chosen, completions, heads=heads or [self.head])
        return [TokenScores(*(self._placed(x, rows, width) for x in vars(scores).values())) for scores in found]

    def score_layout(self, rows: Sequence[int], layout: Layout, prompt_width: int, *, width: int) -> Floats:
        """Log-probs (B, ``width``) of some completions in another layout; NaN in the other rows."""
        chosen, completions = [self.prompt_ids[row] for row in rows], [self.completion_ids[row] for row in rows]
        found = score_in_layout(self.model, chosen, completions, layout, prompt_width=prompt_width, head=self.head)
        return self._placed(found, rows, width)

    def _placed(self, values: Floats, rows: Sequence[int], width: int) -> Floats:
        out = np.full((len(self.completion_ids), width), np.nan)
        out[np.asarray(rows), : values.shape[1]] = values[:, :width]
        return out

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a completion: those given, or those of the model's generation configuration."""
        if self.stop_ids is not None:
            return tuple(self.stop_ids)
        return _listed(self._configured("eos_token_id"))

    @property
    def pads(self) -> tuple[int, ...]:
        """Ids that may pad."""
        if self.pad_ids is not None:
            return tuple(self.pad_ids)
        return tuple(dict.fromkeys([*_listed(self._configured("pad_token_id")), *self.ends, 0]))

    def _configured(self, name: str) -> Any:
        configs = (getattr(self.model, "generation_config", None), self.model.config)
        return next((value for c in configs if (value := getattr(c, name, None)) is not None), None)


def _listed(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


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

    def add(self, name: str, logps: Floats) -> float:
        """Keep a result; returns the share of the mismatch that it leaves."""
        key = f"{self.side}:{name}"
        self.tested[key] = logps
        # This test alone beside the plain scores: the others do not change what it leaves.
        alone = replace(self.evidence, tested={REFERENCE: self.plain.logps, key: logps})
        self.left[name] = left_share(alone, key)
        return self.left[name]

    def best(self) -> tuple[float, str]:
        """Share left by the best test, and its name without the side."""
        name = min(self.left, key=lambda one: self.left[one], default="")
        return self.left.get(name, 1.0), name

    @property
    def solved(self) -> bool:
        return self.best()[0] <= EXPLAINED


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
    for stage in (_test_bookkeeping, _test_heads, _test_forwards, _test_dials, _test_pairs):
        stage(search)
        if search.solved:
            break
    return replace(evidence, tested=search.tested)


def at_fault(evidence: TokenEvidence, reference: Floats) -> Side:
    """The side whose log-probs are further from the plain scoring."""
    use = evidence.observed & np.isfinite(reference)
    engine = distance(reference[use] - evidence.sampling_per_token_logps[use])
    trainer = distance(reference[use] - evidence.old_per_token_logps[use])
    return "trainer" if trainer > engine else "engine"


def left_share(evidence: TokenEvidence, name: str) -> float:
    """Share of the mismatch that is left under a tested hypothesis, over the tokens that it was tested on.

    The mismatch is :func:`.features.distance`: d^2 for small differences, 2 |d| for large ones. A hypothesis on the
    engine is compared with the engine's log-probs, one on the trainer with the trainer's. The share must hold without
    the tokens of the largest differences as well, so that what fits one token does not explain the batch.

    Other weights and precisions may hold only in part (a tenth of an update, rounding half as coarse). Let g be the
    change of the log-probs under the hypothesis and d the mismatch. Then 1 - R^2 of the fit d = s g counts if it is
    smaller and s is plausible. R^2 is the smaller one of values and of ranks.
    """
    values = evidence.tested[name]
    side, cause, *_ = name.split(":")
    use = evidence.observed & (np.isfinite(values) | np.isneginf(values))
    mu, old = evidence.sampling_per_token_logps[use], evidence.old_per_token_logps[use]
    target, other = (old, mu) if side == "trainer" else (mu, old)
    reference = evidence.tested.get(REFERENCE)
    if reference is not None:
        other = np.where(np.isfinite(reference[use]), reference[use], other)
    scored = np.where(np.isneginf(values[use]), target - MAX_LOG_RATIO, values[use])
    if not use.any() or not distance(other - target):
        return float("inf")
    left = _left(scored - target, other - target, noise_rms(evidence))
    scales = {"precision": PRECISION_SCALE, **dict.fromkeys(MEMBERS, WEIGHTS_SCALE)}
    if cause in scales:
        return min(left, 1 - _fit_in_part(other - scored, other - target, scales[cause]))
    return left


def _left(left: Array, whole: Array, noise: float) -> float:
    """The larger share of all tokens and of all but those with the largest differences, if these are above noise."""
    share = distance(left) / distance(whole)
    rest = np.abs(whole) <= np.quantile(np.abs(whole), 1 - OUTLIERS)
    whole_of_rest = distance(whole[rest])
    if not rest.any() or whole_of_rest < max(LEAST_REST * distance(whole), 100 * noise**2):
        return share
    return max(share, distance(left[rest]) / whole_of_rest)


def _fit_in_part(change: Array, d: Array, scale: tuple[float, float]) -> float:
    """The smaller R^2 of values (through 0) and of ranks; 0 if the fitted factor is not within ``scale``."""
    along, square = float(change @ d), float(change @ change)
    ranks = rank_correlation(change, d)
    if along <= 0 or not ranks > 0 or not scale[0] <= np.sqrt(float(d @ d) / square) <= scale[1]:
        return 0.0
    return min(along**2 / max(square * float(d @ d), 1e-60), ranks**2)


def _telling_rows(evidence: TokenEvidence, count: int) -> list[int]:
    """The rows with most disagreement and, for a quarter of ``count``, rows that are spread over the batch."""
    size = np.nansum(np.clip(evidence.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO) ** 2, axis=1)
    # The spread rows show what is the same everywhere. The rows with most disagreement show the fault.
    order = np.argsort(-size, kind="stable").tolist()
    spread = np.linspace(0, len(size) - 1, max(1, count // 4)).astype(int).tolist()
    chosen = [*spread, *(row for row in order if row not in spread)][:count]
    return sorted(set(chosen))


# ------------------------------------------------------------------------------------------ tests without a forward


def _test_bookkeeping(search: _Search) -> None:
    """Shifts, swapped rows, running sums, other units and bounds: log-probs that were written down wrongly."""
    search.note("shifts, swapped rows and units")
    plain, target = search.plain.logps, search.target
    for name, logps in {**_shifts(search, plain), **_swaps(search, plain)}.items():
        search.add(name, logps)
    search.add("misalignment:running sum over the tokens", np.cumsum(plain, axis=1))
    search.add("misalignment:log-probs in base 2", plain / np.log(2))
    search.add("misalignment:log-probs in base 10", plain / np.log(10))
    search.add("misalignment:probabilities in place of log-probs", np.exp(plain))
    use = np.isfinite(plain) & np.isfinite(target) & search.evidence.observed
    lowest = float(target[use].min())
    if np.mean(target[use] <= lowest + 1e-9) > 2 / max(use.sum(), 1):  # more than one token at the bound
        search.add(f"misalignment:log-probs clipped at {lowest:.4g}", np.maximum(plain, lowest))


def _shifts(search: _Search, reference: Floats) -> dict[str, Floats]:
    """The plain log-probs moved by one to three tokens, in the rows that disagree."""
    rows = _disagreeing(search.evidence)
    found = {}
    for step in (1, -1, 2, -2, 3, -3):
        moved = np.full_like(reference, np.nan)
        source, place = (slice(None, -step), slice(step, None)) if step > 0 else (slice(-step, None), slice(None, step))
        moved[:, place] = reference[:, source]
        word = "late" if step > 0 else "early"
        count = "one token" if abs(step) == 1 else f"{abs(step)} tokens"
        found[f"misalignment:log-probs {count} {word}"] = np.where(rows[:, None], moved, reference)
    return found


def _swaps(search: _Search, reference: Floats) -> dict[str, Floats]:
    """Each disagreeing row with the log-probs of the row that fits it best, out of the same number of tokens."""
    evidence = search.evidence
    rows = _disagreeing(evidence)
    lengths = evidence.completion_mask.sum(1)
    # The other side agrees with plain scoring, and it covers all rows.
    whole = evidence.old_per_token_logps if search.side == "engine" else evidence.sampling_per_token_logps
    out, moved = reference.copy(), 0
    for row in np.flatnonzero(rows & np.isfinite(reference).any(1)):
        others = [r for r in range(len(lengths)) if r != row and abs(int(lengths[r]) - int(lengths[row])) <= 1]
        gaps = {r: float(np.nanmedian(np.abs(whole[r] - search.target[row]))) for r in others}
        best = min(gaps, key=lambda r: gaps[r], default=None)
        if best is not None and gaps[best] < 0.1 * float(np.nanmedian(np.abs(whole[row] - search.target[row]))):
            out[row], moved = whole[best], moved + 1
    return {"misalignment:log-probs of swapped rows": out} if moved else {}


def _disagreeing(evidence: TokenEvidence) -> Any:
    gap = np.clip(evidence.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return disagreeing_rows(gap, min(noise_rms(evidence), 1e-3))


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


# ------------------------------------------------------------------------------------------- tests of a forward each


@dataclass(frozen=True)
class _Change:
    """A way to score again: a context, other prompts, or another layout."""

    inside: Inside = nullcontext
    prompts: Ids | None = None
    layout: tuple[Layout, int] | None = None

    def score(self, search: _Search) -> Floats:
        bench = search.bench
        if self.layout is not None:
            with self.inside():
                return bench.score_layout(search.rows, *self.layout, width=search.width)
        return bench.score(search.rows, prompts=self.prompts, inside=self.inside, width=search.width)[0].logps


def _changes(search: _Search) -> dict[str, _Change]:
    """Everything that is tested with a forward each, by ``cause:detail``; the most common causes first."""
    bench, model = search.bench, search.bench.model
    precisions = usual_precisions(model) if bench.precisions is None else bench.precisions
    contexts: dict[str, Inside] = {**usual_routers(model), **bench.weights}
    if not bench.weights:
        contexts |= adapter_changes(model)
    contexts |= precisions
    if bench.precisions is None:
        contexts |= {**cache_changes(), **head_changes(model), **expert_changes(model), **part_changes(model)}
    found = {name: _Change(inside) for name, inside in contexts.items()}
    prompts = {**bench.prompts, **prompt_variants(bench.prompt_ids, model, bench.pads)}
    found |= {f"prompt_difference:{detail}": _Change(prompts=ids) for detail, ids in prompts.items()}
    places = layouts(bench.prompt_ids, bench.completion_ids, search.rows, pad_ids=bench.pads)
    return found | {name: _Change(layout=layout) for name, layout in places.items()}


def _test_forwards(search: _Search) -> None:
    for name, change in _changes(search).items():
        search.note(name)
        if search.add(name, change.score(search)) <= EXPLAINED:
            return


def prompt_variants(prompt_ids: Ids, model: Any, special_ids: Sequence[int] = ()) -> dict[str, list[list[int]]]:
    """Other prompts that follow from the ids: a token doubled, dropped or added at the ends, the start cut, swaps."""
    rows = [list(ids) for ids in prompt_ids]
    bos = next(iter(_listed(getattr(model.config, "bos_token_id", None))), None)
    found = {
        "first token doubled": [ids[:1] + ids for ids in rows],
        "first token missing": [ids[1:] for ids in rows],
        "last token missing": [ids[:-1] for ids in rows],
        "last two tokens missing": [ids[:-2] for ids in rows],
        "last three tokens missing": [ids[:-3] for ids in rows],
        "last token doubled": [ids + ids[-1:] for ids in rows],
    }
    specials = dict.fromkeys(special_ids)
    for token in specials if bos is None else {bos: None, **specials}:
        what = "BOS token" if token == bos else f"token {token}"
        found[f"a {what} more in front"] = [[token, *ids] for ids in rows]
        found[f"a {what} more at the end"] = [[*ids, token] for ids in rows]
    longest = max(len(ids) for ids in rows)
    for keep in (512, 256, 128, 64, 32, 16, 8):
        if keep < longest:
            found[f"cut to its last {keep} tokens"] = [ids[-keep:] for ids in rows]
    distinct = list(dict.fromkeys(map(tuple, rows)))
    for step in (1, -1):
        if len(distinct) > 1:
            after = {ids: list(distinct[(n + step) % len(distinct)]) for n, ids in enumerate(distinct)}
            found[f"that of the {'next' if step > 0 else 'previous'} group"] = [after[tuple(ids)] for ids in rows]
    return {name: ids for name, ids in found.items() if all(ids)}


def usual_routers(model: Any) -> dict[str, Inside]:
    """Contexts in which routers see a less precise input; empty for a dense model."""
    if not routers(model):
        return {}
    return {
        f"routing:router in {name}": partial(rounded_routers, model, SIGNIFICANT_BITS[name])
        for name in ("bf16", "fp16")
    }


def usual_precisions(model: Any) -> dict[str, Inside]:
    """Contexts for the precisions that engines run in: bf16, fp16, and int8, fp8 or int4 weights."""
    simulated: dict[str, Inside] = {
        f"precision:{name}": partial(simulated_dtype, model, name) for name in ("bf16", "fp16")
    }
    rounded: dict[str, Inside] = {
        f"precision:{name} weights": partial(rounded_weights, model, name)
        for name in ("int8", "fp8", "int4", "bf16", "fp16")
    }
    rounded["precision:int8 activations"] = partial(int8_activations, model)
    return {**simulated, **rounded}


# ------------------------------------------------------------------------------------------------ numbers of a setting


def _test_dials(search: _Search) -> None:
    """Settings of one number: a few values each, and a search for the value where one of them helps."""
    for dial in dials(search.bench.model).values():
        _turn(search, dial)
        if search.solved:
            return


def _turn(search: _Search, dial: Dial) -> None:
    context, grid, describe = dial
    logps: dict[float, Floats] = {0.0: search.plain.logps}
    left: dict[float, float] = {0.0: 1.0}

    def tried(x: float) -> float:
        """Share left at the logarithm ``x`` of the factor."""
        if x not in left:
            name = f"model_config:{describe(float(np.exp(x)))}"
            search.note(name)
            logps[x] = _Change(partial(context, float(np.exp(x)))).score(search)
            left[x] = search.add(name, logps[x])
        return left[x]

    for factor in grid:
        tried(float(np.log(factor)))
    # A small step gives the direction of the change. How far it goes follows from the mismatch.
    tried(SMALL_TURN)
    tried(_predicted((logps[SMALL_TURN] - logps[0.0]) / SMALL_TURN, search.target - logps[0.0]))
    best = min(left, key=lambda x: left[x])
    if not EXPLAINED < left[best] < PROMISING:
        return
    # Golden sections between the neighbours of the best value.
    known = sorted(left)
    place = known.index(best)
    low = known[place - 1] if place else 2 * best
    high = known[place + 1] if place + 1 < len(known) else 2 * best
    golden = (np.sqrt(5) - 1) / 2
    for _ in range(5):
        one, two = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, two) if tried(one) < tried(two) else (one, high)
        if search.solved:
            return


def _predicted(direction: Floats, change: Floats) -> float:
    """The step along ``direction`` that fits ``change`` best, by the median of their ratio where it moves much."""
    use = np.isfinite(direction) & np.isfinite(change)
    d, c = direction[use], change[use]
    much = np.abs(d) >= np.quantile(np.abs(d), 0.5)
    step = float(np.median(c[much] / np.where(d[much] == 0, 1e-30, d[much])))
    return float(np.clip(step, -LARGEST_TURN, LARGEST_TURN)) or SMALL_TURN


SMALL_TURN, LARGEST_TURN = 0.01, 3.0
"""Logarithms of the factors: of the small step, and of the largest that may be predicted from it."""


# -------------------------------------------------------------------------------------------------- two causes at once


def _test_pairs(search: _Search) -> None:
    """The best test together with each test of another kind that explains something by itself."""
    share, name = search.best()
    if not PARTIAL[0] < share < PARTIAL[1]:
        return
    changes, head = _changes(search), _head_of(name, search.bench.head)
    if head is None and (name not in changes or changes[name].layout is not None):
        return
    left = {
        other: search.left[other]
        for other, change in changes.items()
        if other.split(":")[0] != name.split(":")[0] and change.layout is None
    }
    for other in [one for one in sorted(left, key=lambda one: left[one]) if left[one] < 1.0][:MOST_PAIRS]:
        search.note(f"{name} with {other}")
        logps = _score_both(search, changes.get(name), head, changes[other])
        if logps is not None and search.add(f"{name} + {other}", logps) <= EXPLAINED:
            return


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
