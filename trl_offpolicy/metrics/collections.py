"""Whole sets of diagnostics as one collection: the moments are computed once per update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchmetrics import MetricCollection

from trl_offpolicy.functional.routing import EXPERT_DIAGNOSTICS
from trl_offpolicy.metrics.base import MomentMetric
from trl_offpolicy.metrics.ratio import RATIO_METRICS
from trl_offpolicy.metrics.routing import ROUTING_METRICS
from trl_offpolicy.metrics.weight import WEIGHT_METRICS


def ratio_metrics(prefix: str = "offpolicy/mismatch/") -> MetricCollection:
    """All ratio diagnostics, named as a :class:`~trl_offpolicy.Correction` names them.

    Args:
        prefix: written before every key; "offpolicy/staleness/" for current/old, "offpolicy/total/" for
            current/sampling.

    Returns:
        One compute group: ``update`` makes one pass over the tokens. Calling the collection itself
        (``forward``) makes one pass per metric, as every torchmetrics collection does.

    Example:
        >>> import torch
        >>> metrics = ratio_metrics()
        >>> old, sampling = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])
        >>> metrics.update(old, sampling, torch.ones(1, 2).bool())
        >>> metrics.compute()["offpolicy/mismatch/kl_k1"]
        tensor(-0.2500, dtype=torch.float64)
    """
    return _collection(RATIO_METRICS, prefix)


def weight_metrics(prefix: str = "offpolicy/weight/") -> MetricCollection:
    """All weight diagnostics, named as a :class:`~trl_offpolicy.Correction` names them.

    Args:
        prefix: written before every key; "offpolicy/weight_applied/" for the weights after cap and
            normalisation, over the kept tokens.

    Returns:
        One compute group, as with :func:`ratio_metrics`.

    Example:
        >>> import torch
        >>> metrics = weight_metrics()
        >>> metrics.update(torch.tensor([[0.5, 2.0]]), torch.ones(1, 2).bool())
        >>> metrics.compute()["offpolicy/weight/max"]
        tensor(2., dtype=torch.float64)
    """
    return _collection(WEIGHT_METRICS, prefix)


def routing_metrics(
    prefix: str = "offpolicy/routing/", *, layers: int | None = None, experts: int | None = None
) -> MetricCollection:
    """All routing diagnostics of a mixture of experts.

    Args:
        prefix: written before every key.
        layers: number of layers with experts; None leaves out the diagnostics that are counted by expert.
        experts: number of experts of a layer.

    Returns:
        One compute group, as with :func:`ratio_metrics`.

    Example:
        >>> import torch
        >>> metrics = routing_metrics()
        >>> metrics.update(torch.tensor([[[[0, 3]]]]), torch.tensor([[[[3, 1]]]]), torch.ones(1, 1).bool())
        >>> metrics.compute()["offpolicy/routing/agreement"]
        tensor(0.5000, dtype=torch.float64)
    """
    left_out = set(EXPERT_DIAGNOSTICS) if experts is None else set()
    classes = {name: metric for name, metric in ROUTING_METRICS.items() if name not in left_out}
    return _collection(classes, prefix, layers=layers, experts=experts)


def _collection(classes: Mapping[str, type[MomentMetric]], prefix: str, **options: Any) -> MetricCollection:
    """One collection whose compute group is given: to detect it, torchmetrics would run every metric once."""
    return MetricCollection(
        {name: metric(**options) for name, metric in classes.items()}, prefix=prefix, compute_groups=[sorted(classes)]
    )
