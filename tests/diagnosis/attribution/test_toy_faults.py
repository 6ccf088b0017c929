"""Faults outside the suite are named right or not at all, whatever was observed of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from toy_faults import FAULTS, batch_of

from trl_offpolicy.diagnosis.attribution.attribute import attribute
from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence
from trl_offpolicy.diagnosis.attribution.trials.shares import left_share

VIEWS: dict[str, Callable[[TokenEvidence], TokenEvidence]] = {
    "log-probs": lambda e: e.at_level("logps"),
    "log-probs without entropies": lambda e: replace(
        e.at_level("logps"), entropies=None, rescored_per_token_logps=None
    ),
    "declared": lambda e: e,
    "recorded": lambda e: replace(e, rescored_per_token_logps=None),
}
UNDECIDED = {("a grammar", view) for view in VIEWS}
"""A tool's output and what a grammar forces look alike, and neither was sampled: the fix is the same, too."""


@pytest.mark.parametrize("name", FAULTS)
def test_no_other_cause_is_named(name: str) -> None:
    fault = FAULTS[name]
    for view, look in VIEWS.items():
        found = attribute(look(batch_of(name)))
        if (name, view) in UNDECIDED:
            assert found.cause == "tool_tokens" and "logit_processors" in found.alternatives
            continue
        assert found.cause in (*fault.right, "unknown"), (view, found.cause, found.confidence, found.reasons)
        assert found.cause != "unknown" or (found.confidence == 0 and found.next_test), view


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.named])
def test_what_has_a_clear_trace_is_still_named(name: str) -> None:
    found = attribute(batch_of(name))
    assert found.cause in FAULTS[name].right, found.reasons
    assert found.confidence >= 0.5


def test_a_second_scoring_with_other_weights_is_no_dropout() -> None:
    """The engine reproduces the first scoring, so that one had no dropout."""
    batch = batch_of("nothing")
    moved = np.random.default_rng(0).normal(0, 0.15, batch.old_per_token_logps.shape)
    again = batch.old_per_token_logps + moved
    assert attribute(replace(batch, rescored_per_token_logps=again)).cause == "none"
    # where the engine agrees with neither, each scoring drew its own noise
    old = batch.old_per_token_logps + np.random.default_rng(1).normal(0, 0.15, moved.shape)
    undeclared = replace(batch, trainer=None, engine=None, old_per_token_logps=old, rescored_per_token_logps=again)
    assert attribute(undeclared).cause == "dropout"


def test_what_a_constant_leaves_is_not_explained() -> None:
    """Beside a mismatch of many nats any number near all of the engine's leaves a few per cent of the distance."""
    batch = batch_of("nothing")
    engine = np.random.default_rng(0).uniform(-0.5, 0.0, batch.old_per_token_logps.shape)
    far = replace(
        batch,
        sampling_per_token_logps=engine,
        old_per_token_logps=engine - 15.0,
        tested={"engine:misalignment:zeros": np.zeros_like(engine), "engine:misalignment:its own": engine + 1e-3},
    )
    assert left_share(far, "engine:misalignment:zeros") > 0.95
    assert left_share(far, "engine:misalignment:its own") < 0.01
