"""Parts of responses: tokens, log-probs and versions stay together."""

from __future__ import annotations

import pytest

from trl_offpolicy.rollouts.ahead.parts import CUT, Part, ResponseInParts, padded_versions


def part(*tokens: int, version: int, reason: str = CUT) -> Part:
    return Part(token_ids=tokens, logps=tuple(-token / 10 for token in tokens), version=version, finish_reason=reason)


def test_parts_in_order() -> None:
    response = ResponseInParts((part(7, 8, version=3),)).then(part(version=4)).then(part(9, version=5, reason="stop"))

    assert response.token_ids == [7, 8, 9]
    assert response.logps == [-0.7, -0.8, -0.9]
    assert response.versions == [3, 3, 5]
    assert response.finish_reason == "stop"


@pytest.mark.parametrize(
    ("reason", "limit", "finished"), [("stop", 9, True), ("length", 9, True), (CUT, 9, False), (CUT, 2, True)]
)
def test_finished(reason: str, limit: int, finished: bool) -> None:
    assert ResponseInParts((part(7, 8, version=0, reason=reason),)).is_finished(limit) is finished


def test_one_log_prob_for_each_token() -> None:
    with pytest.raises(ValueError, match=r"^logps must have one entry for each of 2 tokens, but got 1"):
        Part(token_ids=(1, 2), logps=(-1.0,), version=0, finish_reason="stop")


def test_padding_repeats_the_last_version() -> None:
    assert padded_versions([[3, 4], [], [5]], length=3, of_empty=9) == [[3, 4, 4], [9, 9, 9], [5, 5, 5]]
    with pytest.raises(ValueError, match=r"^length must be at least 2, the longest row, but got 1"):
        padded_versions([[3, 4]], length=1, of_empty=0)
