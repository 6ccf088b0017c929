"""Attributes a mismatch from a run's recorded rollouts, without the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from trl_offpolicy.diagnosis.attribution.alternatives import LOOK_ALIKES, against
from trl_offpolicy.diagnosis.attribution.attribute import Attribution, attribute
from trl_offpolicy.diagnosis.attribution.by_lag import recorded_shares
from trl_offpolicy.diagnosis.attribution.distances import rank_correlation
from trl_offpolicy.diagnosis.attribution.evidence import Compared, Declared, Seen, TokenEvidence, padded
from trl_offpolicy.diagnosis.attribution.traces.signatures import DIFFUSE, OTHER_WEIGHTS, Limits
from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.run_folder.layout import (
    COMPLETION_IDS,
    COMPLETION_MASK,
    ENTROPIES,
    GROUP_ID,
    POLICY_VERSION,
    POLICY_VERSIONS,
)
from trl_offpolicy.run_folder.rollouts import RecordedRollouts, fetch_rows

MOST_ROWS = 256
"""Completions looked at: the last ones."""
EXACT, LOW_PRECISION = 1e-4, 0.02
"""Mean |log-ratio| (nats) up to which a step agrees, if float32 or else 16-bit arithmetic is the only difference."""
GREW, GREW_BEYOND = 4.0, 20.0
"""Times that of the steps that agree, above which a step does not; the second where they only agree in 16 bits. There
the size of rounding errors changes with the policy as well."""
SMALLEST = 1e-5
"""Mean |log-ratio| (nats) that the steps that do not agree have at least."""
GROWING, GROWING_RANK = 1.5, 0.5
"""The last third of the steps with a mismatch over the first third, and the rank correlation with the step, from which
it grows."""
COMES_AND_GOES = (0.15, 0.85)
"""Share of steps without a mismatch, after the first one with it."""
STEADY = 0.85
"""Rank correlation with the step, over all steps, from which the mismatch grows and does not come and go: on its way
past the size that separates the steps some fall on the other side by chance. After a jump it is about 0.75. Where steps
agree exactly, that size is no matter of chance."""
GATHERED, LEAST_STRETCHES = 1.3, 2
"""The last step of a stretch with a mismatch over the first, from which it gathers, and the stretches that show it."""
LEAST_STEPS = 4
"""Steps with a mismatch from which its course is judged."""
ALL_ROWS = 0.7
"""Least share of rows that disagree: other weights change every row."""
EVEN = (0.5, 2.0)
"""First tokens over all within which a mismatch that grows with the steps has no place in the response."""
COURSE_CONFIDENCE = 0.8
"""Confidence in such an answer, set by hand."""
LEAST_STALENESS = 0.1
"""Share of the mismatch that older weights must add to be told apart from chance."""
LAG_CONFIDENCE = 0.85
"""Confidence that it is staleness where most of the mismatch is absent at lag 0, set by hand."""
_EXTRAS = (COMPLETION_IDS, COMPLETION_MASK, GROUP_ID, ENTROPIES, POLICY_VERSION, POLICY_VERSIONS)


def recorded_evidence(
    rollouts: RecordedRollouts,
    info: Mapping[str, Any],
    *,
    steps: tuple[int, int] | None = None,
    only: Sequence[int] | None = None,
) -> TokenEvidence | None:
    """The last recorded completions as evidence; None if no token has both log-probs.

    Args:
        rollouts: rollouts of the run.
        info: ``run.json``; its entry ``declared`` is what both sides declare.
        steps: optimizer steps (first, last) that are judged; None = all. Rollouts are recorded at the step before
            their metrics are logged, so that step counts as well.
        only: recorded steps to which this is limited, unless none of them is judged.
    """
    wanted = np.unique(rollouts.row)
    if steps is not None:
        wanted = wanted[(rollouts.steps[wanted] >= steps[0] - 1) & (rollouts.steps[wanted] <= steps[1])]
    chosen = wanted if only is None else wanted[np.isin(rollouts.steps[wanted], only)]
    wanted = (chosen if chosen.size else wanted)[-MOST_ROWS:]
    return evidence_of_rows(rollouts, info, wanted) if wanted.size else None


def evidence_of_rows(rollouts: RecordedRollouts, info: Mapping[str, Any], wanted: Any) -> TokenEvidence:
    """Some recorded completions as evidence.

    Args:
        rollouts: rollouts of the run.
        info: ``run.json``.
        wanted: rows with an observed token, ascending.
    """
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
        seen=_seen(info),
        compared=_compared(info),
        **extras,
    )


def attribute_run(
    rollouts: RecordedRollouts,
    info: Mapping[str, Any],
    *,
    steps: tuple[int, int] | None = None,
    seen: Sequence[Seen] = (),
) -> Attribution | None:
    """Why engine and trainer differ in the judged steps; None if no token has both log-probs.

    The course of the run counts as well. Different settings show from the first step on, and a change of a setting as a
    jump. Weights that do not arrive show as a mismatch of all tokens that begins at nothing and grows with the updates,
    or that comes and goes. This decides only where the tokens themselves do not. Where tokens of several version lags
    were recorded, what tokens of lag 0 do not have is staleness.

    Args:
        rollouts: rollouts of the run.
        info: ``run.json``.
        steps: optimizer steps (first, last) that are judged; None = all.
        seen: differences that something else of the run proves, such as its syncs.
    """
    course = course_of(rollouts, steps)
    evidence = recorded_evidence(rollouts, info, steps=steps, only=None if course is None else course.differing)
    if evidence is None:
        return None
    evidence = replace(evidence, seen=(*evidence.seen, *seen))
    found = attribute(evidence)
    if found.cause == "none":
        return found
    by_lag = _by_lag(evidence, found)
    if by_lag is not None:
        return by_lag
    return found if course is None else _with_course(found, course, evidence)


def _by_lag(evidence: TokenEvidence, found: Attribution) -> Attribution | None:
    """The answer with what version lags tell; None if they tell nothing, or something was seen."""
    shares = recorded_shares(evidence)
    if shares is None or shares.staleness < LEAST_STALENESS or found.basis == "seen":
        return None
    assert evidence.version_lags is not None
    fresh = attribute(replace(evidence, completion_mask=evidence.completion_mask & (evidence.version_lags == 0)))
    parts = {"policy_staleness": shares.staleness, fresh.cause: shares.mismatch}
    if shares.staleness < 0.5:
        stale = "policy_staleness" if fresh.cause != "policy_staleness" else None
        return replace(
            fresh, runner_up=stale or fresh.runner_up, parts=tuple(reversed(parts.items())),
            reasons=(*fresh.reasons, shares.text),
        )  # fmt: skip
    also = () if fresh.cause in ("none", "policy_staleness") else (f"at lag 0: {fresh.reasons[0]}",)
    return replace(
        found, cause="policy_staleness", coarse=OTHER_WEIGHTS, confidence=LAG_CONFIDENCE, detail="",
        runner_up=found.runner_up if fresh.cause == "none" else fresh.cause, basis="log-probs",
        explained=shares.staleness, parts=() if fresh.cause == "none" else tuple(parts.items()),
        reasons=(shares.text, *also), next_test=CAUSES["policy_staleness"].confirm,
    )  # fmt: skip


def _with_course(found: Attribution, course: Course, evidence: TokenEvidence) -> Attribution:
    """The answer with the course of the run."""
    whole = found.features.disagreeing_rows >= ALL_ROWS
    known = found.basis != "log-probs" and found.cause != "unknown"  # declared, or seen on both sides
    if known or found.cause not in ("unknown", OTHER_WEIGHTS, *DIFFUSE) or not whole:
        return replace(found, reasons=(*found.reasons, course.text))
    if not (course.grows or course.comes_and_goes):
        return replace(found, reasons=(*found.reasons, course.text + ": look at what changed there"))
    if but := _not_weights(course, found, evidence):
        reasons = (*found.reasons, f"{course.text}, as weights that do not arrive now and then would; but {but}")
        return replace(
            found, cause="unknown", coarse="unknown", confidence=0.0, reasons=reasons,
            runner_up=(found.runner_up or OTHER_WEIGHTS) if found.cause == "unknown" else found.cause,
            next_test=LOOK_ALIKES["stale_weights"].text, alternatives=LOOK_ALIKES["stale_weights"].causes,
        )  # fmt: skip
    synced = evidence.engine is not None and evidence.engine.weight_version is not None
    says = " although both sides declare the same weights" if synced else ""
    told = found.reasons
    if found.cause == "unknown":  # or its "closest" cause would read as if it contradicted the one that is named
        closest = "" if found.runner_up is None else f" (closest: {CAUSES[found.runner_up].title})"
        told = (f"the tokens of one step alone do not show it{closest}", *told[1:])
    return replace(
        found, cause="stale_weights" if synced else OTHER_WEIGHTS, coarse=OTHER_WEIGHTS, confidence=COURSE_CONFIDENCE,
        runner_up=found.cause if found.cause != "unknown" else found.runner_up, detail="", basis="log-probs",
        reasons=(course.text + says + ": weights that do not arrive do that", *told),
        next_test=f"{CAUSES['stale_weights'].confirm} {LOOK_ALIKES['stale_weights'].text}",
        alternatives=LOOK_ALIKES["stale_weights"].causes,
    )  # fmt: skip


def _not_weights(course: Course, found: Attribution, evidence: TokenEvidence) -> str:
    """What speaks against weights that do not arrive; empty if nothing does.

    A replica with other settings, or other prompts in some steps, come and go as well. Only weights that change make
    equal tokens differ alike. From nothing, and then more with each step, is what only they do.
    """
    if found.features.forced > Limits.forced:
        return f"{found.features.forced:.0%} of it is at tokens whose sampling log-prob is exactly 0"
    if but := against(evidence, found.features, "stale_weights"):
        return but
    alike, early = found.features.by_token, found.features.early
    if alike >= Limits().by_token:
        return ""
    if course.comes_and_goes and not course.grows and not course.gathers:
        return (
            f"equal tokens do not differ alike (correlation {alike:.2f}), and it does not grow until it goes: engines "
            "with other settings, or other prompts in these steps, are as likely"
        )
    if not EVEN[0] <= early <= EVEN[1]:
        return (
            f"the first tokens differ {early:.2g} times as much as the average token, so something that grows with the "
            "length is as likely (a window, scaled positions)"
        )
    return ""


@dataclass(frozen=True)
class Course:
    """How the mismatch of a run went, where some steps do not have it.

    Args:
        low: mean |log-ratio| of the steps without it (10 % quantile of the steps), nats; one of a token counts as at
            most a nat.
        high: the same of the steps with it (90 % quantile).
        since: first step with it.
        grows: from then on it grows with the steps.
        comes_and_goes: from then on some steps do not have it.
        gathers: where it comes and goes, it is larger at the end of a stretch of steps than at its beginning.
        differing: the recorded steps with it.
    """

    low: float
    high: float
    since: int
    grows: bool
    comes_and_goes: bool
    differing: tuple[int, ...]
    gathers: bool = False

    @property
    def text(self) -> str:
        """The course in words."""
        how = "grows with the steps" if self.grows else "is there at once"
        if self.comes_and_goes:
            how = "comes and goes"
        return (
            f"the mean |log-ratio| is {self.low:.1e} nats in some steps and {self.high:.1e} in others; "
            f"since step {self.since + 1} it {how}"  # as the metrics count
        )


def course_of(rollouts: RecordedRollouts, steps: tuple[int, int] | None = None) -> Course | None:
    """The course of a mismatch that some steps do not have; None if all of them have it, or none.

    Args:
        rollouts: rollouts of the run.
        steps: optimizer steps (first, last) that are judged; later ones are not looked at.
    """
    at = rollouts.steps[rollouts.row]
    known = np.unique(at)
    if steps is not None:
        known = known[known <= steps[1]]
    if len(known) < LEAST_STEPS:
        return None
    # Mean |d| up to a nat: a few tokens that jump do not decide.
    size = np.minimum(np.abs(rollouts.log_ratio), 1.0)
    sizes = np.array([float(np.nanmean(size[at == step])) for step in known])
    low, high = float(np.quantile(sizes, 0.1)), float(np.quantile(sizes, 0.9))
    grew = GREW if low < EXACT else GREW_BEYOND
    if not low < min(LOW_PRECISION, high / grew):
        return None
    differs = sizes > max(grew * low, SMALLEST)
    if not differs.any():
        return None
    begin = int(np.argmax(differs))
    after, agree = sizes[begin:], ~differs[begin:]
    comes_and_goes = len(after) >= LEAST_STEPS and COMES_AND_GOES[0] <= agree.mean() <= COMES_AND_GOES[1]
    steady = low >= EXACT and rank_correlation(np.arange(len(sizes)), sizes) > STEADY
    comes_and_goes = comes_and_goes and not steady
    if not begin and not comes_and_goes:
        return None
    grown = after[~agree]
    third = max(1, len(grown) // 3)
    ranks = rank_correlation(np.arange(len(grown)), grown)
    grows = len(grown) >= LEAST_STEPS and ranks > GROWING_RANK
    grows = steady or (grows and grown[-third:].mean() > GROWING * grown[:third].mean())
    differing = tuple(known[differs].tolist())
    return Course(low, high, int(known[begin]), bool(grows), bool(comes_and_goes), differing, _gathers(sizes, differs))


def _gathers(sizes: Any, differs: Any) -> bool:
    """Whether the mismatch grows from step to step while it lasts: each update that is missed adds to it."""
    places = np.flatnonzero(differs)
    stretches = [one for one in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(one) > 1]
    ratios = [float(sizes[one[-1]] / sizes[one[0]]) for one in stretches]
    return len(ratios) >= LEAST_STRETCHES and float(np.median(ratios)) > GATHERED


def _seen(info: Mapping[str, Any]) -> tuple[Seen, ...]:
    """What the run's engine and trainer were asked for when it began, where they differ."""
    rows = (info.get("effective") or {}).get("differences", ())
    found = [row for row in rows if row.get("outcome") == "different" and row.get("cause")]
    return tuple(Seen(row["cause"], row["what"], row["engine"], row["trainer"]) for row in found)


def _compared(info: Mapping[str, Any]) -> frozenset[Compared]:
    """What was compared when the run began. Weights were not, so rounding that nobody declares is still possible."""
    return frozenset((info.get("effective") or {}).get("compared", ())) - {"precision"}


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
    """Those of token ids, prompt groups, entropies, version lags and turns that every row has."""
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
    if COMPLETION_MASK in known:
        extras["turns"] = _turns([row[: shape[1]] for row in known[COMPLETION_MASK]], shape[1])
        lengths = [len(row) for row in known[COMPLETION_MASK]]
        versions = known.get(POLICY_VERSIONS)
        if versions is None and POLICY_VERSION in known:
            pairs = zip(known[POLICY_VERSION], lengths, strict=True)
            versions = [[version] * length for version, length in pairs]
        if versions is not None:
            lags = [rollouts.steps[row] - np.asarray(one, np.int64) for row, one in zip(wanted, versions, strict=True)]
            extras["version_lags"] = padded([lag[: shape[1]] for lag in lags], width=shape[1], fill=-1).astype(np.int64)
    return extras


def _turns(masks: list[list[bool]], width: int) -> Any:
    """(B, T) turn of each trainable token: tokens that the policy did not sample end a turn; -1 on those."""
    mask = padded(masks, width=width, fill=0.0).astype(bool)
    begins = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    return np.where(mask, begins.cumsum(axis=1) - 1, -1)
