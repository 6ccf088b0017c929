"""Sampling options under which engine and trainer do not measure the same quantity."""

import pytest

from trl_offpolicy.engines.checks import require_comparable, sampling_faults

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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.9),
        ("top_p", 0.0),
        ("top_k", 50),
        ("top_k", 1),
        ("min_p", 0.05),
        ("repetition_penalty", 1.1),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -0.5),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_options_that_change_the_distribution_are_named(name, value, nested):
    options = {"top_p": 1.0, "generation_kwargs": {name: value}} if nested else {name: value}

    (fault,) = sampling_faults(options, device_type="cuda")

    assert fault.startswith(f"{name}={value}: ")
    with pytest.raises(ValueError, match=rf"^sampling options must leave .*comparable, but got {name}={value}"):
        require_comparable(options, device_type="cuda")


def test_the_hint_says_the_neutral_value():
    (fault,) = sampling_faults({"top_p": 0.9}, device_type="cpu")

    assert fault.endswith("set it to 1.0")


def test_generation_kwargs_win_over_the_field():
    assert sampling_faults({"top_p": 0.9, "generation_kwargs": {"top_p": 1.0}}, device_type="cpu") == []
    assert len(sampling_faults({"top_p": 1.0, "generation_kwargs": {"top_p": 0.9}}, device_type="cpu")) == 1


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
    options = {"top_p": 0.9, "generation_kwargs": {"n": 2, "top_k": 5}}

    assert len(sampling_faults(options, device_type="cuda")) == 3
    with pytest.raises(ValueError, match=r"top_p=0\.9.*; .*top_k=5.*; .*generation_kwargs\.n"):
        require_comparable(options, device_type="cuda")
