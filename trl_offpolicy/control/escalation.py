"""Escalation: no more correction than is needed, no less; and when correction cannot help, a systems fix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

from trl_offpolicy.checks import (
    check_choice,
    check_fraction,
    check_positive,
    check_proper_fraction,
    check_whole,
    check_within,
)
from trl_offpolicy.control.actions import Action
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import RatioBand, TruncateWeight
from trl_offpolicy.diagnosis.thresholds import limit
from trl_offpolicy.diagnosis.verdict.tree import APPLIED_ESS
from trl_offpolicy.run_folder.run_data import MetricsLog

CORRECTION_LEVEL = "correction_level"
LEVELS = ("as configured", "geometric rejection", "geometric rejection and token TIS", "systems fix")


class Signals(NamedTuple):
    """What a logging step says about the mismatch; None where it was not logged."""

    chi2: float | None
    pearson: float | None
    ess: float | None
    dropped: float | None

    @classmethod
    def of(cls, log: MetricsLog, step: int) -> Signals:
        """Those of ``step``."""
        last = MetricsLog(log.rows[-1:])
        group, row = last.ratio_group, last.rows[-1] if last.steps == [step] else {}

        def value(key: str) -> float | None:
            found = row.get(f"offpolicy/{key}")
            return None if found is None or found != found else found

        ess = [share for share in map(value, APPLIED_ESS) if share is not None]
        return cls(
            value(f"{group}/chi2_token"),
            value(f"{group}/prob_pearson"),
            min(ess, default=None),
            value("keep/dropped_sequence_fraction"),
        )


@dataclass(frozen=True)
class EscalationState:
    """The ``level`` now, how many readings in a row asked for a higher one, and how many for a lower one."""

    level: int = 0
    rising: int = 0
    calm: int = 0


@dataclass(frozen=True, kw_only=True)
class Escalation:
    """Step by step from the configured correction to rejection, to rejection with token TIS, to a systems fix.

    A reading asks for level 1 (geometric rejection) with chi2_token above ``chi2[0]``; for 2 (token TIS beside it)
    above ``chi2[1]``, or where rejection drops more than ``dropped[0]``; for 3 (systems fix) above ``chi2[2]``, with
    more than ``dropped[1]`` dropped or an ESS below ``ess`` under rejection, or a Pearson correlation below
    ``pearson``. What is dropped and the ESS are looked at from level 1 on, not under the configured correction alone.
    ``patience`` such readings in a row go up, one level at a time; ``calm`` readings in a row that would not ask for
    the level even with ``chi2`` scaled by ``relax`` go down again. Level 3 stops the run with a checkpoint
    (``systems="stop"``), or only says so (``"warn"``).

    ``chi2``, ``dropped``, ``ess`` and ``pearson`` are by default those of :class:`~trl_offpolicy.diagnosis.thresholds.
    Thresholds`; in a configuration those of ``control.thresholds``.

    Args:
        chi2: thresholds of ``mismatch/chi2_token``, which no correction changes.
        dropped: of ``keep/dropped_sequence_fraction``.
        ess: of the applied weights, the smaller of ``weight_applied/ess_token`` and ``ess_sequence``.
        pearson: of ``mismatch/prob_pearson``; -1 = never.
        low: of the geometric mask.
        high: of the geometric mask.
        max_weight: of token TIS.
        patience: readings (logging steps).
        calm: readings.
        relax: hysteresis of ``chi2``, below 1.
        systems: what level 3 does.

    Raises:
        ValueError: a value out of range.

    Reference: Liu 2026, "Off-Policy Drift in LLM RL", "When to escalate from RS to IS to systems fix", and cause C for
    the first step; the hysteresis is this kit's.
    """

    chi2: tuple[float, float, float] = limit("chi2_moderate", "chi2_reject", "chi2_systems")
    dropped: tuple[float, float] = limit("dropped_high", "dropped_broken")
    ess: float = limit("ess_broken")
    pearson: float = limit("pearson_broken")
    low: float = 0.99
    high: float = 1.01
    max_weight: float = 2.0
    patience: int = 3
    calm: int = 50
    relax: float = 0.5
    systems: Literal["stop", "warn"] = "stop"
    name: ClassVar[str] = "escalation"
    setting: ClassVar[str] = CORRECTION_LEVEL

    def __post_init__(self) -> None:
        for field, count in (("chi2", 3), ("dropped", 2)):
            _check_ascending(field, getattr(self, field), count)
            object.__setattr__(self, field, tuple(getattr(self, field)))
        for share in self.dropped:
            check_fraction(dropped=share)
        check_fraction(ess=self.ess)
        check_within("pearson", self.pearson, -1, 1)
        check_proper_fraction(relax=self.relax)
        check_positive(low=self.low, high=self.high)
        for field in ("patience", "calm"):
            check_whole(field, getattr(self, field), least=1)
        check_choice("systems", self.systems, ("stop", "warn"))
        self.ladder(Correction())  # the terms' own checks

    @property
    def terms(self) -> tuple[RatioBand, TruncateWeight]:
        """What the levels add."""
        band = RatioBand(level="sequence_mean", low=self.low, high=self.high)
        return band, TruncateWeight(level="token", max_weight=self.max_weight)

    def ladder(self, base: Correction) -> tuple[Correction, ...]:
        """The corrections of levels 0, 1 and 2; a level that adds nothing to the one before is that one."""
        # a term that the configured correction has in another form already is not added a second time
        band, weight = self.terms
        masked = any(isinstance(term, RatioBand) and term.level == "sequence_mean" for term in base.keep)
        rejecting = base if masked else replace(base, keep=(*base.keep, band))
        weighted = any("sampling" in item.ratio for item in base.weights)
        both = rejecting if weighted else replace(rejecting, weight=(*base.weights, weight))
        return base, rejecting, both

    def start(self) -> EscalationState:
        """As configured."""
        return EscalationState()

    def step(self, state: EscalationState, log: MetricsLog, step: int) -> tuple[EscalationState, Action | None]:
        """Count readings; move one level where there are enough of a kind."""
        signals = Signals.of(log, step)
        if signals.chi2 is None:
            return state, None
        wanted, why = self.demand(signals, state.level, 1.0)
        # down only where even lower limits would not ask for this level, so that it does not swing about one limit
        relaxed, _ = self.demand(signals, state.level, self.relax)
        rising = state.rising + 1 if wanted > state.level else 0
        calm = state.calm + 1 if relaxed < state.level else 0
        if rising >= self.patience:
            return self._move(state, state.level + 1, step, f"{why} in {rising} readings in a row")
        if calm >= self.calm:
            return self._move(state, state.level - 1, step, f"calm in {calm} readings (chi2_token {signals.chi2:.3g})")
        return replace(state, rising=rising, calm=calm), None

    def _move(self, state: EscalationState, level: int, step: int, why: str) -> tuple[EscalationState, Action | None]:
        named = f"{LEVELS[level]}: {why}"
        return EscalationState(level), Action(step, self.name, self.setting, state.level, level, named)

    def demand(self, signals: Signals, level: int, relax: float) -> tuple[int, str]:
        """The level that a reading asks for, and why, with ``chi2`` scaled by ``relax``."""
        chi2, pearson, ess, dropped = signals
        rejecting = level > 0  # a level of this kit: what the configured correction alone drops says nothing about it
        asked = [(0, "")]
        if chi2 is not None:
            for number, threshold in enumerate(self.chi2, 1):
                if chi2 > threshold * relax:
                    asked.append((number, f"chi2_token {chi2:.3g} above {threshold:g}"))
        if rejecting and dropped is not None:
            for number, threshold in enumerate(self.dropped, 2):
                if dropped > threshold:
                    asked.append((number, f"{dropped:.0%} of the responses dropped"))
        if rejecting and ess is not None and ess < self.ess:
            asked.append((3, f"ESS {ess:.2f} below {self.ess:g} under rejection"))
        if pearson is not None and pearson < self.pearson:
            asked.append((3, f"Pearson {pearson:.3f} below {self.pearson:g}"))
        return max(asked, key=lambda item: item[0])


def _check_ascending(field: str, values: object, count: int) -> None:
    if not isinstance(values, tuple | list) or len(values) != count:
        raise ValueError(f"{field} must be {count} ascending positive numbers, but got {values!r}.")
    for value in values:
        check_positive(**{field: value})
    if list(values) != sorted(values):
        raise ValueError(f"{field} must be {count} ascending positive numbers, but got {list(values)}.")
