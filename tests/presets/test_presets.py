"""Presets by name: look-up, options, description."""

from dataclasses import FrozenInstanceError

import pytest

from trl_offpolicy import Correction, Objective, presets
from trl_offpolicy.presets import Preset


def test_names_are_sorted_and_resolve():
    names = presets.names()

    assert names == sorted(names)
    assert {"measure", "paper/tis", "paper/opsm"} <= set(names)
    for name in names:
        preset = presets.get(name)
        assert isinstance(preset, Preset)
        assert preset.name == name
        assert isinstance(preset.objective, Objective)
        assert isinstance(preset.correction, Correction)
        assert preset.citation
        assert preset.formula
        assert preset.notes


def test_options_reach_the_term():
    assert presets.get("paper/tis").correction.weight.max_weight == 2.0
    assert presets.get("paper/tis", max_weight=3.5).correction.weight.max_weight == 3.5


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("paper/tiss", "Did you mean 'paper/tis'"),
        ("tis", "'paper/tis'"),
        ("Paper/MIS", "'paper/mis'"),
        ("zzzz", "but got 'zzzz'."),
    ],
)
def test_an_unknown_preset_is_refused_with_near_names(name, hint):
    with pytest.raises(ValueError, match=r"^preset must be one of the \d+ presets that ") as error:
        presets.get(name)
    assert hint in str(error.value)


def test_a_family_or_a_framework_is_no_preset_and_says_what_it_is():
    with pytest.raises(
        ValueError, match=r"but got 'verl'\. It is a family of presets, which `trl-offpolicy presets verl`"
    ) as error:
        presets.get("verl")
    assert str(error.value).endswith("Options in verl's own names: offpolicy: {framework: verl, options: {...}}.")
    with pytest.raises(ValueError, match=r"but got 'ms-swift'\. Options in ms-swift's own names"):
        presets.get("ms-swift")


def test_a_hopeless_name_gets_no_hint():
    with pytest.raises(ValueError, match=r"but got 'zzzz'\.$"):
        presets.get("zzzz")


def test_an_unknown_option_is_refused_with_near_names():
    message = r"^max_wieght is not an option of preset 'paper/tis', .* Did you mean 'max_weight'"
    with pytest.raises(ValueError, match=message):
        presets.get("paper/tis", max_wieght=3.0)
    with pytest.raises(ValueError, match=r"^threshold is not an option of preset 'measure', which has \[\]\.$"):
        presets.get("measure", threshold=3.0)


@pytest.mark.parametrize("bad", ["2.0", "0.5_5_0", True, float("nan"), float("inf"), -1.0, 1e12, None])
def test_bad_values_are_refused_by_the_term(bad):
    with pytest.raises(ValueError, match=r"^max_weight must be a"):
        presets.get("paper/tis", max_weight=bad)


def test_describe():
    text = presets.describe("paper/tis")

    assert text.splitlines()[0] == "paper/tis"
    assert "w_t = min(pi_old / mu, C)" in text
    assert "max_weight=2.0" in text
    assert "sampling_per_token_logps" in text
    assert "Yao et al. 2025" in text
    assert "options:  -" in presets.describe("measure")
    assert "requires: -" in presets.describe("measure")
    for name in presets.names():
        assert presets.describe(name).splitlines()[0] == name
    assert "clamp:    log-ratios at +-20 nats here, not in the source" in presets.describe("trl/token-mask")
    assert "clamp:" not in text
    assert "loss:     policy_loss=GPG(unit_ratio=False), mode=bypass" in presets.describe("verl/bypass_pg_is")
    assert "scope:    generation_batch" in presets.describe("paper/m2po")


def test_groups_hold_every_name_once():
    groups = presets.groups()

    assert next(iter(groups)) == "general"
    assert groups["general"] == ["measure"]
    assert sorted(name for members in groups.values() for name in members) == presets.names()
    assert all(name.startswith(f"{group}/") for group in groups if group != "general" for name in groups[group])


def test_frameworks():
    assert set(presets.FRAMEWORKS) == {
        "areal", "ms-swift", "nemo-rl", "openrlhf", "prime-rl", "skyrl", "slime", "trl", "verl",
    }  # fmt: skip
    for name, build in presets.FRAMEWORKS.items():
        assert build is getattr(presets, f"from_{name.replace('-', '_')}")


@pytest.mark.parametrize("framework", sorted(presets.FRAMEWORKS))
def test_an_unknown_option_of_a_framework_is_a_type_error_and_a_value_error(framework):
    for kind in (TypeError, ValueError, presets.UnknownOptionError):
        with pytest.raises(kind, match=r"^epsilonnn is not an option of .*, which has \["):
            presets.FRAMEWORKS[framework](epsilonnn=0.2)
    with pytest.raises(TypeError, match="Did you mean 'epsilon'"):
        presets.from_trl(epsilonn=0.2)


def test_describing_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="'paper/opsm'"):
        presets.describe("paper/opms")


def test_a_preset_is_frozen():
    with pytest.raises(FrozenInstanceError):
        presets.get("measure").name = "other"
