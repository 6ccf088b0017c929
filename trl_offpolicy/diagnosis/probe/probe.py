"""The zero-update test: same weights, no training; the engine samples, the trainer scores.

The difference is pure mismatch, because nothing is learned in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.measure import noise_floor
from trl_offpolicy.correction.terms import RawWeight
from trl_offpolicy.diagnosis.attribution.attribute import Attribution, attribute
from trl_offpolicy.diagnosis.attribution.breakdown import Breakdown, break_down
from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence, padded
from trl_offpolicy.diagnosis.attribution.hypotheses import Bench, run_hypotheses
from trl_offpolicy.diagnosis.attribution.recommend import Recommendation, recommend
from trl_offpolicy.diagnosis.attribution.traces.noise import noise_level
from trl_offpolicy.diagnosis.attribution.trials.spellings import spellings_of
from trl_offpolicy.diagnosis.probe.against import Against, compare_answers, with_tested_cause
from trl_offpolicy.diagnosis.probe.asked import Proof
from trl_offpolicy.diagnosis.probe.exactness import Exactness, asked_exact, judge_exactness
from trl_offpolicy.diagnosis.probe.options import ProbeOptions
from trl_offpolicy.diagnosis.probe.second import answer_of_second
from trl_offpolicy.diagnosis.probe.sides import ROWS, Sides, open_sides, render_prompts
from trl_offpolicy.engines.hf import score_completions
from trl_offpolicy.stats import PREFIX
from trl_offpolicy.types import PolicyBatch

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What a probe found.

    Args:
        options: options of the probe.
        metrics: ``mismatch/*``, ``weight_applied/*`` and ``noise_floor/*`` with ``_ci95`` half widths.
        evidence: log-probs and ids of the tokens.
        attribution: the likely cause.
        recommendation: what to do.
        breakdowns: the mismatch by probability, position, length and kind of token.
        completions: text of each completion.
        proof: what was asked on both sides.
        against: the comparison with a second setting; None = none was given.
        exact: whether an exact engine is exact, and what keeps it from that; None = it was not asked for.
        seconds: wall clock by stage.
    """

    options: ProbeOptions
    metrics: Mapping[str, float]
    evidence: TokenEvidence
    attribution: Attribution
    recommendation: Recommendation
    breakdowns: Sequence[Breakdown]
    completions: Sequence[str] = ()
    proof: Proof = field(default_factory=Proof)
    against: Against | None = None
    exact: Exactness | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


def run_probe(options: ProbeOptions, *, note: Note | None = None) -> ProbeResult:
    """Sample, score, measure, explain, recommend.

    Args:
        options: what to probe.
        note: called with the name of each stage as it begins.

    Raises:
        ValueError: the engine returned no token.
        EngineError: the engine cannot answer.
    """
    clock = _Clock(note or (lambda _text: None))
    clock("loading the trainer's model")
    sides = open_sides(options)
    prompts = render_prompts(sides.tokenizer, options.prompts)
    ids = [row for row in prompts.ids for _ in range(options.samples)]
    clock("sampling with the engine")
    completions, logps = sides.sample(prompts.ids)
    clock("scoring with the trainer")
    evidence = _score(options, sides, ids, completions, logps)
    clock("measuring")
    metrics = measure(evidence)
    attribution = attribute(evidence)
    # Test causes with the model. The evidence then holds the results, and the answer may change.
    if options.explain and attribution.cause != "none":
        bench = Bench(
            sides.model, ids, completions, weights=sides.other_weights(),
            prompts={name: [row for row in found for _ in range(options.samples)]
                     for name, found in prompts.others.items()},
            head=options.trainer_head, stop_ids=sides.stop_ids, pad_ids=sides.pad_ids,
            spellings=spellings_of(sides.tokenizer),
        )  # fmt: skip
        evidence = run_hypotheses(evidence, bench, note=lambda text: clock(f"testing {text}", "testing hypotheses"))
        attribution = attribute(evidence)
    against = _against(options, sides, evidence, ids, completions, clock)
    if against is not None:
        attribution = with_tested_cause(attribution, against)
    texts = [sides.tokenizer.decode(row) for row in completions]
    return ProbeResult(
        options=options,
        metrics=metrics,
        evidence=evidence,
        attribution=attribution,
        recommendation=recommend(evidence, attribution, metrics),
        breakdowns=break_down(evidence, decode=lambda token: str(sides.tokenizer.decode([token])),
                              special=frozenset(sides.tokenizer.all_special_ids)),
        completions=texts,
        proof=sides.proof,
        against=against,
        exact=_exactness(sides, evidence) if options.exact else None,
        seconds=clock.done(),
    )  # fmt: skip


def _against(
    options: ProbeOptions, sides: Sides, evidence: TokenEvidence, ids: list[list[int]], completions: list[list[int]],
    clock: _Clock,
) -> Against | None:  # fmt: skip
    """The comparison with the second setting, if there is one; the first engine is closed by now."""
    if options.against is None or sides.first is None:
        return None
    clock(f"scoring with {options.against}", "second setting")
    second = answer_of_second(options, ids, completions)
    return compare_answers(evidence, sides.first, second, text=options.against)


def _exactness(sides: Sides, evidence: TokenEvidence) -> Exactness:
    """The distance to the trainer against the noise floor, with what keeps it above."""
    o = sides.options
    asked = asked_exact(sides.exact, sides.engine_settings, sides.proof.rows, dtype=o.trainer_dtype, rows=ROWS)
    outside = np.where(evidence.observed, 0.0, np.nan)
    sampling, old = evidence.sampling_per_token_logps + outside, evidence.old_per_token_logps + outside
    return judge_exactness(sampling, old, evidence.rescored_per_token_logps, asked=asked)


class _Clock:
    """Announces each stage, and adds up how long it took."""

    def __init__(self, note: Note) -> None:
        self._note, self._stage, self._since = note, "", time.monotonic()
        self.seconds: dict[str, float] = {}

    def __call__(self, text: str, stage: str | None = None) -> None:
        now = time.monotonic()
        if self._stage:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage or text, now
        self._note(text)

    def done(self) -> dict[str, float]:
        self("done")
        return self.seconds


def _score(
    options: ProbeOptions, sides: Sides, ids: list[list[int]], completions: list[list[int]], logps: list[list[float]]
) -> TokenEvidence:
    """Score every completion, and half of them again in another batch layout for the noise floor."""
    if not any(completions):
        raise ValueError("The engine must return at least one token, but every completion is empty.")
    heads = [options.trainer_head]
    (scores,) = score_completions(sides.model, ids, completions, heads=heads, rows=ROWS)
    half = max(1, len(ids) // 2)
    (again,) = score_completions(sides.model, ids[:half], completions[:half], heads=heads, rows=5)
    width = scores.logps.shape[1]
    rescored = np.full((len(ids), width), np.nan)
    rescored[:half, : again.logps.shape[1]] = again.logps
    return TokenEvidence(
        sampling_per_token_logps=padded(logps, width=width),
        old_per_token_logps=scores.logps,
        completion_mask=np.isfinite(padded([[0.0] * len(row) for row in completions], width=width)),
        rescored_per_token_logps=rescored,
        entropies=scores.entropies,
        token_ids=padded(completions, width=width, fill=0).astype(np.int64),
        group_ids=np.repeat(np.arange(len(ids) // options.samples), options.samples),
        engine=sides.engine_declares(),
        trainer=sides.trainer_declares(),
        seen=sides.proof.seen,
        compared=sides.proof.compared,
    )


def measure(evidence: TokenEvidence) -> dict[str, float]:
    """The kit's diagnostics of a batch without the prefix, with 95 % intervals clustered by prompt.

    ``weight_applied/*`` describes raw token weights, that is, a correction without a cap.
    """
    old, mu, mask = (
        torch.from_numpy(np.where(evidence.completion_mask, values, 0.0)).float()
        for values in (evidence.old_per_token_logps, evidence.sampling_per_token_logps, evidence.completion_mask)
    )
    groups = None if evidence.group_ids is None else torch.from_numpy(np.asarray(evidence.group_ids, np.int64))
    batch = PolicyBatch(
        per_token_logps=old, old_per_token_logps=old, sampling_per_token_logps=mu, completion_mask=mask.bool(),
        advantages=torch.zeros(len(old)), group_ids=groups,
    )  # fmt: skip
    stats = Correction(weight=RawWeight(level="token"), measure=("mismatch",))(batch).stats
    found = {key.removeprefix(PREFIX): value for key, value in stats.compute().items()}
    if evidence.rescored_per_token_logps is not None:
        again = np.isfinite(evidence.rescored_per_token_logps) & evidence.observed
        other = torch.from_numpy(np.where(again, evidence.rescored_per_token_logps, 0.0)).float()
        floor = noise_floor(old, other, torch.from_numpy(again)).compute()
        found |= {key.removeprefix(PREFIX): value for key, value in floor.items()}
    return found | {"noise_level": noise_level(evidence)}
