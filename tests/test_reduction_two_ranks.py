"""Two processes with two micro-batches each take the gradient step of one process with one batch, per aggregation."""

import pytest
import torch
import torch.distributed as dist
import two_ranks

from trl_offpolicy import Correction, KLPenalty, Objective, PolicyBatch, RatioBand, Reduction, TruncateWeight

LENGTH = 6
ROWS = {0: ([0], [1, 2, 3]), 1: ([4, 5], [6, 7])}  # uneven micro-batches, ragged responses
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
OPTIONS = {
    "correction": Correction(
        weight=TruncateWeight(max_weight=1.2), keep=(RatioBand(level="token", low=0.7, high=1.5),)
    ),
    "kl": KLPenalty(coef=0.1),
}


def batch(theta, rows):
    """Log-probs that depend on three parameters."""
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(8, LENGTH, 3, generator=generator)
    old = -torch.rand(8, LENGTH, generator=generator) * 2
    noise = [0.2 * torch.randn(8, LENGTH, generator=generator) for _ in range(3)]
    mask = torch.arange(LENGTH) < torch.tensor([6, 2, 4, 1, 5, 3, 6, 2])[:, None]
    fields = {
        "per_token_logps": old + noise[0] + features @ theta,
        "old_per_token_logps": old,
        "sampling_per_token_logps": old + noise[1],
        "ref_per_token_logps": old + noise[2],
        "completion_mask": mask,
        "advantages": torch.randn(8, generator=generator),
    }
    return PolicyBatch(**{name: value[rows] for name, value in fields.items()})


def step(aggregation, groups, reduction):
    """Gradient of the parameters after the micro-batches of this process."""
    theta = torch.zeros(3, requires_grad=True)
    objective = Objective(aggregation=aggregation, **OPTIONS)
    for rows in groups:
        objective(batch(theta, rows), reduction).loss.backward()
    return theta.grad


def run(rank):
    """What data-parallel training does: gradients summed over micro-batches, averaged over ranks."""
    gradients = {}
    for aggregation in AGGREGATIONS:
        reduction = Reduction(tokens=29, sequences=8, world_size=2, accumulation=2, max_length=LENGTH)
        gradient = step(aggregation, ROWS[rank], reduction)
        dist.all_reduce(gradient)
        gradients[aggregation] = gradient / 2
    return gradients


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_ranks.launch(__file__, run, tmp_path_factory.mktemp("ranks"))


@pytest.mark.integration
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_two_ranks_step_as_one(aggregation, ranks):
    whole = step(aggregation, [list(range(8))], Reduction(max_length=LENGTH))

    assert whole.abs().min() > 1e-3
    for gradients in ranks:
        torch.testing.assert_close(gradients[aggregation], whole, rtol=1e-5, atol=1e-7)


if __name__ == "__main__":
    two_ranks.join(run)
