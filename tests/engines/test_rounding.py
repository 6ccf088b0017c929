"""Simulated 8-bit weights."""

import pytest
import torch

from trl_offpolicy.engines.rounding import round_int8, round_weights


def test_by_hand():
    weight = torch.tensor([[127.0, 0.4, -63.6], [2.54, -1.27, 0.011]])

    # row 0: step 1; row 1: step 0.02, -1.27 / 0.02 = -63.5 -> -64 (half to even), 0.011 -> 0.02
    expected = torch.tensor([[127.0, 0.0, -64.0], [2.54, -1.28, 0.02]])
    torch.testing.assert_close(round_int8(weight), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_half_a_step_and_the_dtype_stays(dtype):
    torch.manual_seed(0)
    weight = torch.randn(16, 64).to(dtype)

    rounded = round_int8(weight)

    half_step = weight.float().abs().amax(1, keepdim=True) / 254
    rounding = torch.finfo(dtype).eps * weight.float().abs().amax()  # of the way back to the dtype
    assert rounded.dtype == dtype
    assert ((rounded.float() - weight.float()).abs() <= half_step * 1.001 + rounding).all()


def test_the_largest_entry_of_a_row_is_kept_and_there_are_255_levels():
    weight = torch.linspace(-1.0, 1.0, 4001).view(1, -1)

    rounded = round_int8(weight)

    assert rounded.abs().amax().item() == pytest.approx(1.0, abs=1e-6)
    assert len(rounded.unique()) == 255
    assert not torch.equal(rounded, weight)


def test_rows_have_their_own_scale():
    weight = torch.tensor([[1.0, 0.5], [1e-4, 0.5e-4]])

    torch.testing.assert_close(round_int8(weight)[1], weight[1], rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_of_zeros_stays_zero(dtype):
    weight = torch.tensor([[0.0, 0.0], [1.0, -1.0]]).to(dtype)

    assert round_int8(weight).tolist() == [[0.0, 0.0], [1.0, -1.0]]


def test_rounding_twice_changes_nothing_more():
    torch.manual_seed(0)
    once = round_int8(torch.randn(8, 32))

    torch.testing.assert_close(round_int8(once), once, rtol=0, atol=1e-6)


def test_input_is_not_mutated():
    weight = torch.tensor([[127.0, 0.4]])

    round_int8(weight)

    assert weight.tolist() == [[127.0, pytest.approx(0.4)]]


@pytest.mark.parametrize(
    ("name", "shape", "rounds"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (2, 4), True),
        ("model.layers.0.mlp.down_proj.weight", (2, 4), True),
        ("model.embed_tokens.weight", (2, 4), False),
        ("lm_head.weight", (2, 4), False),
        ("model.norm.weight", (4,), False),
        ("model.layers.0.self_attn.q_proj.bias", (4,), False),
        ("model.layers.0.experts.gate_up_proj", (2, 2, 4), False),
    ],
)
def test_linear_weights_only(name, shape, rounds):
    torch.manual_seed(0)
    weight = torch.randn(shape)

    ((returned, value),) = round_weights([(name, weight)])

    assert returned == name
    assert torch.equal(value, round_int8(weight) if rounds else weight)
    assert torch.equal(value, weight) is not rounds


def test_the_stream_is_lazy_and_keeps_its_order():
    def weights():
        for name in "ab":
            seen.append(name)
            yield name, torch.ones(1, 1)

    seen = []
    stream = round_weights(weights())
    assert seen == []
    assert next(stream)[0] == "a"
    assert seen == ["a"]
    assert [name for name, _ in stream] == ["b"]
