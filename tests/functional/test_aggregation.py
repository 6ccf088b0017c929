"""From a loss per token to one number."""

import pytest
import torch

from trl_offpolicy.functional.aggregation import aggregate_loss

NAN = float("nan")
LOSS = torch.tensor([[1.0, 2.0, 6.0, NAN], [4.0, NAN, NAN, NAN], [NAN, NAN, NAN, NAN]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        ("token_sum", {}, 13.0),  # 1 + 2 + 6 + 4
        ("token_sum", {"tokens": 8, "sequences": 5}, 13.0),
        ("token_mean", {}, 3.25),  # 13 / 4 tokens
        ("token_mean", {"tokens": 8}, 1.625),  # 13 / 8
        ("token_mean", {"tokens": torch.tensor(8)}, 1.625),
        ("seq_mean_token_mean", {}, 7 / 3),  # (9/3 + 4/1 + 0) / 3 rows, the empty one included
        ("seq_mean_token_mean", {"sequences": 7}, 1.0),  # 7 / 7
        ("seq_mean_token_sum", {}, 13 / 3),  # (9 + 4 + 0) / 3
        ("seq_mean_token_sum", {"sequences": torch.tensor(6.5)}, 2.0),
        ("seq_mean_token_sum_norm", {}, 13 / 12),  # (9/4 + 4/4) / 3, L = T = 4
        ("seq_mean_token_sum_norm", {"max_length": 10}, 13 / 30),
        ("seq_mean_token_sum_norm", {"max_length": 10, "sequences": 2}, 0.65),
    ],
)
def test_by_hand(mode, options, expected):
    value = aggregate_loss(LOSS, MASK, mode, **options)

    assert value.shape == ()
    assert value.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "gradient"),
    [
        ("token_sum", [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]),
        ("token_mean", [[1 / 3, 1 / 3, 0.0], [1 / 3, 0.0, 0.0]]),
        ("seq_mean_token_mean", [[0.25, 0.25, 0.0], [0.5, 0.0, 0.0]]),
        ("seq_mean_token_sum", [[0.5, 0.5, 0.0], [0.5, 0.0, 0.0]]),
        ("seq_mean_token_sum_norm", [[1 / 6, 1 / 6, 0.0], [1 / 6, 0.0, 0.0]]),
    ],
)
def test_gradient_is_the_share_of_each_token(mode, gradient):
    loss = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()

    aggregate_loss(loss, mask, mode).backward()

    torch.testing.assert_close(loss.grad, torch.tensor(gradient), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_nothing_trainable_gives_zero(mode):
    value = aggregate_loss(torch.full((2, 2), NAN), torch.zeros(2, 2).bool(), mode)

    assert value.item() == 0.0


@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_a_denominator_of_zero_reads_as_one(zero):
    mask = torch.ones(1, 2).bool()

    assert aggregate_loss(torch.ones(1, 2), mask, "token_mean", tokens=zero).item() == 2.0
    assert aggregate_loss(torch.ones(1, 2), mask, "seq_mean_token_sum", sequences=zero).item() == 2.0


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"aggregation must be one of \['token_mean', .* but got 'mean'"):
        aggregate_loss(torch.ones(1, 1), torch.ones(1, 1).bool(), "mean")


def test_the_length_that_the_norm_divides_by():
    with pytest.raises(ValueError, match=r"^max_length must be at least 1, but got 0\.$"):
        aggregate_loss(LOSS, MASK, "seq_mean_token_sum_norm", max_length=0)
    empty = aggregate_loss(LOSS[:, :0], MASK[:, :0], "seq_mean_token_sum_norm")

    assert empty.item() == 0.0
    assert aggregate_loss(LOSS, MASK, "token_sum", max_length=0).item() == 13.0  # it is not read
