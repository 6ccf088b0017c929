"""The log-ratios of one batch, and what a term sees of each."""

from __future__ import annotations

from torch import Tensor

from trl_offpolicy.correction.terms import TermInputs
from trl_offpolicy.functional.log_ratios import LogRatio, log_ratio
from trl_offpolicy.functional.moments import RatioRows, ratio_rows
from trl_offpolicy.types import PolicyBatch, Ratio


class RatioTable:
    """The log-ratios of one batch, each computed once."""

    def __init__(self, batch: PolicyBatch) -> None:
        self._batch = batch
        self._known: dict[tuple[str, str], LogRatio] = {}

    def __getitem__(self, ratio: Ratio) -> LogRatio:
        return self._between(*(self._resolve(name) for name in ratio.split("/")))

    def _between(self, numerator: str, denominator: str) -> LogRatio:
        if (numerator, denominator) not in self._known:
            batch = self._batch
            self._known[numerator, denominator] = log_ratio(
                batch.logps(numerator), batch.logps(denominator), batch.mask
            )
        return self._known[numerator, denominator]

    def rows(self, ratio: Ratio) -> RatioRows:
        """Row sums of its diagnostics. A ratio that no term reads is made in blocks and not kept."""
        batch = self._batch
        numerator, denominator = (self._resolve(name) for name in ratio.split("/"))
        known = self._known.get((numerator, denominator))
        return ratio_rows(batch.logps(numerator) if known is None else known, batch.logps(denominator), batch.mask)

    def inputs(self, ratio: Ratio, mask: Tensor, *, keep: Tensor) -> TermInputs:
        """What a term on ``ratio`` sees when it measures ``mask`` and ``keep`` is still in the loss."""
        batch = self._batch
        return TermInputs(
            log_ratios=self._between(*(self._centred(name) for name in ratio.split("/"))).values,
            mask=mask,
            advantages=batch.token_advantages,
            denominator_logps=batch.logps(self._centred(ratio.rpartition("/")[2])),
            turn_ids=batch.turn_ids,
            group_ids=batch.group_ids,
            version_lags=batch.version_lags,
            trainable=batch.mask,
            keep=keep,
        )

    def _resolve(self, policy: str) -> str:
        """``old`` is the current policy where the batch has no old log-probs."""
        return "current" if policy == "old" and self._batch.old_per_token_logps is None else policy

    def _centred(self, policy: str) -> str:
        """For terms: ``old`` is the centre of the loss's ratio where the batch has no old log-probs.

        The loss then holds current/proximal and the weight proximal/sampling: each factor once.
        """
        if policy == "old" and self._batch.old_per_token_logps is None:
            return "current" if self._batch.proximal_per_token_logps is None else "proximal"
        return policy
