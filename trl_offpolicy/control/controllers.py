"""Controllers: frozen rules that read the log of a run and change one setting each.

``step(state, log, step)`` returns the next state and the action, if any. A state is a frozen dataclass of numbers, so
that a checkpoint can hold it unchanged. Nothing here depends on a trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

from trl_offpolicy.checks import check_choice, check_fraction, check_positive, check_proper_fraction, check_whole
from trl_offpolicy.control.actions import Action
from trl_offpolicy.control.ess import PIECE, recent_ess, training_drift
from trl_offpolicy.diagnosis.thresholds import limit
from trl_offpolicy.diagnosis.verdict.judge import LENGTHS
from trl_offpolicy.run_folder.run_data import MetricsLog

LEARNING_RATE_SCALE = "learning_rate_scale"


@runtime_checkable
class Controller(Protocol):
    """The interface of a controller; ``setting`` is what its actions change."""

    name: ClassVar[str]
    setting: ClassVar[str]

    def start(self) -> Any:
        """The controller's state at the start of a run."""

    def step(self, state: Any, log: MetricsLog, step: int) -> tuple[Any, Action | None]:
        """The next state and an action or None, after a logging step whose row is the last of ``log``."""


@dataclass(frozen=True)
class LengthState:
    """The current ``scale`` of the learning rate, and the step of the last change (-1 = none)."""

    scale: float = 1.0
    changed: int = -1


@dataclass(frozen=True, kw_only=True)
class LengthGuard:
    """Lower the learning rate when responses grow suddenly; raise it again once their length is level.

    Let growth be the mean response length now over that of ``window`` steps ago. If growth is above ``surge``, the
    scale is multiplied by ``factor``. If it is at most ``level``, the scale is divided by ``factor``, up to 1. At least
    ``window`` steps lie between two changes, so that each change is judged by steps after the previous one.

    Args:
        surge: growth that lowers the learning rate; default: ``length_surge`` of the diagnosis.
        window: optimizer steps over which growth is measured; default: ``length_window`` of the diagnosis.
        factor: factor by which the learning rate is lowered.
        level: growth up to which the length counts as level again.
        smallest: the scale never goes below it.

    Raises:
        ValueError: a value is out of range.

    Reference: Zhang, Li et al. 2026 (arXiv 2602.01826): a surge of the response length announces instability, and
    decaying the learning rate then prevents it. The defaults 1.2, 100 and 0.5 are from Liu 2026, cause F. Raising the
    learning rate again is this kit's addition.
    """

    surge: float = limit("length_surge")
    window: int = limit("length_window", to=round)
    factor: float = 0.5
    level: float = 1.05
    smallest: float = 1 / 16
    name: ClassVar[str] = "length_guard"
    setting: ClassVar[str] = LEARNING_RATE_SCALE

    def __post_init__(self) -> None:
        check_whole("window", self.window, least=1)
        check_proper_fraction(factor=self.factor)
        check_positive(surge=self.surge, smallest=self.smallest, level=self.level)
        if self.surge <= 1:
            raise ValueError(f"surge must be above 1 (a growth), but got {self.surge}.")
        if not self.level < self.surge:
            raise ValueError(f"level must be below surge ({self.surge}), but got {self.level}.")
        if self.smallest > self.factor:
            raise ValueError(f"smallest must be at most factor ({self.factor}), but got {self.smallest}.")

    def start(self) -> LengthState:
        """The whole learning rate (scale 1), and no change so far."""
        return LengthState()

    def step(self, state: LengthState, log: MetricsLog, step: int) -> tuple[LengthState, Action | None]:
        """Compare the length now with that of ``window`` steps ago."""
        now, before = length_now_and_before(log, step, self.window)
        if now is None or before is None:
            return state, None
        # a length from before the last change does not show the effect of that change
        if state.changed >= 0 and step - state.changed < self.window:
            return state, None
        growth = now / before
        if growth > self.surge:
            scale = max(state.scale * self.factor, self.smallest)
            why = f"responses grew from {before:.1f} to {now:.1f} tokens in {self.window} steps (x {growth:.2f})"
        elif growth <= self.level and state.scale < 1.0:
            scale = min(state.scale / self.factor, 1.0)
            why = f"the length is level again ({before:.1f} and {now:.1f} tokens, {self.window} steps apart)"
        else:
            return state, None
        if scale == state.scale:  # the scale is at its limit already
            return state, None
        action = Action(step, self.name, self.setting, state.scale, scale, why)
        return LengthState(scale, step), action


def length_now_and_before(log: MetricsLog, step: int, window: int) -> tuple[float | None, float | None]:
    """Mean response length at ``step``, and the newest one at least ``window`` steps earlier; None = not logged."""
    key = log.first_logged(LENGTHS)
    if key is None:
        return None, None
    steps, values, _ = log.series(key)
    now = values[-1] if steps and steps[-1] == step and values[-1] > 0 else None  # 0: every response was masked
    earlier = [value for at, value in zip(steps, values, strict=True) if at <= step - window]
    return now, earlier[-1] if earlier and earlier[-1] > 0 else None


@dataclass(frozen=True)
class ScaleState:
    """The current ``scale`` of the learning rate, and how many readings in a row would allow a higher one."""

    scale: float = 1.0
    calm: int = 0


@dataclass(frozen=True, kw_only=True)
class ESSStep:
    """Lower the learning rate while the effective sample size is below a base; raise it again once it is not.

    A reading is one logging step. While the ESS is below ``base``, each reading multiplies the scale by
    sqrt(ESS / base), by at least 1/2. After ``calm`` readings in a row at or above it, the scale is multiplied by
    ``back``, up to 1. So a scale that keeps the drift at the base is found and held. (The drift answers to the learning
    rate only after a lag. A scale that follows the ESS jumps back to 1 as soon as the drift is gone, and the drift
    returns: in ``benchmarks/collapse`` that loses most of the reward.)

    The ESS is that of the drift which training itself makes (:func:`~trl_offpolicy.control.ess.training_drift`), over
    pieces of 16 tokens in the log domain (:func:`~trl_offpolicy.control.ess.piece_ess`), of the median of the last 5
    logged rows. So the length of the responses does not move it, nor does a mismatch of the engine, which no learning
    rate changes. Changes below ``resolution`` are not made.

    Args:
        rule: ``sqrt`` (for Adam and similar optimizers) or ``linear``, which omits the root.
        base: ESS from which on the learning rate is not scaled; default: ``ess_healthy`` of the diagnosis.
        metric: key of a logged ESS to read instead, its newest value as it is. The scale then follows it up and down:
            sqrt(min(1, ESS / base)). VCPO itself is ``{metric: offpolicy/total/ess_sequence, base: 1}``, the products
            over whole responses.
        resolution: smallest relative change.
        smallest: the scale never goes below it.
        calm: readings in a row before the scale is raised.
        back: factor by which it is raised.

    Raises:
        ValueError: a value is out of range.

    Reference: Huang et al. 2026, "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs" (arXiv 2602.17616)
    and its code (``ess_scaling`` with ``scaling_rule: sqrt``, ``base_ess_ratio: 1``, ``use_clipped: false``). VCPO uses
    the ESS of the step itself, but then the loss would have to wait for the device: here the scale of a step comes from
    the logged rows before it. Pieces, median, the base of 0.5 and the slow way back are this kit's: with VCPO's numbers
    every healthy run of ``benchmarks/collapse`` is slowed down.
    """

    rule: str = "sqrt"
    base: float = limit("ess_healthy")
    metric: str | None = None
    resolution: float = 0.05
    smallest: float = 1 / 16
    calm: int = 10
    back: float = 1.25
    name: ClassVar[str] = "ess_step"
    setting: ClassVar[str] = LEARNING_RATE_SCALE

    def __post_init__(self) -> None:
        check_choice("rule", self.rule, ("sqrt", "linear"))
        if self.metric is not None and (not isinstance(self.metric, str) or not self.metric):
            raise TypeError(f"metric must be None or the name of a logged metric, but got {self.metric!r}.")
        check_fraction(base=self.base, smallest=self.smallest)
        check_positive(resolution=self.resolution, back=self.back)
        check_whole("calm", self.calm, least=1)
        if self.resolution >= 0.5:
            raise ValueError(
                f"resolution must be below 0.5, but got {self.resolution}: a reading halves the scale at most, and the "
                "learning rate would never be lowered."
            )
        if self.back < 1 + self.resolution:
            raise ValueError(
                f"back must be at least 1 + resolution ({1 + self.resolution:g}), but got {self.back}: smaller changes "
                "are not made, and the learning rate would never be raised."
            )

    def start(self) -> ScaleState:
        """The whole learning rate (scale 1)."""
        return ScaleState()

    def step(self, state: ScaleState, log: MetricsLog, step: int) -> tuple[ScaleState, Action | None]:
        """Lower or raise the scale by the newest ESS, if the change is at least ``resolution``."""
        ess, name = self._reading(log, step)
        if ess is None:
            return state, None
        share = min(1.0, max(ess, 0.0) / self.base)
        factor = share**0.5 if self.rule == "sqrt" else share
        state = replace(state, calm=state.calm + 1 if factor == 1.0 else 0)
        wanted = factor if self.metric is not None else self._held(state, factor)
        scale = max(wanted, self.smallest)
        if abs(scale / state.scale - 1) < self.resolution:
            return state, None
        action = Action(step, self.name, self.setting, state.scale, scale, f"{name} is {ess:.3f}")
        return ScaleState(scale), action

    def _held(self, state: ScaleState, factor: float) -> float:
        """The scale that keeps the drift at the base: lowered at once, raised step by step."""
        if factor < 1.0:
            return state.scale * max(factor, 0.5)
        if state.calm < self.calm:
            return state.scale
        raised = state.scale * self.back
        return 1.0 if raised * (1 + self.resolution) >= 1.0 else raised  # the rest to 1 would be too small a change

    def _reading(self, log: MetricsLog, step: int) -> tuple[float | None, str]:
        """The ESS at ``step`` (None = not known), and what it is called."""
        if self.metric is None:
            return recent_ess(training_drift(log), step), f"the ESS of {PIECE} tokens, of the drift by training,"
        steps, values, _ = log.series(self.metric)
        return (values[-1] if steps and steps[-1] == step else None), self.metric
