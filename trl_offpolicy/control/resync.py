"""Resync: where engine and trainer disagree more than they may, send the weights again, once; then stop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from trl_offpolicy.checks import check_fraction, check_whole, check_within
from trl_offpolicy.control.actions import Action
from trl_offpolicy.diagnosis.thresholds import limit
from trl_offpolicy.run_folder.run_data import MetricsLog

AGREEMENT = "offpolicy/rollout/sync_agreement"


@dataclass(frozen=True)
class ResyncState:
    """What is remembered between readings.

    Args:
        asked: syncs asked for.
        since: the step of the last one, as long as it was the one try (-1: there is none).
        off: readings in a row that were off; below zero: that were good.
        first: agreement of the first sync (-1: not known yet).
    """

    asked: int = 0
    since: int = -1
    off: int = 0
    first: float = -1.0


@dataclass(frozen=True, kw_only=True)
class Resync:
    """Pause and sync again when the agreement is off; if it still is afterwards, stop.

    Off: ``mismatch/prob_pearson`` below ``pearson``, or ``rollout/sync_agreement`` more than ``drop`` below that of
    the first sync, in ``patience`` readings in a row. The next generation then waits for a sync of its own, with its
    proof. ``patience`` more readings that are off, and the run stops with a checkpoint; once the agreement was good
    for ``forget`` readings the one try is there again.

    Args:
        pearson: smallest correlation of the probabilities, ``pearson_broken`` of the diagnosis by default; -1 = any.
        drop: of the agreement on the probe, as a share of the first one.
        patience: readings (logging steps).
        forget: readings.

    Raises:
        ValueError: a value out of range.

    Reference: Liu 2026, "Off-Policy Drift in LLM RL", cause A ("below 0.95 something is seriously off in the
    backend"); to try the sync once before giving up is this kit's.
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
        """No sync asked for."""
        return ResyncState()

    def step(self, state: ResyncState, log: MetricsLog, step: int) -> tuple[ResyncState, Action | None]:
        """Count readings that are off; ask for a sync, then for a stop."""
        row = log.rows[-1]
        group = MetricsLog((row,)).ratio_group
        pearson, agreement = row.get(f"offpolicy/{group}/prob_pearson"), row.get(AGREEMENT)
        if state.first < 0 and agreement is not None and agreement == agreement:
            state = replace(state, first=agreement)
        why = self._why_off(state, pearson, agreement)
        if why is None:
            return self._calm(state, known=pearson is not None or agreement is not None), None
        state = replace(state, off=max(state.off, 0) + 1)  # good readings before it no longer count
        if state.off < self.patience:
            return state, None
        if state.since < 0:  # the one try
            action = Action(step, self.name, "resync", state.asked, state.asked + 1, why)
            return replace(state, asked=state.asked + 1, since=step, off=0), action
        return replace(state, off=0), Action(
            step, self.name, "stop", 0, 1, f"{why}, still so after the sync at step {state.since}"
        )

    def _calm(self, state: ResyncState, *, known: bool) -> ResyncState:
        """One more good reading, counted below zero."""
        if not known:
            return state
        good = min(state.off, 0) - 1
        if -good < self.forget:
            return replace(state, off=good)
        return replace(state, off=0, since=-1)  # the one try is there again

    def _why_off(self, state: ResyncState, pearson: float | None, agreement: float | None) -> str | None:
        if pearson is not None and pearson < self.pearson:
            return f"Pearson {pearson:.3f} below {self.pearson:g}"
        if agreement is not None and state.first > 0 and agreement < (1 - self.drop) * state.first:
            return f"agreement on the probe fell from {state.first:.3f} to {agreement:.3f}"
        return None
