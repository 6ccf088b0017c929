"""Correction: from a PolicyBatch to weights, a keep mask and diagnostics. Nothing here carries gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from trl_offpolicy.checks import check_bool, check_choice, check_number
from trl_offpolicy.correction.measure import LEVELS, Evidence, Level, Measure, WeightsUsed, collect, term_names
from trl_offpolicy.correction.ratio_table import RatioTable
from trl_offpolicy.correction.terms import KeepTerm, Violations, Weight
from trl_offpolicy.correction.terms.base import is_late
from trl_offpolicy.correction.terms.batchwide import check_group_rejections, check_kept_baseline
from trl_offpolicy.functional._fast import as_float, both
from trl_offpolicy.functional.collective import sum_ranks
from trl_offpolicy.functional.weights import NORMALIZER_FLOOR
from trl_offpolicy.types import SCOPES, CorrectionOutput, PolicyBatch, Ratio, Scope

Normalize = Literal["none", "original", "kept"]
MeasureOn = Literal["original", "remaining"]
Nonfinite = Literal["neutral", "drop", "raise"]
NormalizeOver = Literal["generation_batch", "micro_batch"]
Baseline = Literal["all", "kept"]
_CHOICES = {
    "normalize": get_args(Normalize),
    "normalize_over": get_args(NormalizeOver),
    "measure_on": get_args(MeasureOn),
    "nonfinite": get_args(Nonfinite),
    "baseline": get_args(Baseline),
}


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Importance weights and rejection for samples of another policy.

    Args:
        weight: a weight, several on different ratios, or None.
        keep: keep terms; a token stays only if all of them keep it.
        normalize: divide the weights by their mean over the "original" trainable tokens (verl, slime) or over the
            "kept" ones.
        normalize_over: the mean is taken over the "generation_batch" (all ranks; decided before it is split) or over
            each "micro_batch" of this rank.
        measure_on: "original": every term measures all trainable tokens; "remaining": each measures what earlier
            terms kept, and weights come last (SkyRL).
        nonfinite: a trainable token with a NaN or infinite log-ratio is "neutral" (ratio 1, kept), is "drop"ped, or
            makes the call "raise" (which waits for the device). It is always counted and left out of diagnostics. The
            log-ratios are those that the terms read; without any term, that of old/sampling where the batch has it.
        baseline: "kept" leaves dropped responses out of their group's baseline: the trainers recompute the advantages
            over what is left (terms on old/sampling only). "all": advantages stay as they were made.
        correct_threshold: a response is correct if reward >= this; needed for ``keep/dropped_correct_fraction``.
        measure: which ratio diagnostics to compute: "full", "core" (a few sums of old/sampling and current/sampling:
            KL, total variation, chi-square, ESS), "off", or a tuple of groups, with "core" among them for those sums
            alone. What a batch lacks the policies for is left out. Weights and drops are counted in any case.
        compiled: run as one graph of ``torch.compile``. The first call takes up to half a minute.

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
    normalize_over: NormalizeOver = "generation_batch"
    measure_on: MeasureOn = "original"
    nonfinite: Nonfinite = "neutral"
    baseline: Baseline = "all"
    correct_threshold: float | None = None
    measure: tuple[Measure, ...] | Level = ("mismatch", "kept", "staleness", "total")
    compiled: bool = False

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            check_choice(field, getattr(self, field), allowed)
        check_bool(compiled=self.compiled)
        if not isinstance(self.keep, tuple) or not all(isinstance(term, KeepTerm) for term in self.keep):
            raise TypeError(f"keep must be a tuple of keep terms (they derive from KeepTerm), but got {self.keep!r}.")
        if not all(isinstance(weight, Weight) for weight in self.weights):
            raise TypeError(
                "weight must be a weight, a tuple of weights or None (they derive from Weight), "
                f"but got {self.weight!r}."
            )
        ratios = [weight.ratio for weight in self.weights]
        if len(set(ratios)) < len(ratios):
            raise ValueError(f"weight must name each ratio once, but got {ratios}; it would be applied twice.")
        if "current/sampling" in ratios and len(ratios) > 1:
            raise ValueError(
                f"weight must hold each factor of current/sampling = current/old x old/sampling once, but got {ratios}."
            )
        if isinstance(self.measure, str) and self.measure in LEVELS:
            object.__setattr__(self, "measure", LEVELS[self.measure])
        if not isinstance(self.measure, tuple):
            raise ValueError(
                f"measure must be one of {list(LEVELS)} or a tuple of some of {list(get_args(Measure))}, but got "
                f"{self.measure!r}."
            )
        for name in self.measure:
            if name not in get_args(Measure):
                raise ValueError(f"measure must name some of {list(get_args(Measure))}, but got {name!r}.")
        if self.correct_threshold is not None:
            check_number("correct_threshold", self.correct_threshold)
        if self.normalize != "none" and not self.weights:
            raise ValueError(f"normalize must be 'none' without a weight, but got {self.normalize!r}.")
        self._check_scopes()

    def _check_scopes(self) -> None:
        """Raise if something of wide scope depends on what is decided in the loss step."""
        late = next((weight for weight in self.weights if is_late(weight)), None)
        if self.normalize != "none" and self.normalize_over == "generation_batch" and late is not None:
            raise ValueError(
                f"normalize_over must be 'micro_batch' with a weight on {late.ratio!r} of scope {late.scope!r} (known "
                "one micro-batch at a time), but got 'generation_batch'."
            )
        check_group_rejections(self.keep, nonfinite_drops=self.nonfinite == "drop")
        if self.baseline == "kept":
            check_kept_baseline(self.keep)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """``weight`` as a tuple, empty for None."""
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
        """The widest scope of its parts. ``group`` and ``generation_batch`` are decided before the batch is split."""
        scopes: set[Scope] = {weight.scope for weight in self.weights} | {term.scope for term in self.keep}
        if self.normalize != "none":
            scopes.add(self.normalize_over)
        if self.baseline == "kept":
            scopes.add("group")
        return max(scopes, key=SCOPES.index, default="row")

    def split(self) -> tuple[Correction, Correction]:
        """The early and the late part of the correction.

        The early part is decided once on the whole generation batch, before it is split and shuffled. The late part is
        decided in every loss step, on batches that carry the early part's ``decided_weights`` and ``decided_keep``. A
        term is late if it reads the current policy or has ``scope="micro_batch"``.

        Raises:
            ValueError: the order of the terms cannot be kept, because an early term would have to see what happens in
                the loss step.
        """
        early_keep = tuple(term for term in self.keep if not is_late(term))
        late_keep = tuple(term for term in self.keep if is_late(term))
        early_weights = tuple(weight for weight in self.weights if not is_late(weight))
        late_weights = tuple(weight for weight in self.weights if is_late(weight))
        self._check_order(early_weights, early_keep, late_keep)

        # Weights are normalised where they are complete: ``_check_scopes`` and ``_check_order`` leave only one place.
        normalize_early: Normalize = self.normalize
        normalize_late: Normalize = "none"
        if self.normalize_over == "micro_batch":
            normalize_early, normalize_late = "none", self.normalize
        # ``mismatch`` does not change after the rollouts. ``staleness`` and ``total`` compare the current policy. What
        # is ``kept`` is known only after the last part that drops.
        measured_early: tuple[Measure, ...] = ("mismatch", "kept")
        measured_late: tuple[Measure, ...] = ("staleness", "total")
        if late_keep:
            measured_early, measured_late = ("mismatch",), ("staleness", "total", "kept")
        # Without a late part nothing is left to drop in the loss step; the early part has looked at the rest.
        nonfinite_late = self.nonfinite if late_keep or late_weights else "neutral"
        early = replace(
            self,
            weight=early_weights,
            keep=early_keep,
            normalize=normalize_early,
            measure=self._measuring(measured_early),
        )
        late = replace(
            self,
            weight=late_weights,
            keep=late_keep,
            normalize=normalize_late,
            baseline="all",  # advantages are made before the loss step
            nonfinite=nonfinite_late,
            measure=self._measuring(measured_late),
        )
        return early, late

    def _check_order(
        self, early_weights: tuple[Weight, ...], early_keep: tuple[KeepTerm, ...], late_keep: tuple[KeepTerm, ...]
    ) -> None:
        """Raise unless the early terms followed by the late ones give what the correction's own order gives."""
        in_order = self.keep == (*early_keep, *late_keep)
        if self.measure_on == "remaining" and late_keep and (early_weights or not in_order):
            raise ValueError(
                "measure_on must be 'original' when a part of wide scope meets terms that are decided in the loss step "
                f"({late_keep[0].name}), which drop tokens only after it was decided, but got 'remaining'."
            )
        if self.normalize != "none" and self.normalize_over == "micro_batch" and early_weights:
            raise ValueError(
                f"normalize_over must be 'generation_batch' with a weight on {early_weights[0].ratio!r} that is "
                "decided before the batch is split, but got 'micro_batch'."
            )
        if self.normalize == "kept" and late_keep and self.normalize_over != "micro_batch":
            raise ValueError(
                f"normalize must not be 'kept' with terms that are decided in the loss step ({late_keep[0].name}): "
                "what they keep is not known when the weights are normalised."
            )

    @property
    def _measured(self) -> tuple[Measure, ...]:
        """``measure`` with its level spelled out."""
        return LEVELS[self.measure] if isinstance(self.measure, str) else self.measure

    def measures(self, group: Measure, *, whole: bool = False) -> bool:
        """Whether the diagnostics of a ratio are computed; ``whole``: all of them, not only the sums of a core pass."""
        return group in self._measured and not (whole and "core" in self._measured)

    def _measuring(self, groups: tuple[Measure, ...]) -> tuple[Measure, ...]:
        return tuple(name for name in self._measured if name in groups or name == "core")

    def __call__(self, batch: PolicyBatch) -> CorrectionOutput:
        """Weights, keep mask and diagnostics of a batch.

        Raises:
            ValueError: ``sampling_per_token_logps`` is needed but absent, or a log-ratio is not finite under
                ``nonfinite="raise"``.
        """
        if not isinstance(batch, PolicyBatch):
            raise TypeError(f"batch must be a PolicyBatch, but got {type(batch).__name__}.")
        if self.needs_sampling and batch.sampling_per_token_logps is None:
            raise ValueError(
                "sampling_per_token_logps must be given, because the correction reads "
                f"{sorted(self.required_ratios)}, but got None. Ask the engine for the log-probs of the sampled tokens."
            )
        with torch.no_grad():
            return _run_compiled(self, batch) if self.compiled else self._run(batch)

    def _run(self, batch: PolicyBatch) -> CorrectionOutput:
        """The call without its check and without ``torch.no_grad``; torch.compile traces this part."""
        ratios = RatioTable(batch, core="core" in self._measured)
        base = self._usable(batch, ratios)
        decisions, keep = self._keep(batch, ratios, base)
        keep_mask = both(base, keep)
        measured = base if self.measure_on == "original" else keep_mask
        weights = self._weigh(ratios, measured, keep, batch.mask, keep_mask)
        stats = collect(
            batch,
            ratios,
            Evidence(decisions, keep, keep_mask, base is not batch.mask, weights),
            wanted=self._measured,
            drops_nonfinite=self.nonfinite == "drop",
            correct_threshold=self.correct_threshold,
        )
        applied = None if weights is None else weights.applied
        if batch.decided_weights is not None:  # of the part that ran before the batch was split
            decided = batch.decided_weights
            if decided.shape == batch.mask.shape:  # padding may hold anything
                decided = torch.where(batch.mask, decided, 0.0)
            applied = decided if applied is None else applied * decided
        if applied is None:
            return CorrectionOutput(as_float(batch.mask), keep_mask, stats)
        return CorrectionOutput(
            weights=torch.where(batch.mask, applied, 0.0),
            keep_mask=keep_mask,
            stats=stats,
            sequence_weights=applied if applied.shape[-1] == 1 else None,
        )

    def decide(self, batch: PolicyBatch, ratios: RatioTable) -> tuple[Tensor, WeightsUsed | None]:
        """The keep mask (B, T) and the weights (None = 1) alone, without diagnostics; ``ratios`` are of ``batch``."""
        base = self._usable(batch, ratios)
        _, keep = self._keep(batch, ratios, base)
        keep_mask = both(base, keep)
        measured = base if self.measure_on == "original" else keep_mask
        return keep_mask, self._weigh(ratios, measured, keep, batch.mask, keep_mask)

    def _usable(self, batch: PolicyBatch, ratios: RatioTable) -> Tensor:
        """The trainable tokens, without the unobserved ones under ``nonfinite="drop"``."""
        if self.nonfinite == "neutral":
            return batch.mask
        usable = batch.mask
        read: set[Ratio] = set(self.required_ratios)
        # Without terms the loss may read mu itself. After an early part, what that left out is not measured later.
        if (not read or batch.decided_keep is not None) and batch.sampling_per_token_logps is not None:
            read.add("old/sampling")
        for ratio in sorted(read):
            observed = ratios[ratio].observed
            if self.nonfinite == "raise" and bool((batch.mask & ~observed).any()):
                raise ValueError(
                    f"{' and '.join(ratio.split('/'))} log-probs must be finite on trainable tokens "
                    "(nonfinite='raise'), but got NaN or infinity."
                )
            usable = usable & observed
        return usable

    def _keep(self, batch: PolicyBatch, ratios: RatioTable, base: Tensor) -> tuple[dict[str, Violations], Tensor]:
        """Each term's violations, by its name in the metrics, and the joint keep mask.

        The mask is (B, 1) as long as all terms decide on sequences. Nothing then needs a second pass over the tokens.
        """
        keep = torch.ones_like(base[:, :1]) if batch.decided_keep is None else batch.decided_keep != 0
        decisions = {}
        for name, term in zip(term_names(self.keep), self.keep, strict=True):
            left = keep if base is batch.mask else base & keep
            measured = base if self.measure_on == "original" else both(base, keep)
            violations = term.violations(ratios.inputs(term.ratio, measured, keep=left))
            decisions[name] = violations
            for violated in violations:
                if violated is not None:
                    keep = keep & ~violated
        return decisions, keep

    def _weigh(
        self, ratios: RatioTable, measured: Tensor, keep: Tensor, mask: Tensor, keep_mask: Tensor
    ) -> WeightsUsed | None:
        """The product of all weights: raw, bounded and applied. None if there are no weights."""
        if not self.weights:
            return None
        parts = [weight.weigh(ratios.inputs(weight.ratio, measured, keep=keep)) for weight in self.weights]
        raw, bounded, shaped = parts[0].raw, parts[0].bounded, any(part.shaped for part in parts)
        for part in parts[1:]:
            raw, bounded = raw * part.raw, bounded * part.bounded
        normalizer = self._normalizer(bounded, mask, keep_mask)
        applied = bounded if normalizer is None else bounded / normalizer
        return WeightsUsed(raw, bounded, shaped, applied, normalizer)

    def _normalizer(self, weights: Tensor, mask: Tensor, keep_mask: Tensor) -> Tensor | None:
        """0-d mean weight over tokens (or non-empty sequences) and ranks; 1 if that mean is 0."""
        if self.normalize == "none":
            return None
        unit = mask if self.normalize == "original" else keep_mask
        if weights.shape[-1] == 1:  # one weight for a sequence counts once, whatever its length
            unit = unit.any(-1, keepdim=True)
        total = torch.stack([torch.where(unit, weights, 0.0).sum(dtype=torch.float64), unit.sum().double()])
        if self.normalize_over == "generation_batch":
            total = sum_ranks(total)
        mean = total[0] / total[1].clamp(min=1.0)
        return torch.where(mean > NORMALIZER_FLOOR, mean, 1.0).float()


_COMPILE_OPTIONS: dict[str, Any] = {"cpp.max_horizontal_fusion_size": 64}
"""Lets inductor take all row sums of a pass in one loop over the tokens; its default of 16 needs several loops."""


def _run_compiled(correction: Correction, batch: PolicyBatch) -> CorrectionOutput:
    """Run the correction as one graph of torch.compile: a few fused kernels instead of several hundred operations.

    The graph is compiled at the first call, and again when a later call brings something new. The numbers differ from
    those of the plain call by the rounding of float32 sums.
    """
    _ = batch.mask, batch.lengths  # cached here: on Python 3.11 a cached_property takes a lock, which is not traced
    out: CorrectionOutput = _compiled()(correction, batch)
    return replace(out, keep_mask=out.keep_mask.view(torch.bool))


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(_run_for_compiler, options=_COMPILE_OPTIONS)


def _run_for_compiler(correction: Correction, batch: PolicyBatch) -> CorrectionOutput:
    """:meth:`Correction._run` with the keep mask as bytes, because inductor writes booleans one by one on a CPU."""
    out = correction._run(batch)
    return replace(out, keep_mask=out.keep_mask.float().to(torch.uint8))
