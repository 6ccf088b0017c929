"""A correction as one graph of torch.compile: a handful of fused kernels in place of several hundred operations."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trl_offpolicy.correction.correction import Correction
    from trl_offpolicy.types import CorrectionOutput, PolicyBatch

_OPTIONS: dict[str, Any] = {"cpp.max_horizontal_fusion_size": 64}
"""All row sums of a pass in one loop over the tokens; inductor's default of 16 needs several."""


def run_compiled(correction: Correction, batch: PolicyBatch) -> CorrectionOutput:
    """``correction`` on ``batch``, compiled at the first call and again for what is new in a later one.

    Numbers differ from those of the plain call by the rounding of float32 sums.
    """
    _ = batch.mask, batch.lengths  # made here: on Python 3.11 a cached_property takes a lock, which is not traced
    out: CorrectionOutput = _compiled()(correction, batch)
    return replace(out, keep_mask=out.keep_mask.view(torch.bool))


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(_run, options=_OPTIONS)


def _run(correction: Correction, batch: PolicyBatch) -> CorrectionOutput:
    """The keep mask leaves as bytes: inductor writes booleans one by one on a CPU."""
    out = correction.run(batch)
    return replace(out, keep_mask=out.keep_mask.float().to(torch.uint8))
