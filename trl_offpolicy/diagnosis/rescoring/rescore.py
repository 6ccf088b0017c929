"""Scores recorded tokens again, and tests causes on them.

A recorded run holds both log-probs of each token but not the model. Where the weights of a recorded step are at hand
(the model that the run began with, a checkpoint), the tokens of that step can be scored again. If the result is the
recorded trainer's, the engine's side differs, and every cause that ``probe`` tests can be tested here. If it is the
engine's, the trainer's side differs. If it is neither's, these are not the weights that scored: nothing is concluded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trl_offpolicy.diagnosis.attribution.attribute import Attribution, attribute
from trl_offpolicy.diagnosis.attribution.bench import Bench, pad_ids_of, stop_ids_of
from trl_offpolicy.diagnosis.attribution.distances import distance
from trl_offpolicy.diagnosis.attribution.evidence import Declared, Floats, Seen, TokenEvidence
from trl_offpolicy.diagnosis.attribution.hypotheses import run_hypotheses
from trl_offpolicy.diagnosis.attribution.recorded import (
    EXACT,
    LOW_PRECISION,
    SMALLEST,
    Course,
    attribute_run,
    course_of,
    evidence_of_rows,
)  # fmt: skip
from trl_offpolicy.diagnosis.attribution.trials.spellings import spellings_of
from trl_offpolicy.diagnosis.rescoring import weights
from trl_offpolicy.diagnosis.rescoring.renderings import other_renderings
from trl_offpolicy.engines.hf import Head
from trl_offpolicy.functional.truncated_sampling import Truncation
from trl_offpolicy.run_folder.declared import largest_dropout
from trl_offpolicy.run_folder.layout import COMPLETION_IDS, POLICY_VERSION, PROMPT, PROMPT_IDS
from trl_offpolicy.run_folder.rollouts import RecordedRollouts, fetch_rows

MOST_ROWS = 32
"""Completions of a step that are scored again, to compare them with what was recorded."""
NEITHER = 0.5
"""Share of the mismatch by which new scores miss the nearer side, above which the weights are not those that scored."""
AGREES = 0.1
"""The same up to which they agree with it."""
DROPOUT_SCALE = 3.0
"""Times by which the effect of dropout may differ from one scoring to the next."""

Note = Callable[[str], None]


@dataclass(frozen=True)
class Recorded:
    """The recorded tokens of one step.

    Args:
        evidence: what was recorded of them.
        prompt_ids: prompts as the engine got them.
        prompts: the same as text.
        completion_ids: completions, tool output included.
    """

    evidence: TokenEvidence
    prompt_ids: list[list[int]]
    prompts: list[str]
    completion_ids: list[list[int]]

    @property
    def head(self) -> Head:
        """Temperature and truncation of the trainer's distribution, as it declares them."""
        said = self.evidence.trainer or Declared()
        cut = Truncation(top_p=said.top_p or 1.0, top_k=said.top_k or 0, min_p=said.min_p or 0.0)
        return Head(said.temperature or 1.0, cut)


OpenBench = Callable[[Recorded], AbstractContextManager[Bench]]
"""Opens the model, with the weights of a step and computing as the trainer did, for the recorded tokens."""


@dataclass(frozen=True)
class Rescored:
    """What scoring again showed.

    Args:
        step: optimizer steps before the weights that were used; -1 = not known.
        attribution: the cause; None if these are not the weights that scored.
        text: in words, how the new scores compare with both sides.
        size: mismatch of these tokens, :func:`~trl_offpolicy.diagnosis.attribution.distances.distance` per token.
        tried: causes that were tested with the model.
    """

    step: int
    attribution: Attribution | None
    text: str
    size: float
    tried: frozenset[str] = frozenset()


# ---------------------------------------------------------------------------------------------------------- one batch


def rescore(evidence: TokenEvidence, bench: Bench, *, step: int = -1, note: Note | None = None) -> Rescored:
    """Score a recorded batch again, and test causes if the model is the one that scored.

    Args:
        evidence: what was recorded; a second scoring in it is not used.
        bench: the model with the trainer's weights, and what can be changed about it.
        step: optimizer steps before these weights.
        note: called with the name of what is being tested.
    """
    (note or (lambda _text: None))("scoring recorded tokens again")
    width, rows = evidence.completion_mask.shape[1], list(range(len(evidence.completion_mask)))
    plain = bench.score(rows, width=width)[0]
    missed = _misses(evidence, plain.logps)
    size = missed["mismatch"]
    where = "" if step < 0 else f" of step {step + 1}"  # as the metrics count
    begin = f"scored again with the trainer's model, {missed['rows']:.0f} recorded responses{where}"
    trainer, engine = missed["trainer"], missed["engine"]
    if min(trainer, engine) > max(NEITHER * size, _agreement(evidence) ** 2):
        text = f"{begin} fit neither side: these are not the weights, or not the prompts, that scored"
        return Rescored(step, None, text, size)
    fits = trainer <= max(AGREES * size, _agreement(evidence) ** 2)
    text = f"{begin} are the recorded trainer's (mean |difference| {missed['trainer_mean']:.1e} nats)"
    known = replace(evidence, rescored_per_token_logps=plain.logps if fits else None)
    if known.entropies is None:
        known = replace(known, entropies=plain.entropies)
    if not fits:
        text = (
            f"{begin} are not the recorded trainer's (mean |difference| {missed['trainer_mean']:.1e} nats; "
            f"{missed['engine_mean']:.1e} from the engine's): "
            "the trainer computed otherwise than its model alone (dropout, padding, precision, other weights)"
        )
        if engine <= max(AGREES * size, _agreement(evidence) ** 2) and _dropout_explains(evidence, bench, plain.logps):
            text = f"{begin} are the engine's, and the trainer's with its dropout differ as much as the recorded ones"
            known = replace(known, rescored_per_token_logps=plain.logps)
    found = attribute(known)
    if found.cause == "none":
        return Rescored(step, found, text, size)
    tested = run_hypotheses(known, bench, note=note)
    tried = frozenset(name.split(":")[1] for name in tested.tested if ":" in name)
    return Rescored(step, attribute(tested), text, size, tried)


def attribute_rescored(evidence: TokenEvidence, bench: Bench, *, note: Note | None = None) -> Attribution:
    """Why engine and trainer differ in a recorded batch, with the model at hand.

    It is what ``doctor RUN --model`` says of a batch whose weights are known. Without a fit of the model, it is what
    the recorded tokens say alone.

    Args:
        evidence: what was recorded.
        bench: the model with the trainer's weights, and what can be changed about it.
        note: called with the name of what is being tested.
    """
    alone = attribute(replace(evidence, rescored_per_token_logps=None))
    return merged(alone, rescore(evidence, bench, note=note), grown=False)


def _dropout_explains(evidence: TokenEvidence, bench: Bench, plain: Floats) -> bool:
    """Whether the model's own dropout changes its log-probs about as much as the recorded trainer's are changed."""
    if not largest_dropout(bench.model):
        return False
    bench.model.train()
    try:
        dropped = bench.score(list(range(len(plain))), width=plain.shape[1])[0].logps
    finally:
        bench.model.eval()
    use = evidence.observed & np.isfinite(plain) & np.isfinite(dropped)
    missed, noise = distance((evidence.old_per_token_logps - plain)[use]), distance((dropped - plain)[use])
    return missed <= DROPOUT_SCALE * noise and noise <= DROPOUT_SCALE * missed


def _misses(evidence: TokenEvidence, plain: Floats) -> dict[str, float]:
    """How far plain scores are from both sides, and both sides from each other, per token."""
    use = evidence.observed & np.isfinite(plain)
    old, mu, new = (x[use] for x in (evidence.old_per_token_logps, evidence.sampling_per_token_logps, plain))
    count = max(1, int(use.sum()))
    return {
        "rows": float(use.any(1).sum()),
        "mismatch": distance(old - mu) / count,
        "trainer": distance(new - old) / count,
        "engine": distance(new - mu) / count,
        "trainer_mean": float(np.mean(np.abs(new - old))),
        "engine_mean": float(np.mean(np.abs(new - mu))),
    }


def _agreement(evidence: TokenEvidence) -> float:
    """Mean difference (nats) that two scorings in the trainer's precision may have."""
    return LOW_PRECISION if evidence.trainer is not None and evidence.trainer.low_precision else EXACT


# -------------------------------------------------------------------------------------------------------------- a run


def rescore_run(
    rollouts: RecordedRollouts,
    info: Mapping[str, Any],
    sources: Mapping[int, OpenBench],
    *,
    course: Course | None = None,
    note: Note | None = None,
) -> Rescored | None:
    """Test causes on the recorded rows of a step whose weights are at hand; None if no such row was recorded.

    Of several steps it takes the latest one whose rows have a mismatch, else the latest one.

    Args:
        rollouts: rollouts of the run.
        info: ``run.json``.
        sources: optimizer steps -> how the model with the weights after them is opened.
        course: how the mismatch went over the run, if some steps do not have it.
        note: called with the name of what is being tested.
    """
    known = {step: found for step in sorted(sources) if (found := recorded_at(rollouts, info, step)) is not None}
    if not known:
        return None

    def differs(step: int) -> bool:
        if course is not None:
            return step in course.differing
        return float(np.nanmean(np.abs(known[step].evidence.log_ratio))) > SMALLEST

    step = max(known, key=lambda one: (differs(one), one))
    with sources[step](known[step]) as bench:
        return rescore(known[step].evidence, bench, step=step, note=note)


def attribute_run_rescored(
    rollouts: RecordedRollouts,
    info: Mapping[str, Any],
    sources: Mapping[int, OpenBench],
    *,
    steps: tuple[int, int] | None = None,
    seen: Sequence[Seen] = (),
    note: Note | None = None,
) -> tuple[Attribution | None, Rescored | None]:
    """Why engine and trainer differ in the judged steps: what the tokens say, and tests where weights are at hand.

    Args:
        rollouts: rollouts of the run.
        info: ``run.json``.
        sources: optimizer steps -> how the model with the weights after them is opened; empty = no test.
        steps: optimizer steps (first, last) that are judged; None = all.
        seen: differences that something else of the run proves.
        note: called with the name of what is being tested.

    Returns:
        The answer (None if no token has both log-probs), and what scoring again showed (None if nothing was scored).
    """
    alone = attribute_run(rollouts, info, steps=steps, seen=seen)
    if alone is None or alone.cause == "none" or not sources:
        return alone, None
    rescored = rescore_run(rollouts, info, sources, course=course_of(rollouts, steps), note=note)
    if rescored is None:
        return alone, None
    return merged(alone, rescored, grown=has_grown(rollouts, rescored, steps)), rescored


def recorded_at(rollouts: RecordedRollouts, info: Mapping[str, Any], step: int) -> Recorded | None:
    """What was recorded at a step and sampled by its weights; None if nothing was, or the prompts were not recorded."""
    rows = np.unique(rollouts.row)
    rows = rows[rollouts.steps[rows] == step]
    if not rows.size:
        return None
    records = fetch_rows(rollouts, rows.tolist(), (PROMPT_IDS, PROMPT, COMPLETION_IDS, POLICY_VERSION))
    fresh = [
        row for row in rows.tolist()
        if records[row][PROMPT_IDS] and records[row][COMPLETION_IDS]
        and records[row][POLICY_VERSION] in (None, step)
    ][:MOST_ROWS]  # fmt: skip
    if not fresh:
        return None
    return Recorded(
        evidence=evidence_of_rows(rollouts, info, np.asarray(fresh)),
        prompt_ids=[records[row][PROMPT_IDS] for row in fresh],
        prompts=[records[row][PROMPT] or "" for row in fresh],
        completion_ids=[records[row][COMPLETION_IDS] for row in fresh],
    )


def sources_of(run_dir: Path, info: Mapping[str, Any], model: str = weights.AUTO) -> dict[int, OpenBench]:
    """How the models of a run are opened, by their step; empty if none is on this machine.

    Args:
        run_dir: folder of the run.
        info: ``run.json``.
        model: model that the run began with; "auto" = the one in ``info``.

    Raises:
        FileNotFoundError: ``model`` is given and is not on this machine.
    """
    hand = weights.weights_at_hand(run_dir, info, model)
    declared = (info.get("declared") or {}).get("trainer") or {}
    return {} if hand is None else {at.step: _opening(hand, at, declared) for at in hand.snapshots}


def _opening(hand: weights.AtHand, at: weights.Snapshot, declared: Mapping[str, Any]) -> OpenBench:
    @contextmanager
    def opened(recorded: Recorded) -> Iterator[Bench]:
        model = weights.load(at, hand.base)
        tokenizer = weights.load_tokenizer(hand.base)
        of_text: dict[str, Any] = {}
        if tokenizer is not None:
            stop_ids = stop_ids_of(model, tokenizer)
            of_text = {
                "prompts": other_renderings(tokenizer, recorded.prompts, recorded.prompt_ids),
                "stop_ids": stop_ids,
                "pad_ids": pad_ids_of(tokenizer, stop_ids),
                "spellings": spellings_of(tokenizer),
            }
        bench = Bench(
            model, recorded.prompt_ids, recorded.completion_ids, head=recorded.head,
            weights=weights.other_weights(model, at, hand.snapshots), **of_text,
        )  # fmt: skip
        with _nearest(bench, recorded.evidence, weights.precisions(model, declared))():
            yield bench

    return opened


def _nearest(bench: Bench, evidence: TokenEvidence, ways: Mapping[str, Any]) -> Any:
    """The context in which the model comes nearest to the recorded trainer."""
    if len(ways) == 1:
        return next(iter(ways.values()))
    rows, width = list(range(min(8, len(evidence.completion_mask)))), evidence.completion_mask.shape[1]
    far = {}
    for name, way in ways.items():
        with way():
            far[name] = _misses(evidence, bench.score(rows, width=width)[0].logps)["trainer"]
    return ways[min(far, key=lambda name: far[name])]


# -------------------------------------------------------------------------------------------------------------- merge

GROWN = 4.0
"""Mismatch per token of the judged steps over that of the tested ones, above which something has come since."""


def has_grown(rollouts: RecordedRollouts, rescored: Rescored, steps: tuple[int, int] | None) -> bool:
    """Whether a token of the judged steps differs by far more than one of the tokens that were scored again."""
    at = rollouts.steps[rollouts.row]
    judged = slice(None) if steps is None else (at >= steps[0] - 1) & (at <= steps[1])
    d = rollouts.log_ratio[judged].astype(np.float64)
    return bool(d.size) and distance(d) / d.size > GROWN * max(rescored.size, SMALLEST**2)


def merged(alone: Attribution, rescored: Rescored, *, grown: bool) -> Attribution:
    """What the recorded tokens say over time, together with what was tested on those of one step.

    Args:
        alone: from the recorded tokens of the judged steps.
        rescored: from the tokens of the step whose weights are at hand.
        grown: whether the judged steps differ by much more than that step.
    """
    tested = rescored.attribution
    if tested is None:
        return replace(alone, reasons=(*alone.reasons, rescored.text))
    if tested.cause == "none":
        later = f"{rescored.text}, and the engine's: what differs began later"
        return replace(alone, reasons=(*alone.reasons, later), next_test=_later(alone))
    if grown:
        return _with_earlier(alone, tested, rescored)
    # A trace that was not among the tests, and a difference that was seen, are not refuted by tests that fail.
    untouched = alone.cause not in ("none", "unknown", *rescored.tried) or alone.basis in ("seen", "declared")
    if tested.cause == "unknown" and alone.cause != "unknown" and untouched:
        return replace(alone, reasons=(*alone.reasons, rescored.text, *tested.reasons[:1]))
    others = (one for one in alone.reasons if one not in tested.reasons)
    return replace(tested, reasons=(*tested.reasons, rescored.text, *(others if alone.cause == tested.cause else ())))


def _with_earlier(alone: Attribution, tested: Attribution, rescored: Rescored) -> Attribution:
    """The mismatch has grown beyond that of the tested step: its cause is told beside what the judged steps show."""
    if tested.cause == "unknown":
        return replace(alone, reasons=(*alone.reasons, rescored.text, *tested.reasons[:1]))
    if alone.cause == tested.cause:
        return replace(tested, reasons=(*tested.reasons, rescored.text, *alone.reasons))
    name = f"{tested.cause.replace('_', ' ')} {tested.detail}".rstrip()
    said = f"{name} is there from step {rescored.step + 1} on, but the mismatch has grown beyond it since"
    return replace(
        alone,
        runner_up=tested.cause,
        reasons=(*alone.reasons, said, *tested.reasons[:1], rescored.text),
        next_test=_later(alone),
    )


def _later(alone: Attribution) -> str:
    step = "Save a checkpoint in a step that has the mismatch, and run trl-offpolicy doctor RUN_DIR --model auto again."
    return alone.next_test if alone.cause != "unknown" else f"{step} {alone.next_test}"
