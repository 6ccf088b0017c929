"""Random inputs of the policy losses, in the package's form and in that of ``plain_losses.py``."""

import torch
from plain_losses import Case, Row

from trl_offpolicy import PolicyBatch
from trl_offpolicy.objective.losses import LossInputs

ROWS, LENGTH = 7, 6


def random_inputs(seed):
    """Float64 inputs with holes and an empty row, and the log-probs that carry gradient."""
    generator = torch.Generator().manual_seed(seed)

    def normal(width, *shape):
        return width * torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(ROWS, LENGTH, generator=generator) < 0.8
    mask[2], mask[4] = False, True
    mask[5, 2:4] = False  # two turns
    logps = (-0.2 - normal(1.0, ROWS, LENGTH).abs()).requires_grad_()
    centre = (logps.detach() - normal(0.25, ROWS, LENGTH)).clamp(max=-0.01)
    sampling = (centre - normal(0.1, ROWS, LENGTH)).clamp(max=-0.01)
    inputs = LossInputs(
        logps=torch.where(mask, logps, 0.0),
        log_ratios=torch.where(mask, logps - centre, 0.0),
        advantages=normal(1.0, ROWS, 1),
        mask=mask,
        sampling_log_ratios=torch.where(mask, logps - sampling, 0.0),
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.25, 0.5, 0.0, 1.0], dtype=torch.float64).unsqueeze(1),
        group_ids=torch.tensor([3, 3, 3, 3, 8, 8, 8]),
        entropies=torch.where(mask, normal(1.0, ROWS, LENGTH).abs(), 0.0),
        mismatch_log_ratios=torch.where(mask, centre - sampling, 0.0),
    )
    return inputs, logps, centre, sampling


def plain(inputs, logps, centre, sampling):
    """The same as a :class:`Case`."""
    rows = {}
    for i, inside in enumerate(inputs.mask.tolist()):
        at = [t for t in range(LENGTH) if inside[t]]
        if at:
            rows[i] = Row(
                at=at,
                current=[logps[i, t] for t in at],
                centre=[centre[i, t] for t in at],
                sampling=[sampling[i, t] for t in at],
                entropy=[inputs.entropies[i, t].item() for t in at],
                advantage=inputs.advantages[i].item(),
                reward=inputs.rewards[i].item(),
                group=inputs.group_ids[i].item(),
            )
    return Case(rows)


def on_policy_batch():
    """All three policies agree; groups are complete."""
    generator = torch.Generator().manual_seed(5)
    logps = -3 * torch.rand(ROWS, LENGTH, generator=generator) - 0.05
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.25, 0.5, 0.0, 1.0])
    return PolicyBatch(
        per_token_logps=logps.clone().requires_grad_(),
        old_per_token_logps=logps,
        sampling_per_token_logps=logps,
        completion_mask=torch.rand(ROWS, LENGTH, generator=generator) < 0.8,
        advantages=torch.randn(ROWS, generator=generator),
        rewards=rewards,
        group_ids=torch.tensor([3, 3, 3, 3, 8, 8, 8]),
        entropies=torch.rand(ROWS, LENGTH, generator=generator),
    )
