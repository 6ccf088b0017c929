"""The log-ratios of one batch, and what a term sees of each."""

from __future__ import annotations

from torch import Tensor

from trl_offpolicy.correction.terms import TermInputs
from trl_offpolicy.functional.log_ratios import LogRatio, log_ratio
from trl_offpolicy.functional.moments import RatioRows, ratio_rows
from trl_offpolicy.types import PolicyBatch, Ratio


class RatioTable:
    """The log-ratios of one batch, each computed once.

    A ratio names its policies by role ("old/sampling"). Which log-probs play the role of ``old`` depends on the batch
    and on who asks: diagnostics (:meth:`_measured_as`) or terms (:meth:`_weighed_as`). Roles that resolve to the same
    log-probs share one log-ratio.

    Args:
        batch: the batch.
        core: row sums for diagnostics are those of a core pass.
    """

    def __init__(self, batch: PolicyBatch, *, core: bool = False) -> None:
        self._batch = batch
        self._core = core
        self._known: dict[tuple[str, str], LogRatio] = {}
        self._rows: dict[tuple[str, str], RatioRows] = {}

    def __getitem__(self, ratio: Ratio) -> LogRatio:
        numerator, denominator = ratio.split("/")
        return self._between(self._measured_as(numerator), self._measured_as(denominator))

    def _between(self, numerator: str, denominator: str) -> LogRatio:
        if (numerator, denominator) not in self._known:
            batch = self._batch
            found = log_ratio(batch.logps(numerator), batch.logps(denominator), batch.mask)
            self._known[numerator, denominator] = found
        return self._known[numerator, denominator]

    def rows(self, ratio: Ratio) -> RatioRows:
        """Row sums for the diagnostics of ``ratio``. One that no term reads is computed in blocks and not kept."""
        batch = self._batch
        numerator, denominator = (self._measured_as(role) for role in ratio.split("/"))
        names = (numerator, denominator)
        if names not in self._rows:
            known = self._known.get(names)
            first = batch.logps(numerator) if known is None else known
            below = batch.logps(denominator)
            self._rows[names] = ratio_rows(first, below, batch.mask, batch.lengths, core=self._core)
        return self._rows[names]

    def inputs(self, ratio: Ratio, mask: Tensor, *, keep: Tensor) -> TermInputs:
        """What a term on ``ratio`` sees when it measures ``mask`` and ``keep`` is still in the loss."""
        batch = self._batch
        numerator, denominator = (self._weighed_as(role) for role in ratio.split("/"))
        return TermInputs(
            log_ratios=self._between(numerator, denominator).values,
            mask=mask,
            advantages=batch.token_advantages,
            denominator_logps=batch.logps(denominator),
            turn_ids=batch.turn_ids,
            group_ids=batch.group_ids,
            version_lags=batch.version_lags,
            trainable=batch.mask,
            keep=keep,
            group_rewards=batch.group_rewards,
        )

    def _measured_as(self, role: str) -> str:
        """For diagnostics: ``old`` is the current policy where the batch has no old log-probs.

        The name has to be resolved before a log-ratio is looked up, although ``PolicyBatch.logps("old")`` falls back in
        the same way: "old/sampling" and "current/sampling" are then one entry of the table and not two equal ones.
        """
        return "current" if role == "old" and self._batch.old_per_token_logps is None else role

    def _weighed_as(self, role: str) -> str:
        """For terms: ``old`` is the centre of the loss's ratio where the batch has no old log-probs.

        The loss then holds current/proximal and the weight proximal/sampling: each factor once.
        """
        if role != "old" or self._batch.old_per_token_logps is not None:
            return role
        return "current" if self._batch.proximal_per_token_logps is None else "proximal"
