"""The diagnostics of a :class:`~trl_offpolicy.Correction`: which groups of moments a call collects."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.functional.diagnostics import (
    RATIO_DIAGNOSTICS,
    WEIGHT_DIAGNOSTICS,
    Finalizer,
    fraction,
)
from trl_offpolicy.functional.intervals import ClusterRows
from trl_offpolicy.functional.log_ratios import LogRatio, log_ratio
from trl_offpolicy.functional.moments import (
    ROW_LAYOUT,
    WEIGHT_LAYOUT,
    Layout,
    Moments,
    RatioRows,
    fold_ratio_rows,
    moments,
    ratio_row_moments,
    ratio_rows,
    weight_moments,
    weight_row_moments,
)
from trl_offpolicy.stats import Group, Stats
from trl_offpolicy.terms import Violations

if TYPE_CHECKING:
    from trl_offpolicy.corrections import Correction
    from trl_offpolicy.ratio_table import RatioTable
    from trl_offpolicy.types import PolicyBatch


class Evidence(NamedTuple):
    """What a correction decided: masks bool, weights float32, each (B, 1) or (B, T); ``normalizer`` 0-d."""

    decisions: list[Violations]
    keep: Tensor
    keep_mask: Tensor
    raw: Tensor | None
    bounded: Tensor | None
    applied: Tensor | None
    normalizer: Tensor | None


def collect(correction: Correction, batch: PolicyBatch, ratios: RatioTable, evidence: Evidence) -> Stats:
    """All diagnostics of one call."""
    groups = _ratio_groups(correction, batch, ratios, evidence)
    if evidence.raw is not None and evidence.bounded is not None and evidence.applied is not None:
        groups.update(_weight_groups(batch, evidence))
    if correction.keep or correction.nonfinite == "drop":
        groups.update(_keep_groups(correction, batch, evidence))
    return Stats(groups)


def _ratio_groups(
    correction: Correction, batch: PolicyBatch, ratios: RatioTable, evidence: Evidence
) -> dict[str, Group]:
    wanted, groups = correction.measure, {}
    has_old, has_sampling = batch.old_per_token_logps is not None, batch.sampling_per_token_logps is not None
    if has_sampling and {"mismatch", "kept"} & set(wanted):
        groups.update(_mismatch_groups(correction, batch, ratios, evidence))
    if has_old and "staleness" in wanted:
        groups["staleness"] = _ratio_group(_rows(ratios["current/old"], batch, "old", batch.mask), batch)
    if has_sampling and "total" in wanted:
        if not has_old and "mismatch" in groups and batch.version_lags is None:
            groups["total"] = groups["mismatch"]  # old is the current policy: the same numbers
        else:
            rows = _rows(ratios["current/sampling"], batch, "sampling", batch.mask)
            groups["total"] = _ratio_group(rows, batch)
    return groups


def _mismatch_groups(
    correction: Correction, batch: PolicyBatch, ratios: RatioTable, evidence: Evidence
) -> dict[str, Group]:
    """old/sampling on all trainable tokens, and on the kept ones."""
    groups = {}
    fresh = _sampled_by_current_weights(batch)
    rows = _rows(ratios["old/sampling"], batch, "sampling", batch.mask)
    if "mismatch" in correction.measure:
        groups["mismatch"] = _ratio_group(rows, batch, fresh)
    if "kept" in correction.measure:
        keep_rows = fresh
        if evidence.keep.shape[-1] == 1 and correction.nonfinite != "drop":
            kept = evidence.keep.squeeze(-1)  # only whole sequences were dropped: no second pass
            keep_rows = kept if fresh is None else kept & fresh
        else:
            rows = _kept_rows(ratios["old/sampling"], batch, evidence.keep_mask)
        groups["kept"] = Group(fold_ratio_rows(rows, keep_rows), RATIO_DIAGNOSTICS)
    return groups


def _sampled_by_current_weights(batch: PolicyBatch) -> Tensor | None:
    """(B,) bool: rows on which the current policy can stand in for the missing old one; None = all of them."""
    if batch.old_per_token_logps is not None or batch.version_lags is None:
        return None
    return ((batch.version_lags == 0) | ~batch.mask).all(-1)


def _rows(ratio: LogRatio, batch: PolicyBatch, denominator: str, mask: Tensor) -> RatioRows:
    return ratio_rows(ratio, batch.logps(denominator), mask)


RATIO_INTERVALS = ("kl_k1", "kl_k3", "chi2_token", "chi2_sequence", "ppl_ratio")
WEIGHT_INTERVALS = ("ess_token", "ess_sequence")
"""Diagnostics that get a confidence interval."""


def _ratio_group(rows: RatioRows, batch: PolicyBatch, keep_rows: Tensor | None = None) -> Group:
    values = ratio_row_moments(rows)
    moments = fold_ratio_rows(rows, keep_rows, values)
    if keep_rows is not None:
        values = torch.where(keep_rows.unsqueeze(-1), values, 0.0)
    clusters = ClusterRows(ROW_LAYOUT, values, batch.group_ids)
    return Group(moments, RATIO_DIAGNOSTICS, clusters, RATIO_INTERVALS)


def _kept_rows(ratio: LogRatio, batch: PolicyBatch, keep_mask: Tensor) -> RatioRows:
    kept = LogRatio(torch.where(keep_mask, ratio.values, 0.0), ratio.observed & keep_mask)
    return _rows(kept, batch, "sampling", keep_mask)


_TRUNCATION = Layout(sums=("units", "truncated", "normalizer", "batches"))
_TRUNCATION_DIAGNOSTICS: Mapping[str, Finalizer] = {
    "truncated_fraction": fraction("truncated", "units"),
    "normalizer": fraction("normalizer", "batches"),
}


def _weight_groups(batch: PolicyBatch, evidence: Evidence) -> dict[str, Group]:
    mask, raw, bounded, applied = batch.mask, evidence.raw, evidence.bounded, evidence.applied
    assert raw is not None and bounded is not None and applied is not None
    unit = mask.any(-1, keepdim=True) if raw.shape[-1] == 1 else mask
    one = torch.ones((), device=mask.device)
    truncation = moments(
        _TRUNCATION,
        [unit.sum(), ((raw != bounded) & unit).sum(), one if evidence.normalizer is None else evidence.normalizer, one],
    )
    rows = weight_row_moments(applied, evidence.keep_mask)
    clusters = ClusterRows(Layout(WEIGHT_LAYOUT.sums), rows, batch.group_ids)
    after = weight_moments(applied, evidence.keep_mask, rows)
    return {
        "weight": Group(weight_moments(raw, mask), WEIGHT_DIAGNOSTICS),
        "weight_applied": Group(after, WEIGHT_DIAGNOSTICS, clusters, WEIGHT_INTERVALS),
        "weight#bounds": Group(truncation, _TRUNCATION_DIAGNOSTICS),
    }


_KEEP = Layout(
    sums=("tokens", "dropped_tokens", "sequences", "dropped_sequences", "dropped_rewarded", "dropped_reward", "correct")
)
_TERM = Layout(sums=("units", "dropped", "above", "below"))
_TERM_DIAGNOSTICS: Mapping[str, Finalizer] = {
    "dropped_fraction": fraction("dropped", "units"),
    "above_fraction": fraction("above", "units"),
    "below_fraction": fraction("below", "units"),
}


@lru_cache(maxsize=4)
def _keep_diagnostics(rewards: bool, correct: bool) -> Mapping[str, Finalizer]:
    table = {
        "dropped_token_fraction": fraction("dropped_tokens", "tokens"),
        "dropped_sequence_fraction": fraction("dropped_sequences", "sequences"),
    }
    if rewards:
        table["dropped_reward_mean"] = fraction("dropped_reward", "dropped_rewarded")
    if rewards and correct:
        table["dropped_correct_fraction"] = fraction("correct", "dropped_rewarded")
    return table


def _keep_groups(correction: Correction, batch: PolicyBatch, evidence: Evidence) -> dict[str, Group]:
    mask, keep_mask = batch.mask, evidence.keep_mask
    trainable = mask.any(-1)
    dropped = trainable & ~keep_mask.any(-1)
    rewards, threshold = batch.rewards, correction.correct_threshold
    values = torch.zeros_like(dropped, dtype=torch.float32) if rewards is None else rewards.float()
    rewarded = dropped & (values.abs() < torch.inf)
    right = rewarded & (values >= (torch.inf if threshold is None else threshold))
    tokens = mask.sum()
    sums = [
        tokens,
        tokens - keep_mask.sum(),
        trainable.sum(),
        dropped.sum(),
        rewarded.sum(),
        torch.where(rewarded, values, 0.0).sum(),
        right.sum(),
    ]
    table = _keep_diagnostics(rewards is not None, threshold is not None)
    groups = {"keep": Group(moments(_KEEP, sums), table)}
    for name, violations in zip(term_names(correction), evidence.decisions, strict=True):
        groups[f"keep/{name}"] = Group(_term_moments(violations, mask), _TERM_DIAGNOSTICS)
    return groups


def term_names(correction: Correction) -> list[str]:
    """Metric names of the keep terms; a repeated one gets a number."""
    names: list[str] = []
    seen: dict[str, int] = {}
    for term in correction.keep:
        seen[term.name] = count = seen.get(term.name, 0) + 1
        names.append(term.name if count == 1 else f"{term.name}_{count}")
    return names


def _term_moments(violations: Violations, mask: Tensor) -> Moments:
    """Counts in the term's own unit: tokens, or sequences with a trainable token."""
    zero = torch.zeros_like(mask[:, :1])
    above = zero if violations.above is None else violations.above
    below = zero if violations.below is None else violations.below
    either = above | below
    unit = mask.any(-1, keepdim=True) if either.shape[-1] == 1 else mask
    return moments(_TERM, [unit.sum(), (either & unit).sum(), (above & unit).sum(), (below & unit).sum()])


def noise_floor(first: Tensor, again: Tensor, mask: Tensor) -> Stats:
    """The trainer against itself: what the same weights give for the same text in another batch size.

    Differences between engine and trainer of this size mean nothing.

    Args:
        first: (B, T) log-probs of the loss step, nats.
        again: (B, T) log-probs of a second forward.
        mask: (B, T) bool.
    """
    rows = ratio_rows(log_ratio(again, first, mask), first, mask)
    return Stats({"noise_floor": Group(fold_ratio_rows(rows), RATIO_DIAGNOSTICS)})
