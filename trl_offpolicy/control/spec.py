"""The ``control`` option: whether a run is watched, and what control may do about a finding."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from trl_offpolicy.checks import check_bool, check_choice, check_fraction, check_number, check_whole, near
from trl_offpolicy.control.acceptance import AcceptUpdate
from trl_offpolicy.control.controllers import LEARNING_RATE_SCALE, Controller, ESSStep, LengthGuard
from trl_offpolicy.control.escalation import Escalation
from trl_offpolicy.control.resync import Resync
from trl_offpolicy.control.staleness import StalenessCeiling
from trl_offpolicy.diagnosis.thresholds import Thresholds, limits_of, thresholds_from
from trl_offpolicy.diagnosis.verdict.course import BASELINE
from trl_offpolicy.diagnosis.verdict.judge import WINDOW
from trl_offpolicy.parts import parse_tagged, read_numbers

logger = logging.getLogger(__name__)

Policy = Literal["warn", "stop", "act"]
CONTROLLERS: Mapping[str, type] = {
    cls.name: cls for cls in (LengthGuard, ESSStep, Escalation, Resync, StalenessCeiling, AcceptUpdate)
}
_KEYS = ("policy", "controllers", "thresholds", "patience", "risk", "gradient_cosine", "max_gradient_cosine")


@dataclass(frozen=True, kw_only=True)
class ControlSpec:
    """The parsed ``control`` option.

    Args:
        policy: ``warn`` prints a line for every new finding; ``stop`` also ends the run, with a checkpoint, when it is
            critical; ``act`` prints and runs the controllers.
        controllers: the controllers to run with ``act``.
        named: True if the configuration names the controllers; then one that cannot work is an error.
        thresholds: limits of the diagnosis. Controllers made from a configuration also take their defaults from here.
        patience: with ``stop``, logging steps in a row with a critical verdict or a high risk before the run ends.
        risk: with ``stop``, collapse risk that counts as high.
        gradient_cosine: whether to log the cosine between the gradients of consecutive optimizer steps. It keeps a copy
            of one gradient.
        max_gradient_cosine: with ``act``, largest cosine in [0, 1) that a gradient may have to the one before; what is
            beyond is projected away (:class:`~trl_offpolicy.control.gradient_cosine.ConsecutiveCosine`), and the cosine
            is logged. None = gradients stay as they are.
    """

    policy: Policy = "warn"
    controllers: tuple[Controller, ...] = ()
    named: bool = False
    thresholds: Thresholds = field(default_factory=Thresholds)
    patience: int = 3
    risk: float = 0.5
    gradient_cosine: bool = False
    max_gradient_cosine: float | None = None

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, get_args(Policy))
        known = isinstance(self.controllers, tuple) and all(isinstance(item, Controller) for item in self.controllers)
        if not known or any(isinstance(item, type) for item in self.controllers):
            raise TypeError(f"controllers must be a tuple of controllers, but got {self.controllers!r}.")
        if self.controllers and self.policy != "act":
            names = [item.name for item in self.controllers]
            raise ValueError(f"controllers must be absent with policy {self.policy!r}, but got {names}.")
        if not isinstance(self.thresholds, Thresholds):
            raise TypeError(f"thresholds must be Thresholds, but got {self.thresholds!r}.")
        check_whole("patience", self.patience, least=1)
        check_fraction(risk=self.risk)
        check_bool(named=self.named, gradient_cosine=self.gradient_cosine)
        if self.max_gradient_cosine is not None:
            check_number("max_gradient_cosine", self.max_gradient_cosine)
            if not 0 <= self.max_gradient_cosine < 1:
                raise ValueError(f"max_gradient_cosine must be in [0, 1), but got {self.max_gradient_cosine}.")
            if self.policy != "act":
                raise ValueError(f"max_gradient_cosine must be None with policy {self.policy!r}, but got a number.")

    def without(self, missing: Mapping[str, str]) -> ControlSpec:
        """Leave out controllers that cannot work in a run, with a warning.

        Args:
            missing: ``{controller: what it would need}``.

        Raises:
            ValueError: the configuration names one of them.
        """
        for item in self.controllers:
            if item.name in missing and self.named:
                raise ValueError(f"control.controllers must not name {item.name}, which needs {missing[item.name]}.")
            if item.name in missing:
                logger.warning("control: act leaves out %s, which needs %s.", item.name, missing[item.name])
        return replace(self, controllers=tuple(item for item in self.controllers if item.name not in missing))

    @property
    def escalation(self) -> Escalation | None:
        """The :class:`Escalation` among the controllers, or None."""
        return next((item for item in self.controllers if isinstance(item, Escalation)), None)

    @property
    def moves_learning_rate(self) -> bool:
        """True if a controller scales the learning rate."""
        return any(item.setting == LEARNING_RATE_SCALE for item in self.controllers)

    @property
    def history(self) -> int:
        """Optimizer steps whose rows are remembered: twice the longest window that is read, at least 200."""
        windows = [getattr(item, "window", 0) for item in self.controllers]
        windows += [self.thresholds.length_window, self.thresholds.reward_drop_steps]
        return max([200, *(2 * int(window) for window in windows)])

    @property
    def remembered_rows(self) -> int:
        """Logged rows that are remembered whatever their steps, for windows that count rows."""
        return max([WINDOW + BASELINE, *(int(getattr(item, "window", 0)) for item in self.controllers)])


def parse_control(spec: Any, *, where: str = "control") -> ControlSpec | None:
    """Parse ``warn``, ``stop``, ``act`` or a mapping; None, ``off`` and False mean that the run is not watched.

    An example of a mapping is
    ``{policy: act, controllers: {length_guard: {surge: 1.5}}, thresholds: {kl_high: 0.1}, patience: 3, risk: 0.5}``.
    ``act`` runs the controllers that ``controllers`` names. If it is left out, ``act`` runs all of them but those that
    need a number of yours (``by_default`` is False). A controller without options may be null.

    Raises:
        ValueError: an entry is not valid; the message names it.

    Example:
        >>> parse_control({"policy": "act", "controllers": {"length_guard": {"window": 50}}}).controllers[0].window
        50
    """
    if spec is None or spec is False or spec == "off":
        return None
    if isinstance(spec, ControlSpec):
        return spec
    if isinstance(spec, str):
        check_choice(where, spec, (*get_args(Policy), "off"))
    values = {"policy": spec} if isinstance(spec, str) else read_numbers(spec)
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must be warn, stop, act, off or a mapping, but got {spec!r}.")
    for key in values:
        if key not in _KEYS:
            raise ValueError(f"{where}.{key} is not an option; known are {list(_KEYS)}.{near(str(key), _KEYS)}")
    given = dict(values)
    policy = given.get("policy", "act" if "controllers" in given else "warn")
    named = given.pop("controllers", None)
    given["named"] = named is not None
    if named is None and policy == "act":
        named = [name for name, cls in CONTROLLERS.items() if getattr(cls, "by_default", True)]
    try:
        given["thresholds"] = _thresholds(given.get("thresholds"))
        controllers = _controllers(named, given["thresholds"], where=f"{where}.controllers")
        given |= {"policy": policy, "controllers": controllers}
        return ControlSpec(**given)
    except (TypeError, ValueError) as error:
        message = str(error)
        raise ValueError(message if message.startswith(f"{where}.") else f"{where}.{message}") from None


def _thresholds(given: Any) -> Thresholds:
    if given is None or isinstance(given, Thresholds):
        return given or Thresholds()
    if not isinstance(given, Mapping):
        raise ValueError(f"thresholds must be a mapping, but got {given!r}.")
    try:
        return thresholds_from(given)
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith("thresholds ") else f"thresholds.{message}") from None


def _controllers(named: Any, limits: Thresholds, *, where: str) -> tuple[Controller, ...]:
    """The named controllers. Options that are thresholds of the diagnosis default to ``limits``."""
    if named is None:
        return ()
    if isinstance(named, list | tuple):
        named = dict.fromkeys(named)
    if not isinstance(named, Mapping):
        raise ValueError(f"{where} must be a list of names or a mapping of name to options, but got {named!r}.")
    made = []
    for name, options in named.items():
        if name not in CONTROLLERS:
            known = list(CONTROLLERS)
            raise ValueError(f"{where} must name some of {known}, but got {name!r}.{near(str(name), known)}")
        if not isinstance(options, Mapping | None):
            raise ValueError(f"{where}.{name} must be a mapping of options or null, but got {options!r}.")
        shared = limits_of(CONTROLLERS[name], limits)
        made.append(parse_tagged({"type": name, **shared, **(options or {})}, CONTROLLERS, where=f"{where}.{name}"))
    return tuple(made)
