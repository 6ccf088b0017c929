"""One configuration for all findings: valid in the framework it is for, and never two values of one thing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.diagnosis.doctor import _rate as rate_in_force
from trl_offpolicy.diagnosis.verdict.advice import _CORRECTIONS, ASKED, OURS, THEIRS, TO_LOG, advise, advise_after
from trl_offpolicy.diagnosis.verdict.tree import TREE
from trl_offpolicy.presets import from_ms_swift, from_skyrl, from_slime, from_trl, from_verl
from trl_offpolicy.run_folder.run_data import MetricsLog


def leaves(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def correction_of(framework: str, settings: Mapping[str, Any]) -> Any:
    """The preset that the framework's own options make, read by the kit's reader of that framework."""
    if framework == "verl":
        return from_verl(**settings["algorithm"]["rollout_correction"])
    if framework == "SkyRL":
        return from_skyrl(**settings["trainer"]["algorithm"]["off_policy_correction"])
    if framework == "slime":
        return from_slime(**{key: value for key, value in settings.items() if key != "get_mismatch_metrics"})
    if framework == "ms-swift":
        return from_ms_swift(
            **{key: value for key, value in settings.items() if key != "log_rollout_offpolicy_metrics"}
        )
    return from_trl(**settings)


def settings_log_a_distance(settings: Mapping[str, Any]) -> bool:
    return settings["vllm_importance_sampling_correction"] is True


@pytest.mark.parametrize("framework", THEIRS)
@pytest.mark.parametrize("thing", _CORRECTIONS)
def test_each_correction_is_what_it_says_in_their_options(framework: str, thing: Any) -> None:
    cause = next(cause for cause, things in ASKED.items() if thing in things)
    found = yaml.safe_load(advise([cause], [framework]).yaml)
    others = [one for one in ASKED[cause] if one not in _CORRECTIONS]
    drop = {key for one in others for key in THEIRS[framework][one]}
    if framework in ("slime", "TRL", "ms-swift"):
        found = {key: value for key, value in found.items() if key not in drop}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        preset = correction_of(framework, found)
    weights, keep = preset.correction.weights, preset.correction.keep
    if framework == "TRL" and thing in ("measure", "geometric"):  # a weight of 1: TRL logs no distance without one
        (one,) = weights
        assert settings_log_a_distance(found) and 1 - 1e-5 < one.min_weight < one.max_weight == 1
        weights = ()
    if thing == "measure":
        assert not weights and not keep
    if thing in ("token", "tis"):
        (weight,) = weights
        assert weight.level == "token" and weight.max_weight == 2.0
    if thing in ("token", "geometric"):
        (term,) = keep
        if framework in ("TRL", "ms-swift"):  # no geometric mask there: the one-sided one of the same width
            assert term.max_divergence == 0.01
        else:  # verl's band is one of -log rho
            bounds = [value if value > 0.5 else math.exp(value) for value in (term.low, term.high)]
            assert term.level == "sequence_mean" and sorted(bounds) == pytest.approx([0.99, 1.01], rel=1e-3)
    if thing == "geometric" and framework != "slime":  # slime's weight is the geometric mean itself, 0.99 to 1.01
        assert not weights
    if thing == "band" and framework == "ms-swift":  # its mask has no lower bound
        assert [(one.level, one.low, one.high) for one in weights] == [("token", None, 5.0)]
    elif thing == "band":
        bounds = [one for one in (*weights, *keep) if getattr(one, "low", None) is not None]
        low, high = bounds[0].low, bounds[0].high
        assert len(bounds) == 1 and sorted((low, high)) in ([0.2, 2.0], [0.5, 5.0])


@pytest.mark.parametrize("framework", THEIRS)
def test_two_findings_never_get_two_corrections(framework: str) -> None:
    """Every pair in both orders: the first one's correction is whole, the second one's is named for later."""
    for first, second in permutations(ASKED, 2):
        found = advise([first, second], [framework], rate=1e-6)
        settings = leaves(yaml.safe_load(found.yaml) or {})
        wants = [next((one for one in ASKED[cause] if one in _CORRECTIONS), None) for cause in (first, second)]
        wanted = [one for one in wants if one is not None]
        if wanted:
            expected = THEIRS[framework][wanted[0]]
            assert {key: settings[key] for key in expected} == dict(expected), (first, second)
        assert bool(found.later) == (len(set(wanted)) == 2), (first, second)
        if found.later:
            assert found.later[0].startswith(CAUSES[second].title)


def test_stock_trl_takes_the_settings(tmp_path: Path) -> None:
    from trl import GRPOConfig

    for cause in ASKED:
        settings = yaml.safe_load(advise([cause], ["TRL"]).yaml) or {}
        args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{"bf16": False, **settings, "fp16": False})
        for key, value in settings.items():
            assert key == "fp16" or getattr(args, key) == value


@pytest.mark.parametrize("first", [one.cause for one in TREE])
def test_our_own_settings_load_together(first: str, tmp_path: Path) -> None:
    from trl_offpolicy.trl.config import OffPolicyGRPOConfig, resolve_preset

    for second in dict.fromkeys(one.cause for one in TREE):
        found = advise([first, second])
        settings = yaml.safe_load(found.yaml) or {}
        for key, value in (yaml.safe_load(CAUSES[first].snippet) or {}).items():
            if isinstance(value, dict):
                assert value.items() <= settings[key].items()
            else:
                assert settings[key] == value
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings.pop("lora_dropout", None)  # of TRL's ModelConfig
            args = OffPolicyGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{"bf16": False, **settings})
            assert resolve_preset(args).objective is not None


FLOAT16 = {"engine": {"dtype": "float16"}, "bf16": False, "fp16": True}


def test_what_any_run_is_told_has_no_place_beside_the_tokens_answer() -> None:
    found = advise_after("other_weights", ["engine_mismatch", "correction_limit", "clip_saturation"])
    expected = {"engine": {"check_sync": True}, **yaml.safe_load(CAUSES["clip_saturation"].snippet)}
    assert yaml.safe_load(found.yaml) == expected and "offpolicy: measure" in advise(["engine_mismatch"]).yaml
    assert found.follows == (CAUSES["correction_limit"].title,) and found.later == ()


def test_the_more_severe_finding_decides_and_the_other_waits() -> None:
    found = advise(["engine_mismatch", "policy_staleness"])
    assert yaml.safe_load(found.yaml) == {
        "offpolicy": "measure",
        **FLOAT16,
        "num_iterations": 1,
    }
    assert found.later == ("policy staleness: offpolicy: paper/geometric-mask",)
    both = advise(["rejection_limit", "policy_staleness"])
    wide = {"preset": "paper/geometric-mask", "options": {"low": 0.9, "high": 1.1}}  # a band of 1 % would drop more
    assert yaml.safe_load(both.yaml)["offpolicy"] == wide
    assert both.later == ("policy staleness: offpolicy: paper/geometric-mask",)
    maps = advise(["precision", "stale_weights"])
    assert yaml.safe_load(maps.yaml) == {
        **FLOAT16,
        "engine": {"dtype": "float16", "check_sync": True},
        "offpolicy": "paper/tis",
    }
    rounding = advise(["sync_rounding", "precision"])  # a float32 engine beside a trainer in fp16 would be a new fault
    assert yaml.safe_load(rounding.yaml) == {"engine": {"dtype": "float32"}, "offpolicy": "paper/tis"}
    assert [one.split(": ", 1)[1] for one in rounding.later] == [
        "engine: {dtype: float16}",
        "bf16: false",
        "fp16: true",
    ]
    assert advise([]).yaml == "" and advise(["misalignment"]).yaml == ""


@pytest.mark.parametrize("framework", [(), ("verl",), ("TRL",)])
def test_no_precision_is_advised_where_no_rounding_reaches(framework: tuple[str, ...]) -> None:
    near, far = (advise(["engine_mismatch"], framework, by_rounding=by).yaml for by in (True, False))
    assert "float16" in near or "fp16" in near
    assert "16" not in far and far != ""
    other = advise(["engine_mismatch", "precision"], by_rounding=False).yaml  # a cause of its own is not held back
    assert "fp16: true" in other


def test_every_framework_says_how_to_log_the_distance() -> None:
    assert TO_LOG.keys() == THEIRS.keys() | {OURS}


@pytest.mark.parametrize("framework", [*THEIRS, "", "lightning"])
def test_half_of_the_learning_rate_is_half_of_the_runs_own(framework: str) -> None:
    """With a fixed number a run of 1.97e-7 was told to go up (FinQA)."""
    info = {"settings": {"framework": "lightning"}} if framework == "lightning" else None
    named = [framework] if framework in THEIRS else []
    found = leaves(yaml.safe_load(advise(["collapse"], named, info, rate=1.97e-7).yaml))
    assert list(found.values()) == [pytest.approx(1.97e-7 / 2)]
    if named:
        unknown = advise(["collapse"], named)
        assert unknown.yaml == "" and unknown.later == ("collapse: half of your learning rate, which was not logged",)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([1e-7, 1e-6, 9e-7, 5e-7, 1e-7, 1e-8], 1e-6),  # a schedule, logged rarely
        ([1e-6 * (1 - step / 400) for step in range(400)], 1e-6),
        ([1e-6] * 50 + [1e-7] * 50, 1e-7),  # lowered at once
        ([1e-6] * 50 + [1e-8, 5e-8, *[1e-7] * 50], 1e-7),  # ... with a warm-up
        ([1e-6] * 50 + [3e-6] * 50, 3e-6),
        ([1e-6] * 50 + [5e-7, 2e-7, 0.0], 1e-6),  # a stable rate that decays at the end
        ([0.0] * 9, None),
        ([], None),
    ],
)
def test_the_rate_of_which_half_is_advised_is_the_one_in_force(rates: list[float], expected: float | None) -> None:
    rows = tuple({"step": float(step), "learning_rate": rate} for step, rate in enumerate(rates))
    assert rate_in_force(MetricsLog(rows)) == expected
