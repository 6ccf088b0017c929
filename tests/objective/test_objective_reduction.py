"""What the loss of an objective is divided by: aggregations, rejected tokens, micro-batches and ranks.

On-policy the policy loss of a token is -A. Log-probs are -4; None is padding, which holds NaN.
"""

from functools import partial

import pytest
import torch
from batches import LOGP, evaluate, policy_batch, rows_of, to_tensor

from trl_offpolicy import (
    Correction,
    KLPenalty,
    Objective,
    RatioBand,
    Reduction,
    TruncateWeight,
)

NAN = float("nan")
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

TWO_ROWS = [[1.0, 1.0, 1.0], [1.0, None, None]]
A13 = {"advantages": torch.tensor([1.0, 3.0])}
DROP_HIGH = Correction(keep=(RatioBand(level="token", low=None, high=4.0),))


def loss_of(batch, reduction=None, **options):
    return evaluate(batch, reduction, **options)[0].loss.item()


def ref(ratios):
    """Reference log-probs with ref/current = ``ratios`` where current is -4."""
    return {"ref_per_token_logps": LOGP + to_tensor(ratios).log()}


# ------------------------------------------------------------------------------------------------ aggregation


@pytest.mark.parametrize(
    ("aggregation", "max_length", "expected"),
    [
        ("token_mean", None, -1.5),  # -(1 + 1 + 1 + 3) / 4
        ("token_sum", None, -6.0),
        ("seq_mean_token_mean", None, -2.0),  # -(3/3 + 3/1) / 2
        ("seq_mean_token_sum", None, -3.0),  # -(3 + 3) / 2
        ("seq_mean_token_sum_norm", None, -1.0),  # -(3/3 + 3/3) / 2
        ("seq_mean_token_sum_norm", 10, -0.3),
    ],
)
def test_aggregation(aggregation, max_length, expected):
    batch = policy_batch(TWO_ROWS, **A13)

    assert loss_of(batch, Reduction(max_length=max_length), aggregation=aggregation) == pytest.approx(
        expected, abs=1e-6
    )


@pytest.mark.parametrize(
    ("aggregation", "whole", "kept"),
    [  # the first token of row 0 is dropped: the policy sum is -(1 + 1 + 3)
        ("token_mean", -5 / 4, -5 / 3),
        ("token_sum", -5.0, -5.0),
        ("seq_mean_token_mean", -(2 / 3 + 3) / 2, -(2 / 2 + 3) / 2),
        ("seq_mean_token_sum", -5 / 2, -5 / 2),
        ("seq_mean_token_sum_norm", -5 / 6, -5 / 6),
    ],
)
def test_denominator_after_rejection(aggregation, whole, kept):
    batch = policy_batch([[8.0, 1.0, 1.0], [1.0, None, None]], **A13)
    options = {"aggregation": aggregation, "correction": DROP_HIGH}

    assert loss_of(batch, denominator="all", **options) == pytest.approx(whole, abs=1e-6)
    assert loss_of(batch, denominator="kept", **options) == pytest.approx(kept, abs=1e-6)


@pytest.mark.parametrize(("denominator", "expected"), [("all", -1.5), ("kept", -3.0)])  # -(0 + 3) / 2 or / 1
def test_a_dropped_sequence_counts_unless_the_denominator_is_kept(denominator, expected):
    batch = policy_batch([[8.0, 9.0, 8.0], [1.0, None, None]], **A13)

    loss = loss_of(batch, aggregation="seq_mean_token_mean", correction=DROP_HIGH, denominator=denominator)

    assert loss == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_an_empty_row_counts_where_nothing_is_dropped(denominator):
    batch = policy_batch([[1.0, 1.0, 1.0], [None, None, None]], **A13)

    loss = loss_of(batch, aggregation="seq_mean_token_mean", denominator=denominator)

    assert loss == pytest.approx(-0.5, abs=1e-6)


def test_a_length_of_its_own_goes_before_that_of_the_reduction():
    batch = policy_batch([[1.0, 1.0], [1.0, None]])
    options = {"aggregation": "seq_mean_token_sum_norm", "max_length": 8}

    assert loss_of(batch, Reduction(max_length=2), **options) == pytest.approx(-3 / 2 / 8, abs=1e-6)
    with pytest.raises(ValueError, match=r"^max_length must be None unless aggregation is 'seq_mean_token_sum_norm'"):
        Objective(max_length=8)
    with pytest.raises(ValueError, match=r"^max_length must be a whole number of at least 1, but got 0"):
        Objective(aggregation="seq_mean_token_sum_norm", max_length=0)
    with pytest.raises(ValueError, match=r"^entropy_aggregation must be one of"):
        Objective(entropy_aggregation="mean")


def test_advantages_by_token():
    batch = policy_batch(TWO_ROWS, advantages=torch.tensor([[1.0, -2.0, 4.0], [3.0, NAN, NAN]]))

    out, gradient = evaluate(batch)

    assert out.loss.item() == pytest.approx(-1.5, abs=1e-6)  # -(1 - 2 + 4 + 3) / 4
    close(gradient, torch.tensor([[-0.25, 0.5, -1.0], [-0.75, 0.0, 0.0]]))


# -------------------------------------------------------------------------------------------------- reduction


FOUR_ROWS = [[1.5, 0.5, 2.0], [3.0, None, None], [0.25, 1.0, None], [1.0, 2.0, 0.5]]
STALE = [[1.1, 0.7, 1.5], [0.9, None, None], [1.0, 1.3, None], [0.5, 1.0, 1.2]]
FOUR = {"advantages": torch.tensor([1.0, -2.0, 0.5, -0.7])}
OPTIONS = {"correction": Correction(weight=TruncateWeight(max_weight=2.0)), "kl": KLPenalty(coef=0.1)}


def four_rows():
    return policy_batch(FOUR_ROWS, STALE, **FOUR, **ref([[2.0, 0.5, 1.0]] * 4))


def micro_batched(split, reduction, **options):
    """Sum of the losses and the stacked gradients of micro-batches with these rows."""
    total, gradients = 0.0, []
    for rows in split:
        out, gradient = evaluate(rows_of(four_rows(), rows), reduction, **options)
        total += out.loss.item()
        gradients.append(gradient)
    return total, torch.cat(gradients)


EVEN, UNEVEN = ([0, 1], [2, 3]), ([0], [1, 2, 3])


@pytest.mark.parametrize(
    ("aggregation", "split", "reduction"),
    [
        ("token_mean", EVEN, Reduction(tokens=9)),
        ("token_mean", UNEVEN, Reduction(tokens=torch.tensor(9.0), accumulation=2)),
        ("seq_mean_token_mean", EVEN, Reduction(accumulation=2)),
        ("seq_mean_token_mean", UNEVEN, Reduction(sequences=4, accumulation=2)),
        ("seq_mean_token_sum", EVEN, Reduction(accumulation=2)),
        ("seq_mean_token_sum", UNEVEN, Reduction(sequences=torch.tensor(4), accumulation=2)),
        ("seq_mean_token_sum_norm", EVEN, Reduction(accumulation=2, max_length=3)),
        ("seq_mean_token_sum_norm", UNEVEN, Reduction(sequences=4, max_length=3)),
        ("token_sum", UNEVEN, Reduction(accumulation=2)),
    ],
)
def test_micro_batches_add_up_to_the_whole_batch(aggregation, split, reduction):
    whole, gradient = evaluate(four_rows(), Reduction(max_length=3), aggregation=aggregation, **OPTIONS)

    total, gradients = micro_batched(split, reduction, aggregation=aggregation, **OPTIONS)

    assert total == pytest.approx(whole.loss.item(), abs=1e-5)
    close(gradients, gradient)


@pytest.mark.parametrize(
    ("aggregation", "reduction"),
    [
        ("token_mean", Reduction(tokens=9, world_size=2)),
        ("seq_mean_token_mean", Reduction(sequences=4, world_size=2)),
        ("seq_mean_token_sum_norm", Reduction(sequences=4, world_size=2, max_length=3)),
    ],
)
def test_ranks_average_to_the_whole_batch(aggregation, reduction):
    whole, gradient = evaluate(four_rows(), Reduction(max_length=3), aggregation=aggregation, **OPTIONS)

    total, gradients = micro_batched(UNEVEN, reduction, aggregation=aggregation, **OPTIONS)

    assert total / 2 == pytest.approx(whole.loss.item(), abs=1e-6)
    close(gradients / 2, gradient)


def test_without_global_tokens_each_micro_batch_is_its_own_mean():
    batch = policy_batch(TWO_ROWS, **A13)

    assert loss_of(batch, Reduction(accumulation=4)) == pytest.approx(-1.5 / 4, abs=1e-6)
    assert loss_of(batch, Reduction(sequences=100, accumulation=4)) == pytest.approx(-1.5 / 4, abs=1e-6)


def test_a_token_count_is_ignored_by_sequence_means():
    batch = policy_batch(TWO_ROWS, **A13)

    loss = loss_of(batch, Reduction(tokens=100, accumulation=4), aggregation="seq_mean_token_mean")

    assert loss == pytest.approx(-2.0 / 4, abs=1e-6)
