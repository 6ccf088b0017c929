"""Quantities that a loop measures one number at a time (a sync, a generation, a gradient), one class each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trl_offpolicy.functional.diagnostics import fraction
from trl_offpolicy.functional.moments import Layout, moments
from trl_offpolicy.metrics.base import MomentMetric, classes_in, derived

_mean = fraction("part", "whole")


class ValueMetric(MomentMetric):
    """Base of the means of numbers, and of shares: sum of the parts over sum of the wholes, over updates and ranks.

    Example:
        >>> from trl_offpolicy.metrics import RetokenisedFraction, SyncSeconds
        >>> seconds, changed = SyncSeconds(), RetokenisedFraction()
        >>> seconds.update(2.0), seconds.update(4.0)
        (None, None)
        >>> seconds.compute()
        tensor(3., dtype=torch.float64)
        >>> changed.update(1, 8)  # 1 of 8 rows
        >>> changed.compute()
        tensor(0.1250, dtype=torch.float64)
    """

    layout = Layout(sums=("part", "whole"))

    def update(self, part: float | Tensor, whole: float | Tensor = 1.0) -> None:
        """Add a number, or a share as ``part`` of a ``whole``.

        Args:
            part: a number, or a 0-d tensor.
            whole: a number, or a 0-d tensor; 1 = ``part`` is one value.
        """
        device = self.sums.device
        self._add(moments(self.layout, [torch.as_tensor(number, device=device) for number in (part, whole)]))


def _value(name: str, key: str, *, better: bool | None = False) -> type[ValueMetric]:
    return derived(ValueMetric, name, key, _mean, __name__, better=better)


SyncAgreement = _value("SyncAgreement", "rollout/sync_agreement", better=True)
SyncSeconds = _value("SyncSeconds", "rollout/sync_seconds")
SyncBytes = _value("SyncBytes", "rollout/sync_bytes")
SyncChangedFraction = _value("SyncChangedFraction", "rollout/sync_changed_fraction", better=None)
SyncVisibleFraction = _value("SyncVisibleFraction", "rollout/sync_visible_fraction", better=True)
GenerationTime = _value("GenerationTime", "time/generation")
WaitingTime = _value("WaitingTime", "time/waiting")
SyncTime = _value("SyncTime", "time/sync")
RewardsTime = _value("RewardsTime", "time/rewards")
ScoringTime = _value("ScoringTime", "time/scoring")
CorrectionTime = _value("CorrectionTime", "time/correction")
BackwardTime = _value("BackwardTime", "time/backward")
RecordingTime = _value("RecordingTime", "time/recording")
LearningTime = _value("LearningTime", "time/learning")
WaitSeconds = _value("WaitSeconds", "rollout/wait_seconds")
RetokenisedFraction = _value("RetokenisedFraction", "rollout/retokenised_fraction")
NoncanonicalFraction = _value("NoncanonicalFraction", "rollout/noncanonical_fraction")
DistinctFraction = _value("DistinctFraction", "rollout/distinct_fraction", better=True)
CopiedFraction = _value("CopiedFraction", "rollout/copied_fraction")
TeacherShare = _value("TeacherShare", "rollout/teacher_share", better=None)
NormNoiseSize = _value("NormNoiseSize", "rollout/norm_noise", better=None)
DraftTakenFraction = _value("DraftTakenFraction", "rollout/draft_taken_fraction", better=True)
UnusableFraction = _value("UnusableFraction", "rollout/unusable_fraction")
RetriedFraction = _value("RetriedFraction", "rollout/retried_fraction")
ToolTimeoutFraction = _value("ToolTimeoutFraction", "rollout/tool_timeout_fraction")
ToolCutFraction = _value("ToolCutFraction", "rollout/tool_cut_fraction")
ToolControlFraction = _value("ToolControlFraction", "rollout/tool_control_fraction")
GradientSignal = _value("GradientSignal", "gradient/signal", better=None)
GradientNoise = _value("GradientNoise", "gradient/noise")
GradientCosinePrevious = _value("GradientCosinePrevious", "gradient/cosine_previous", better=None)

VALUE_METRICS: Mapping[str, type[ValueMetric]] = classes_in(globals(), ValueMetric)
"""Key below ``offpolicy/`` -> class."""
