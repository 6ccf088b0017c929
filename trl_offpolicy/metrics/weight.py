"""Health of importance weights, one class each."""

from __future__ import annotations

from collections.abc import Mapping

from trl_offpolicy.functional.diagnostics import WEIGHT_DIAGNOSTICS
from trl_offpolicy.metrics.base import WeightMetric, by_quantity, classes_in, derived


def _weight(name: str, key: str, *, better: bool | None) -> type[WeightMetric]:
    return derived(WeightMetric, name, f"weight/{key}", WEIGHT_DIAGNOSTICS[key], __name__, better=better)


WeightMean = _weight("WeightMean", "mean", better=None)
WeightStd = _weight("WeightStd", "std", better=False)
WeightMin = _weight("WeightMin", "min", better=None)
WeightMax = _weight("WeightMax", "max", better=None)
ESSToken = _weight("ESSToken", "ess_token", better=True)
ESSSequence = _weight("ESSSequence", "ess_sequence", better=True)

WEIGHT_METRICS: Mapping[str, type[WeightMetric]] = by_quantity(classes_in(globals(), WeightMetric))
"""Key of ``offpolicy/weight/<key>`` -> class."""
