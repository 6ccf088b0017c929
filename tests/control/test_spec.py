"""The ``control`` option: what it takes, and errors that name the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trl_offpolicy.control import ControlSpec, ESSStep, LengthGuard, parse_control
from trl_offpolicy.diagnosis.thresholds import Thresholds


@pytest.mark.parametrize("spec", [None, "off", False])
def test_nobody_watches(spec: Any) -> None:
    assert parse_control(spec) is None


def test_a_name_is_a_policy() -> None:
    assert parse_control("warn") == ControlSpec() == parse_control({})
    assert parse_control("stop") == ControlSpec(policy="stop")
    acting = parse_control("act")
    assert acting is not None
    assert [item.name for item in acting.controllers] == ["length_guard", "ess_step", "escalation", "resync"]
    assert not acting.named and parse_control(acting) is acting


def test_a_mapping_says_more() -> None:
    spec = parse_control(
        {
            "policy": "act",
            "controllers": {"length_guard": {"window": 50}, "ess_step": None},
            "thresholds": {"kl_high": 0.1},
            "patience": 5,
            "risk": 0.8,
        }
    )
    assert spec is not None and spec.controllers == (LengthGuard(window=50), ESSStep())
    assert spec.thresholds == Thresholds(kl_high=0.1) and (spec.patience, spec.risk) == (5, 0.8) and spec.named
    assert parse_control({"controllers": ["ess_step"]}) == ControlSpec(
        policy="act", controllers=(ESSStep(),), named=True
    )
    assert spec.history == 200 and parse_control({"controllers": {"length_guard": {"window": 300}}}).history == 600


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("panic", r"control must be one of \['warn', 'stop', 'act', 'off'\], but got 'panic'"),
        (3, "control must be warn, stop, act, off or a mapping, but got 3"),
        ({"polcy": "act"}, r"control\.polcy is not an option.*Did you mean 'policy'"),
        ({"controllers": ["lenght_guard"]}, r"control\.controllers must name some of .*Did you mean 'length_guard'"),
        (
            {"controllers": {"length_guard": {"windw": 5}}},
            r"control\.controllers\.length_guard\.windw is not an option",
        ),
        (
            {"controllers": {"length_guard": {"factor": 2}}},
            r"control\.controllers\.length_guard: factor must be a fraction",
        ),
        ({"controllers": {"resync": 5}}, r"control\.controllers\.resync must be a mapping of options or null"),
        ({"controllers": 5}, r"control\.controllers must be a list of names or a mapping"),
        ({"policy": "warn", "controllers": ["resync"]}, r"control\.controllers must be absent with policy 'warn'"),
        ({"thresholds": {"kl": 1}}, r"control\.thresholds must be among"),
        ({"thresholds": 1}, r"control\.thresholds must be a mapping"),
        ({"patience": 0}, r"control\.patience must be a whole number of at least 1"),
        ({"risk": 1.5}, r"control\.risk must be at most 1"),
        (
            {"policy": "act", "max_gradient_cosine": 1.0},
            r"control\.max_gradient_cosine must be in \[0, 1\), but got 1.0",
        ),
        ({"max_gradient_cosine": 0.5}, r"control\.max_gradient_cosine must be None with policy 'warn'"),
        ({"gradient_cosine": "yes"}, r"control\.gradient_cosine must be True or False"),
    ],
)
def test_errors_name_the_field(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_control(spec)


def test_the_configuration_refuses_it_before_anything_is_loaded(make_args: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"control must be one of"):
        make_args(control="panic")
    assert make_args(control=None).control_spec is None
    assert make_args().control_spec == ControlSpec()
    assert make_args(control='{"policy": "stop", "patience": 2}').control_spec.patience == 2  # from a command line


def test_what_cannot_work_is_left_out_or_refused() -> None:
    every = parse_control("act")
    assert every is not None
    left = every.without({"resync": "vLLM", "escalation": "an engine"})
    assert [item.name for item in left.controllers] == ["length_guard", "ess_step"] and left.escalation is None
    named = parse_control({"controllers": ["resync"]})
    assert named is not None
    with pytest.raises(ValueError, match="must not name resync, which needs vLLM"):
        named.without({"resync": "vLLM"})
