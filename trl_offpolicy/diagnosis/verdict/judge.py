"""Judges a run by its metrics: findings of the decision tree, each with its cause and the smallest fix."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from trl_offpolicy.diagnosis.causes import CAUSES, Cause
from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.diagnosis.thresholds import Thresholds, short_source
from trl_offpolicy.diagnosis.verdict.course import LENGTHS
from trl_offpolicy.diagnosis.verdict.readings import read, statistic
from trl_offpolicy.diagnosis.verdict.sga import Cell, sga_cell
from trl_offpolicy.diagnosis.verdict.tree import (
    INTERVAL,
    NOT_JUDGED,
    SEVERITIES,
    TREE,
    Readings,
    Severity,
    Step,
    Symptom,
    Verdict,
)
from trl_offpolicy.run_folder.layout import STEP
from trl_offpolicy.run_folder.run_data import MetricsLog
from trl_offpolicy.stats import PREFIX

WINDOW = 20
"""Number of last logged steps that a verdict reads."""
__all__ = ["LENGTHS", "WINDOW", "Diagnosis", "Finding", "diagnose", "read"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: what was seen and what to do.

    Args:
        cause: key of :data:`~trl_offpolicy.diagnosis.causes.CAUSES`.
        severity: notice, warning or critical.
        symptom: a sentence with the numbers and their limits.
        evidence: the readings that led here.
        since: first logged step from which the symptom has held without a break, or None.
        instead: what to do in place of the cause's fix, where nothing is to be changed yet; empty = the fix.
    """

    cause: str
    severity: Severity
    symptom: str
    evidence: dict[str, float]
    since: int | None = None
    instead: str = ""

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
        return self.instead or self.about.fix

    @property
    def snippet(self) -> str:
        """The fix as YAML for ``config.yaml``; may be empty."""
        return "" if self.instead else self.about.snippet


@dataclass(frozen=True)
class Diagnosis:
    """The result of the decision tree for the last steps of a run.

    Args:
        findings: most severe first.
        steps: (first, last) logged step that was judged; None if there is none.
        readings: the numbers that were judged.
        unknown: what could not be judged because nothing was logged for it.
        cell: what bias and variance ask for together; None if total variation or chi-square was not logged.
        broken: the gradient norm or loss that is no number since some step, and that step; everything else is then
            judged by the steps before. None = neither is.
    """

    findings: tuple[Finding, ...]
    steps: tuple[int, int] | None
    readings: dict[str, float]
    unknown: tuple[str, ...] = ()
    cell: Cell | None = None
    broken: tuple[str, int] | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst severity. If nothing was found: ``ok``, or ``not judged`` if agreement could not be judged.

        A run whose gradient or loss is no number is ``critical``.
        """
        if self.broken is not None:
            return "critical"
        if not self.findings and AGREEMENT in self.unknown:
            return NOT_JUDGED
        return max((one.severity for one in self.findings), key=SEVERITIES.index, default="ok")

    def no_number(self) -> str:
        """What is no number since when, and what to do; empty if everything is one."""
        if self.broken is None:
            return ""
        name, step = self.broken
        before = "all that follows is judged by the steps before" if self.steps else "no step before it was logged"
        return (
            f"{name} is NaN or infinite from step {step} to the last: the weights are probably lost since. Go back to "
            "a checkpoint before it and look at its batch, the learning rate and the precision (float16 overflows); "
            f"{before}"
        )

    def line(self) -> str:
        """One line for a terminal: the first finding and how many more there are, or "ok" with the KL."""
        if self.broken is not None:
            return f"{self.verdict}  {self.no_number()}"
        if self.verdict == NOT_JUDGED:
            return f"{NOT_JUDGED}  {self._open()}"
        if not self.findings:
            key = next(key for key in _SHOWN if key in self.readings)
            return f"ok  {_SHOWN[key].format(format_number(self.readings[key]))}"
        first = self.findings[0]
        more = f" (+{len(self.findings) - 1} more)" if len(self.findings) > 1 else ""
        return f"{first.severity}  {first.about.title}: {first.symptom}{more}"

    def _open(self) -> str:
        """Why agreement could not be judged."""
        low, high = (self.readings.get(f"{side}/mismatch/kl_k3") for side in ("atleast", "atmost"))
        if low is None:
            return "no distance between sampler and trainer was logged"
        if high is None:
            return f"KL k3 is at least {format_number(low)} nats per token, and nothing bounds it from above"
        return f"KL k3 lies between {format_number(low)} and {format_number(high)} nats per token"

    def as_dict(self) -> dict[str, Any]:
        """Verdict, findings and readings as plain values, for JSON."""
        return {
            "verdict": self.verdict,
            "broken": None if self.broken is None else {"metric": self.broken[0], "since": self.broken[1]},
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
            "bias_and_variance": None if self.cell is None else asdict(self.cell),
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
    if log.broken is not None:
        before = tuple(row for row in log.rows if row[STEP] < log.broken[1])
        return replace(diagnose(replace(log, rows=before, broken=None), limits, window=window), broken=log.broken)
    readings = read(log.rows, window, limits)
    taken: dict[str, list[Step]] = {}
    for step in TREE:
        if step.taken(readings, limits):
            taken.setdefault(step.cause, []).append(step)
    findings = [_finding(log, steps, readings, limits, window) for steps in taken.values()]
    findings.sort(key=lambda one: -SEVERITIES.index(one.severity))
    cell = sga_cell(readings, limits)
    return Diagnosis(tuple(findings), _span(log, window), dict(readings), _unknown(readings, limits), cell)


def _finding(log: MetricsLog, steps: list[Step], readings: Readings, limits: Thresholds, window: int) -> Finding:
    """What the most severe of the branches that lead to one cause say."""
    severity = max((step.severity for step in steps), key=SEVERITIES.index)
    worst = [step for step in steps if step.severity == severity]
    symptoms = tuple(dict.fromkeys(one for step in worst for one in step.taken(readings, limits)))
    evidence = {one.metric: readings[one.metric] for one in symptoms}
    text = "; ".join(_sentence(one, readings, limits, _steps_with(log, window, one)) for one in symptoms)
    instead = {step.instead for step in worst}  # branches of different words leave the cause's fix
    words = worst[0].instead if len(instead) == 1 else ""
    return Finding(worst[0].cause, severity, text, evidence, _since(log, symptoms[0], limits), words)


def _steps_with(log: MetricsLog, window: int, symptom: Symptom) -> int:
    """Logged steps of the window that hold the metric; for a number that follows from others, all of them."""
    rows = log.rows[-window:]
    return sum(f"{PREFIX}{symptom.metric}" in row for row in rows) or len(rows)


def _sentence(symptom: Symptom, readings: Readings, thresholds: Thresholds, steps: int) -> str:
    """Value with its interval, the statistic of the window, the limit and where it comes from."""
    limit, value = format_number(symptom.limit(thresholds)), format_number(readings[symptom.metric])
    half_width = readings.get(f"{symptom.metric}{INTERVAL}", 0.0)
    interval = f" ± {half_width:.1g}" if half_width > 0 else ""
    source = "" if isinstance(symptom.threshold, float) else f", {short_source(symptom.threshold)}"
    return f"{symptom.label} {value}{interval} ({statistic(symptom.metric, steps)}; limit {limit}{source})"


def _since(log: MetricsLog, symptom: Symptom, thresholds: Thresholds) -> int | None:
    """First step of the last unbroken stretch of logged steps at which the symptom held by itself."""
    found = None
    group, _, rest = symptom.metric.partition("/")
    metric = rest if group in _ALIASES else symptom.metric
    for row in reversed(log.rows):
        value = row.get(f"{PREFIX}{metric}")
        if value is None:
            continue
        if not symptom.holds({symptom.metric: value}, thresholds):
            break
        found = int(row["step"])
    return found


_ALIASES = ("alone", "close", "lone", "open")
"""Readings that are a logged metric under a condition."""


def _span(log: MetricsLog, window: int) -> tuple[int, int] | None:
    steps = log.steps[-window:]
    return (steps[0], steps[-1]) if steps else None


AGREEMENT = "agreement of engine and trainer"
_SHOWN = {
    "mismatch/kl_k3": "KL k3 {} nats per token",
    "total/kl_k3": "KL k3 of current/sampling {} nats per token",
    "alone/mismatch/kl_k1": "KL k1 {} nats per token",
    "alone/total/kl_k1": "KL k1 of current/sampling {} nats per token",
    "mismatch/prob_pearson": "correlation of the two probabilities {} (10 % quantile of the steps)",
    "total/prob_pearson": "correlation of the two probabilities {} (10 % quantile of the steps)",
    "mismatch/chi2_token": "token chi-square {}",
    "total/chi2_token": "token chi-square of current/sampling {}",
    "atmost/mismatch/kl_k3": "KL k3 at most {} nats per token",
}
"""Distances between sampler and trainer, of which one must be known to say "ok", and their names for people."""
_JUDGED = {
    "noise floor": ("noise_floor/kl_k3",),
    "staleness": ("staleness/kl_k3", "total/kl_k3", "alone/staleness/kl_k1", "alone/total/kl_k1"),
    "effective sample size": (
        *("mismatch/ess_sequence", "total/ess_sequence"),
        *("weight_applied/ess_token", "weight/ess_token"),
    ),
    "clipping": ("loss/clip_region_fraction",),
    "growth of the response length (from ten steps on)": ("rollout/length_surge",),
    "fall of the entropy (from ten steps on)": ("fallen/entropy",),
}


def _unknown(readings: Readings, thresholds: Thresholds) -> tuple[str, ...]:
    missing = tuple(name for name, metrics in _JUDGED.items() if not any(one in readings for one in metrics))
    known = set(_SHOWN) & readings.keys()
    # an upper bound that is too high to call the run healthy decides nothing
    if readings.get("atmost/mismatch/kl_k3", 0.0) > thresholds.kl_healthy:
        known -= {"atmost/mismatch/kl_k3"}
    return missing if known else (AGREEMENT, *missing)
