"""The diagnostics of a :class:`~trl_offpolicy.Correction`: which groups of moments a call collects."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.correction.post_tool import post_tool_group
from trl_offpolicy.correction.terms import Violations
from trl_offpolicy.functional._fast import both, count_true
from trl_offpolicy.functional.diagnostics import (
    RATIO_DIAGNOSTICS,
    WEIGHT_DIAGNOSTICS,
    Finalizer,
    fraction,
)
from trl_offpolicy.functional.intervals import ClusterRows
from trl_offpolicy.functional.log_ratios import LogRatio
from trl_offpolicy.functional.moments import (
    ROW_LAYOUT,
    Layout,
    Moments,
    RatioRows,
    fold_ratio_rows,
    moments,
    ratio_row_moments,
    ratio_rows,
)
from trl_offpolicy.functional.weight_moments import WEIGHT_LAYOUT, fold_weight_rows, weight_rows
from trl_offpolicy.stats import Group, Stats

if TYPE_CHECKING:
    from trl_offpolicy.correction.correction import Correction
    from trl_offpolicy.correction.ratio_table import RatioTable
    from trl_offpolicy.types import PolicyBatch


class Evidence(NamedTuple):
    """What a correction decided: masks bool, weights float32, each (B, 1) or (B, T); ``normalizer`` 0-d."""

    decisions: list[Violations]
    keep: Tensor
    keep_mask: Tensor
    unobserved_dropped: bool
    raw: Tensor | None
    bounded: Tensor | None
    shaped: bool
    applied: Tensor | None
    normalizer: Tensor | None

    @property
    def kept_rows(self) -> Tensor | None:
        """(B,) bool where only whole sequences were dropped; None where single tokens were."""
        return self.keep.squeeze(-1) if self.keep.shape[-1] == 1 and not self.unobserved_dropped else None


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
        groups["staleness"] = _ratio_group(ratios.rows("current/old"), batch)
    if has_sampling and "total" in wanted:
        if not has_old and "mismatch" in groups and batch.version_lags is None:
            groups["total"] = groups["mismatch"]  # old is the current policy: the same numbers
        else:
            groups["total"] = _ratio_group(ratios.rows("current/sampling"), batch)
    return groups


def _mismatch_groups(
    correction: Correction, batch: PolicyBatch, ratios: RatioTable, evidence: Evidence
) -> dict[str, Group]:
    """old/sampling on all trainable tokens, and on the kept ones."""
    groups = {}
    fresh = _sampled_by_current_weights(batch)
    rows = ratios.rows("old/sampling")
    if "mismatch" in correction.measure:
        groups["mismatch"] = _ratio_group(rows, batch, fresh)
        if batch.turn_ids is not None:
            groups["post_tool"] = post_tool_group(ratios["old/sampling"], batch.mask, batch.turn_ids, fresh)
    if "kept" in correction.measure:
        keep_rows = fresh
        if (kept := evidence.kept_rows) is not None:  # no second pass
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


RATIO_INTERVALS = ("kl_k1", "kl_k3", "chi2_token", "chi2_sequence", "ppl_ratio", "ess_sequence")
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
    return ratio_rows(kept, batch.logps("sampling"), keep_mask)


_TRUNCATION = Layout(sums=("units", "truncated", "normalizer", "batches"))
_TRUNCATION_DIAGNOSTICS: Mapping[str, Finalizer] = {
    "truncated_fraction": fraction("truncated", "units"),
    "normalizer": fraction("normalizer", "batches"),
}


def _weight_groups(batch: PolicyBatch, evidence: Evidence) -> dict[str, Group]:
    mask, raw, bounded, applied = batch.mask, evidence.raw, evidence.bounded, evidence.applied
    assert raw is not None and bounded is not None and applied is not None
    by_row = raw.shape[-1] == 1 and mask.shape[-1] > 1
    units = (batch.lengths > 0).float() if by_row else batch.lengths
    changed = torch.zeros_like(raw, dtype=torch.bool) if evidence.shaped else raw != bounded
    truncated = changed.squeeze(-1) * units if by_row else count_true(both(changed, mask))
    one = torch.ones((), device=mask.device)
    normalizer = one if evidence.normalizer is None else evidence.normalizer
    truncation = moments(_TRUNCATION, [units.sum(), truncated.sum(), normalizer, one])
    kept = evidence.kept_rows
    if kept is not None:  # one pass for both
        before, rows = weight_rows(mask, raw, applied, lengths=batch.lengths)
    else:
        (before,) = weight_rows(mask, raw, lengths=batch.lengths)
        (rows,) = weight_rows(evidence.keep_mask, applied)
    values = rows.sums if kept is None else torch.where(kept.unsqueeze(-1), rows.sums, 0.0)
    clusters = ClusterRows(Layout(WEIGHT_LAYOUT.sums), values, batch.group_ids)
    after = fold_weight_rows(rows, kept)
    return {
        "weight": Group(fold_weight_rows(before), WEIGHT_DIAGNOSTICS),
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


_KEEP_DIAGNOSTICS = {flags: _keep_diagnostics(*flags) for flags in product((False, True), repeat=2)}
GROUPS: Mapping[str, tuple[Layout, Mapping[str, Finalizer]]] = {
    "weight#bounds": (_TRUNCATION, _TRUNCATION_DIAGNOSTICS),
    "keep": (_KEEP, _KEEP_DIAGNOSTICS[True, True]),
    "keep/<term>": (_TERM, _TERM_DIAGNOSTICS),
}
"""Of each group that is no ratio and no weight: the names of its moments, and all its finalisers."""


def _keep_groups(correction: Correction, batch: PolicyBatch, evidence: Evidence) -> dict[str, Group]:
    lengths, kept_rows = batch.lengths, evidence.kept_rows
    kept = count_true(evidence.keep_mask) if kept_rows is None else lengths * kept_rows
    trainable = lengths > 0
    dropped = trainable & (kept == 0)
    rewards, threshold = batch.rewards, correction.correct_threshold
    values = torch.zeros_like(lengths) if rewards is None else rewards.float()
    rewarded = dropped & (values.abs() < torch.inf)
    right = rewarded & (values >= (torch.inf if threshold is None else threshold))
    reward = torch.where(rewarded, values, 0.0)
    sums = _row_total(lengths, lengths - kept, trainable, dropped, rewarded, reward, right)
    table = _KEEP_DIAGNOSTICS[rewards is not None, threshold is not None]
    groups = {"keep": Group(Moments(_KEEP, sums, sums.new_empty(0)), table)}
    for name, violations in zip(term_names(correction), evidence.decisions, strict=True):
        groups[f"keep/{name}"] = Group(_term_moments(violations, batch), _TERM_DIAGNOSTICS)
    return groups


def term_names(correction: Correction) -> list[str]:
    """Metric names of the keep terms; a repeated one gets a number."""
    names: list[str] = []
    seen: dict[str, int] = {}
    for term in correction.keep:
        seen[term.name] = count = seen.get(term.name, 0) + 1
        names.append(term.name if count == 1 else f"{term.name}_{count}")
    return names


def _term_moments(violations: Violations, batch: PolicyBatch) -> Moments:
    """Counts in the term's own unit: tokens, or sequences with a trainable token."""
    zero = torch.zeros_like(batch.mask[:, :1])
    above = zero if violations.above is None else violations.above
    below = zero if violations.below is None else violations.below
    if above.shape[-1] == 1 and below.shape[-1] == 1:
        unit = (batch.lengths > 0).unsqueeze(-1)
        counted = ((part & unit).squeeze(-1) for part in (unit, above | below, above, below))
    else:
        counted = (count_true(both(part, batch.mask)) for part in (batch.mask, above | below, above, below))
    sums = _row_total(*counted)
    return Moments(_TERM, sums, sums.new_empty(0))


def _row_total(*columns: Tensor) -> Tensor:
    """(S,) float64: the sum of each (B,) column."""
    return torch.stack([column.float() for column in columns]).double().sum(-1)


def noise_floor(first: Tensor, again: Tensor, mask: Tensor) -> Stats:
    """The trainer against itself: what the same weights give for the same text in another batch size.

    Differences between engine and trainer of this size mean nothing.

    Args:
        first: (B, T) log-probs of the loss step, nats.
        again: (B, T) log-probs of a second forward.
        mask: (B, T) bool.
    """
    rows = ratio_rows(again, first, mask)
    return Stats({"noise_floor": Group(fold_ratio_rows(rows), RATIO_DIAGNOSTICS)})
