"""Attributes a mismatch from a run's recorded rollouts, without the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from trl_offpolicy.diagnosis.attribution.attribute import Attribution, attribute
from trl_offpolicy.diagnosis.attribution.evidence import Declared, TokenEvidence, padded
from trl_offpolicy.diagnosis.attribution.features import kl_k3, rank_correlation
from trl_offpolicy.diagnosis.attribution.signatures import DIFFUSE, OTHER_WEIGHTS
from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.run_folder.layout import COMPLETION_IDS, ENTROPIES, GROUP_ID
from trl_offpolicy.run_folder.rollouts import RecordedRollouts, fetch_rows

MOST_ROWS = 256
"""Completions looked at: the last ones."""
GREW = 20.0
"""Times that the mismatch must have grown since the start of the run."""
SMALL_START = 1e-3
"""KL k3, nats per token, that it must have begun below."""
GROWING, GROWING_RANK = 1.5, 0.5
"""The last third of the steps with a mismatch over the first third, and the rank correlation with the step, from which
it grows."""
COMES_AND_GOES = (0.15, 0.85)
"""Share of steps without a mismatch, after the first one with it."""
LEAST_STEPS = 4
"""Steps with a mismatch from which its course is judged."""
ALL_ROWS, FEW_TOKENS = 0.7, 0.68
"""Other weights change every row and most tokens: the least share of rows, and the most that 2 % of tokens may make."""
COURSE_CONFIDENCE = 0.8
"""Share of such answers that are right."""
_EXTRAS = (COMPLETION_IDS, GROUP_ID, ENTROPIES)


def recorded_evidence(
    rollouts: RecordedRollouts, info: Mapping[str, Any], *, steps: tuple[int, int] | None = None
) -> TokenEvidence | None:
    """The last recorded completions as evidence; None if no token has both log-probs.

    Args:
        rollouts: rollouts of the run.
        info: ``run.json``; its entry ``declared`` is what both sides declare.
        steps: optimizer steps (first, last) that are judged; None = all. Rollouts are recorded at the step before
            their metrics are logged, so that step counts as well.
    """
    wanted = np.unique(rollouts.row)
    if steps is not None:
        wanted = wanted[(rollouts.steps[wanted] >= steps[0] - 1) & (rollouts.steps[wanted] <= steps[1])]
    wanted = wanted[-MOST_ROWS:]
    if not wanted.size:
        return None
    token = np.isin(rollouts.row, wanted)
    row, position = np.searchsorted(wanted, rollouts.row[token]), rollouts.position[token]
    shape = (len(wanted), int(position.max()) + 1)
    sampling, log_ratio = rollouts.sampling_logp[token], rollouts.log_ratio[token]
    extras = _extras(rollouts, wanted, shape)
    return TokenEvidence(
        sampling_per_token_logps=_scattered(sampling, row, position, shape),
        old_per_token_logps=_scattered(sampling + log_ratio.astype(np.float64), row, position, shape),
        completion_mask=np.isfinite(_scattered(sampling, row, position, shape)),
        engine=_declared(info, "engine"),
        trainer=_declared(info, "trainer"),
        **extras,
    )


def attribute_run(
    rollouts: RecordedRollouts, info: Mapping[str, Any], *, steps: tuple[int, int] | None = None
) -> Attribution | None:
    """Why engine and trainer differ in the judged steps; None if no token has both log-probs.

    The course of the run counts as well. Different settings show from the first step on, and a change of a setting as a
    jump. Weights that do not arrive show as a mismatch of all tokens that begins at nothing and grows with the updates,
    or that comes and goes. This decides only where the tokens themselves do not.
    """
    evidence = recorded_evidence(rollouts, info, steps=steps)
    if evidence is None:
        return None
    found, course = attribute(evidence), course_of(rollouts, steps)
    if found.cause == "none" or course is None:
        return found
    whole = found.features.disagreeing_rows >= ALL_ROWS and found.features.top_tokens < FEW_TOKENS
    if found.cause not in ("unknown", OTHER_WEIGHTS, *DIFFUSE) or not whole:
        return replace(found, reasons=(*found.reasons, course.text))
    if not (course.grows or course.comes_and_goes):
        return replace(found, reasons=(*found.reasons, course.text + ": look at what changed there"))
    synced = evidence.engine is not None and evidence.engine.weight_version is not None
    says = " although both sides declare the same weights" if synced else ""
    return replace(
        found, cause="stale_weights" if synced else OTHER_WEIGHTS, coarse=OTHER_WEIGHTS, confidence=COURSE_CONFIDENCE,
        runner_up=found.cause if found.cause != "unknown" else found.runner_up, detail="", basis="log-probs",
        reasons=(course.text + says + ": weights that do not arrive do that", *found.reasons),
        next_test=CAUSES["stale_weights"].confirm,
    )  # fmt: skip


@dataclass(frozen=True)
class Course:
    """How the mismatch of a run went, where it began small.

    Args:
        first: KL k3 of the first tenth of the recorded steps, nats per token.
        last: KL k3 of the judged steps.
        since: first step with a mismatch well above the first ones.
        grows: from then on it grows with the steps.
        comes_and_goes: from then on some steps agree as well as the first ones.
    """

    first: float
    last: float
    since: int
    grows: bool
    comes_and_goes: bool

    @property
    def text(self) -> str:
        """The course in words."""
        how = "grows with the steps" if self.grows else "is there at once"
        if self.comes_and_goes:
            how = "comes and goes"
        return (
            f"KL k3 is {self.first:.1e} in the first recorded steps and {self.last:.1e} now; "
            f"since step {self.since} it {how}"
        )


def course_of(rollouts: RecordedRollouts, steps: tuple[int, int] | None) -> Course | None:
    """The course of a mismatch that began small and grew much; None if it was there from the start, or is not there."""
    at = rollouts.steps[rollouts.row]
    known = np.unique(at)
    early = at <= known[(len(known) - 1) // 10]
    late = np.ones(len(at), bool) if steps is None else (at >= steps[0] - 1) & (at <= steps[1])
    late &= at > known[len(known) // 2]  # the judged steps may be the whole run: its second half, then
    if not late.any():
        return None
    first, last = kl_k3(rollouts.log_ratio[early]), kl_k3(rollouts.log_ratio[late])
    if not first < min(SMALL_START, last / GREW):
        return None
    sizes = np.array([kl_k3(rollouts.log_ratio[at == step]) for step in known])
    differs = sizes > max(2 * first, last / 100)
    begin = int(np.argmax(differs))
    after, agree = sizes[begin:], ~differs[begin:]
    grown = after[~agree]
    third = max(1, len(grown) // 3)
    grows = len(grown) >= LEAST_STEPS and rank_correlation(np.arange(len(grown)), grown) > GROWING_RANK
    grows = grows and grown[-third:].mean() > GROWING * grown[:third].mean()
    comes_and_goes = len(after) >= LEAST_STEPS and COMES_AND_GOES[0] <= agree.mean() <= COMES_AND_GOES[1]
    return Course(first, last, int(known[begin]), bool(grows), bool(comes_and_goes))


def _declared(info: Mapping[str, Any], side: str) -> Declared | None:
    declared = (info.get("declared") or {}).get(side)
    if declared is None:
        return None
    known = {item.name for item in fields(Declared)}  # run.json of another version may hold other fields
    return Declared(**{name: value for name, value in declared.items() if name in known})


def _scattered(values: Any, row: Any, position: Any, shape: tuple[int, int]) -> Any:
    out = np.full(shape, np.nan)
    out[row, position] = values
    return out


def _extras(rollouts: RecordedRollouts, wanted: Any, shape: tuple[int, int]) -> dict[str, Any]:
    """Those of token ids, prompt groups and entropies that every row has."""
    records = fetch_rows(rollouts, wanted.tolist(), _EXTRAS)
    columns = {name: [records[int(row)][name] for row in wanted] for name in _EXTRAS}
    known = {name: values for name, values in columns.items() if all(value is not None for value in values)}
    extras: dict[str, Any] = {}
    if COMPLETION_IDS in known:
        ids = padded([ids[: shape[1]] for ids in known[COMPLETION_IDS]], width=shape[1], fill=-1)
        extras["token_ids"] = ids.astype(np.int64)
    if GROUP_ID in known:
        extras["group_ids"] = np.asarray(known[GROUP_ID], np.int64)
    if ENTROPIES in known:
        extras["entropies"] = padded([row[: shape[1]] for row in known[ENTROPIES]], width=shape[1])
    return extras
