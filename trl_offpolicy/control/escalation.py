"""Escalation: as much correction as is needed and no more; if correction cannot help, a systems fix."""

from __future__ import annotations

from collections.abc import Callable
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
from trl_offpolicy.control.ess import PIECE, latest
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import RatioBand, TruncateWeight
from trl_offpolicy.diagnosis.thresholds import limit
from trl_offpolicy.diagnosis.verdict.tree import APPLIED_ESS
from trl_offpolicy.run_folder.run_data import MetricsLog

CORRECTION_LEVEL = "correction_level"
LEVELS = ("as configured", "geometric rejection", "geometric rejection and token TIS", "systems fix")


class Signals(NamedTuple):
    """The numbers of a logging step that escalation reads; None = not logged.

    ``ess`` is the smallest of the applied weights' ESS and of the ESS of what the keep terms left; ``ess_before`` is
    the ESS before any correction. Both are of products over 16 tokens (:mod:`trl_offpolicy.control.ess`).
    """

    chi2: float | None
    pearson: float | None
    ess: float | None
    dropped: float | None
    ess_before: float | None = None

    @classmethod
    def of(cls, log: MetricsLog, step: int) -> Signals:
        """Read the signals from the last row of ``log``, if that row is of ``step``."""
        last = MetricsLog(log.rows[-1:])
        group, row = log.ratio_group, last.rows[-1] if last.steps == [step] else {}

        def value(key: str) -> float | None:
            found = row.get(f"offpolicy/{key}")
            return None if found is None or found != found else found

        found = (*map(value, APPLIED_ESS), latest(last, ["kept"]) if row else None)
        return cls(
            chi2=value(f"{group}/chi2_token"),
            pearson=value(f"{group}/prob_pearson"),
            ess=min((share for share in found if share is not None), default=None),
            dropped=value("keep/dropped_sequence_fraction"),
            ess_before=latest(last, [group]) if row else None,
        )


@dataclass(frozen=True)
class EscalationState:
    """The current ``level``, how many readings in a row asked for a higher one, and how many for a lower one."""

    level: int = 0
    rising: int = 0
    calm: int = 0


@dataclass(frozen=True, kw_only=True)
class Escalation:
    """Step by step from the configured correction to rejection, to rejection with token TIS, to a systems fix.

    A reading is one logging step. It asks for

    - level 1 (geometric rejection) if chi2_token is above ``chi2[0]``, or the ESS before any correction is below
      ``ess_low``;
    - level 2 (also token TIS) if chi2_token is above ``chi2[1]``, or rejection drops more than ``dropped[0]``;
    - level 3 (systems fix) if chi2_token is above ``chi2[2]``, if more than ``dropped[1]`` is dropped or the ESS is
      below ``ess`` under rejection, or if the Pearson correlation is below ``pearson``.

    The ESS before a correction is that of products over 16 tokens (:func:`~trl_offpolicy.control.ess.piece_ess`). The
    one under rejection is the smallest of that of the kept tokens and those of the applied weights.

    The dropped fraction and the ESS count from level 1 on, not under the configured correction alone. After
    ``patience`` such readings in a row the level goes up by one. It goes down by one after ``calm`` readings in a row
    that would not ask for it even with ``chi2`` scaled by ``relax`` and ``ess_low`` raised to the power of ``relax``.
    Level 3 stops the run with a checkpoint (``systems="stop"``), again if it is resumed and as many readings still ask
    for it, or only reports it (``"warn"``).

    The defaults of ``chi2``, ``dropped``, ``ess``, ``ess_low`` and ``pearson`` are those of
    :class:`~trl_offpolicy.diagnosis.thresholds.Thresholds`; in a configuration they are those of
    ``control.thresholds``.

    Args:
        chi2: three limits of ``mismatch/chi2_token``, which no correction changes.
        dropped: two limits of ``keep/dropped_sequence_fraction``.
        ess: limit of the ESS under rejection.
        ess_low: limit of the ESS before any correction.
        pearson: limit of ``mismatch/prob_pearson``; -1 = no limit.
        low: lower bound of the geometric mask.
        high: upper bound of the geometric mask.
        max_weight: cap of token TIS.
        patience: readings in a row before the level goes up.
        calm: readings in a row before the level goes down.
        relax: factor below 1 on ``chi2`` and on the logarithm of ``ess_low`` when going down (hysteresis).
        systems: what level 3 does.

    Raises:
        ValueError: a value is out of range.

    Reference: Liu 2026, "Off-Policy Drift in LLM RL", "When to escalate from RS to IS to systems fix", and causes C
    and D for the first step. The pieces of 16 tokens and the hysteresis are this kit's additions.
    """

    chi2: tuple[float, float, float] = limit("chi2_moderate", "chi2_reject", "chi2_systems")
    dropped: tuple[float, float] = limit("dropped_high", "dropped_broken")
    ess: float = limit("ess_broken")
    ess_low: float = limit("ess_healthy")
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
        check_fraction(ess=self.ess, ess_low=self.ess_low)
        check_within("pearson", self.pearson, -1, 1)
        check_proper_fraction(relax=self.relax)
        check_positive(low=self.low, high=self.high)
        for field in ("patience", "calm"):
            check_whole(field, getattr(self, field), least=1)
        check_choice("systems", self.systems, ("stop", "warn"))
        self.ladder(Correction())  # the terms' own checks

    @property
    def terms(self) -> tuple[RatioBand, TruncateWeight]:
        """The terms that levels 1 and 2 add: the geometric mask and the truncated token weight."""
        band = RatioBand(level="sequence_mean", low=self.low, high=self.high)
        return band, TruncateWeight(level="token", max_weight=self.max_weight)

    def ladder(
        self, base: Correction, admits: Callable[[Correction], bool] = lambda correction: True
    ) -> tuple[Correction, ...]:
        """The corrections of levels 0, 1 and 2. A level that adds nothing is the same as the one below it.

        Args:
            base: the configured correction.
            admits: whether the run's loss takes a correction. One that it refuses is not added: a loss whose own ratio
                is current/sampling takes no weight on old/sampling, which would count that factor twice.
        """
        # a term that the configured correction already has in another form is not added again
        band, weight = self.terms
        masked = any(isinstance(term, RatioBand) and term.level == "sequence_mean" for term in base.keep)
        rejecting = base if masked else replace(base, keep=(*base.keep, band))
        weighted = any("sampling" in item.ratio for item in base.weights)
        both = rejecting if weighted else replace(rejecting, weight=(*base.weights, weight))
        if not admits(rejecting):
            return base, base, base
        return base, rejecting, both if admits(both) else rejecting

    def start(self) -> EscalationState:
        """Level 0, the configured correction, with no readings counted."""
        return EscalationState()

    def step(self, state: EscalationState, log: MetricsLog, step: int) -> tuple[EscalationState, Action | None]:
        """Count readings that ask for a higher or a lower level, and move one level when there are enough."""
        signals = Signals.of(log, step)
        if signals.chi2 is None:
            return state, None
        wanted, why = self.demand(signals, state.level, 1.0)
        # go down only if even lower limits would not ask for this level, so that it does not swing around one limit
        relaxed, _ = self.demand(signals, state.level, self.relax)
        # A run that was stopped at the top and resumed is stopped again if nothing was mended.
        top = len(LEVELS) - 1
        again = state.level == wanted == top and self.systems == "stop"
        rising = state.rising + 1 if wanted > state.level or again else 0
        calm = state.calm + 1 if relaxed < state.level else 0
        if rising >= self.patience and again:
            said = f"{LEVELS[top]}: still {why} in {rising} readings in a row"
            return EscalationState(top), Action(step, self.name, "stop", 0, 1, said)
        if rising >= self.patience:
            return self._move(state, state.level + 1, step, f"{why} in {rising} readings in a row")
        if calm >= self.calm:
            return self._move(state, state.level - 1, step, f"calm in {calm} readings (chi2_token {signals.chi2:.3g})")
        return replace(state, rising=rising, calm=calm), None

    def _move(self, state: EscalationState, level: int, step: int, why: str) -> tuple[EscalationState, Action | None]:
        named = f"{LEVELS[level]}: {why}"
        return EscalationState(level), Action(step, self.name, self.setting, state.level, level, named)

    def demand(self, signals: Signals, level: int, relax: float) -> tuple[int, str]:
        """The level that a reading asks for, and the reason, with ``chi2`` scaled by ``relax``."""
        chi2, pearson, ess, dropped, ess_before = signals
        rejecting = level > 0  # what the configured correction alone drops is no reason to escalate
        asked = [(0, "")]
        if chi2 is not None:
            for number, threshold in enumerate(self.chi2, 1):
                if chi2 > threshold * relax:
                    asked.append((number, f"chi2_token {chi2:.3g} above {threshold:g}"))
        # the ESS is exp(-n D): a factor on the variance D is a power of the ESS
        if ess_before is not None and ess_before < self.ess_low**relax:
            asked.append((1, f"ESS of {PIECE} tokens {ess_before:.2f} below {self.ess_low:g}"))
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
