"""Whether an exact engine is exact, and what is said to keep it from that."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trl_offpolicy.diagnosis.probe.asked import information, row
from trl_offpolicy.diagnosis.probe.exactness import ExactAsked, ask_exact, asked_exact, judge_exactness
from trl_offpolicy.engines.exact import Exact
from trl_offpolicy.run_folder.writer import add_to_run

RNG = np.random.default_rng(0)
OLD = -RNG.exponential(size=(8, 16))
ASKED = ExactAsked(
    applied="dtype=float32",
    rows=(
        row("precision", "dtype", "bfloat16", "float32", "precision", equal=False),
        row("precision", "quantisation of the weights", "none", "none", "precision", equal=True),
        information("parallelism", "enable prefix caching", False),
    ),
    missing=("batch-invariant kernels: none",),
)


def test_a_distance_of_rounding_is_the_floor() -> None:
    found = judge_exactness(OLD + 1e-6 * RNG.normal(size=OLD.shape), OLD, OLD, asked=ASKED)
    assert found.at_floor and found.floor == 1e-10 and found.tokens == OLD.size
    assert found.kl_k3 == pytest.approx(5e-13, rel=0.3) and found.text.startswith("engine and trainer are the same")


def test_a_larger_distance_names_what_was_seen_and_what_cannot_be_had() -> None:
    sampling = OLD + 0.02 * RNG.normal(size=OLD.shape)
    found = judge_exactness(sampling, OLD, None, asked=ASKED)
    assert not found.at_floor and found.kl_k3 == pytest.approx(2e-4, rel=0.3)
    assert found.keeps == ("dtype: bfloat16 in the engine, float32 in the trainer", "batch-invariant kernels: none")
    assert "What keeps it: dtype: bfloat16 in the engine" in found.text
    assert "run trl-offpolicy probe" in judge_exactness(sampling, OLD, None, asked=ExactAsked(applied="")).text


def test_the_floor_is_the_trainers_own_distance_to_itself() -> None:
    noise = lambda size: size * RNG.normal(size=OLD.shape)  # noqa: E731
    found = judge_exactness(OLD + noise(0.01), OLD, OLD + noise(0.01), asked=ASKED)
    assert found.at_floor and found.floor == pytest.approx(5e-5, rel=0.3)
    # what was not scored again, and what is outside of the completions, does not count
    again, sampling = OLD + noise(0.01), OLD.copy()
    again[:, 8:] = np.nan
    sampling[4:] = np.nan
    found = judge_exactness(sampling, OLD, again, asked=ASKED)
    assert found.tokens == OLD.size // 2 and found.kl_k3 == 0 and found.floor == pytest.approx(5e-5, rel=0.5)


def test_a_server_is_told_its_flags_only_if_something_is_wrong() -> None:
    good = {"dtype": "float32", "kv_cache_dtype": "auto"}
    assert asked_exact(None, good, (), dtype="float32", rows=8).missing == ()
    bad = asked_exact(None, {**good, "dtype": "bfloat16"}, (), dtype="float32", rows=8).missing
    assert bad[0] == "dtype is bfloat16, not float32" and "--max-num-seqs 8, and VLLM_BATCH_INVARIANT=1" in bad[1]
    sglang = {"server": "SGLang", "dtype": "float32", "batch_invariant": False}
    found = asked_exact(None, sglang, (), dtype="float32", rows=8).missing
    assert found[0] == "batch_invariant is false, not true" and "--enable-deterministic-inference" in found[1]
    assert "VLLM" not in found[1]
    own = asked_exact(Exact(arguments={"dtype": "float32"}, missing=("x",)), {}, (), dtype="float32", rows=8)
    assert (own.applied, own.missing) == ("dtype=float32", ("x",))


def test_an_engine_that_cannot_be_asked_is_said() -> None:
    silent: Any = SimpleNamespace()
    assert ask_exact(silent, None, None, rows=8).missing == ("the engine cannot be asked what it runs with",)


def test_the_verdict_is_added_to_run_json(tmp_path: Path) -> None:
    entry = judge_exactness(OLD, OLD, OLD, asked=ASKED).as_dict()
    add_to_run(tmp_path, "exact", entry)
    assert not list(tmp_path.iterdir())
    (tmp_path / "run.json").write_text('{"model": "m"}')
    add_to_run(tmp_path, "exact", entry)
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["model"] == "m" and found["exact"]["at_floor"] is True and found["exact"]["kl_k3"] == 0
