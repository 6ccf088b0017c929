"""Mismatch and staleness by version lag: shares by hand, and in the doctor's answer on recorded tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trl_offpolicy.diagnosis.attribution.by_lag import lag_shares
from trl_offpolicy.diagnosis.attribution.recorded import attribute_run
from trl_offpolicy.run_folder.rollouts import read_rollouts


def test_shares_by_hand() -> None:
    found = lag_shares([(0, 100, 0.5), (1, 200, 1.0), (4, 100, 3.5)])
    assert found is not None and (found.mismatch, found.staleness) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert "33%" in found.text and "67%" in found.text
    shrinking = lag_shares([(0, 100, 2.0), (1, 100, 1.0)])
    assert shrinking is not None and (shrinking.mismatch, shrinking.staleness) == (1.0, 0.0)


@pytest.mark.parametrize(
    "sizes", [[], [(0, 100, 1.0)], [(2, 100, 1.0)], [(0, 10, 1.0), (1, 900, 2.0)], [(0, 100, 0.0), (1, 100, 0.0)]]
)
def test_without_both_kinds_of_tokens_nothing_is_said(sizes: Any) -> None:
    assert lag_shares(sizes) is None


def recorded(gap: Any, *, mismatch: float = 0.0) -> list[dict[str, Any]]:
    """Six steps of 16 responses, a quarter of each lag 0 to 3; a lag moves log-probs by ``gap(lag)`` nats.

    Beside that the engine's temperature differs by the factor 1 + ``mismatch``.
    """
    random, rows = np.random.default_rng(0), []
    for step in range(4, 10):
        for place in range(16):
            logits = random.normal(0, 2, (20, 30))
            mu = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            ids = np.array([random.choice(30, p=np.exp(one)) for one in mu])
            new = logits / (1 + mismatch) + gap(place % 4) * random.normal(0, 1, (20, 30))
            old = new - np.logaddexp.reduce(new, axis=1, keepdims=True)
            at = (np.arange(20), ids)
            rows.append({
                "step": step, "policy_version": step - place % 4, "group_id": place, "completion_ids": ids.tolist(),
                "completion_mask": [True] * 20, "sampling_per_token_logps": mu[at].tolist(),
                "old_per_token_logps": old[at].tolist(), "entropies": (-(np.exp(old) * old).sum(1)).tolist(),
            })  # fmt: skip
    return rows


def answer(write_run: Any, rows: list[dict[str, Any]]) -> Any:
    rollouts = read_rollouts(write_run([{"step": 10, "loss": 0.1}], [rows]))
    assert rollouts is not None
    found = attribute_run(rollouts, {})
    assert found is not None
    return found


def test_what_tokens_of_lag_0_do_not_have_is_staleness(write_run: Any) -> None:
    found = answer(write_run, recorded(lambda lag: 0.2 * lag))
    assert found.cause == "policy_staleness" and found.explained > 0.95 and found.parts == ()
    assert "is added by older weights" in found.reasons[0]


def test_both_parts_are_named_with_their_shares(write_run: Any) -> None:
    found = answer(write_run, recorded(lambda lag: 0.1 * lag, mismatch=0.4))
    assert found.cause == "temperature"  # of the tokens at lag 0; the larger part
    parts = dict(found.parts)
    assert set(parts) == {"temperature", "policy_staleness"} and sum(parts.values()) == pytest.approx(1)
    assert 0.1 < parts["policy_staleness"] < 0.5


def test_a_mismatch_that_no_lag_changes_is_none(write_run: Any) -> None:
    found = answer(write_run, recorded(lambda _lag: 0.0, mismatch=0.4))
    assert found.cause == "temperature" and found.parts == ()
