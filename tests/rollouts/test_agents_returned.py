"""What a rollout function returns in a wrong form is an error that names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trl_offpolicy.engines.engine import Rollouts
from trl_offpolicy.rollouts.agents.returned import read_returned

GOOD: dict[str, Any] = {
    "prompt_ids": [[1], [2, 3]],
    "completion_ids": [[4, 5, 6], [7]],
    "logprobs": [[-1, -0.5, None], [-2.0]],
    "env_mask": [[1, 0, 1], [True]],
    "sampled_ids": [[4, 6], [7]],
    "score": [0.5, 0.7],
    "kind": "test",
}


def test_a_mapping_as_trl_takes_it() -> None:
    found = read_returned(GOOD, rows=2, version=4)
    assert found.rollouts.tool_mask == [[1, 0, 1], [1]] and found.rollouts.policy_versions == [[4] * 3, [4]]
    logps = found.rollouts.sampling_per_token_logps
    assert logps is not None and logps[0][:2] == [-1.0, -0.5] and math.isnan(logps[0][2])
    assert found.columns == {"score": [0.5, 0.7], "kind": ["test", "test"]} and found.sampled_ids == [[4, 6], [7]]
    plain = {name: GOOD[name] for name in ("prompt_ids", "completion_ids")}
    bare = read_returned({**plain, "logprobs": None}, rows=2, version=None).rollouts
    assert bare.tool_mask is None and bare.sampling_per_token_logps is None and bare.policy_versions[1] == [-1]
    assert read_returned(
        {**plain, "logprobs": None, "tool_mask": GOOD["env_mask"]}, rows=2, version=0
    ).rollouts.tool_mask
    assert read_returned(bare, rows=2, version=0).rollouts is bare


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"prompt_ids": [[1]]}, ValueError, "prompt_ids must have 2 entries, one per completion, but got 1"),
        ({"prompt_ids": "ab"}, TypeError, "prompt_ids must be a list with one entry per completion, but got str"),
        (
            {"completion_ids": [[4, 5, 6], ["x"]]},
            TypeError,
            r"completion_ids must hold lists of token ids, but entry 1",
        ),
        ({"completion_ids": [4, 5]}, TypeError, "completion_ids must hold lists of token ids, but entry 0 is 4"),
        (
            {"logprobs": [[-1.0, -0.5], [-2.0]]},
            ValueError,
            "logprobs must have one value .* entry 0 has 2 for 3 tokens",
        ),
        ({"logprobs": [[-1.0, "a", 0.0], [-2.0]]}, TypeError, "logprobs must hold lists of numbers"),
        ({"logprobs": [-1.0, -2.0]}, TypeError, "logprobs must hold lists, but entry 0 is -1.0"),
        ({"env_mask": [[1, 0], [1]]}, ValueError, "env_mask must have one value for each token"),
        (
            {"env_mask": [[1, 0, 2], [1]]},
            ValueError,
            r"env_mask must hold 1 \(sampled by the policy\) or 0, but entry 0",
        ),
        ({"tool_mask": [[1, 0, 1], [1]]}, ValueError, "env_mask or tool_mask, which mean the same, but got both"),
        ({"sampled_ids": [[4, 6]]}, ValueError, "sampled_ids must have 2 entries"),
        ({"score": [0.5]}, ValueError, "score must have 2 entries, one per completion, but got 1"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=f"rollout.*{said}"):
        read_returned({**GOOD, **change}, rows=2, version=0)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"rollout must return .*, but prompt_ids, logprobs is missing"):
        read_returned({"completion_ids": [[1]]}, rows=1, version=0)
    with pytest.raises(TypeError, match="rollout must return Rollouts or a mapping, but got list"):
        read_returned([[1]], rows=1, version=0)


def test_the_mask_of_rollouts_has_a_value_for_each_token() -> None:
    fields: dict[str, Any] = {
        "prompt_ids": [[1]], "completion_ids": [[2, 3]], "sampling_per_token_logps": None,
        "policy_versions": [[0, 0]], "finish_reasons": ["stop"],
    }  # fmt: skip
    assert Rollouts(**fields, tool_mask=[[1, 0]]).tool_mask == [[1, 0]]
    with pytest.raises(ValueError, match="tool_mask must have one entry for each token of completion_ids"):
        Rollouts(**fields, tool_mask=[[1]])
