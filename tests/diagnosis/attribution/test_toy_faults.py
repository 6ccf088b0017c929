"""Faults outside the suite are named right or not at all, whatever was observed of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from toy_faults import FAULTS, batch_of

from trl_offpolicy.diagnosis.attribution.attribute import attribute
from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence

VIEWS: dict[str, Callable[[TokenEvidence], TokenEvidence]] = {
    "log-probs": lambda e: e.at_level("logps"),
    "log-probs without entropies": lambda e: replace(
        e.at_level("logps"), entropies=None, rescored_per_token_logps=None
    ),
    "declared": lambda e: e,
    "recorded": lambda e: replace(e, rescored_per_token_logps=None),
}
UNDECIDED = {("a grammar", "log-probs"), ("a grammar", "log-probs without entropies")}
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
