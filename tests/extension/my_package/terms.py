from dataclasses import dataclass

import torch

import trl_offpolicy as op


@dataclass(frozen=True, kw_only=True)
class SoftCapWeight(op.Weight):
    """The ratio up to 1, above it a power of the ratio: large weights are damped, none is cut."""

    power: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.power <= 1:
            raise ValueError(f"power must be in [0, 1], but got {self.power}.")

    @property
    def formula(self) -> str:
        return f"w = min(rho_t, rho_t^{self.power:g})"

    def weigh(self, inputs: op.TermInputs) -> op.Weighed:
        ratio = inputs.ratio_at(self.level)  # (B, T) at level "token"
        return op.Weighed(ratio, torch.minimum(ratio, ratio**self.power))


@dataclass(frozen=True, kw_only=True)
class OpeningVeto(op.KeepTerm):
    """Drop a response of which one of the first ``tokens`` tokens is off by more than ``high`` nats."""

    tokens: int
    high: float

    def violations(self, inputs: op.TermInputs) -> op.Violations:
        opening = inputs.mask & (inputs.mask.cumsum(-1) <= self.tokens)
        worst = torch.where(opening, inputs.log_ratios.abs(), 0.0).amax(-1, keepdim=True)  # (B, 1): whole responses
        return op.Violations(above=worst > self.high, below=None)
