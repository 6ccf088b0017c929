"""Controllers: frozen rules that read the log of a run and change one setting each.

``step(state, log, step)`` returns the next state and the action, if any. A state is a frozen dataclass of numbers, so
that it goes into a checkpoint as it is. Nothing here knows a trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

from trl_offpolicy.checks import check_choice, check_fraction, check_positive, check_proper_fraction, check_whole
from trl_offpolicy.control.actions import Action
from trl_offpolicy.diagnosis.thresholds import limit
from trl_offpolicy.diagnosis.verdict.judge import LENGTHS
from trl_offpolicy.run_folder.run_data import MetricsLog

LEARNING_RATE_SCALE = "learning_rate_scale"


@runtime_checkable
class Controller(Protocol):
    """The contract; ``setting`` is what its actions change."""

    name: ClassVar[str]
    setting: ClassVar[str]

    def start(self) -> Any:
        """The state of a new run."""

    def step(self, state: Any, log: MetricsLog, step: int) -> tuple[Any, Action | None]:
        """After a logging step, whose row is the last of ``log``."""


@dataclass(frozen=True)
class LengthState:
    """``scale`` of the learning rate now, and the step of the last change (-1: none)."""

    scale: float = 1.0
    changed: int = -1


@dataclass(frozen=True, kw_only=True)
class LengthGuard:
    """Lower the learning rate when responses grow suddenly; raise it again once their length is level.

    length now / length ``window`` steps ago > ``surge``: scale x ``factor``. At most ``level`` times that length:
    scale / ``factor``, up to 1. ``window`` steps lie between two changes, so that each one is judged by what came
    after the one before.

    Args:
        surge: growth that triggers; ``length_surge`` of the diagnosis by default.
        window: optimizer steps that it is measured over; ``length_window`` of the diagnosis by default.
        factor: of the learning rate.
        level: growth up to which the length counts as level again.
        smallest: the scale never goes below it.

    Raises:
        ValueError: a value out of range.

    Reference: Zhang, Li et al. 2026 (arXiv 2602.01826): a surge of the response length announces instability, and
    decaying the learning rate then prevents it; 1.2, 100 and 0.5 are Liu 2026, cause F. Taking it back is this kit's.
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
        """Nothing changed."""
        return LengthState()

    def step(self, state: LengthState, log: MetricsLog, step: int) -> tuple[LengthState, Action | None]:
        """Compare the length now with that of ``window`` steps ago."""
        now, before = length_now_and_before(log, step, self.window)
        if now is None or before is None:
            return state, None
        # the length of before a change says nothing about what the change did
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
        if scale == state.scale:  # at one of its ends
            return state, None
        action = Action(step, self.name, self.setting, state.scale, scale, why)
        return LengthState(scale, step), action


def length_now_and_before(log: MetricsLog, step: int, window: int) -> tuple[float | None, float | None]:
    """The mean response length at ``step`` and the newest one at least ``window`` steps earlier; None where unknown."""
    key = log.first_logged(LENGTHS)
    if key is None:
        return None, None
    steps, values, _ = log.series(key)
    now = values[-1] if steps and steps[-1] == step else None
    earlier = [value for at, value in zip(steps, values, strict=True) if at <= step - window]
    return now, earlier[-1] if earlier and earlier[-1] > 0 else None


ESS_KEYS = ("offpolicy/total/ess_sequence", "offpolicy/mismatch/ess_sequence")
"""The ESS of the products over whole responses: of current/sampling, else of old/sampling."""


@dataclass(frozen=True)
class ScaleState:
    """``scale`` of the learning rate now."""

    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ESSStep:
    """Scale the learning rate with the effective sample size: sqrt(min(1, ESS / base)), or without the root.

    The scale of a step comes from the logging step before it; VCPO takes that of the step itself, which would have the
    loss wait for the device. Changes below ``resolution`` are not made.

    Args:
        rule: ``sqrt`` (for Adam and its kind) or ``linear``.
        base: share at which the learning rate is whole; VCPO runs with 1.
        metric: the ESS, a share of the responses; None takes the first of :data:`ESS_KEYS` that was logged: products
            over whole responses, before any cap, as VCPO, whatever the correction weighs.
        resolution: smallest relative change.
        smallest: the scale never goes below it.

    Raises:
        ValueError: a value out of range.

    Reference: Huang et al. 2026, "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs" (arXiv 2602.17616)
    and its code (``ess_scaling`` with ``scaling_rule: sqrt``, ``base_ess_ratio: 1``, ``use_clipped: false``).
    """

    rule: str = "sqrt"
    base: float = 1.0
    metric: str | None = None
    resolution: float = 0.05
    smallest: float = 1 / 16
    name: ClassVar[str] = "ess_step"
    setting: ClassVar[str] = LEARNING_RATE_SCALE

    def __post_init__(self) -> None:
        check_choice("rule", self.rule, ("sqrt", "linear"))
        if self.metric is not None and (not isinstance(self.metric, str) or not self.metric):
            raise TypeError(f"metric must be None or the name of a logged metric, but got {self.metric!r}.")
        check_fraction(base=self.base, smallest=self.smallest)
        check_positive(resolution=self.resolution)

    def start(self) -> ScaleState:
        """The whole learning rate."""
        return ScaleState()

    def step(self, state: ScaleState, log: MetricsLog, step: int) -> tuple[ScaleState, Action | None]:
        """The scale that the newest ESS asks for."""
        metric = self.metric or log.first_logged(ESS_KEYS)
        if metric is None:
            return state, None
        steps, values, _ = log.series(metric)
        if not steps or steps[-1] != step:
            return state, None
        share = min(1.0, max(values[-1], 0.0) / self.base)
        wanted = share**0.5 if self.rule == "sqrt" else share
        scale = max(wanted, self.smallest)
        if abs(scale / state.scale - 1) < self.resolution:
            return state, None
        why = f"{metric} is {values[-1]:.3f}"
        return replace(state, scale=scale), Action(step, self.name, self.setting, state.scale, scale, why)
