"""The ways in which the sampler of the benchmark differs from the learner."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.lab.experts import with_other_routers
from benchmarks.lab.loop import rounded
from benchmarks.lab.sorting import Answers, Sorter, sample


@dataclass(frozen=True)
class Mismatch:
    """How the sampler differs.

    Args:
        title: for a table.
        bits: every linear weight is rounded to so many bits a row; None = not at all.
        bfloat16: the sampler computes in bfloat16.
        temperature: of the draws; the log-probs that are reported do not know of it.
        top_p: of the draws; the log-probs that are reported do not know of it.
        lag: generations by which its weights are behind.
        router_noise: noise on the routers' weights, in their standard deviations; the model then has experts.
    """

    title: str
    bits: int | None = None
    bfloat16: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    lag: int = 0
    router_noise: float = 0.0

    @property
    def experts(self) -> bool:
        """Whether the model is the one with experts."""
        return self.router_noise > 0

    def sampler(self, versions: Sequence[Sorter], generator: torch.Generator) -> Sorter:
        """What samples; ``versions`` are the learner's weights of past generations, the present ones last."""
        source = versions[max(0, len(versions) - 1 - self.lag)]
        if self.router_noise:
            return with_other_routers(source, self.router_noise, generator)
        return rounded(source, self.bits)

    def sample(self, sampler: Sorter, questions: Tensor, generator: torch.Generator) -> Answers:
        """Answers of ``sampler`` with the log-probs (nats) that it reports, mu."""
        with torch.autocast("cpu", torch.bfloat16) if self.bfloat16 else nullcontext():
            return sample(sampler, questions, generator, temperature=self.temperature, top_p=self.top_p)


MISMATCHES: dict[str, Mismatch] = {
    "none": Mismatch("none"),
    "int8": Mismatch("INT8", bits=8),
    "bf16": Mismatch("bf16", bfloat16=True),
    "int4": Mismatch("INT4", bits=4),
    "int3": Mismatch("INT3", bits=3),
    "temperature": Mismatch("temperature 0.9, unsaid", temperature=0.9),
    "top_p": Mismatch("top-p 0.9, unsaid", top_p=0.9),
    "lag1": Mismatch("lag 1", lag=1),
    "lag4": Mismatch("lag 4", lag=4),
    "lag8": Mismatch("lag 8", lag=8),
    "int4_lag4": Mismatch("INT4, lag 4", bits=4, lag=4),
    "experts": Mismatch("experts, none", router_noise=1e-9),
    "flips": Mismatch("router flips", router_noise=0.3),
}
"""``experts`` is the reference of ``flips``: its noise turns no router."""
