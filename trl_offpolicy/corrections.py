"""Correction: from a PolicyBatch to weights, a keep mask and diagnostics. Nothing here carries gradient."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from trl_offpolicy import correction_stats
from trl_offpolicy.functional.levels import aggregate_ratio
from trl_offpolicy.functional.log_ratios import LogRatio, log_ratio
from trl_offpolicy.functional.weights import NORMALIZER_FLOOR
from trl_offpolicy.terms import KeepTerm, Violations, Weight
from trl_offpolicy.types import CorrectionOutput, PolicyBatch, Ratio, Scope, check_number

Normalize = Literal["none", "original", "kept"]
MeasureOn = Literal["original", "remaining"]
Nonfinite = Literal["neutral", "drop", "raise"]
Measure = Literal["mismatch", "kept", "staleness", "total"]


class RatioTable:
    """The log-ratios of one batch, each computed once."""

    def __init__(self, batch: PolicyBatch) -> None:
        self._batch = batch
        self._known: dict[tuple[str, str], LogRatio] = {}

    def __getitem__(self, ratio: Ratio) -> LogRatio:
        numerator, denominator = (self._resolve(name) for name in ratio.split("/"))
        if (numerator, denominator) not in self._known:
            batch = self._batch
            self._known[numerator, denominator] = log_ratio(
                batch.logps(numerator), batch.logps(denominator), batch.mask
            )
        return self._known[numerator, denominator]

    def _resolve(self, policy: str) -> str:
        """``old`` is the current policy where the batch has no old log-probs."""
        return "current" if policy == "old" and self._batch.old_per_token_logps is None else policy


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Importance weights and rejection for samples of another policy.

    Args:
        weight: a weight, several on different ratios, or None.
        keep: keep terms, ANDed.
        normalize: divide the weights by their mean over the "original" trainable tokens (verl, slime) or the
            "kept" ones; the mean is taken over all ranks of the batch at hand.
        measure_on: "original": every term measures all trainable tokens; "remaining": each measures what earlier
            terms kept, and weights come last (SkyRL).
        nonfinite: a trainable token with a NaN or infinite log-ratio is "neutral" (ratio 1, kept), is "drop"ped, or
            makes the call "raise" (which waits for the device). It is counted and left out of diagnostics always.
        correct_threshold: a response is correct if reward >= this; needed for ``keep/dropped_correct_fraction``.
        measure: which ratio diagnostics to compute; those whose policies the batch lacks are left out.

    Raises:
        ValueError: two weights on one ratio, or an unknown option.

    Example:
        >>> import trl_offpolicy as op
        >>> batch = op.PolicyBatch(per_token_logps=torch.tensor([[-1.0, -2.0]]), advantages=torch.ones(1),
        ...     sampling_per_token_logps=torch.tensor([[-1.0, -3.0]]), completion_mask=torch.ones(1, 2).bool())
        >>> op.Correction(weight=op.TruncateWeight(max_weight=2.0))(batch).weights
        tensor([[1., 2.]])
    """

    weight: Weight | tuple[Weight, ...] | None = None
    keep: tuple[KeepTerm, ...] = ()
    normalize: Normalize = "none"
    measure_on: MeasureOn = "original"
    nonfinite: Nonfinite = "neutral"
    correct_threshold: float | None = None
    measure: tuple[Measure, ...] = ("mismatch", "kept", "staleness", "total")

    def __post_init__(self) -> None:
        for field, allowed in (("normalize", Normalize), ("measure_on", MeasureOn), ("nonfinite", Nonfinite)):
            if getattr(self, field) not in get_args(allowed):
                raise ValueError(f"{field} must be one of {list(get_args(allowed))}, but got {getattr(self, field)!r}.")
        if not isinstance(self.keep, tuple) or not all(hasattr(term, "violations") for term in self.keep):
            raise TypeError(f"keep must be a tuple of keep terms, but got {self.keep!r}.")
        if not all(hasattr(weight, "bound") for weight in self.weights):
            raise TypeError(f"weight must be a weight, a tuple of weights or None, but got {self.weight!r}.")
        ratios = [weight.ratio for weight in self.weights]
        if len(set(ratios)) < len(ratios):
            raise ValueError(f"weight must name each ratio once, but got {ratios}; it would be applied twice.")
        if unknown := set(self.measure) - set(get_args(Measure)):
            raise ValueError(f"measure must name some of {list(get_args(Measure))}, but got {sorted(unknown)}.")
        if self.correct_threshold is not None:
            check_number("correct_threshold", self.correct_threshold)
        if self.normalize != "none" and not self.weights:
            raise ValueError(f"normalize must be 'none' without a weight, but got {self.normalize!r}.")

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights as a tuple."""
        if self.weight is None:
            return ()
        return self.weight if isinstance(self.weight, tuple) else (self.weight,)

    @cached_property
    def required_ratios(self) -> frozenset[Ratio]:
        """The ratios that weights and keep terms read."""
        return frozenset([weight.ratio for weight in self.weights] + [term.ratio for term in self.keep])

    @property
    def needs_sampling(self) -> bool:
        """True if any term reads the sampling policy."""
        return any("sampling" in ratio for ratio in self.required_ratios)

    @property
    def scope(self) -> Scope:
        """The widest scope of its parts; normalisation needs the whole generation batch."""
        scopes = {weight.scope for weight in self.weights} | {term.scope for term in self.keep}
        return "generation_batch" if self.normalize != "none" or scopes - {"row"} else "row"

    @torch.no_grad()
    def __call__(self, batch: PolicyBatch) -> CorrectionOutput:
        """Run on a batch.

        Raises:
            ValueError: ``sampling_per_token_logps`` is needed but absent; or a non-finite log-ratio under
                ``nonfinite="raise"``.
        """
        if self.needs_sampling and batch.sampling_per_token_logps is None:
            raise ValueError(
                "sampling_per_token_logps must be given, because the correction reads "
                f"{sorted(self.required_ratios)}, but got None. Ask the engine for the log-probs of the sampled tokens."
            )
        ratios = RatioTable(batch)
        base = self._usable(batch, ratios)
        decisions, keep = self._keep(batch, ratios, base)
        raw, bounded = self._weigh(ratios, base if self.measure_on == "original" else base & keep)
        normalizer = None if bounded is None else self._normalizer(bounded, batch.mask, keep & base)
        applied = bounded if normalizer is None or bounded is None else bounded / normalizer
        keep_mask = base & keep
        stats = correction_stats.collect(
            self,
            batch,
            ratios,
            correction_stats.Evidence(decisions, keep, keep_mask, raw, bounded, applied, normalizer),
        )
        return CorrectionOutput(
            weights=batch.mask.float() if applied is None else torch.where(batch.mask, applied, 0.0),
            keep_mask=keep_mask,
            stats=stats,
            sequence_weights=applied if applied is not None and applied.shape[-1] == 1 else None,
        )

    def _usable(self, batch: PolicyBatch, ratios: RatioTable) -> Tensor:
        """Trainable tokens, less the unobserved ones where ``nonfinite`` says so."""
        if self.nonfinite == "neutral":
            return batch.mask
        usable = batch.mask
        for ratio in sorted(self.required_ratios):
            observed = ratios[ratio].observed
            if self.nonfinite == "raise" and bool((batch.mask & ~observed).any()):
                raise ValueError(
                    f"{' and '.join(ratio.split('/'))} log-probs must be finite on trainable tokens "
                    "(nonfinite='raise'), but got NaN or infinity."
                )
            usable = usable & observed
        return usable

    def _keep(self, batch: PolicyBatch, ratios: RatioTable, base: Tensor) -> tuple[list[Violations], Tensor]:
        """Each term's violations, and their joint keep mask: (B, 1) while all terms decide on sequences."""
        keep = torch.ones_like(base[:, :1])
        decisions = []
        for term in self.keep:
            measured = base if self.measure_on == "original" else base & keep
            violations = term.violations(ratios[term.ratio].values, measured, batch.token_advantages)
            decisions.append(violations)
            for violated in violations:
                if violated is not None:
                    keep = keep & ~violated
        return decisions, keep

    def _weigh(self, ratios: RatioTable, measured: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Product of the raw ratios and of the bounded weights, (B, 1) or (B, T)."""
        raw: Tensor | None = None
        bounded: Tensor | None = None
        for weight in self.weights:
            ratio = aggregate_ratio(ratios[weight.ratio].values, measured, weight.level)
            factor = weight.bound(ratio)
            raw = ratio if raw is None else raw * ratio
            bounded = factor if bounded is None else bounded * factor
        return raw, bounded

    def _normalizer(self, weights: Tensor, mask: Tensor, keep_mask: Tensor) -> Tensor | None:
        """0-d mean weight over tokens (or non-empty sequences) and ranks; 1 where it vanishes."""
        if self.normalize == "none":
            return None
        unit = mask if self.normalize == "original" else keep_mask
        unit = unit.any(-1, keepdim=True) if weights.shape[-1] == 1 else unit
        total = torch.stack([torch.where(unit, weights, 0.0).sum(dtype=torch.float64), unit.sum().double()])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        mean = total[0] / total[1].clamp(min=1.0)
        return torch.where(mean > NORMALIZER_FLOOR, mean, 1.0).float()
