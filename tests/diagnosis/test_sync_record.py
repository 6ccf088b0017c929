"""What recorded syncs prove: nothing new, a part, or a version that never arrived; healthy syncs prove nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trl_offpolicy.diagnosis.attribution.recorded import attribute_run
from trl_offpolicy.diagnosis.doctor import examine
from trl_offpolicy.diagnosis.sync_record import describe_syncs, seen_in_syncs
from trl_offpolicy.engines.engine import SyncReport
from trl_offpolicy.run_folder.rollouts import read_rollouts
from trl_offpolicy.run_folder.syncs import append_sync


def syncs(checksums: str, **more: Any) -> list[SyncReport]:
    """One sync for each letter; equal letters are equal weights in the engine."""
    default = {"kind": "memory", "bytes": 1000, "seconds": 0.1, "changed": 0.8, **more}
    return [SyncReport(version=n, checksum=letter, **default) for n, letter in enumerate(checksums)]


def part(step: int, *, gap: float = 0.1, version: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Four responses of 20 tokens whose log-probs differ by ``gap``."""
    random = np.random.default_rng(seed + step)
    rows = []
    for _ in range(4):
        mu = -random.exponential(1.0, 20)
        rows.append({
            "step": step, "policy_version": step if version is None else version, "completion_mask": [True] * 20,
            "completion_ids": random.integers(0, 50, 20).tolist(), "sampling_per_token_logps": mu.tolist(),
            "old_per_token_logps": (mu + gap * random.normal(size=20)).tolist(),
        })  # fmt: skip
    return rows


def test_an_engine_that_does_not_move_while_the_trainer_does_is_a_cause() -> None:
    (seen,) = seen_in_syncs(syncs("aaaab", engine_dtype="bfloat16", visible=0.0))
    assert seen.cause == "sync_rounding" and "after 3 of 4 syncs (bfloat16)" in seen.engine and "80%" in seen.trainer


@pytest.mark.parametrize(
    "healthy",
    [
        syncs("abcdef"),
        syncs("aabcde", visible=0.9),  # one sync of five
        syncs("aaaaaa", changed=0.0),  # the trainer itself did not move
        syncs("aa"),  # too few to say
        [],
    ],
)
def test_healthy_syncs_prove_nothing(healthy: list[SyncReport]) -> None:
    assert seen_in_syncs(healthy) == ()


def test_a_sync_with_fewer_bytes_sent_a_part() -> None:
    found = syncs("abcd")
    found[2] = SyncReport(version=2, kind="memory", bytes=400, seconds=0.1, checksum="c", changed=0.8)
    (seen,) = seen_in_syncs(found)
    assert seen.cause == "stale_weights" and seen.engine == "400 bytes at version 2" and "1000" in seen.trainer
    adapters = [SyncReport(version=n, kind="adapter", bytes=10, seconds=0.1, changed=0.8) for n in range(4)]
    assert seen_in_syncs([*syncs("abcd"), *adapters]) == ()  # another kind has another size
    changed = [SyncReport(version=n, kind="memory", bytes=9 * n, seconds=0.1, changed=0.8, whole=False) for n in (4, 5)]
    assert seen_in_syncs([*syncs("abcd"), *changed]) == () == seen_in_syncs(changed)  # meant to be a part


def test_responses_that_name_a_version_which_no_sync_brought(write_run: Any) -> None:
    rollouts = read_rollouts(write_run([{"step": 6, "loss": 0.1}], [part(step) for step in range(2, 6)]))
    assert rollouts is not None
    (seen,) = seen_in_syncs(syncs("abcd"), rollouts)
    assert seen.cause == "stale_weights" and seen.engine == "3 is the last one sent before" and seen.trainer == "4"
    assert seen_in_syncs(syncs("abcdef"), rollouts) == ()
    assert seen_in_syncs([], rollouts) == ()  # transformers' generate has no syncs
    resumed = [one for one in syncs("abcdef") if one.version >= 4]
    assert seen_in_syncs(resumed, rollouts) == ()  # what came before the first recorded sync is not judged


def test_what_syncs_prove_outranks_a_guess_and_reaches_the_doctor(write_run: Any) -> None:
    folder: Path = write_run([{"step": step, "loss": 0.1} for step in range(1, 7)], [part(step) for step in range(6)])
    rollouts = read_rollouts(folder)
    assert rollouts is not None
    seen = seen_in_syncs(syncs("aaaaab", engine_dtype="bfloat16"))
    guess, proven = attribute_run(rollouts, {}), attribute_run(rollouts, {}, seen=seen)
    assert guess is not None and guess.cause != "sync_rounding"
    assert proven is not None and (proven.cause, proven.basis) == ("sync_rounding", "seen")
    for one in syncs("aaaaab", engine_dtype="bfloat16", visible=0.02):
        append_sync(folder, one)
    found = examine(folder)
    assert found.attribution is not None and found.attribution.cause == "sync_rounding"
    assert "2%" in found.syncs and "4 brought the engine the weights that it had" in found.syncs
    assert json.loads(json.dumps(found.as_dict()))["syncs"] == found.syncs


def test_a_sentence_only_where_there_is_something_to_say() -> None:
    assert describe_syncs(syncs("abc")) == ""
    assert describe_syncs(syncs("aab", changed=0.0)) == "Of 3 syncs: 1 found that the trainer itself had not moved."
