"""Resync: if engine and trainer disagree too much, send the weights again, once; if that fails, stop the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from trl_offpolicy.checks import check_fraction, check_whole, check_within
from trl_offpolicy.control.actions import Action
from trl_offpolicy.control.staleness import LAG
from trl_offpolicy.diagnosis.thresholds import limit
from trl_offpolicy.run_folder.layout import STEP
from trl_offpolicy.run_folder.run_data import MetricsLog

AGREEMENT = "offpolicy/rollout/sync_agreement"


@dataclass(frozen=True)
class ResyncState:
    """What the controller remembers between readings.

    Args:
        asked: how many syncs it has asked for.
        since: the step of the one try that is allowed, while it counts (-1 = none).
        off: readings in a row that were off; below zero = readings in a row that were good.
        first: agreement of the first sync (-1 = not known yet).
        waited: readings left out because they may be from before the sync.
    """

    asked: int = 0
    since: int = -1
    off: int = 0
    first: float = -1.0
    waited: int = 0


@dataclass(frozen=True, kw_only=True)
class Resync:
    """Pause and sync again when the agreement is off; if it is still off afterwards, stop.

    A reading (one logging step) is off if ``mismatch/prob_pearson`` is below ``pearson``, or if
    ``rollout/sync_agreement`` is more than ``drop`` below that of the first sync. After ``patience`` such readings in a
    row, the next generation waits for another sync and its proof. From then on every sync brings all weights, not only
    those that changed: the engine's copy of the others may be what is wrong. After ``patience`` more readings that are
    off, the run stops with a checkpoint; those with a response from before that sync do not count. Once the agreement
    was good for ``forget`` readings, another sync may be tried.

    Args:
        pearson: smallest correlation of the probabilities; default: ``pearson_broken`` of the diagnosis; -1 = any.
        drop: largest fall of the agreement on the probe, as a share of the first one.
        patience: readings in a row that must be off.
        forget: good readings in a row after which a sync may be tried again.

    Raises:
        ValueError: a value is out of range.

    Reference: Liu 2026, "Off-Policy Drift in LLM RL", cause A ("below 0.95 something is seriously off in the
    backend"). Trying one sync before giving up is this kit's addition.
    """

    pearson: float = limit("pearson_broken")
    drop: float = 0.05
    patience: int = 2
    forget: int = 20
    name: ClassVar[str] = "resync"
    setting: ClassVar[str] = "resync"

    def __post_init__(self) -> None:
        check_within("pearson", self.pearson, -1, 1)
        check_fraction(drop=self.drop)
        for field in ("patience", "forget"):
            check_whole(field, getattr(self, field), least=1)

    def start(self) -> ResyncState:
        """No sync asked for, no reading counted, no agreement known."""
        return ResyncState()

    def step(self, state: ResyncState, log: MetricsLog, step: int) -> tuple[ResyncState, Action | None]:
        """Count readings that are off. Ask for a sync first, then for a stop."""
        row = log.rows[-1]
        pearson, agreement = row.get(f"offpolicy/{log.ratio_group}/prob_pearson"), row.get(AGREEMENT)
        if state.first < 0 and agreement is not None and agreement == agreement:
            state = replace(state, first=agreement)
        if pearson is not None and self._may_be_older(state, log):
            state, pearson = replace(state, waited=state.waited + 1), None
            if self._why_off(state, None, agreement) is None:
                return state, None
        why = self._why_off(state, pearson, agreement)
        if why is None:
            return self._calm(state, known=pearson is not None or agreement is not None), None
        state = replace(state, off=max(state.off, 0) + 1)  # good readings before it no longer count
        if state.off < self.patience:
            return state, None
        if state.since < 0:  # the one try
            action = Action(step, self.name, "resync", state.asked, state.asked + 1, why)
            return replace(state, asked=state.asked + 1, since=step, off=0, waited=0), action
        return replace(state, off=0), Action(
            step, self.name, "stop", 0, 1, f"{why}, still so after the sync at step {state.since}"
        )

    def _may_be_older(self, state: ResyncState, log: MetricsLog) -> bool:
        """Whether a response of the last row may be from before the sync that was asked for.

        For ``forget`` readings only: with replay some response is always that old.
        """
        if state.since < 0 or state.waited >= self.forget:
            return False
        row, before = log.rows[-1], log.rows[-2][STEP] if len(log.rows) > 1 else log.rows[-1][STEP] - 1
        return before - row.get(LAG, 0.0) < state.since  # at the row's first step

    def _calm(self, state: ResyncState, *, known: bool) -> ResyncState:
        """Count one more good reading (as a negative number)."""
        if not known:
            return state
        good = min(state.off, 0) - 1
        if -good < self.forget:
            return replace(state, off=good)
        return replace(state, off=0, since=-1)  # a sync may be tried again

    def _why_off(self, state: ResyncState, pearson: float | None, agreement: float | None) -> str | None:
        if pearson is not None and pearson < self.pearson:
            return f"Pearson {pearson:.3f} below {self.pearson:g}"
        if agreement is not None and state.first > 0 and agreement < (1 - self.drop) * state.first:
            return f"agreement on the probe fell from {state.first:.3f} to {agreement:.3f}"
        return None
