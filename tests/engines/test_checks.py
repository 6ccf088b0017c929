"""Sampling options under which engine and trainer do not measure the same quantity."""

import pytest

from trl_offpolicy.engines.checks import require_comparable, sampling_faults, truncation_of
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
def test_neutral_options_are_comparable(options):
    assert sampling_faults(options, device_type="cpu") == []
    require_comparable(options, device_type="cuda")
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
    assert not [fault for fault in sampling_faults(options, device_type="cuda") if "generation_kwargs.n" not in fault]


def test_a_truncation_outside_of_its_range_is_refused():
    with pytest.raises(ValueError, match=r"^top_p must be in \(0, 1\], but got 0\.0\.$"):
        truncation_of({"top_p": 0.0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.1),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -0.5),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_options_that_change_the_distribution_are_named(name, value, nested):
    options = {"repetition_penalty": 1.0, "generation_kwargs": {name: value}} if nested else {name: value}

    (fault,) = sampling_faults(options, device_type="cuda")

    assert fault.startswith(f"{name}={value}: ")
    with pytest.raises(ValueError, match=rf"^sampling options must leave .*comparable, but got {name}={value}"):
        require_comparable(options, device_type="cuda")


def test_the_hint_says_the_neutral_value():
    (fault,) = sampling_faults({"repetition_penalty": 1.1}, device_type="cpu")

    assert fault.endswith("set it to 1.0")


def test_generation_kwargs_win_over_the_field():
    both = (
        {"repetition_penalty": low, "generation_kwargs": {"repetition_penalty": high}} for low, high in [(2, 1), (1, 2)]
    )
    assert [len(sampling_faults(options, device_type="cpu")) for options in both] == [0, 1]


@pytest.mark.parametrize("name", ["logprobs", "n", "temperature"])
def test_forbidden_generation_kwargs(name):
    (fault,) = sampling_faults({"generation_kwargs": {name: 1}}, device_type="cuda")

    assert fault.startswith(f"generation_kwargs.{name}: ")


def test_a_seed_stops_vllm_on_the_cpu_only():
    options = {"generation_kwargs": {"seed": 1}}

    assert sampling_faults(options, device_type="cuda") == []
    (fault,) = sampling_faults(options, device_type="cpu")
    assert fault.startswith("generation_kwargs.seed: ")


def test_all_faults_are_told_at_once():
    options = {"repetition_penalty": 1.1, "generation_kwargs": {"n": 2, "presence_penalty": 0.5}}

    assert len(sampling_faults(options, device_type="cuda")) == 3
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.1.*; .*presence_penalty=0\.5.*; .*\.n"):
        require_comparable(options, device_type="cuda")
