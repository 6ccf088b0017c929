from dataclasses import dataclass, replace

import torch
from torch import Tensor

import trl_offpolicy as op


@dataclass(frozen=True, kw_only=True)
class QuadraticLoss(op.losses.PolicyLoss):
    """-r A + coef log(r)^2. What carries gradient: r, in both terms."""

    coef: float

    def __call__(self, inputs: op.losses.LossInputs) -> op.losses.LossTerms:
        ratio = inputs.log_ratios.exp()  # (B, T), 1 on padding
        return op.losses.LossTerms(-ratio * inputs.advantages + self.coef * inputs.log_ratios.square())


@dataclass(frozen=True, kw_only=True)
class SignAdvantage(op.advantages.AdvantageEstimator):
    """+1 above the mean reward of the group, -1 below it."""

    def __call__(self, inputs: op.advantages.AdvantageInputs) -> Tensor:
        return op.advantages.DrGRPO()(inputs).sign()  # (B,)


@dataclass(frozen=True, kw_only=True)
class HuberKL(op.KLPenalty):
    """l^2 / 2 up to ``width`` nats, then a line; l = log(pi / ref). The coefficient is KLPenalty's."""

    width: float = 1.0

    def __call__(self, log_ratios: Tensor, policy_log_ratios: Tensor) -> Tensor:
        return torch.nn.functional.huber_loss(
            log_ratios, torch.zeros_like(log_ratios), reduction="none", delta=self.width
        )


@dataclass(frozen=True, kw_only=True)
class RisingKL(op.KLController):
    """A coefficient that rises by ``step`` at every optimizer step, up to ``highest``."""

    coef: float
    step: float
    highest: float
    adapts = True

    def updated(self, kl: float, samples: int) -> "RisingKL":
        return replace(self, coef=min(self.coef + self.step, self.highest))


@dataclass(frozen=True, kw_only=True)
class HalfwayProximal(op.proximal.Proximal):
    """The centre of the trust region halfway between the old and the current policy, in log-probs."""

    def __call__(self, batch: op.PolicyBatch) -> Tensor:
        return (batch.logps("old").float() + batch.logps("current").float()) / 2
