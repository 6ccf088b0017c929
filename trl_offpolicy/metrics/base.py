"""What all metrics share: packed moments as states, and a finaliser that the diagnostics of a Correction use too.

A metric consists of a base, which defines what ``update`` takes, and of a finaliser, which holds the formula.
:func:`derived` puts the two together, so that no formula is written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torchmetrics import Metric

from trl_offpolicy.functional._shapes import check_zero_or_one
from trl_offpolicy.functional.diagnostics import Finalizer
from trl_offpolicy.functional.log_ratios import log_ratio
from trl_offpolicy.functional.moments import RATIO_LAYOUT, Layout, Moments, fold_ratio_rows, ratio_rows
from trl_offpolicy.functional.weight_moments import WEIGHT_LAYOUT, weight_moments


class MomentMetric(Metric):
    """A shell around moments: ``update`` adds them up, ``compute`` applies the finaliser.

    Its states are ``sums`` (additive, histogram counts included) and ``maxima``. Both stay float64 even if the module
    that holds the metric is cast, because counts and differences of sums are not exact in fewer bits.
    """

    is_differentiable = False
    full_state_update = False
    layout: ClassVar[Layout]
    key: ClassVar[str]
    sums: Tensor
    maxima: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        sums = torch.zeros(len(self.layout.sums) + self.layout.bins, dtype=torch.float64)
        maxima = torch.full((len(self.layout.maxima),), -torch.inf, dtype=torch.float64)
        self.add_state("sums", sums, dist_reduce_fx="sum")
        self.add_state("maxima", maxima, dist_reduce_fx="max")

    @staticmethod
    def finalize(m: Moments) -> Tensor:
        """The value from the moments, 0-d float64. Each metric has its function of ``functional.diagnostics`` here."""
        raise NotImplementedError("finalize must be set by the metric, but got none.")

    def compute(self) -> Tensor:
        """The value, 0-d float64; a sample without any trainable token gives 0."""
        return self.finalize(Moments(self.layout, self.sums, self.maxima))

    def _add(self, batch: Moments) -> None:
        """Add moments to the states, not in place: the metrics of a compute group share their state tensors."""
        self.sums = self.sums + batch.sums
        self.maxima = torch.maximum(self.maxima, batch.maxima)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> MomentMetric:
        """Move the states between devices, never to another dtype."""
        super()._apply(fn, exclude_state=("sums", "maxima", *exclude_state))
        for name in ("sums", "maxima"):
            self._defaults[name] = _moved(fn, self._defaults[name])
            setattr(self, name, _moved(fn, getattr(self, name)))
        self._computed = None
        return self


M = TypeVar("M", bound=MomentMetric)


def derived(
    base: type[M],
    name: str,
    key: str,
    finalize: Finalizer,
    module: str,
    *,
    better: bool | None = False,
    **members: Any,
) -> type[M]:
    """The metric class that adds a finaliser, whose docstring holds the formula, to ``base``.

    Args:
        base: the class that defines what ``update`` takes.
        name: name of the class. The variable of ``module`` that holds it has the same name, so that it can be pickled.
        key: key of the metric, below ``offpolicy/``.
        finalize: from moments to the 0-d float64 value.
        module: the ``__name__`` of the module.
        better: ``higher_is_better`` of torchmetrics; None if the best value lies inside the range.
        **members: further attributes of the class.
    """
    formula = " ".join((finalize.__doc__ or "").split())
    text = (
        f"``{key}``: {formula}\n\n``update`` and notation: :class:`~trl_offpolicy.metrics.{base.__name__}`. "
        "Unit, normaliser, healthy range and source: docs/metrics.md."
    )
    body = {"key": key, "finalize": staticmethod(finalize), "higher_is_better": better, "__doc__": text}
    return cast(type[M], type(name, (base,), {**body, "__module__": module, **members}))


def classes_in(namespace: Mapping[str, Any], base: type[M]) -> dict[str, type[M]]:
    """{key: class} of the classes that a module derived from ``base`` with :func:`derived`, in its order."""
    found = (one for one in namespace.values() if isinstance(one, type) and issubclass(one, base))
    return {one.key: one for one in found if "key" in vars(one)}  # a base has no key


def by_quantity(classes: Mapping[str, type[M]]) -> dict[str, type[M]]:
    """The classes by the last part of their key; they must be of one group."""
    return {key.rpartition("/")[2]: one for key, one in classes.items()}


class RatioMetric(MomentMetric):
    """Base of the diagnostics of rho = numerator / denominator on tokens that the denominator sampled.

    l = log rho in nats (rho is clamped to e^+-20), E = mean over observed trainable tokens, a_i and b_i = mean
    log-prob of response i under numerator and denominator. Tokens with a non-finite log-ratio are left out.

    Example:
        >>> import torch
        >>> from trl_offpolicy.metrics import KLK3
        >>> metric = KLK3()  # any of RATIO_METRICS
        >>> metric.update(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), torch.ones(1, 2).bool())
        >>> metric.compute()
        tensor(0.0744, dtype=torch.float64)
    """

    layout = RATIO_LAYOUT

    def update(self, numerator_logps: Tensor, denominator_logps: Tensor, completion_mask: Tensor) -> None:
        """Add a batch.

        Args:
            numerator_logps: (B, T) log-probs of the sampled tokens in nats, any float dtype; e.g. pi_old.
            denominator_logps: (B, T) log-probs under the policy that sampled; e.g. mu.
            completion_mask: (B, T) bool or 0/1, True = trainable token.

        Raises:
            ValueError: the shapes are not all the same (B, T), or the mask holds another number than 0 and 1 (looked
                for on the CPU only).
            TypeError: an argument is not a tensor, or log-probs are not floating point.
        """
        _check_floats("numerator_logps", numerator_logps)
        _check_floats("denominator_logps", denominator_logps, numerator_logps)
        mask = _checked_mask("completion_mask", completion_mask, numerator_logps)
        if not mask.shape[1]:  # responses of length 0 only
            return
        with torch.no_grad():
            ratio = log_ratio(numerator_logps, denominator_logps, mask)
            self._add(fold_ratio_rows(ratio_rows(ratio, denominator_logps, mask)))


class WeightMetric(MomentMetric):
    """Base of the diagnostics of importance weights w over the tokens of a mask.

    Example:
        >>> import torch
        >>> from trl_offpolicy.metrics import ESSToken
        >>> metric = ESSToken()  # any of WEIGHT_METRICS
        >>> metric.update(torch.tensor([[0.5, 2.0], [1.0, 9.0]]), torch.tensor([[True, True], [True, False]]))
        >>> metric.compute()
        tensor(0.7778, dtype=torch.float64)
    """

    layout = WEIGHT_LAYOUT

    def update(self, weights: Tensor, mask: Tensor) -> None:
        """Add a batch.

        Args:
            weights: (B, T), or (B, 1) for one weight per sequence; float, never negative.
            mask: (B, T) bool or 0/1, the tokens of the weights: all trainable ones for raw weights, the kept ones for
                applied weights.

        Raises:
            ValueError: the shapes do not fit, or the mask holds another number than 0 and 1 (looked for on the CPU
                only).
            TypeError: an argument is not a tensor, or the weights are not floating point.
        """
        _check_floats("weights", weights)
        tokens = _checked_mask("mask", mask, weights, broadcast=True)
        if not tokens.shape[1]:
            return
        with torch.no_grad():
            self._add(weight_moments(weights.float(), tokens))


def _moved(fn: Callable[[Tensor], Tensor], state: Any) -> Any:
    return state.to(fn(torch.zeros(1, device=state.device)).device)


def _check_floats(name: str, value: Tensor, like: Tensor | None = None) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, but got {type(value).__name__}.")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a floating point tensor, but got {value.dtype}.")
    expected = "(B, T)" if like is None else str(tuple(like.shape))
    if value.dim() != 2 or (like is not None and value.shape != like.shape):
        raise ValueError(f"{name} must have shape {expected}, but got {tuple(value.shape)}.")


def _checked_mask(name: str, mask: Tensor, like: Tensor, broadcast: bool = False) -> Tensor:
    """The mask as bool, after its shape was compared with ``like``, which may be (B, 1) with ``broadcast``."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor, but got {type(mask).__name__}.")
    rows, length = like.shape
    free = broadcast and length == 1
    if mask.dim() != 2 or len(mask) != rows or (mask.shape[1] != length and not free):
        expected = f"({rows}, {'T' if free else length})"
        raise ValueError(f"{name} must have shape {expected}, but got {tuple(mask.shape)}.")
    check_zero_or_one(**{name: mask})
    return mask if mask.dtype == torch.bool else mask != 0
