"""The diagnostics of a :class:`~trl_offpolicy.Correction`: which groups of moments a call collects."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trl_offpolicy.correction.ratio_table import RatioTable
from trl_offpolicy.correction.terms import KeepTerm, Violations
from trl_offpolicy.functional._fast import both, count_true
from trl_offpolicy.functional.diagnostics import (
    RATIO_DIAGNOSTICS,
    WEIGHT_DIAGNOSTICS,
    Finalizer,
    fraction,
    kl_k1,
    kl_k3,
)
from trl_offpolicy.functional.intervals import ClusterRows
from trl_offpolicy.functional.lags import LAG_NAMES, sums_by_lag
from trl_offpolicy.functional.levels import turn_index
from trl_offpolicy.functional.log_ratios import LogRatio, excess_of
from trl_offpolicy.functional.moments import (
    CORE_LAYOUT,
    ROW_LAYOUT,
    Layout,
    Moments,
    RatioRows,
    core_row_moments,
    fold_ratio_rows,
    is_core,
    moments,
    ratio_row_moments,
    ratio_rows,
)
from trl_offpolicy.functional.sequence_ess import PRODUCT_DIAGNOSTICS, PRODUCT_LAYOUT, product_moments
from trl_offpolicy.functional.weight_moments import WEIGHT_LAYOUT, cut_rows, fold_weight_rows, weight_rows
from trl_offpolicy.functional.weights import ess_fraction
from trl_offpolicy.stats import Group, Stats
from trl_offpolicy.types import PolicyBatch

Measure = Literal["mismatch", "kept", "staleness", "total", "core"]
"""The measured ratios: old/sampling on all trainable tokens and on the kept ones, current/old, current/sampling. With
"core" only the sums of a core pass are taken of each."""
Level = Literal["full", "core", "off"]
LEVELS: Mapping[str, tuple[Measure, ...]] = {
    "full": ("mismatch", "kept", "staleness", "total"),
    "core": ("mismatch", "total", "core"),
    "off": (),
}
CORE_DIAGNOSTICS: Mapping[str, Finalizer] = {
    name: RATIO_DIAGNOSTICS[name]
    for name in ("kl_k1", "kl_k3", "tv", "chi2_token", "logp_diff_mean", "ess_sequence", "nonfinite_fraction")
}
"""The diagnostics of a ratio that a core pass gives."""


class WeightsUsed(NamedTuple):
    """The product of a correction's weights, float32 (B, 1) or (B, T).

    ``raw`` is the product of the ratios themselves, ``bounded`` is after caps, bands and shapes, and ``applied`` is
    after the division by the 0-d ``normalizer`` (None = not normalised). ``shaped``: see :class:`~.terms.Weighed`.
    """

    raw: Tensor
    bounded: Tensor
    shaped: bool
    applied: Tensor
    normalizer: Tensor | None


class Evidence(NamedTuple):
    """What a correction decided.

    ``decisions`` holds the decision of each keep term by its name in the metrics, and ``keep``, bool (B, 1) or (B, T),
    is their joint mask. ``keep_mask`` (B, T) bool is True on the tokens that stay. ``unobserved_dropped`` is True if
    single tokens were dropped because their log-ratio is not finite. ``weights`` is None if there are no weights.
    """

    decisions: Mapping[str, Violations]
    keep: Tensor
    keep_mask: Tensor
    unobserved_dropped: bool
    weights: WeightsUsed | None

    @property
    def kept_rows(self) -> Tensor | None:
        """(B,) bool where only whole sequences were dropped; None where single tokens were."""
        return self.keep.squeeze(-1) if self.keep.shape[-1] == 1 and not self.unobserved_dropped else None


def collect(
    batch: PolicyBatch,
    ratios: RatioTable,
    evidence: Evidence,
    *,
    wanted: tuple[Measure, ...],
    drops_nonfinite: bool,
    correct_threshold: float | None,
) -> Stats:
    """All diagnostics of one call of a correction.

    Args:
        batch: the batch of the call.
        ratios: the log-ratios of ``batch``.
        evidence: what the correction decided.
        wanted: the ratio diagnostics to compute; those whose policies the batch lacks are left out.
        drops_nonfinite: True if tokens may be dropped without a keep term.
        correct_threshold: a response is correct if its reward is at least this; None = it is not known.
    """
    groups = _ratio_groups(batch, ratios, evidence, wanted)
    if evidence.weights is not None:
        groups.update(_weight_groups(batch, evidence, evidence.weights))
    if evidence.decisions or drops_nonfinite:
        groups.update(_keep_groups(batch, evidence, correct_threshold))
    return Stats(groups)


# -------------------------------------------------------------------------------------------- ratios of two policies


def _ratio_groups(
    batch: PolicyBatch, ratios: RatioTable, evidence: Evidence, wanted: tuple[Measure, ...]
) -> dict[str, Group]:
    groups = {}
    has_old, has_sampling = batch.old_per_token_logps is not None, batch.sampling_per_token_logps is not None
    if has_sampling and {"mismatch", "kept"} & set(wanted):
        groups.update(_mismatch_groups(batch, ratios, evidence, wanted))
    if has_old and "staleness" in wanted:
        groups["staleness"] = _ratio_group(ratios.rows("current/old"), batch)
        groups["staleness#products"] = _product_group(ratios.rows("current/old"))
    if has_sampling and "total" in wanted:
        if not has_old and "mismatch" in groups and batch.version_lags is None:
            groups["total"] = groups["mismatch"]  # old is the current policy: the same numbers
            groups["total#products"] = groups["mismatch#products"]
        else:
            groups["total"] = _ratio_group(ratios.rows("current/sampling"), batch)
            groups["total#products"] = _product_group(ratios.rows("current/sampling"))
            groups.update(_lag_groups(ratios, batch))
    return groups


def _mismatch_groups(
    batch: PolicyBatch, ratios: RatioTable, evidence: Evidence, wanted: tuple[Measure, ...]
) -> dict[str, Group]:
    """old/sampling on all trainable tokens, and on the kept ones."""
    groups = {}
    fresh = _sampled_by_current_weights(batch)
    rows = ratios.rows("old/sampling")
    by_row = _row_moments(rows)
    if "mismatch" in wanted:
        groups["mismatch"] = _ratio_group(rows, batch, fresh, by_row)
        groups["mismatch#products"] = _product_group(rows, fresh)
        if batch.turn_ids is not None:
            groups["post_tool"] = _post_tool_group(ratios["old/sampling"], batch.mask, batch.turn_ids, fresh)
    if "kept" in wanted:
        keep_rows = fresh
        kept = evidence.kept_rows
        if kept is None:
            rows = _kept_rows(ratios["old/sampling"], batch, evidence.keep_mask, core=is_core(rows))
            by_row = _row_moments(rows)
        else:  # whole rows were dropped: leave them out of the sums by row, without a second pass over the tokens
            keep_rows = kept if fresh is None else kept & fresh
        if is_core(rows):
            groups["kept"] = Group(_core_moments(_of_rows(by_row, keep_rows)), CORE_DIAGNOSTICS)
        else:
            groups["kept"] = Group(fold_ratio_rows(rows, keep_rows, by_row), RATIO_DIAGNOSTICS)
        groups["kept#products"] = _product_group(rows, keep_rows)
    return groups


def _sampled_by_current_weights(batch: PolicyBatch) -> Tensor | None:
    """(B,) bool: the rows on which the current policy serves as the missing old one; None = all rows."""
    if batch.old_per_token_logps is not None or batch.version_lags is None:
        return None
    return ((batch.version_lags == 0) | ~batch.mask).all(-1)


RATIO_INTERVALS = ("kl_k1", "kl_k3", "chi2_token", "chi2_sequence", "ppl_ratio", "ess_sequence")
WEIGHT_INTERVALS = ("ess_token", "ess_sequence")
"""Diagnostics that get a confidence interval."""


def _ratio_group(
    rows: RatioRows, batch: PolicyBatch, keep_rows: Tensor | None = None, by_row: Tensor | None = None
) -> Group:
    """The diagnostics of one ratio; ``by_row`` are the moments of each response, where they are known."""
    by_row = _row_moments(rows) if by_row is None else by_row
    values = _of_rows(by_row, keep_rows)
    if is_core(rows):
        named = tuple(name for name in RATIO_INTERVALS if name in CORE_DIAGNOSTICS)
        return Group(_core_moments(values), CORE_DIAGNOSTICS, ClusterRows(CORE_LAYOUT, values, batch.group_ids), named)
    clusters = ClusterRows(ROW_LAYOUT, values, batch.group_ids)
    return Group(fold_ratio_rows(rows, keep_rows, by_row), RATIO_DIAGNOSTICS, clusters, RATIO_INTERVALS)


def _row_moments(rows: RatioRows) -> Tensor:
    """Moments of each single response, of a full pass or of a core pass."""
    return core_row_moments(rows) if is_core(rows) else ratio_row_moments(rows)


def _of_rows(by_row: Tensor, keep_rows: Tensor | None) -> Tensor:
    """The moments of the responses that count, 0 for the others."""
    return by_row if keep_rows is None else torch.where(keep_rows.unsqueeze(-1), by_row, 0.0)


def _core_moments(values: Tensor) -> Moments:
    return Moments(CORE_LAYOUT, values.sum(0), values.new_empty(0))


def _product_group(rows: RatioRows, keep_rows: Tensor | None = None) -> Group:
    return Group(product_moments(rows, keep_rows), PRODUCT_DIAGNOSTICS)


def _kept_rows(ratio: LogRatio, batch: PolicyBatch, keep_mask: Tensor, *, core: bool) -> RatioRows:
    kept = LogRatio(torch.where(keep_mask, ratio.values, 0.0), ratio.observed & keep_mask)
    return ratio_rows(kept, batch.logps("sampling"), keep_mask, core=core)


# ----------------------------------------------------------------------------------------------------- by version lag

# Of fresh tokens (lag 0) current/sampling is the mismatch of engine and trainer alone. What an older token has beyond
# that is staleness. So a table by lag tells the two apart where nobody kept the old log-probs.

_LAG = Layout(sums=("tokens", "log_ratio", "abs_log_ratio", "excess", "excess_sq"))
_LAG_COLUMNS = [ROW_LAYOUT.sums.index(name) for name in _LAG.sums]


def _lag_tokens(m: Moments) -> Tensor:
    """Observed trainable tokens of this lag."""
    return m["tokens"]


def _lag_log_ratio_mean(m: Moments) -> Tensor:
    """E[l], nats."""
    return -kl_k1(m)


def _lag_ess_token(m: Moments) -> Tensor:
    """Effective sample size of the tokens' ratios, a fraction in [0, 1]."""
    total = m["tokens"] + m["excess"]
    return ess_fraction(total, m["excess_sq"] + 2 * m["excess"] + m["tokens"], m["tokens"])


_LAG_DIAGNOSTICS: Mapping[str, Finalizer] = {
    "tokens": _lag_tokens,
    "log_ratio_mean": _lag_log_ratio_mean,
    "logp_diff_mean": RATIO_DIAGNOSTICS["logp_diff_mean"],
    "ess_token": _lag_ess_token,
}


def _lag_groups(ratios: RatioTable, batch: PolicyBatch) -> dict[str, Group]:
    """The groups ``lag/<lag>`` of current/sampling, if the versions are known. A lag without tokens is not logged."""
    lags = batch.version_lags
    if lags is None:
        return {}
    if lags.shape[-1] == 1:  # one version a row: its sums are there already
        of_rows = ratios.rows("current/sampling").sums
        columns = tuple(of_rows[:, column] for column in _LAG_COLUMNS)  # a list as index is copied there, which waits
        lags = lags.squeeze(-1)
    else:
        values, observed = ratios["current/sampling"]
        excess = excess_of(values)
        columns = (observed, values, values.abs(), excess, excess.square())
    table = sums_by_lag(columns, lags)
    return {
        f"lag/{name}": Group(Moments(_LAG, sums, sums.new_empty(0)), _LAG_DIAGNOSTICS, sparse=True)
        for name, sums in zip(LAG_NAMES, table.unbind(0), strict=True)
    }


# ------------------------------------------------------------------------------------------------ after a tool call

# No policy wrote what a tool returns. It moves the model to contexts that it rarely reaches by itself, where tokens are
# less certain and engine and trainer differ more (Liu 2026, "Off-Policy Drift in LLM RL", the fifth source of drift).
# So old/sampling is measured on the tokens after the first tool output, apart from those before it.

_POST_TOOL = Layout(
    sums=("tokens", "log_ratio", "abs_log_ratio", "excess", "excess_sq", "all", "tokens_before", "k3_before")
)
_SHARED = ("kl_k1", "kl_k3", "chi2_token", "logp_diff_mean")


def _kl_k3_ratio(m: Moments) -> Tensor:
    """KL k3 after the first tool output / before it; 0 if one of the two has no tokens or is 0."""
    before = m["k3_before"] / m["tokens_before"].clamp(min=1.0)
    return torch.where(before > 0, kl_k3(m) / before.clamp(min=torch.finfo(torch.float64).tiny), 0.0)


_POST_TOOL_DIAGNOSTICS = {
    **{name: RATIO_DIAGNOSTICS[name] for name in _SHARED},
    "kl_k3_ratio": _kl_k3_ratio,
    "token_fraction": fraction("tokens", "all"),
}


def _post_tool_group(ratio: LogRatio, mask: Tensor, turn_ids: Tensor, rows: Tensor | None = None) -> Group:
    """The diagnostics ``post_tool/*`` of a batch.

    Args:
        ratio: old/sampling on the trainable tokens.
        mask: (B, T) bool, the trainable tokens.
        turn_ids: (B, T) integer; a row's turn with its first trainable token comes before its first tool output.
        rows: (B,) bool, rows that count; None = all.
    """
    observed = ratio.observed if rows is None else both(ratio.observed, rows.unsqueeze(-1))
    index = turn_index(mask, turn_ids)
    # Padding on the left may have an id of its own, which numbers a turn without tokens.
    first = torch.where(mask, index, index.shape[-1]).amin(-1, keepdim=True)
    later = index > first
    after, before = both(observed, later), both(observed, ~later)
    excess = excess_of(ratio.values)
    log_ratios, excess_after = (torch.where(after, part, 0.0).double() for part in (ratio.values, excess))
    # k3 from the excess at hand instead of a second expm1; a test compares it with functional.kl.k3.
    k3_before = torch.where(before, excess - ratio.values, 0.0).double()
    sums = [
        count_true(after).sum(),
        log_ratios.sum(),
        log_ratios.abs().sum(),
        excess_after.sum(),
        excess_after.square().sum(),
        count_true(observed).sum(),
        count_true(before).sum(),
        k3_before.sum(),
    ]
    return Group(moments(_POST_TOOL, sums), _POST_TOOL_DIAGNOSTICS)


# ----------------------------------------------------------------------------------------------------------- weights

_TRUNCATION = Layout(sums=("units", "truncated", "normalizer", "batches", "raw_mass", "cut_mass"))
_TRUNCATION_DIAGNOSTICS: Mapping[str, Finalizer] = {
    "truncated_fraction": fraction("truncated", "units"),
    "normalizer": fraction("normalizer", "batches"),
    "cut_mass": fraction("cut_mass", "raw_mass"),
}


def _weight_groups(batch: PolicyBatch, evidence: Evidence, used: WeightsUsed) -> dict[str, Group]:
    mask, kept = batch.mask, evidence.kept_rows
    # Counted before the sums: in the other order torch.compile makes one more pass (a fifth of a compiled call).
    changed, cut = _cut(batch, used)
    if kept is None:
        (before,) = weight_rows(mask, used.raw, lengths=batch.lengths)
        (rows,) = weight_rows(evidence.keep_mask, used.applied)
        values = rows.sums
    else:  # whole rows were dropped: one pass for both
        before, rows = weight_rows(mask, used.raw, used.applied, lengths=batch.lengths)
        values = torch.where(kept.unsqueeze(-1), rows.sums, 0.0)
    clusters = ClusterRows(Layout(WEIGHT_LAYOUT.sums), values, batch.group_ids)
    raw, after = fold_weight_rows(before), fold_weight_rows(rows, kept)
    by_row = _is_by_row(batch, used)
    one = torch.ones((), device=mask.device)
    bounds = [
        raw["rows" if by_row else "tokens"],
        changed,
        one if used.normalizer is None else used.normalizer,
        one,
        raw["row_weight" if by_row else "weight"],
        cut,
    ]
    return {
        "weight": Group(raw, WEIGHT_DIAGNOSTICS),
        "weight_applied": Group(after, WEIGHT_DIAGNOSTICS, clusters, WEIGHT_INTERVALS),
        "weight#bounds": Group(moments(_TRUNCATION, bounds), _TRUNCATION_DIAGNOSTICS),
    }


def _is_by_row(batch: PolicyBatch, used: WeightsUsed) -> bool:
    """True if the unit of the weights is the sequence, not the token."""
    return used.raw.shape[-1] == 1 and batch.mask.shape[-1] > 1


def _cut(batch: PolicyBatch, used: WeightsUsed) -> tuple[Tensor, Tensor]:
    """How many weights differ from their ratio, and the mass that caps and bands take away, in units of the weights.

    A floor adds mass to other units, which makes up for none of it. Shapes differ from their ratio by design: 0.
    """
    if used.shaped or used.raw is used.bounded:
        zero = torch.zeros((), dtype=torch.float64, device=batch.mask.device)
        return zero, zero
    mask = (batch.lengths > 0).unsqueeze(-1) if _is_by_row(batch, used) else batch.mask
    changed, cut = cut_rows(mask, used.raw, used.bounded).double().sum(-1).unbind()
    return changed, cut


# ------------------------------------------------------------------------------------------------- what was dropped

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
    "mismatch#products": (PRODUCT_LAYOUT, PRODUCT_DIAGNOSTICS),
    "post_tool": (_POST_TOOL, _POST_TOOL_DIAGNOSTICS),
    "lag/<lag>": (_LAG, _LAG_DIAGNOSTICS),
    "weight#bounds": (_TRUNCATION, _TRUNCATION_DIAGNOSTICS),
    "keep": (_KEEP, _KEEP_DIAGNOSTICS[True, True]),
    "keep/<term>": (_TERM, _TERM_DIAGNOSTICS),
}
"""The names of the moments and all finalisers of each group that measures neither a ratio nor a weight."""


def _keep_groups(batch: PolicyBatch, evidence: Evidence, correct_threshold: float | None) -> dict[str, Group]:
    lengths, kept_rows = batch.lengths, evidence.kept_rows
    kept = count_true(evidence.keep_mask) if kept_rows is None else lengths * kept_rows
    trainable = lengths > 0
    dropped = trainable & (kept == 0)
    # Sums over the dropped responses: how many have a reward, the rewards, and how many of them are correct.
    rewards = torch.zeros_like(lengths) if batch.rewards is None else batch.rewards.float()
    threshold = torch.inf if correct_threshold is None else correct_threshold
    rewarded = dropped & (rewards.abs() < torch.inf)
    correct = rewarded & (rewards >= threshold)
    reward = torch.where(rewarded, rewards, 0.0)
    sums = _row_total(lengths, lengths - kept, trainable, dropped, rewarded, reward, correct)
    # What this batch cannot tell gets no finaliser, and so no metric.
    table = _KEEP_DIAGNOSTICS[batch.rewards is not None, correct_threshold is not None]
    groups = {"keep": Group(Moments(_KEEP, sums, sums.new_empty(0)), table)}
    for name, violations in evidence.decisions.items():
        groups[f"keep/{name}"] = Group(_term_moments(violations, batch), _TERM_DIAGNOSTICS)
    return groups


def term_names(keep: tuple[KeepTerm, ...]) -> list[str]:
    """Metric names of the keep terms; a repeated one gets a number."""
    names: list[str] = []
    seen: dict[str, int] = {}
    for term in keep:
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
    """(S,) float64: the sum of each (B,) column. All are stacked first: one cast and one sum for all of them."""
    return torch.stack([column.float() for column in columns]).double().sum(-1)


# ------------------------------------------------------------------------------------- the trainer against itself


def noise_floor(first: Tensor, again: Tensor, mask: Tensor) -> Stats:
    """The trainer against itself: the difference that another batch size makes with the same weights on the same text.

    A difference of this size between engine and trainer means nothing.

    Args:
        first: (B, T) log-probs of the loss step, nats.
        again: (B, T) log-probs of a second forward.
        mask: (B, T) bool.
    """
    rows = ratio_rows(again, first, mask)
    return Stats({"noise_floor": Group(fold_ratio_rows(rows), RATIO_DIAGNOSTICS)})
