"""Where images of a row go: as in TRL, for the same rows and messages."""

from __future__ import annotations

from typing import Any

import pytest
from trl.data_utils import prepare_multimodal_messages

from trl_offpolicy.rollouts.images import check_completions, has_images, images_of, placed

TEXT = [{"role": "system", "content": "be short"}, {"role": "user", "content": "what?"}]
PLACES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]}]
FILLED = [{"role": "user", "content": [{"type": "image", "image": "mine"}, {"type": "image"}]}]
TURNS = [
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "reply"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "tool_calls": []},
    {"role": "tool", "name": "look", "content": "seen"},
]


@pytest.mark.parametrize(
    ("messages", "images"),
    [(TEXT, ["a"]), (TEXT, ["a", "b"]), (TEXT, []), (PLACES, ["a", "b"]), (FILLED, ["a"]), (TURNS, ["a"])],
)
def test_messages_are_filled_as_trl_fills_them(messages: list[Any], images: list[Any]) -> None:
    expected = prepare_multimodal_messages(messages, images)
    assert placed(messages, images) == expected


@pytest.mark.parametrize(("messages", "images"), [(PLACES, ["a"]), (PLACES, ["a", "b", "c"]), (FILLED, [])])
def test_too_few_or_too_many_images_are_refused_as_in_trl(messages: list[Any], images: list[Any]) -> None:
    with pytest.raises(ValueError, match="does not match"):
        prepare_multimodal_messages(messages, images)
    with pytest.raises(ValueError, match="prompt must have one place for each image"):
        placed(messages, images)


def test_a_role_that_trl_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="role must be one of"):
        placed([{"role": "nobody", "content": "a"}])


def test_the_column_images_goes_before_image_and_messages_may_hold_their_own() -> None:
    assert images_of({"images": ["a"], "image": "b"}) == ["a"] and images_of({"images": None}) == []
    assert has_images({"prompt": FILLED}) and has_images({"prompt": TEXT, "image": "a"})
    assert not has_images({"prompt": TEXT, "image": None}) and not has_images({"prompt": "text"})


def test_only_a_completion_with_the_image_token_is_refused() -> None:
    class Config:
        image_token_index = 7

    check_completions([[1, 2], []], Config)
    check_completions([[7]], object())
    with pytest.raises(ValueError, match="completion_ids must not hold the image token 7"):
        check_completions([[1], [2, 7]], Config)
