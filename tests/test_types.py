"""PolicyBatch: what it accepts, and errors that name the field."""

import re
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from batches import policy_batch

from trl_offpolicy import PolicyBatch

TOKENS = (2, 3)
VALID = {
    "per_token_logps": torch.full(TOKENS, -1.0),
    "old_per_token_logps": torch.full(TOKENS, -2.0),
    "sampling_per_token_logps": torch.full(TOKENS, -3.0),
    "proximal_per_token_logps": torch.full(TOKENS, -2.5),
    "completion_mask": torch.ones(TOKENS).bool(),
    "advantages": torch.ones(2),
    "rewards": torch.ones(2),
    "ref_per_token_logps": torch.full(TOKENS, -1.0),
    "entropies": torch.ones(TOKENS),
    "sum_sq_probs": torch.ones(TOKENS),
    "policy_mask": torch.ones(TOKENS).bool(),
    "turn_ids": torch.zeros(TOKENS).long(),
    "policy_versions": torch.zeros(2).long(),
    "group_ids": torch.zeros(2).long(),
    "group_rewards": torch.ones(2, 4),
    "decided_weights": torch.ones(TOKENS),
    "decided_keep": torch.ones(TOKENS).bool(),
}
REQUIRED = ("per_token_logps", "completion_mask", "advantages")
FLOATS = [name for name, value in VALID.items() if value.dtype == torch.float32]
INTEGERS = [name for name, value in VALID.items() if value.dtype == torch.int64]
MASKS = [name for name, value in VALID.items() if value.dtype == torch.bool]


def test_every_field_is_covered_here():
    assert {*VALID, "current_version", "past_average"} == {item.name for item in fields(PolicyBatch)}
    assert set(FLOATS) | set(INTEGERS) | set(MASKS) == set(VALID)


def test_a_complete_batch_is_accepted():
    PolicyBatch(**VALID)


@pytest.mark.parametrize("name", sorted(set(VALID) - set(REQUIRED)))
def test_optional_fields_may_be_none(name):
    assert getattr(PolicyBatch(**{**VALID, name: None}), name) is None


@pytest.mark.parametrize("name", REQUIRED)
def test_required_fields_may_not_be_left_out_or_none(name):
    with pytest.raises(TypeError, match=name):
        PolicyBatch(**{key: value for key, value in VALID.items() if key != name})
    with pytest.raises(TypeError, match=rf"^{name} must be a tensor, but got NoneType"):
        PolicyBatch(**{**VALID, name: None})


@pytest.mark.parametrize("name", VALID)
def test_a_list_is_refused(name):
    with pytest.raises(TypeError, match=rf"^{name} must be a tensor, but got list"):
        PolicyBatch(**{**VALID, name: [[1.0]]})


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (2, 3, 1), (1, 3), ()])
@pytest.mark.parametrize("name", sorted(set(VALID) - {"per_token_logps", "group_rewards"}))
def test_a_wrong_shape_is_refused(name, shape):
    wrong = torch.ones(shape, dtype=VALID[name].dtype)

    with pytest.raises(ValueError, match=rf"^{name} must have shape .*2.*, but got {re.escape(str(shape))}"):
        PolicyBatch(**{**VALID, name: wrong})


@pytest.mark.parametrize("shape", [(2,), (3, 4), (2, 4, 1), ()])
def test_group_rewards_have_a_row_for_each_response(shape):
    with pytest.raises(ValueError, match=r"^group_rewards must have shape \(2, G\), but got"):
        PolicyBatch(**{**VALID, "group_rewards": torch.ones(shape)})


@pytest.mark.parametrize("name", ["rewards", "group_ids"])
def test_row_fields_have_no_token_axis(name):
    with pytest.raises(ValueError, match=rf"^{name} must have shape \(2,\), but got \(2, 3\)"):
        PolicyBatch(**{**VALID, name: torch.ones(TOKENS, dtype=VALID[name].dtype)})


@pytest.mark.parametrize("name", ["old_per_token_logps", "completion_mask", "turn_ids"])
def test_token_fields_need_a_token_axis(name):
    with pytest.raises(ValueError, match=rf"^{name} must have shape \(2, 3\), but got \(2,\)"):
        PolicyBatch(**{**VALID, name: torch.ones(2, dtype=VALID[name].dtype)})


@pytest.mark.parametrize("name", ["advantages", "policy_versions"])
def test_row_or_token_fields(name):
    value = torch.ones(TOKENS, dtype=VALID[name].dtype)

    assert getattr(PolicyBatch(**{**VALID, name: value}), name) is value
    with pytest.raises(ValueError, match=rf"^{name} must have shape \(2,\) or \(2, 3\), but got \(3,\)"):
        PolicyBatch(**{**VALID, name: value[0]})


@pytest.mark.parametrize("shape", [(3,), (2, 3, 1)])
def test_per_token_logps_has_two_axes(shape):
    with pytest.raises(ValueError, match=r"^per_token_logps must have shape \(B, T\)"):
        PolicyBatch(**{**VALID, "per_token_logps": torch.ones(shape)})


@pytest.mark.parametrize("rows", [0, 2])
def test_a_batch_without_token_positions_is_refused(rows):
    with pytest.raises(ValueError, match="per_token_logps must have at least one token a row"):
        policy_batch([[]] * rows) if rows else PolicyBatch(
            per_token_logps=torch.ones(0, 0), completion_mask=torch.ones(0, 0), advantages=torch.ones(0)
        )


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", FLOATS)
def test_float_fields_refuse_other_dtypes(name, dtype):
    with pytest.raises(TypeError, match=rf"^{name} must be a floating point tensor, but got {dtype}"):
        PolicyBatch(**{**VALID, name: VALID[name].to(dtype)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", INTEGERS)
def test_integer_fields_refuse_other_dtypes(name, dtype):
    with pytest.raises(TypeError, match=rf"^{name} must be an integer tensor, but got {dtype}"):
        PolicyBatch(**{**VALID, name: VALID[name].to(dtype)})


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_bool_or_zero_one(name):
    with pytest.raises(TypeError, match=rf"^{name} must be a bool or 0/1 tensor, but got torch.complex64"):
        PolicyBatch(**{**VALID, name: VALID[name].to(torch.complex64)})
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.float32):
        PolicyBatch(**{**VALID, name: VALID[name].to(dtype)})


@pytest.mark.parametrize("bad", [float("nan"), 0.5, 2.0, -100])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_holds_nothing_but_zero_and_one(name, bad):
    """NaN and the label -100 are not 0, so they would count as trainable."""
    value = VALID[name].to(torch.int64 if isinstance(bad, int) else torch.float32)
    value[1, 2] = bad
    with pytest.raises(ValueError, match=rf"^{name} must be a bool or 0/1 tensor, but got {bad}\.$"):
        PolicyBatch(**{**VALID, name: value})


@pytest.mark.parametrize("name", sorted(set(VALID) - {"per_token_logps"}))
def test_a_field_on_another_device_is_refused(name):
    with pytest.raises(ValueError, match=rf"^{name} must be on cpu, as per_token_logps is, but got meta\.$"):
        PolicyBatch(**{**VALID, name: VALID[name].to("meta")})


@pytest.mark.parametrize("bad", [torch.zeros(TOKENS), 0.5, "x"])
def test_a_past_average_is_one(bad):
    with pytest.raises(TypeError, match=r"^past_average must be an Average or None, but got "):
        PolicyBatch(**VALID, past_average=bad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_float_width_is_accepted(dtype):
    PolicyBatch(**{name: value.to(dtype) if name in FLOATS else value for name, value in VALID.items()})


def test_mask_reads_zero_one_as_bool():
    batch = PolicyBatch(**{**VALID, "completion_mask": torch.tensor([[1, 0, 1], [0, 0, 1]])})

    assert batch.mask.dtype == torch.bool
    assert batch.mask.tolist() == [[True, False, True], [False, False, True]]
    boolean = PolicyBatch(**VALID)
    assert boolean.mask is boolean.completion_mask


def test_token_advantages_broadcast_in_float32():
    rows = PolicyBatch(**{**VALID, "advantages": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)})
    tokens = PolicyBatch(**{**VALID, "advantages": torch.arange(6.0).view(2, 3)})

    assert rows.token_advantages.dtype == torch.float32
    assert rows.token_advantages.tolist() == [[1.0], [2.0]]
    assert tokens.token_advantages.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_logps_by_policy_are_detached():
    batch = PolicyBatch(**{**VALID, "per_token_logps": torch.full(TOKENS, -1.0, requires_grad=True)})

    for policy, value in (("current", -1.0), ("old", -2.0), ("sampling", -3.0)):
        logps = batch.logps(policy)
        assert not logps.requires_grad
        assert logps.unique().tolist() == [value]


def test_old_is_the_current_policy_where_absent():
    batch = PolicyBatch(**{**VALID, "old_per_token_logps": None})

    assert batch.logps("old").unique().tolist() == [-1.0]


def test_absent_sampling_log_probs_are_an_error_not_a_default():
    batch = PolicyBatch(**{**VALID, "sampling_per_token_logps": None})

    with pytest.raises(ValueError, match=r"^sampling_per_token_logps must be given"):
        batch.logps("sampling")


@pytest.mark.parametrize("bad", [1.0, True, "3", torch.tensor(3)], ids=repr)
def test_current_version_is_an_int(bad):
    with pytest.raises(TypeError, match=r"^current_version must be an int, but got"):
        PolicyBatch(**VALID, current_version=bad)


def test_version_lags_by_row_and_by_token():
    by_row = PolicyBatch(**{**VALID, "policy_versions": torch.tensor([1, 5])}, current_version=4)
    by_token = {"policy_versions": torch.tensor([[1, 2, 3], [4, 4, 250]], dtype=torch.uint8)}

    assert by_row.version_lags.tolist() == [[3], [-1]]
    assert PolicyBatch(**{**VALID, **by_token}, current_version=4).version_lags.tolist() == [[3, 2, 1], [0, 0, -246]]
    assert PolicyBatch(**VALID).version_lags is None
    assert PolicyBatch(**{**VALID, "policy_versions": None}, current_version=4).version_lags is None


def test_the_batch_is_frozen():
    with pytest.raises(FrozenInstanceError):
        PolicyBatch(**VALID).rewards = None
