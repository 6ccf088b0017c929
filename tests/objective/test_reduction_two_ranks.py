"""Ranks with micro-batches of their own take the gradient step of one process with one batch, for every option."""

from dataclasses import fields
from itertools import product
from typing import get_args

import pytest
import torch
import torch.distributed as dist
import two_ranks

from trl_offpolicy import Correction, KLPenalty, Objective, PolicyBatch, RatioBand, Reduction, TruncateWeight
from trl_offpolicy.functional.aggregation import Aggregation
from trl_offpolicy.objective.objective import Denominator

OPTIONS = tuple(product(get_args(Aggregation), get_args(Denominator)))  # a new one is tested without being listed
LENGTH = 6
LENGTHS = (6, 2, 4, 0, 5, 3, 6, 2)  # ragged, and row 3 is empty
DROPPED_ROW = 5
ALL_ROWS = list(range(8))
SPLITS = {  # rows of each micro-batch of each rank
    "uneven micro-batches": (([0], [1, 2, 3]), ([4, 5], [6, 7])),
    "uneven ranks": (([0, 1], [2, 3, 4]), ([5], [6, 7])),
    "one micro-batch a rank": (([0, 1, 2],), ([3, 4, 5, 6, 7],)),
    "a rank without a token": (([0, 1, 2, 4], [5, 6, 7]), ([3], [3])),
    "a rank that keeps nothing": (([0, 1, 2], [4, 6, 7]), ([3], [5])),
    "a rank without a row": (([0, 1, 2, 3], [4, 5, 6, 7]), ([], [])),
    "three ranks, three micro-batches": (([0], [1], [2]), ([3], [4], [5]), ([6], [7], [])),
    "one rank": (([0, 1], [2, 3], [4, 5], [6, 7]),),
}


def batch(theta, rows):
    """Log-probs that depend on three parameters; every token of one row, and some others, have ratios out of bounds."""
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(8, LENGTH, 3, generator=generator)
    old = -torch.rand(8, LENGTH, generator=generator) * 2
    noise = [0.2 * torch.randn(8, LENGTH, generator=generator) for _ in range(3)]
    noise[1][DROPPED_ROW] -= 3.0
    noise[1][[0, 6], [1, 4]] += 3.0
    fields = {
        "per_token_logps": old + noise[0] + features @ theta,
        "old_per_token_logps": old,
        "sampling_per_token_logps": old + noise[1],
        "ref_per_token_logps": old + noise[2],
        "completion_mask": torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None],
        "advantages": torch.randn(8, generator=generator),
    }
    return PolicyBatch(**{name: value[rows] for name, value in fields.items()})


def objective(aggregation, denominator):
    return Objective(
        aggregation=aggregation,
        denominator=denominator,
        correction=Correction(
            weight=TruncateWeight(max_weight=1.2), keep=(RatioBand(level="token", low=0.7, high=1.5),)
        ),
        kl=KLPenalty(coef=0.1),
        kl_on=denominator,  # what leaves the denominator takes its KL term along
    )


def step(option, micro_batches, reduction):
    """Loss, and gradient of the parameters, after the micro-batches of one process."""
    theta = torch.zeros(3, requires_grad=True)
    losses = [objective(*option)(batch(theta, rows), reduction).loss for rows in micro_batches]
    sum(losses).backward()
    return torch.cat([sum(losses).detach().view(1), theta.grad])


def one_process(option, rows=ALL_ROWS):
    return step(option, [rows], Reduction(max_length=LENGTH))


def totals(denominator, rows=ALL_ROWS):
    """Tokens and sequences of the whole step, as the trainers count them: empty rows are rows, dropped ones are not."""
    out = objective("token_mean", denominator)(batch(torch.zeros(3), rows))
    if denominator == "all":
        return {"tokens": sum(LENGTHS[row] for row in rows), "sequences": len(rows)}
    return {"tokens": out.keep_mask.sum(), "sequences": out.keep_mask.any(-1).sum()}


def reduction(denominator, ranks, micro_batches):
    """Every field, so that one that is new is thought of here."""
    given = {"world_size": ranks, "accumulation": micro_batches, "max_length": LENGTH, **totals(denominator)}
    assert set(given) == {item.name for item in fields(Reduction)}
    return Reduction(**given)


def run(rank):
    """What data-parallel training does: gradients summed over micro-batches, averaged over ranks."""
    results = {}
    for option in OPTIONS:
        result = step(option, SPLITS["uneven micro-batches"][rank], reduction(option[1], 2, 2))
        dist.all_reduce(result)
        results[option] = result / 2
    return results


def test_the_batch_has_what_is_hard():
    out = objective("token_mean", "kept")(batch(torch.zeros(3), ALL_ROWS))
    assert out.keep_mask.any(-1).tolist() == [row not in (3, DROPPED_ROW) for row in ALL_ROWS]
    assert out.keep_mask.sum() < sum(LENGTHS) - LENGTHS[DROPPED_ROW]


@pytest.mark.parametrize("name", SPLITS)
def test_ranks_average_to_one_process(name):
    split = SPLITS[name]
    for option in OPTIONS:
        whole = one_process(option)
        given = reduction(option[1], len(split), len(split[0]))

        average = sum(step(option, micro_batches, given) for micro_batches in split) / len(split)

        assert whole.abs().min() > 1e-3, option
        torch.testing.assert_close(average, whole, rtol=1e-5, atol=1e-6, msg=lambda text, o=option: f"{o}: {text}")


def test_equal_micro_batches_need_no_totals():
    """Two ranks, two micro-batches each, all of the same rows: the mean of means is the mean."""
    rows = [0, 1, 4]
    given = Reduction(world_size=2, accumulation=2, max_length=LENGTH)
    for option in OPTIONS:
        average = sum(step(option, [rows, rows], given) for _ in range(2)) / 2
        torch.testing.assert_close(average, one_process(option, rows * 4), rtol=1e-5, atol=1e-6)


@pytest.mark.integration
def test_two_processes_step_as_one(tmp_path):
    for results in two_ranks.launch(__file__, run, tmp_path):
        assert list(results) == list(OPTIONS)
        for option, result in results.items():
            torch.testing.assert_close(result, one_process(option), rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    two_ranks.join(run)
