"""A ceiling on the learning rate that falls with the staleness of the rollouts: rate times lag stays bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trl_offpolicy.checks import check_fraction, check_positive, check_whole
from trl_offpolicy.control.actions import Action
from trl_offpolicy.control.controllers import LEARNING_RATE_SCALE, ScaleState
from trl_offpolicy.run_folder.run_data import MetricsLog
from trl_offpolicy.stats import PREFIX

LAG = f"{PREFIX}rollout/version_lag_max"


@dataclass(frozen=True, kw_only=True)
class StalenessCeiling:
    """Keep learning rate times lag at most what it is at the lag ``lag``.

        scale = min(1, lag / S)

    S is the largest version lag, in optimizer steps, of the last ``window`` logged rows. The bias that stale rollouts
    bring into a step is O(S eta), for a learning rate eta, and a step is stable while S eta G <= R: G is the length of
    an update per unit of eta, and R the drift at which the clip acts. Neither is known beforehand, but R / G is S eta
    of a run that was stable. ``lag`` says up to which lag the configured learning rate is that of a stable run.

    The scale follows S down at once, and up after ``window`` rows. Below ``lag`` the learning rate is untouched: there
    the paper's other bound holds, on the drift of the whole run, and staleness does not enter it.

    Args:
        lag: the lag for which the configured learning rate was tuned, in optimizer steps.
        window: logged rows over which the largest lag is taken.
        resolution: smallest relative change.
        smallest: the scale never goes below it.

    Raises:
        ValueError: a value is out of range.

    Reference: Song, Xu et al. 2026, "Staleness-learning rate scaling laws for asynchronous RLHF" (arXiv 2607.01083):
    eta << min(R_batch / (S G_upd), R_crit / (T G_upd)). The paper bounds a constant learning rate. That it follows the
    lag that was measured, and that the first bound is calibrated by ``lag``, is this kit's.

    Example:
        >>> StalenessCeiling(lag=2).ceiling(8)
        0.25
    """

    lag: float = 1.0
    window: int = 5
    resolution: float = 0.05
    smallest: float = 1 / 16
    name: ClassVar[str] = "staleness_ceiling"
    setting: ClassVar[str] = LEARNING_RATE_SCALE
    by_default: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive(lag=self.lag, resolution=self.resolution)
        check_whole("window", self.window, least=1)
        check_fraction(smallest=self.smallest)

    def start(self) -> ScaleState:
        """The whole learning rate (scale 1)."""
        return ScaleState()

    def ceiling(self, lag: float) -> float:
        """The scale that a largest lag of ``lag`` optimizer steps allows, in [smallest, 1]."""
        return max(min(1.0, self.lag / max(lag, self.lag)), self.smallest)

    def step(self, state: ScaleState, log: MetricsLog, step: int) -> tuple[ScaleState, Action | None]:
        """Move the scale to the ceiling of the largest lag of the last rows, if the change is large enough."""
        steps, lags, _ = MetricsLog(log.rows[-self.window :]).series(LAG)
        if not steps or steps[-1] != step:
            return state, None
        largest = max(lags)
        scale = self.ceiling(largest)
        back = scale == 1.0 != state.scale  # the last rise may be a small one
        if abs(scale / state.scale - 1) < self.resolution and not back:
            return state, None
        why = f"the largest lag is {largest:g} optimizer steps (the learning rate was tuned for {self.lag:g})"
        return ScaleState(scale), Action(step, self.name, self.setting, state.scale, scale, why)
