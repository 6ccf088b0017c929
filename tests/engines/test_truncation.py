"""Sampling options that the trainer mirrors."""

import pytest

from trl_offpolicy.engines.truncation import truncation_of
from trl_offpolicy.functional.truncated_sampling import Truncation

NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": {"presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": 8},
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        NEUTRAL,
        {**NEUTRAL, "generation_kwargs": None},
        {"top_k": -1},
        {"top_k": None},
        {"min_p": 0.0},
        {"top_p": None},
        {"top_p": 1},
    ],
)
def test_neutral_options_cut_nothing(options):
    assert not truncation_of(options)


@pytest.mark.parametrize(
    ("options", "truncation"),
    [
        ({"top_p": 0.9}, Truncation(top_p=0.9)),
        ({"top_k": 50, "min_p": None}, Truncation(top_k=50)),
        ({"top_k": 50, "generation_kwargs": {"top_k": -1, "min_p": 0.05}}, Truncation(min_p=0.05)),
        ({"top_p": 1, "generation_kwargs": {"top_p": 0.8, "n": 1}}, Truncation(top_p=0.8)),
    ],
)
def test_truncation_is_mirrored_not_refused(options, truncation):
    assert truncation_of(options) == truncation


def test_a_truncation_outside_of_its_range_is_refused():
    with pytest.raises(ValueError, match=r"^top_p must be in \(0, 1\], but got 0\.0\.$"):
        truncation_of({"top_p": 0.0})
