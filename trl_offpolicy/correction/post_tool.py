"""Mismatch after a tool call: old/sampling on the tokens after the first tool output, apart from those before it.

What a tool returns was written by no policy. It moves the model to contexts that it rarely reaches by itself, where
tokens are less certain and engine and trainer differ more (Liu 2026, "Off-Policy Drift in LLM RL", source 5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_offpolicy.functional._fast import both, count_true
from trl_offpolicy.functional.diagnostics import RATIO_DIAGNOSTICS, fraction, kl_k3
from trl_offpolicy.functional.levels import turn_index
from trl_offpolicy.functional.log_ratios import LogRatio, excess_of
from trl_offpolicy.functional.moments import Layout, Moments, moments
from trl_offpolicy.stats import Group

_LAYOUT = Layout(
    sums=("tokens", "log_ratio", "abs_log_ratio", "excess", "excess_sq", "all", "tokens_before", "k3_before")
)
_SHARED = ("kl_k1", "kl_k3", "chi2_token", "logp_diff_mean")


def _kl_k3_ratio(m: Moments) -> Tensor:
    """KL k3 after the first tool output / before it; 0 where one of the two has no tokens or is 0."""
    before = m["k3_before"] / m["tokens_before"].clamp(min=1.0)
    return torch.where(before > 0, kl_k3(m) / before.clamp(min=torch.finfo(torch.float64).tiny), 0.0)


POST_TOOL_DIAGNOSTICS = {
    **{name: RATIO_DIAGNOSTICS[name] for name in _SHARED},
    "kl_k3_ratio": _kl_k3_ratio,
    "token_fraction": fraction("tokens", "all"),
}


GROUPS = {"post_tool": (_LAYOUT, POST_TOOL_DIAGNOSTICS)}
"""Names of the moments and finalisers, by group."""


@torch.no_grad()
def post_tool_group(ratio: LogRatio, mask: Tensor, turn_ids: Tensor, rows: Tensor | None = None) -> Group:
    """The diagnostics ``post_tool/*`` of a batch.

    Args:
        ratio: old/sampling on the trainable tokens.
        mask: (B, T) bool, the trainable tokens.
        turn_ids: (B, T) integer; the first turn of a row stands before its first tool output.
        rows: (B,) bool, rows that count; None = all.
    """
    observed = ratio.observed if rows is None else both(ratio.observed, rows.unsqueeze(-1))
    later = turn_index(mask, turn_ids) > 0
    after, before = both(observed, later), both(observed, ~later)
    excess = excess_of(ratio.values)
    log_ratios, excess_after = (torch.where(after, part, 0.0).double() for part in (ratio.values, excess))
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
    return Group(moments(_LAYOUT, sums), POST_TOOL_DIAGNOSTICS)
