"""TRL's entropy options and the coefficient that moves: by hand, at the edges, and its state."""

import math

import pytest

from trl_offpolicy.objective.coefficients import EntropyControl, EntropyOptions

ADAPTIVE = EntropyOptions(
    use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=1.0, entropy_coef_delta=0.04, entropy_coef_max=0.15,
    entropy_coef_min=0.05,
)  # fmt: skip


def test_the_coefficient_follows_the_entropy_and_stays_in_its_bounds():
    control, seen = EntropyControl(ADAPTIVE, 0.1), []
    for entropy in (2.0, 2.0, 1.0, 0.5, 0.5, 0.5):
        control = control.after(entropy)
        seen.append((round(control.coef, 6), round(control.in_force, 6)))
    assert seen == [(0.06, 0.0), (0.05, 0.0), (0.09, 0.09), (0.13, 0.13), (0.15, 0.15), (0.15, 0.15)]


def test_before_the_first_measurement_an_adaptive_bonus_is_left_out():
    assert EntropyControl(ADAPTIVE, 0.1).in_force == 0.0
    fixed = EntropyControl(EntropyOptions(entropy_coef=0.1), 0.1)
    assert fixed.in_force == 0.1 and fixed.after(9.0) is fixed and fixed.state_dict() == {}


def test_its_state_goes_on():
    control = EntropyControl(ADAPTIVE, 0.1).after(0.5)
    again = EntropyControl(ADAPTIVE, 0.1).restored(control.state_dict())
    assert again == control and EntropyControl(ADAPTIVE, 0.1).restored({}).measured == math.inf


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"entropy_goal": 1}, r"^entropy\.entropy_goal must be one of \[.*'entropy_target'\]\. Did you mean"),
        ({"top_entropy_quantile": 1.5}, r"^entropy\.top_entropy_quantile must be in \[0, 1\], but got 1\.5"),
        ({"entropy_coef": "0.1"}, r"^entropy\.entropy_coef must be a finite number, but got '0\.1'"),
        ({"use_adaptive_entropy": 1}, r"^entropy\.use_adaptive_entropy must be True or False, but got 1"),
        ({"entropy_coef_delta": -0.1}, r"^entropy\.entropy_coef_delta must be at least 0, but got -0\.1"),
        ({"entropy_coef_min": 2.0}, r"^entropy\.entropy_coef_min must be at most entropy_coef_max, but got 2\.0 and 1"),
        (0.1, r"^entropy must be a mapping of options, but got 0\.1"),
    ],
)
def test_wrong_options_are_named(spec, message):
    with pytest.raises(ValueError, match=message):
        EntropyOptions.parse(spec)


def test_the_defaults_are_those_of_trl():
    trl = pytest.importorskip("trl")
    defaults = {name: field.default for name, field in trl.GRPOConfig.__dataclass_fields__.items()}
    assert vars(EntropyOptions.parse(None)) == {name: defaults[name] for name in vars(EntropyOptions())}
