"""Simulated low-precision weights."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_offpolicy.engines.rounding import WeightRounding, parse_rounding, round_fp8, round_integer, round_weights

round_int8 = partial(round_integer, bits=8)
ROUNDINGS = [
    WeightRounding("int8"),
    WeightRounding("int4"),
    WeightRounding("int3"),
    WeightRounding("int4", group_size=16),
    WeightRounding("fp8"),
    WeightRounding("fp8", scale="tensor"),
    WeightRounding("bf16"),
    WeightRounding("fp16"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def error_bound(rounding, weight):
    """Largest error before the way back to the weight's dtype, for each entry."""
    wide = weight.float().abs()
    if rounding.type.startswith("int"):
        groups = wide.reshape(len(wide), -1, rounding.group_size or wide.shape[1])
        largest = groups.amax(-1, keepdim=True).expand_as(groups).reshape(wide.shape)
        return largest / (2 ** int(rounding.type[3:]) - 2)  # half of max / (2^(b-1) - 1)
    if rounding.type == "fp8":
        largest = wide.amax(1, keepdim=True) if rounding.scale != "tensor" else wide.amax()
        return torch.maximum(wide / 17, largest / 448 / 1024)
    return wide * {"bf16": 2**-8, "fp16": 2**-11}[rounding.type] + {"bf16": 0, "fp16": 2**-25}[rounding.type]


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1e-3, 1.0, 30.0]), heavy=st.booleans())
def test_properties_of_every_rounding(rounding, dtype, seed, scale, heavy):
    """Bounded error, dtype kept, odd, idempotent, zero stays zero; and something is rounded."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 32, generator=random)
    weight = (scale * (weight**3 if heavy else weight)).to(dtype)
    weight[2] = 0.0
    before = weight.clone()

    rounded = rounding(weight)

    assert rounded.dtype == dtype and rounded.shape == weight.shape and torch.equal(weight, before)
    bound = error_bound(rounding, weight)
    back = torch.finfo(dtype).eps * weight.float().abs() + torch.finfo(dtype).smallest_normal  # to the dtype again
    assert (
        (rounded.float() - weight.float()).abs() <= bound * (1 + 1e-5) + back + torch.finfo(dtype).eps * bound
    ).all()
    assert torch.equal(rounding(-weight), -rounded)
    assert (rounded[weight == 0] == 0).all()
    if dtype == torch.float32:
        torch.testing.assert_close(rounding(rounded), rounded, rtol=1e-5, atol=0)
        assert not torch.equal(rounded, weight)


@pytest.mark.parametrize("rounding", [item for item in ROUNDINGS if item.group_size is None], ids=str)
def test_the_edge_of_the_error_bound_is_reached(rounding):
    """The bound is not merely an upper one: dense values come within 2 % of it."""
    weight = torch.linspace(-1.0, 1.0, 32_000).view(1, -1)
    error = (rounding(weight) - weight).abs() / error_bound(rounding, weight)
    assert 0.98 < error[weight.abs() > 0.1].max() < 1.001


def test_int4_by_hand():
    weight = torch.tensor([[7.0, 3.4, -2.6, 0.4], [0.7, -0.7, 0.04, 0.16]])

    torch.testing.assert_close(round_integer(weight, bits=4), torch.tensor([[7.0, 3, -3, 0], [0.7, -0.7, 0, 0.2]]))
    grouped = torch.tensor([[7.0, 3.0, -2.6, 2.6 / 7], [0.7, -0.7, 0.16 * 2 / 7, 0.16]])
    torch.testing.assert_close(round_integer(weight, bits=4, group_size=2), grouped)


@pytest.mark.parametrize(("bits", "levels"), [(3, 7), (4, 15), (8, 255)])
def test_number_of_levels(bits, levels):
    assert len(round_integer(torch.linspace(-1.0, 1.0, 4001).view(1, -1), bits=bits).unique()) == levels


def test_fp8_by_hand():
    """448 keeps the scale 1; e4m3 has three bits behind the point, and steps of 2^-9 below 2^-6."""
    weight = torch.tensor([[448.0, 100.0, -1.06, 0.0021, 0.0009], [4.48, 1.0, 0.0, 0.0, 0.0]])

    rows = round_fp8(weight)

    torch.testing.assert_close(rows[0], torch.tensor([448.0, 96.0, -1.0, 2**-9, 0.0]))
    torch.testing.assert_close(rows[1, :2], torch.tensor([4.48, 0.96]))
    torch.testing.assert_close(round_fp8(weight, scale="tensor")[1, :2], torch.tensor([4.5, 1.0]))


def test_finer_is_closer():
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    error = {str(rounding): float((rounding(weight) - weight).abs().mean()) for rounding in ROUNDINGS}
    int8, int4, int3, grouped, fp8, _, bf16, fp16 = error.values()
    assert fp16 < bf16 < int8 < fp8 < grouped < int4 < int3


@pytest.mark.parametrize(
    ("spec", "rounding"),
    [
        ("int8", WeightRounding("int8")),
        ({"type": "int4", "group_size": 32}, WeightRounding("int4", 32)),
        ({"type": "fp8", "scale": "tensor"}, WeightRounding("fp8", scale="tensor")),
        (WeightRounding("bf16"), WeightRounding("bf16")),
    ],
)
def test_parsing(spec, rounding):
    assert parse_rounding(spec) == rounding


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int5", r"^engine\.weight_rounding\.type must be one of \['int8', .*\], but got 'int5'\.$"),
        (8, r"^engine\.weight_rounding must be one of .* or a mapping with the key type, but got 8\.$"),
        (True, r"^engine\.weight_rounding must be one of"),
        ({"group_size": 8}, r"^engine\.weight_rounding must be one of .* key type"),
        (
            {"type": "int4", "groups": 8},
            r"^engine\.weight_rounding\.groups must be one of \['type', 'group_size', 'scale'\]",
        ),
        ({"type": "int4", "group_size": 0}, r"^engine\.weight_rounding\.group_size must be .* >= 1, but got 0\.$"),
        ({"type": "int4", "group_size": 1.5}, r"^engine\.weight_rounding\.group_size must be"),
        ({"type": "fp8", "group_size": 8}, r"^engine\.weight_rounding\.group_size must be absent with type fp8"),
        ({"type": "int4", "scale": "row"}, r"^engine\.weight_rounding\.scale must be absent with type int4"),
        (
            {"type": "fp8", "scale": "column"},
            r"^engine\.weight_rounding\.scale must be 'row' or 'tensor', but got 'column'",
        ),
    ],
)
def test_refused_specifications(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_rounding(spec)
    with pytest.raises(ValueError, match=message):
        round_weights([], spec)  # at once, not at the first weight


def test_a_group_size_that_does_not_fit_names_the_weight():
    stream = round_weights([("a.weight", torch.ones(2, 6))], {"type": "int4", "group_size": 4})

    with pytest.raises(ValueError, match=r"does not fit a\.weight: group_size must divide the 6 columns .* got 4\.$"):
        next(stream)


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
