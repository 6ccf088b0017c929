"""Reading options: names, switches, choices, and what is said aloud."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields

import pytest

from trl_offpolicy.presets.frameworks.areal import ARealOptions
from trl_offpolicy.presets.frameworks.ms_swift import MSSwiftOptions
from trl_offpolicy.presets.frameworks.nemo_rl import NeMoRLOptions
from trl_offpolicy.presets.frameworks.openrlhf import OpenRLHFOptions
from trl_offpolicy.presets.frameworks.options import UnknownOptionError, check_choice, read_options, warn_no_effect
from trl_offpolicy.presets.frameworks.prime_rl import PrimeRLOptions
from trl_offpolicy.presets.frameworks.skyrl import SkyRLOptions
from trl_offpolicy.presets.frameworks.slime import SlimeOptions
from trl_offpolicy.presets.frameworks.trl import TRLOptions
from trl_offpolicy.presets.frameworks.verl.losses import VerlLossOptions
from trl_offpolicy.presets.frameworks.verl.translate import VerlOptions

FRAMEWORKS = (
    ARealOptions, MSSwiftOptions, NeMoRLOptions, OpenRLHFOptions, PrimeRLOptions, SkyRLOptions, SlimeOptions,
    TRLOptions, VerlOptions, VerlLossOptions,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """Two options."""

    cap: float = 2.0
    active: bool = False


def test_what_is_left_out_has_its_default():
    assert read_options(Options, {}, framework="X") == Options()
    assert read_options(Options, {"cap": 3.0, "active": True}, framework="X") == Options(cap=3.0, active=True)


def test_an_unknown_name_is_refused_with_near_names():
    message = r"^capp is not an option of X, which has \['cap', 'active'\]\. Did you mean 'cap'\?$"
    with pytest.raises(UnknownOptionError, match=message):
        read_options(Options, {"capp": 3.0}, framework="X")


@pytest.mark.parametrize("bad", ["true", 1, None])
def test_a_switch_is_true_or_false(bad):
    with pytest.raises(ValueError, match=r"^active must be True or False, but got "):
        read_options(Options, {"active": bad}, framework="X")


def test_every_option_of_every_framework_is_of_its_kind():
    """Also one that the framework does not read under the other options: a typing error there is one, too."""
    odd = {"None": None, "bool": True, "int": 3, "float": 0.5, "str": "x", "list": [], "nan": float("nan")}
    taken = {"int": {"int"}, "float": {"int", "float"}, "bool": {"bool"}, "str": {"str"}, "None": {"None"}}
    refused = 0
    for cls in FRAMEWORKS:
        for item in fields(cls):
            kinds = item.type.split(" | ")
            if not set(kinds) <= set(taken):
                continue  # sequences: their own framework checks them
            fitting = set().union(*(taken[kind] for kind in kinds))
            for kind in odd.keys() - fitting:
                with pytest.raises(ValueError, match=rf"^{item.name} must be .*, but got "):
                    read_options(cls, {item.name: odd[kind]}, framework="X")
                refused += 1
            for kind in fitting:
                read_options(cls, {item.name: odd[kind]}, framework="X")
    assert refused > 250


def test_choices():
    check_choice("level", "token", ("token", "sequence"))
    with pytest.raises(ValueError, match=r"^level must be one of \['token'\], but got 'tokn'\. Did you mean 'token'"):
        check_choice("level", "tokn", ("token",))
    with pytest.raises(ValueError, match=r"^level must be one of \['token'\], but got 3\.$"):
        check_choice("level", 3, ("token",))


def test_only_values_that_were_changed_are_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_no_effect(Options(), ("cap", "active"), "today", framework="X")
    with pytest.warns(UserWarning, match=r"^cap=3.0 has no effect today, in X as here\.$") as caught:
        warn_no_effect(Options(cap=3.0), ("cap", "active"), "today", framework="X")
    assert len(caught) == 1
