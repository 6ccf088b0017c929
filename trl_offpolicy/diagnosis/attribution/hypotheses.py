"""Tests causes with the model: the same tokens are scored again under the conditions of each cause.

A cause that removes the mismatch is no longer a guess. First the tokens are scored plainly. If that agrees with the
engine, the trainer is at fault, and its log-probs are compared with other prompts. If it agrees with the trainer, the
engine is at fault, and its log-probs are compared with other temperatures, truncations, weights and precisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from trl_offpolicy.diagnosis.attribution.evidence import Array, Floats, TokenEvidence
from trl_offpolicy.diagnosis.attribution.features import (
    MAX_LOG_RATIO,
    disagreeing_rows,
    extract,
    kl_k3,
    noise_rms,
    rank_correlation,
)
from trl_offpolicy.diagnosis.attribution.precision import (
    SIGNIFICANT_BITS,
    rounded_routers,
    rounded_weights,
    routers,
    simulated_dtype,
)
from trl_offpolicy.diagnosis.attribution.signatures import MEMBERS, OTHER_WEIGHTS, read_signatures
from trl_offpolicy.engines.hf import Head, Ids, TokenScores, score_completions
from trl_offpolicy.functional.truncated_sampling import Truncation

Inside = Callable[[], AbstractContextManager[Any]]
Side = Literal["engine", "trainer"]
REFERENCE = "reference"
"""Name of the plain scoring."""
EXPLAINED = 0.03
"""Share of the mismatch left at which the search stops: nothing else can do much better."""


@dataclass(frozen=True)
class Bench:
    """A model and what can be changed about it.

    Args:
        model: the trainer's model, in eval mode and with the trainer's weights.
        prompt_ids: B prompts as the engine got them.
        completion_ids: B completions as the engine returned them.
        weights: contexts in which the model holds other weights, by ``cause:detail``, e.g. "wrong_adapter:no adapter".
        precisions: contexts in which it computes in another precision, by ``precision:detail``; None = the usual ones.
        prompts: other renderings of the prompts, by name.
        rows: number of completions that are scored under each hypothesis.
    """

    model: Any
    prompt_ids: Ids
    completion_ids: Ids
    weights: Mapping[str, Inside] = field(default_factory=dict)
    precisions: Mapping[str, Inside] | None = None
    prompts: Mapping[str, Ids] = field(default_factory=dict)
    rows: int = 8

    def score(self, rows: Sequence[int], *, prompts: Ids | None = None, inside: Inside = nullcontext,
              heads: Sequence[Head] = (Head(),), width: int) -> list[TokenScores]:  # fmt: skip
        """Scores (B, ``width``) of some completions; NaN in the other rows."""
        chosen = [(prompts or self.prompt_ids)[row] for row in rows]
        with inside():
            found = score_completions(self.model, chosen, [self.completion_ids[row] for row in rows], heads=heads)
        return [TokenScores(*(self._placed(x, rows, width) for x in vars(scores).values())) for scores in found]

    def _placed(self, values: Floats, rows: Sequence[int], width: int) -> Floats:
        out = np.full((len(self.completion_ids), width), np.nan)
        out[np.asarray(rows), : values.shape[1]] = values[:, :width]
        return out


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
    rows = _telling_rows(evidence, bench.rows)
    width = evidence.completion_mask.shape[1]
    say("plain scoring")
    (plain,) = bench.score(rows, width=width)
    tested: dict[str, Floats] = {REFERENCE: plain.logps}
    if at_fault(evidence, plain.logps) == "trainer":
        _test_prompts(evidence, bench, rows, tested, say)
    else:
        _test_engine(evidence, bench, rows, plain, tested, say)
    return replace(evidence, tested=tested)


def at_fault(evidence: TokenEvidence, reference: Floats) -> Side:
    """The side whose log-probs are further from the plain scoring."""
    engine = kl_k3(_masked(evidence, reference - evidence.sampling_per_token_logps))
    trainer = kl_k3(_masked(evidence, reference - evidence.old_per_token_logps))
    return "trainer" if trainer > engine else "engine"


def left_share(evidence: TokenEvidence, name: str) -> float:
    """Share of the mismatch (KL k3) that is left under a tested hypothesis, over the tokens that it was tested on.

    A hypothesis on the engine is compared with the engine's log-probs, one on the trainer with the trainer's. Other
    weights and precisions may also hold only in part (a tenth of an update, rounding half as coarse). Let g be the
    change of the log-probs under the hypothesis and d = old - mu. Then 1 - R^2 of the fit d = s g, s > 0, counts if it
    is smaller. R^2 is the smaller one of values and of ranks, so that one token cannot decide.
    """
    values = evidence.tested[name]
    use = evidence.observed & (np.isfinite(values) | np.isneginf(values))
    mu, old = evidence.sampling_per_token_logps[use], evidence.old_per_token_logps[use]
    scored = np.where(np.isneginf(values[use]), old - MAX_LOG_RATIO, values[use])
    whole = kl_k3(old - mu)
    if not use.any() or not whole:
        return float("inf")
    on_trainer = name.startswith("trainer:")
    left = kl_k3(scored - (old if on_trainer else mu)) / whole
    if not on_trainer and name.split(":")[1] in (*MEMBERS, "precision"):
        return min(left, 1 - _fit_in_part(old - scored, old - mu))
    return left


def _fit_in_part(change: Array, d: Array) -> float:
    """The smaller R^2 of values (through 0) and of ranks; 0 if they point in opposite directions."""
    along = float(change @ d)
    ranks = rank_correlation(change, d)
    if along <= 0 or not ranks > 0:
        return 0.0
    return min(along**2 / max(float(change @ change) * float(d @ d), 1e-60), ranks**2)


def _masked(evidence: TokenEvidence, values: Array) -> Array:
    return np.where(evidence.observed, values, np.nan)


def _telling_rows(evidence: TokenEvidence, count: int) -> list[int]:
    """The rows with most disagreement and, for a quarter of ``count``, rows that are spread over the batch."""
    gap = _masked(evidence, evidence.old_per_token_logps - evidence.sampling_per_token_logps)
    size = np.nansum(np.clip(gap, -20, 20) ** 2, axis=1)
    # The spread rows show what is the same everywhere. The rows with most disagreement show the fault.
    order = np.argsort(-size, kind="stable").tolist()
    spread = np.linspace(0, len(size) - 1, max(1, count // 4)).astype(int).tolist()
    chosen = [*spread, *(row for row in order if row not in spread)][:count]
    return sorted(set(chosen))


def _test_prompts(
    evidence: TokenEvidence, bench: Bench, rows: list[int], tested: dict[str, Floats], say: Callable[[str], None]
) -> None:
    width = evidence.completion_mask.shape[1]
    for detail, prompts in bench.prompts.items():
        name = f"trainer:prompt_difference:{detail}"
        say(name)
        tested[name] = bench.score(rows, prompts=prompts, width=width)[0].logps
        if _explained(evidence, tested, name):
            return


def _test_engine(
    evidence: TokenEvidence, bench: Bench, rows: list[int], plain: TokenScores, tested: dict[str, Floats],
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Cheap tests first (shifts need no forward, all sampling options share one), then what the log-probs suggest."""
    width = evidence.completion_mask.shape[1]
    tested |= _shifts(evidence, plain.logps)
    heads = sampling_candidates(evidence, plain)
    if heads:
        say("temperature and truncation")
        scores = bench.score(rows, heads=list(heads.values()), width=width)
        tested |= {f"engine:{name}": found.logps for name, found in zip(heads, scores, strict=True)}
    if any(_explained(evidence, tested, name) for name in tested if name != REFERENCE):
        return
    for name, change in _costly(evidence, bench):
        say(name)
        tested[f"engine:{name}"] = bench.score(rows, width=width, **change)[0].logps
        if _explained(evidence, tested, f"engine:{name}"):
            return


def _explained(evidence: TokenEvidence, tested: dict[str, Floats], name: str) -> bool:
    return left_share(replace(evidence, tested=tested), name) <= EXPLAINED


def _costly(evidence: TokenEvidence, bench: Bench) -> list[tuple[str, dict[str, Any]]]:
    """Hypotheses that need a forward each; first the kind that the log-probs support."""
    precisions = usual_precisions(bench.model) if bench.precisions is None else bench.precisions
    kinds: dict[str, list[tuple[str, dict[str, Any]]]] = {
        OTHER_WEIGHTS: [(name, {"inside": inside}) for name, inside in bench.weights.items()],
        "precision": [(name, {"inside": inside}) for name, inside in precisions.items()],
        "prompt_difference": [
            (f"prompt_difference:{detail}", {"prompts": prompts}) for detail, prompts in bench.prompts.items()
        ],
    }
    scores = {s.cause: s.score for s in read_signatures(extract(evidence))}
    order = sorted(kinds, key=lambda kind: -scores.get(kind, 0.0))
    routing = [(name, {"inside": inside}) for name, inside in usual_routers(bench.model).items()]
    return routing + [pair for kind in order for pair in kinds[kind]]


def usual_routers(model: Any) -> dict[str, Inside]:
    """Contexts in which routers see a less precise input; empty for a dense model."""
    if not routers(model):
        return {}
    return {
        f"routing:router in {name}": lambda name=name: rounded_routers(model, SIGNIFICANT_BITS[name])  # type: ignore[misc]
        for name in ("bf16", "fp16")
    }


def usual_precisions(model: Any) -> dict[str, Inside]:
    """Contexts for the precisions that engines run in: bf16, fp16, and int8, fp8 or int4 weights."""
    simulated: dict[str, Inside] = {
        f"precision:{name}": lambda name=name: simulated_dtype(model, name)  # type: ignore[misc]
        for name in ("bf16", "fp16")
    }
    rounded: dict[str, Inside] = {
        f"precision:{name} weights": lambda name=name: rounded_weights(model, name)  # type: ignore[misc]
        for name in ("int8", "fp8", "int4")
    }
    return {**simulated, **rounded}


def _shifts(evidence: TokenEvidence, reference: Floats) -> dict[str, Floats]:
    """The trainer's log-probs moved by a token, in the rows that disagree."""
    gap = _masked(evidence, evidence.old_per_token_logps - evidence.sampling_per_token_logps)
    rows = disagreeing_rows(np.clip(gap, -20, 20), noise_rms(evidence))
    found = {}
    for step, detail in ((1, "engine one token late"), (-1, "engine one token early")):
        moved = np.roll(reference, step, axis=1)
        moved[:, 0 if step == 1 else -1] = np.nan  # np.roll has moved this entry to the other end
        found[f"engine:misalignment:{detail}"] = np.where(rows[:, None], moved, reference)
    return found


def sampling_candidates(evidence: TokenEvidence, plain: TokenScores) -> dict[str, Head]:
    """The temperature, top-p, top-k and min-p that fit the engine's log-probs best, to be tested.

    The temperature follows from the slope of d on b + H. Under a truncation d is the log of the kept mass, and top-p
    keeps a mass of at least its value. Top-k samples no token of rank k or more, min-p no token with less than min-p
    times the largest probability.
    """
    use = evidence.observed & np.isfinite(plain.logps)
    d = (plain.logps - evidence.sampling_per_token_logps)[use]
    if not d.size:
        return {}
    found: dict[str, Head] = {}
    x = (plain.logps + plain.entropies)[use]
    slope = float(np.sum(x * d) / max(np.sum(x * x), 1e-30))
    if 1e-7 < abs(slope) < 0.75:
        guess = 1.0 / (1.0 - slope)
        for factor in (1.0, 1.1, 0.9):  # the slope is 1 - 1 / T to first order
            value = 1.0 + (guess - 1.0) * factor
            found[f"temperature:{value:.6g}"] = Head(value)
    # Under truncation d is log(kept mass): the smallest one seen bounds what top-p can have been.
    mass = float(np.exp(np.clip(d, -5, 0)).min())
    if mass < 1 - 1e-6:
        found |= _truncations(plain, use, mass)
    return found


def _truncations(plain: TokenScores, use: Array, mass: float) -> dict[str, Head]:
    found = {}
    for value in dict.fromkeys((round(mass, 2), round(mass - 0.005, 3), mass)):
        if 0 < value < 1:
            found[f"truncated_sampling:top_p {value:.4g}"] = Head(1.0, Truncation(top_p=value))
    ranks = int(plain.ranks[use].max()) + 1
    if ranks < 1000:
        found[f"truncated_sampling:top_k {ranks}"] = Head(1.0, Truncation(top_k=ranks))
    smallest = float(np.exp((plain.logps - plain.top_logps)[use].min()))
    for value in dict.fromkeys((round(smallest, 2), smallest)):
        if 1e-3 < value < 1:
            found[f"truncated_sampling:min_p {value:.4g}"] = Head(1.0, Truncation(min_p=value))
    return found
