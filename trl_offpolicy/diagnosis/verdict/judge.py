"""Judges a run by its metrics: findings of the decision tree, each with its cause and the smallest fix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trl_offpolicy.diagnosis.causes import CAUSES, Cause
from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.diagnosis.verdict.tree import (
    APPLIED_ESS,
    INTERVAL,
    SEVERITIES,
    TREE,
    Readings,
    Severity,
    Symptom,
)
from trl_offpolicy.run_folder.run_data import MetricsLog

WINDOW = 20
"""Number of last logged steps that a verdict reads."""
LENGTHS = ("offpolicy/rollout/response_length_mean", "completions/mean_length")
_EXTREMES = {"_max": max, "_min": min, "prob_pearson": min}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: what was seen and what to do.

    Args:
        cause: key of :data:`~trl_offpolicy.diagnosis.causes.CAUSES`.
        severity: notice, warning or critical.
        symptom: a sentence with the numbers and their limits.
        evidence: the readings that led here.
        since: first logged step from which the symptom has held without a break, or None.
    """

    cause: str
    severity: Severity
    symptom: str
    evidence: dict[str, float]
    since: int | None = None

    @property
    def about(self) -> Cause:
        """The entry of the cause in :data:`~trl_offpolicy.diagnosis.causes.CAUSES`: meaning, confirmation and fix."""
        return CAUSES[self.cause]

    @property
    def confirm(self) -> str:
        """How to make sure of the cause before changing anything."""
        return self.about.confirm

    @property
    def fix(self) -> str:
        """The smallest change that helps."""
        return self.about.fix

    @property
    def snippet(self) -> str:
        """The fix as YAML for ``config.yaml``; may be empty."""
        return self.about.snippet


@dataclass(frozen=True)
class Diagnosis:
    """The result of the decision tree for the last steps of a run.

    Args:
        findings: most severe first.
        steps: (first, last) logged step that was judged; None if there is none.
        readings: the numbers that were judged.
        unknown: what could not be judged because nothing was logged for it.
    """

    findings: tuple[Finding, ...]
    steps: tuple[int, int] | None
    readings: dict[str, float]
    unknown: tuple[str, ...] = ()

    @property
    def verdict(self) -> Severity:
        """The worst severity; ``ok`` if nothing was found."""
        return max((one.severity for one in self.findings), key=SEVERITIES.index, default="ok")

    def line(self) -> str:
        """One line for a terminal: the first finding and how many more there are, or "ok" with the KL."""
        if not self.findings:
            distance = self.readings.get("mismatch/kl_k3", self.readings.get("total/kl_k3"))
            if distance is None:
                return "ok?  no distance between sampler and trainer was logged"
            return f"ok  KL k3 {format_number(distance)} nats per token"
        first = self.findings[0]
        more = f" (+{len(self.findings) - 1} more)" if len(self.findings) > 1 else ""
        return f"{first.severity}  {first.about.title}: {first.symptom}{more}"

    def as_dict(self) -> dict[str, Any]:
        """Verdict, findings and readings as plain values, for JSON."""
        return {
            "verdict": self.verdict,
            "steps": self.steps,
            "findings": [
                {
                    "cause": one.cause,
                    "severity": one.severity,
                    "since": one.since,
                    "symptom": one.symptom,
                    "evidence": one.evidence,
                    "confirm": one.confirm,
                    "fix": one.fix,
                    "snippet": one.snippet,
                }
                for one in self.findings
            ],
            "unknown": list(self.unknown),
            "readings": self.readings,
        }


def diagnose(log: MetricsLog, thresholds: Thresholds | None = None, *, window: int = WINDOW) -> Diagnosis:
    """Walk the decision tree over the last ``window`` logged steps.

    Args:
        log: metrics under this kit's names (other frameworks': :func:`~trl_offpolicy.run_folder.names.translate`).
        thresholds: limits of the tree; None = the defaults.
        window: number of logged steps that count.

    Returns:
        The diagnosis, with one finding per branch taken. A branch whose metrics were not logged is not taken.
    """
    limits = thresholds or Thresholds()
    readings = read(log.rows, window, limits)
    findings = []
    for step in TREE:
        symptoms = step.taken(readings, limits)
        if symptoms:
            evidence = {one.metric: readings[one.metric] for one in symptoms}
            text = "; ".join(_sentence(one, readings, limits) for one in symptoms)
            findings.append(Finding(step.cause, step.severity, text, evidence, _since(log, symptoms[0], limits)))
    findings.sort(key=lambda one: -SEVERITIES.index(one.severity))
    return Diagnosis(tuple(findings), _span(log, window), dict(readings), _unknown(readings))


def read(rows: Sequence[dict[str, float]], window: int, thresholds: Thresholds) -> Readings:
    """The readings of the tree: means over the last ``window`` rows, and numbers derived from them.

    Maxima give the largest value of the rows; minima and ``prob_pearson`` give the smallest.
    """
    last = rows[-window:]
    names = {key for row in last for key in row if key.startswith("offpolicy/")}
    found = _intervals(last, [name for name in names if name.endswith(INTERVAL)])
    for name in names:
        if name.endswith(INTERVAL):
            continue
        values = [row[name] for row in last if math.isfinite(row.get(name, math.nan))]
        if values:
            reduce = next((how for end, how in _EXTREMES.items() if name.endswith(end)), _mean)
            found[name.removeprefix("offpolicy/")] = float(reduce(values))
    return found | _derived(found, last) | _surge(rows, thresholds)


def _intervals(rows: Sequence[dict[str, float]], names: Sequence[str]) -> dict[str, float]:
    """Half-widths of the means, with rows taken as independent. Left out unless each row with a value has one."""
    found = {}
    for name in names:
        rows_with = [row for row in rows if math.isfinite(row.get(name.removesuffix(INTERVAL), math.nan))]
        widths = [row.get(name, math.nan) for row in rows_with]
        if widths and all(map(math.isfinite, widths)):
            found[name.removeprefix("offpolicy/")] = math.sqrt(math.fsum(w**2 for w in widths)) / len(widths)
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _derived(found: Readings, rows: Sequence[dict[str, float]]) -> dict[str, float]:
    extra: dict[str, float] = {}
    floor, distance = found.get("noise_floor/kl_k3"), found.get("mismatch/kl_k3")
    if floor is not None and distance is not None and floor > 0:
        extra["floor/kl_k3"] = distance / floor
    if "mismatch/log_ppl_diff" in found:
        extra["mismatch/-log_ppl_diff"] = -found["mismatch/log_ppl_diff"]
    if found.get("rollout/version_lag_mean", 0.0) > 0 and "total/kl_k3" in found:
        extra["lagged/kl_k3"] = found["total/kl_k3"]
    if found.get("keep/dropped_token_fraction", 0.0) > 0:
        applied = min((key for key in APPLIED_ESS if key in found), key=found.__getitem__, default="")
        extra |= {f"rejecting/ess{end}": found[applied + end] for end in ("", INTERVAL) if applied + end in found}
    clip = "offpolicy/loss/clip_region_fraction"
    values = [row[clip] for row in rows if math.isfinite(row.get(clip, math.nan))]
    half = len(values) // 2
    if half and _mean(values[:half]) > 0:
        extra["rising/loss/clip_region_fraction"] = _mean(values[half:]) / _mean(values[:half])
    return extra


def _surge(rows: Sequence[dict[str, float]], thresholds: Thresholds) -> dict[str, float]:
    """``rollout/length_surge`` as logged, else the length now over that of ``length_window`` steps before.

    Both lengths are means of five logged steps. A run that is shorter than the window is measured from its start, once
    it has ten steps.
    """
    if any("offpolicy/rollout/length_surge" in row for row in rows[-1:]):
        return {}  # the run's control has already measured it
    key = next((name for name in LENGTHS if any(name in row for row in rows)), None)
    lengths = [(row["step"], row[key]) for row in rows if key and math.isfinite(row.get(key, math.nan))]
    if len(lengths) < 10:
        return {}
    start = lengths[-1][0] - thresholds.length_window
    # the first row inside the window, but early enough that the five rows from it on are not among the last five
    first = min(next(i for i, (step, _) in enumerate(lengths) if step >= start), len(lengths) - 10)
    before, now = _mean([v for _, v in lengths[first : first + 5]]), _mean([v for _, v in lengths[-5:]])
    return {"rollout/length_surge": now / before} if before > 0 else {}


def _sentence(symptom: Symptom, readings: Readings, thresholds: Thresholds) -> str:
    limit, value = format_number(symptom.limit(thresholds)), format_number(readings[symptom.metric])
    half_width = readings.get(f"{symptom.metric}{INTERVAL}")
    interval = "" if half_width is None else f" ± {half_width:.1g}"
    return f"{symptom.label} {value}{interval} (limit {limit})"


def _since(log: MetricsLog, symptom: Symptom, thresholds: Thresholds) -> int | None:
    """First step of the last unbroken stretch of logged steps at which the symptom held by itself."""
    found = None
    for row in reversed(log.rows):
        value = row.get(f"offpolicy/{symptom.metric}")
        if value is None:
            continue
        if not symptom.holds({symptom.metric: value}, thresholds):
            break
        found = int(row["step"])
    return found


def _span(log: MetricsLog, window: int) -> tuple[int, int] | None:
    steps = log.steps[-window:]
    return (steps[0], steps[-1]) if steps else None


_JUDGED = {
    "agreement of engine and trainer": ("mismatch/kl_k3", "mismatch/prob_pearson"),
    "noise floor": ("noise_floor/kl_k3",),
    "staleness": ("staleness/kl_k3", "total/kl_k3"),
    "effective sample size": (
        *("mismatch/ess_sequence", "total/ess_sequence"),
        *("weight_applied/ess_token", "weight/ess_token"),
    ),
    "clipping": ("loss/clip_region_fraction",),
    "response length": ("rollout/length_surge",),
}


def _unknown(readings: Readings) -> tuple[str, ...]:
    return tuple(name for name, metrics in _JUDGED.items() if not any(one in readings for one in metrics))
