"""The doctor's attribution from recorded rollouts: what is read, at which steps, and what the declarations add."""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_offpolicy.diagnosis.attribution.attribute import attribute
from trl_offpolicy.diagnosis.attribution.recorded import attribute_run, course_of, recorded_evidence
from trl_offpolicy.diagnosis.doctor import examine
from trl_offpolicy.run_folder.rollouts import read_rollouts

SAME = {"dtype": "float32", "quantization": "none", "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def rows(steps: range, change: Any, *, count: int = 16, length: int = 20, seed: int = 0) -> list[dict[str, Any]]:
    """Completions from known distributions; ``change`` maps the sampler's logits to the trainer's."""
    generator = np.random.default_rng(seed)
    found = []
    for step in steps:
        for row in range(count):
            logits = generator.normal(0, 2, (length, 30))
            mu = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            ids = np.array([generator.choice(30, p=np.exp(one)) for one in mu])
            new = change(logits)
            old = new - np.logaddexp.reduce(new, axis=1, keepdims=True)
            at = (np.arange(length), ids)
            found.append(
                {
                    "step": step,
                    "group_id": row // 4,
                    "completion_ids": ids.tolist(),
                    "completion_mask": [True] * (length - 1) + [False],
                    "sampling_per_token_logps": mu[at].astype(np.float32).tolist(),
                    "old_per_token_logps": old[at].astype(np.float32).tolist(),
                    "entropies": (-(np.exp(old) * old).sum(1)).astype(np.float32).tolist(),
                }
            )
    return found


def metrics(steps: int) -> list[dict[str, Any]]:
    return [{"step": step, "offpolicy/mismatch/kl_k3": 0.2} for step in range(1, steps + 1)]


def test_rows_of_the_window_become_evidence(write_run: Any) -> None:
    folder = write_run(metrics(5), [rows(range(5), lambda x: x / 1.3)])
    rollouts = read_rollouts(folder)
    assert rollouts is not None
    late = recorded_evidence(rollouts, {"declared": {"engine": SAME, "trainer": SAME}}, steps=(4, 5))
    assert late is not None and late.sampling_per_token_logps.shape == (2 * 16, 19)
    assert late.engine is not None and late.engine.dtype == "float32"
    assert late.token_ids is not None and late.entropies is not None and late.group_ids is not None
    part = rows(range(5), lambda x: x / 1.3)[3 * 16]
    assert late.token_ids[0].tolist() == part["completion_ids"][:19]
    np.testing.assert_allclose(late.sampling_per_token_logps[0], part["sampling_per_token_logps"][:19])
    np.testing.assert_allclose(late.old_per_token_logps[0], part["old_per_token_logps"][:19], rtol=1e-5)
    assert recorded_evidence(rollouts, {}, steps=(90, 99)) is None


def test_a_temperature_fault_is_named_by_the_doctor(write_run: Any) -> None:
    folder = write_run(metrics(3), [rows(range(3), lambda x: x / 1.3)])
    seen = examine(folder)
    assert seen.attribution is not None and seen.attribution.cause == "temperature"
    assert seen.as_dict()["attribution"]["cause"] == "temperature"


def test_old_logps_alone_are_enough_evidence_without_entropies(write_run: Any) -> None:
    part = [{k: v for k, v in row.items() if k not in ("entropies", "group_id")} for row in rows(range(2), lambda x: x)]
    rollouts = read_rollouts(write_run(metrics(2), [part]))
    assert rollouts is not None
    evidence = recorded_evidence(rollouts, {})
    assert evidence is not None and evidence.entropies is None and evidence.engine is None
    assert attribute(evidence).cause == "none"


def test_version_lags_and_turns_are_passed_on(write_run: Any) -> None:
    """Tool output splits a response into two turns; a lag is the step less the version that sampled."""
    part = rows(range(3, 5), lambda x: x, count=4)
    for place, row in enumerate(part):
        row["completion_mask"] = [True] * 5 + [False] * 3 + [True] * 12
        row["policy_version"] = row["step"] - place % 3
    rollouts = read_rollouts(write_run(metrics(5), [part]))
    assert rollouts is not None
    evidence = recorded_evidence(rollouts, {})
    assert evidence is not None and evidence.turns is not None and evidence.version_lags is not None
    assert evidence.turns[0].tolist() == [0] * 5 + [-1] * 3 + [1] * 12
    assert [lags.tolist() for lags in evidence.version_lags] == [[place % 3] * 20 for place in range(8)]
    for row in part:  # a version for each token wins
        row["policy_versions"] = [row["step"] - 1] * 10 + [row["step"]] * 10
    rollouts = read_rollouts(write_run(metrics(5), [part]))
    assert rollouts is not None
    evidence = recorded_evidence(rollouts, {})
    assert evidence is not None and evidence.version_lags is not None
    assert evidence.version_lags[3].tolist() == [1] * 10 + [0] * 10


def test_without_versions_no_lag_is_made_up(write_run: Any) -> None:
    rollouts = read_rollouts(write_run(metrics(2), [rows(range(2), lambda x: x)]))
    assert rollouts is not None
    evidence = recorded_evidence(rollouts, {})
    assert evidence is not None and evidence.version_lags is None
    assert evidence.turns is not None and set(evidence.turns.flatten().tolist()) == {0}


def test_a_run_without_mismatch_gets_no_attribution_and_a_small_one_gets_its_fix(write_run: Any) -> None:
    quiet = [{**row, "offpolicy/mismatch/kl_k3": 0.001} for row in metrics(3)]
    assert examine(write_run(quiet, [rows(range(3), lambda x: x)])).attribution is None
    small = examine(write_run(quiet, [rows(range(3), lambda x: x / 1.3)]))
    assert small.attribution is not None and small.attribution.cause == "temperature"
    assert small.advice is not None and "temperature" in small.advice.yaml


def test_a_setting_that_changed_in_the_run_is_named_and_its_step_is_told(write_run: Any) -> None:
    late = rows(range(5, 10), lambda x: x / 1.3)
    grown = read_rollouts(write_run(metrics(10), [rows(range(5), lambda x: x), late]))
    assert grown is not None
    found = attribute_run(grown, {}, steps=(6, 10))
    assert found is not None and found.cause == "temperature"
    assert any("since step 6 it is there at once" in reason for reason in found.reasons)


def drifted(share: float, seed: int = 5) -> Any:
    """The trainer's logits after ``share`` of an update that depends on the token and the context."""
    generator = np.random.default_rng(seed)
    token = generator.normal(0, 0.6, 30)  # the same in every context
    return lambda x: x + share * token + share * generator.normal(0, 0.8, x.shape)


def test_weights_that_stop_arriving_show_as_a_mismatch_that_grows(write_run: Any) -> None:
    exact = [rows(range(6), lambda x: x)]
    growing = [rows(range(s, s + 1), drifted(0.15 * (s - 5)), seed=s) for s in range(6, 14)]
    flat = [rows(range(s, s + 1), drifted(0.5), seed=s) for s in range(6, 14)]
    declared = {"declared": {"engine": SAME | {"weight_version": 0}, "trainer": SAME}}
    rollouts = read_rollouts(write_run(metrics(14), exact + growing))
    assert rollouts is not None
    course = course_of(rollouts)
    assert course is not None and (course.since, course.grows, course.comes_and_goes) == (6, True, False)
    for info, cause in ((declared, "stale_weights"), ({}, "other_weights")):
        found = attribute_run(rollouts, info)
        assert found is not None and found.cause == cause and "grows with the steps" in found.reasons[0]
        assert not any(reason.startswith("nothing explains") for reason in found.reasons)  # it names the closest cause
    jumped = read_rollouts(write_run(metrics(14), exact + flat))
    assert jumped is not None
    found = attribute_run(jumped, declared)
    assert found is not None and found.cause == "unknown"  # a change at step 6, and nothing that says which
    assert any("since step 7 it is there at once: look at what changed" in reason for reason in found.reasons)


def test_syncs_that_fail_now_and_then_come_and_go(write_run: Any) -> None:
    parts = [rows(range(s, s + 1), drifted(0.5 * (s % 2)), seed=s) for s in range(10)]
    rollouts = read_rollouts(write_run(metrics(10), parts))
    assert rollouts is not None
    found = attribute_run(rollouts, {"declared": {"engine": SAME | {"weight_version": 0}, "trainer": SAME}})
    assert found is not None and found.cause == "stale_weights" and "comes and goes" in found.reasons[0]


def scattered(size: float, seed: int, *, late: bool = False) -> Any:
    """The trainer's logits after something that depends on the context alone; if ``late``, on the second half of it."""
    generator = np.random.default_rng(seed)
    return lambda x: x + size * generator.normal(0, 0.8, x.shape) * (np.arange(len(x)) >= 10 * late)[:, None]


def course_answer(write_run: Any, sizes: list[float], *, late: bool = False) -> tuple[Any, Any]:
    parts = [rows(range(s, s + 1), scattered(size, s, late=late), seed=s) for s, size in enumerate(sizes)]
    rollouts = read_rollouts(write_run(metrics(len(sizes)), parts))
    assert rollouts is not None
    info = {"declared": {"engine": SAME | {"weight_version": 0}, "trainer": SAME}}
    return course_of(rollouts), attribute_run(rollouts, info)


def test_a_replica_with_other_settings_comes_and_goes_as_well(write_run: Any) -> None:
    """Nothing tells it from a sync that fails now and then, so no cause is named, and the test that decides is."""
    course, found = course_answer(write_run, [0.0, 0.3] * 5)
    assert course.comes_and_goes and not course.gathers
    assert (found.cause, found.confidence) == ("unknown", 0.0)
    assert "precision" in found.alternatives and "every engine" in found.next_test


def test_what_gathers_until_the_next_sync_is_weights(write_run: Any) -> None:
    course, found = course_answer(write_run, [0.0, 0.2, 0.4, 0.6] * 3)
    assert course.comes_and_goes and course.gathers
    assert found.cause == "stale_weights" and "precision" in found.alternatives


def test_what_grows_past_the_threshold_by_jerks_does_not_come_and_go(write_run: Any) -> None:
    """From 0.005 to 0.3 with every other step smaller: some are below 20 times the least after larger ones."""
    sizes = [0.005 * 1.3**step * (1.0 if step % 2 else 0.6) for step in range(17)]
    course, found = course_answer(write_run, sizes)
    assert course.grows and not course.comes_and_goes and "grows with the steps" in course.text
    assert found.cause == "stale_weights"


def test_what_grows_and_begins_late_in_responses_is_not_weights(write_run: Any) -> None:
    sizes = [0.0] * 4 + [0.1 * step for step in range(1, 9)]
    course, found = course_answer(write_run, sizes, late=True)
    assert course.grows and found.cause == "unknown" and any("begins later" in text for text in found.reasons)
    _, everywhere = course_answer(write_run, sizes)
    assert everywhere.cause == "stale_weights"


def test_one_bad_row_from_half_way_on_is_not_blamed_on_weights(write_run: Any) -> None:
    """Whatever starts late is no sync: a row that was tokenised again leaves the others as they are."""
    parts = []
    for step in range(10):
        part = rows(range(step, step + 1), lambda x: x, seed=step)
        if step >= 5:
            old = part[3]["old_per_token_logps"]
            old[4:] = [value - 2.0 - 0.3 * place for place, value in enumerate(old[4:])]
        parts.append(part)
    rollouts = read_rollouts(write_run(metrics(10), parts))
    assert rollouts is not None
    found = attribute_run(rollouts, {"declared": {"engine": SAME | {"weight_version": 0}, "trainer": SAME}})
    assert found is not None and found.cause not in ("stale_weights", "other_weights")


def test_rounding_errors_that_change_with_the_policy_are_no_failing_syncs(write_run: Any) -> None:
    """The quickstart's engine rounds to int8. As the policy grows certain its mismatch shrinks to a tenth."""
    sizes = (0.3, 0.2, 0.3, 0.1, 0.03, 0.3, 0.03, 0.04, 0.03, 0.03)
    parts = [rows(range(s, s + 1), drifted(size), seed=s) for s, size in enumerate(sizes)]
    rollouts = read_rollouts(write_run(metrics(10), parts))
    assert rollouts is not None and course_of(rollouts) is None
    engine = SAME | {"quantization": "int8", "weight_version": 0}
    found = attribute_run(rollouts, {"declared": {"engine": engine, "trainer": SAME | {"weight_version": 0}}})
    assert found is not None and (found.cause, found.basis) == ("precision", "declared")


def test_a_declared_difference_outranks_the_course_of_the_run(write_run: Any) -> None:
    parts = [rows(range(s, s + 1), drifted(0.5 * (s % 2)), seed=s) for s in range(10)]
    rollouts = read_rollouts(write_run(metrics(10), parts))
    assert rollouts is not None
    found = attribute_run(rollouts, {"declared": {"engine": SAME | {"quantization": "int8"}, "trainer": SAME}})
    assert found is not None and found.cause == "precision"
