"""The fix fits the run: the YAML, put into the run's own configuration, removes the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.diagnosis.fixes import fix_of
from trl_offpolicy.run_folder.declared import declared_sides

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart/config.yaml"


def quickstart() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    return config


def test_the_quickstarts_rounding_is_removed_and_nothing_else_changes() -> None:
    config = quickstart()
    fix = fix_of("precision", {"settings": config})
    assert fix is not None and "weight_rounding: fp8" in fix.text and "float16" not in fix.text + fix.yaml
    changed = {**config, **yaml.safe_load(fix.yaml)}
    assert changed["engine"] == {k: v for k, v in config["engine"].items() if k != "weight_rounding"}
    assert {k: v for k, v in changed.items() if k != "engine"} == {k: v for k, v in config.items() if k != "engine"}


def test_a_mismatched_dtype_becomes_the_trainers() -> None:
    for trainer, dtype in (
        ({"bf16": True}, "bfloat16"),
        ({"fp16": True}, "float16"),
        ({"dtype": "float32"}, "float32"),
    ):
        fix = fix_of("precision", {"settings": {"engine": {"dtype": "half", "seed": 1}, **trainer}})
        assert fix is not None and yaml.safe_load(fix.yaml) == {"engine": {"dtype": dtype, "seed": 1}}


def test_after_the_fix_both_sides_declare_the_same() -> None:
    from tiny_models import tiny_model

    same = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "min_p": None}
    engine = {"dtype": "float32", "weight_rounding": "int4", "kv_cache_dtype": "fp8"}
    for options, equal in ((engine, False), (yaml.safe_load(_yaml(engine))["engine"], True)):
        sides = declared_sides(tiny_model(), engine=options, autocast=None, sampling=same)
        names = ("dtype", "quantization")
        assert all(sides["engine"][name] == sides["trainer"][name] for name in names) is equal
        assert (sides["engine"]["kv_cache"] == "auto") is equal


def _yaml(engine: dict[str, Any]) -> str:
    fix = fix_of("precision", {"settings": {"engine": engine}})
    assert fix is not None
    return fix.yaml


def test_a_run_that_recorded_no_settings_is_served_by_what_it_declares() -> None:
    sides = {
        "engine": {"dtype": "float32", "quantization": "int8", "kv_cache": "auto"},
        "trainer": {"dtype": "float32"},
    }
    fix = fix_of("precision", {"declared": sides})
    assert fix is not None and yaml.safe_load(fix.yaml) == {"engine": {"dtype": "float32"}}
    assert "int8" in fix.text and "float16" not in fix.text


def test_staleness_names_what_reuses_a_generation() -> None:
    settings = {"num_iterations": 2, "steps_per_generation": 8, "gradient_accumulation_steps": 2}
    fix = fix_of("policy_staleness", {"settings": settings})
    assert fix is not None and yaml.safe_load(fix.yaml) == {"num_iterations": 1, "steps_per_generation": 2}
    assert "4 optimizer steps" in fix.text


@pytest.mark.parametrize("cause", list(CAUSES))
def test_without_settings_the_fix_is_the_one_for_any_run(cause: str) -> None:
    fix = fix_of(cause)
    assert fix is not None and (fix.text, fix.yaml) == (CAUSES[cause].fix, CAUSES[cause].snippet)
    fitted = fix_of(cause, {"settings": quickstart()})
    assert fitted is not None and fitted.text


def test_what_is_no_cause_has_no_fix() -> None:
    assert fix_of("unknown") is None and fix_of("none") is None


def test_the_lightning_quickstarts_rounding_is_removed_in_its_own_sections() -> None:
    config = yaml.safe_load((QUICKSTART.parents[1] / "lightning/quickstart.yaml").read_text())
    engine = config["model"]["engine"]
    settings = {"framework": "lightning", "engine": engine, "dtype": "float32", "lora_dropout": 0.0}
    fix = fix_of("precision", {"settings": settings})
    assert fix is not None and "weight_rounding: fp8" in fix.text
    left = {name: value for name, value in engine.items() if name != "weight_rounding"}
    assert yaml.safe_load(fix.yaml) == {"model": {"engine": left}}


def test_other_fixes_lie_where_lightning_has_them() -> None:
    settings = {"framework": "lightning", "engine": {"type": "vllm", "seed": 1}, "num_iterations": 2}
    cases = {
        "policy_staleness": {"data": {"num_iterations": 1}},
        "stale_weights": {"model": {"sync_check": True}},
        "truncated_sampling": {"model": {"sampling": {"top_p": 1.0, "top_k": 0}}},
        "sync_rounding": {"model": {"engine": {"type": "vllm", "seed": 1, "dtype": "float32"}}},
        "weight_variance": {"model": {"correction": "paper/icepop"}},
        "wrong_adapter": {"model": {"sync_check": True}},
        "unreported_sampling": None,  # no counterpart: words only
    }
    for cause, expected in cases.items():
        fix = fix_of(cause, {"settings": settings})
        assert fix is not None and fix.text and yaml.safe_load(fix.yaml) == expected
