"""Accept or reject an update after the sync, by how far the engine is from the trainer with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trl_offpolicy.checks import check_positive, check_whole
from trl_offpolicy.control.actions import Action
from trl_offpolicy.run_folder.run_data import MetricsLog

Parameters = Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class AcceptState:
    """Nothing: what is remembered are weights, which a checkpoint of the session does not hold."""


@dataclass(frozen=True, kw_only=True)
class AcceptUpdate:
    """Take an update back if engine and trainer disagree more with it than with the updates before.

    After each sync both sides score the probe. Let gap = -log(agreement), their mean absolute difference in log-prob.
    An update is rejected if its gap is above ``least`` and above ``growth`` times the median gap of the last
    ``history`` accepted ones. The trainer then gets the weights of the last accepted update back, and these are synced
    and proved instead. After ``patience`` rejections in a row the next update is accepted as it is, so that no run
    stands still.

    The optimizer's moments and the schedule go on. One copy of the trainable weights is kept on the CPU. After a resume
    the first update is accepted.

    Args:
        growth: how many times the usual gap an update may have.
        least: gap in nats below which nothing is rejected.
        history: accepted updates whose median is the usual gap.
        patience: rejections in a row after which the next update is accepted.

    Raises:
        ValueError: a value is out of range.

    Reference: Liang et al. 2026, MIPU (arXiv 2606.29526), second step: a candidate is accepted or rejected after the
    sync by a proxy of the gap on the engine's side. We know the paper by its abstract, project page and a summary. The
    proxy (the probe of the proven sync) and the bound (relative to the run's own gaps) are this kit's. The first step,
    candidates that refer to the sampler, is ``paper/ppo-is``.
    """

    growth: float = 2.0
    least: float = 1e-3
    history: int = 20
    patience: int = 3
    name: ClassVar[str] = "accept_update"
    setting: ClassVar[str] = "update"
    by_default: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive(growth=self.growth, least=self.least)
        check_whole("history", self.history, least=1)
        check_whole("patience", self.patience, least=1)
        if self.growth <= 1:
            raise ValueError(f"growth must be above 1 (the usual gap), but got {self.growth}.")

    def start(self) -> AcceptState:
        """Nothing to remember."""
        return AcceptState()

    def step(self, state: AcceptState, log: MetricsLog, step: int) -> tuple[AcceptState, Action | None]:
        """No action at a logged row: updates are judged when they are synced (:class:`UpdateGate`)."""
        return state, None

    def bound(self, accepted: list[float]) -> float:
        """The largest gap that an update may have after these, nats; infinite while nothing was accepted."""
        return max(self.least, self.growth * median(accepted)) if accepted else math.inf


class UpdateGate:
    """Judges each synced update, and holds the weights of the last accepted one.

    Args:
        rule: when an update is rejected.
        parameters: the trainable parameters by name; whole on this rank.
        note: takes the action of a rejection, to print and record it.
    """

    def __init__(
        self, rule: AcceptUpdate, parameters: Callable[[], Parameters], note: Callable[[Action], object]
    ) -> None:
        self._rule, self._parameters, self._note = rule, parameters, note
        self._gaps: list[float] = []
        self._weights: dict[str, Tensor] = {}
        self._in_a_row = 0
        self.rejected = 0
        """Updates rejected so far."""

    def accepts(self, version: int, agreement: float) -> bool:
        """Whether the update that made ``version`` stays. All ranks pass the same agreement of the proof."""
        gap = -math.log(max(agreement, 1e-300))
        bound = self._rule.bound(self._gaps)
        unusual, resumed = gap > bound, not self._weights
        if unusual and not resumed and self._in_a_row < self._rule.patience:
            self._in_a_row += 1
            self.rejected += 1
            why = f"the gap to the engine is {gap:.3g} nats, above {bound:.3g}"
            self._note(Action(version, self._rule.name, self._rule.setting, 1, 0, why))
            return False
        self._in_a_row = 0
        if not (unusual and resumed):  # it stays because there is nothing to go back to; that makes it no usual one
            self._gaps = [*self._gaps, gap][-self._rule.history :]
        self._weights = {name: value.detach().cpu().clone() for name, value in self._parameters().items()}
        return True

    def state_dict(self) -> dict[str, Any]:
        """What judges later updates, as plain values, without the weights: a resumed run keeps its first sync."""
        return {"gaps": list(self._gaps), "in_a_row": self._in_a_row, "rejected": self.rejected}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._gaps, self._in_a_row, self.rejected = list(state["gaps"]), state["in_a_row"], state["rejected"]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the trainer the weights of the last accepted update."""
        for name, value in self._parameters().items():
            value.copy_(self._weights[name])


def gate_of(
    controllers: tuple[Any, ...], parameters: Callable[[], Parameters], note: Callable[[Action], object]
) -> UpdateGate | None:
    """The gate of a run whose controllers hold an :class:`AcceptUpdate`; None = every update stays."""
    rule = next((item for item in controllers if isinstance(item, AcceptUpdate)), None)
    return None if rule is None else UpdateGate(rule, parameters, note)
