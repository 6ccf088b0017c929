"""Several corrections on one batch, side by side: what each would miss of the target, and how noisy it would be."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.measure import WeightsUsed
from trl_offpolicy.correction.ratio_table import RatioTable
from trl_offpolicy.functional.diagnostics import Finalizer, fraction
from trl_offpolicy.functional.estimator import (
    ESTIMATOR_DIAGNOSTICS,
    ESTIMATOR_LAYOUT,
    estimator_rows,
    unmatched,
)
from trl_offpolicy.functional.intervals import ClusterRows
from trl_offpolicy.functional.moments import Layout, Moments
from trl_offpolicy.stats import Group, Stats
from trl_offpolicy.types import PolicyBatch

COMPARED = Layout(sums=(*ESTIMATOR_LAYOUT.sums, "raw", "cut"), maxima=ESTIMATOR_LAYOUT.maxima)
"""The estimator's moments; and by response the means of the raw weight and of what cap, band or mask take from it."""
COMPARISON: Mapping[str, Finalizer] = {
    "missed": ESTIMATOR_DIAGNOSTICS["missed"],
    "unmatched": unmatched,
    "missed_token": ESTIMATOR_DIAGNOSTICS["missed_token"],
    "cut_mass": fraction("cut", "raw"),
    "second_moment": ESTIMATOR_DIAGNOSTICS["second_moment"],
    "ess": ESTIMATOR_DIAGNOSTICS["ess"],
}
"""What is estimated of each correction; ``unmatched`` is there for the interval of ``missed``."""
COMPARED_INTERVALS = ("unmatched", "ess")


@torch.no_grad()
def compare(corrections: Mapping[str, Correction], batch: PolicyBatch, *, prefix: str) -> Stats:
    """The moments of each correction on ``batch``, under ``<prefix>/<name>``; additive over batches and ranks.

    The log-ratios are made once for all. Nothing waits for the device.

    Args:
        corrections: by name; their terms read old/sampling and need no more than a row.
        batch: a batch with the sampling log-probs; without old ones the current policy takes their place.
        prefix: first part of the groups' names.
    """
    ratios = RatioTable(batch)
    groups = {name: _group(one, ratios, batch) for name, one in corrections.items()}
    return Stats({f"{prefix}/{name}": group for name, group in groups.items()})


def _group(correction: Correction, ratios: RatioTable, batch: PolicyBatch) -> Group:
    keep_mask, weights = correction.decide(batch, ratios)
    nothing = torch.ones_like(batch.mask[:, :1], dtype=torch.float32)
    raw = nothing if weights is None else weights.raw
    applied = torch.where(keep_mask, nothing if weights is None else weights.applied, 0.0)
    log_ratios = ratios.inputs("old/sampling", batch.mask, keep=nothing.bool()).log_ratios
    sums, tops = estimator_rows(log_ratios, applied, batch.mask, batch.token_advantages)
    mass = _row_means(torch.stack([raw.expand_as(applied), _cut(raw, weights, applied)]), batch.mask)
    top = tops.amax(0) if len(tops) else tops.new_zeros(1)
    return _of_rows(torch.cat([sums, mass], -1), top, batch.group_ids)


def _of_rows(rows: Tensor, top: Tensor, ids: Tensor | None) -> Group:
    clusters = ClusterRows(Layout(COMPARED.sums), rows, ids)
    return Group(Moments(COMPARED, rows.sum(0), top), COMPARISON, clusters, COMPARED_INTERVALS)


def packed(stats: Stats) -> dict[str, dict[str, Tensor | None]]:
    """What :func:`compare` collected as plain tensors on the CPU, for a checkpoint."""
    tables = {}
    for name, group in stats.groups.items():
        assert group.rows is not None
        parts = {"rows": group.rows.values, "top": group.moments.maxima, "ids": group.rows.ids}
        tables[name] = {key: None if part is None else part.cpu() for key, part in parts.items()}
    return tables


def unpacked(tables: Mapping[str, Mapping[str, Tensor | None]], device: torch.device) -> Stats:
    """The stats that :func:`packed` took apart, on ``device``."""
    groups = {}
    for name, table in tables.items():
        parts = {key: None if part is None else part.to(device) for key, part in table.items()}
        rows, top = parts["rows"], parts["top"]
        assert rows is not None and top is not None
        groups[name] = _of_rows(rows, top, parts["ids"])
    return Stats(groups)


def _cut(raw: Tensor, weights: WeightsUsed | None, applied: Tensor) -> Tensor:
    """(B, T) what is taken from each raw weight; for a shape, which differs from it by design, only by dropping."""
    whole = weights.bounded if weights is not None and weights.shaped else raw
    return (whole - applied).clamp(min=0.0)


def _row_means(values: Tensor, mask: Tensor) -> Tensor:
    """(K, B, T) values to (B, K) float64 means over the trainable tokens of each response."""
    counts = mask.sum(-1).clamp(min=1)
    return (torch.where(mask, values, 0.0).sum(-1).double() / counts).T
