"""The fault suite: the wall between its kinds, what its faults do to a tiny model, and how answers are counted."""

from __future__ import annotations

import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "faults"))
import contexts
import engine_faults as e
import fifth_kinds
import sixth_kinds
import time_faults as r
import trainer_faults as t
from cases import Case, load_cases
from fault_checks import SAME, assert_changed_and_put_back, k3
from kind import split_of
from kinds import CLEANS, KINDS, MARKER, table
from run import CLEAN_SEEDS, SEEDS, plan
from sampler import Order, plain, processed, reporting_raw, sample, speculated
from score import Answer, calibration, markdown, summarize, totals, verdict_of, write_results
from wall import FIFTH_HALF, FIRST, FOURTH, SECOND, SEEN, SEEN_CLEAN, SIXTH_HALF, THIRD
from weights import VERSIONS
from worlds import LENGTH, Made, World, one_pass, padded_pass

from trl_offpolicy.diagnosis.attribution.recorded import attribute_run
from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.engines.hf import Head
from trl_offpolicy.run_folder.rollouts import read_rollouts

FIFTH = (fifth_kinds.prompts, fifth_kinds.sampling, fifth_kinds.architecture, fifth_kinds.precision,
         fifth_kinds.bookkeeping, fifth_kinds.weights, fifth_kinds.trainer, fifth_kinds.routing, fifth_kinds.mixtures,
         fifth_kinds.over_time)  # fmt: skip
SIXTH = (sixth_kinds.prompts, sixth_kinds.sampling, sixth_kinds.architecture, sixth_kinds.precision,
         sixth_kinds.bookkeeping, sixth_kinds.weights, sixth_kinds.trainer, sixth_kinds.routing, sixth_kinds.mixtures,
         sixth_kinds.over_time)  # fmt: skip

# ------------------------------------------------------------------------------------------------------------ the wall


def test_the_wall_stands_where_it_stood() -> None:
    """What was looked at stays on the tune side; no name may leave the list, or move to the report."""
    known = sorted(FIRST)
    assert len(known) == 129 and len(SECOND) == 70 and len(THIRD) == 60 and len(FOURTH) == 58
    assert len(FIFTH_HALF) == 30 and len(SIXTH_HALF) == 31
    assert KINDS.keys() >= SEEN
    assert sha256(" ".join(known).encode()).hexdigest()[:16] == "5a3859f8f671bccc"
    assert sha256(" ".join(sorted(SEEN)).encode()).hexdigest()[:16] == "10e2153868a00ceb"
    assert {name for name, kind in KINDS.items() if kind.split == "tune"} == SEEN
    fifth, sixth = ({kind.name for family in round_ for kind in family()} for round_ in (FIFTH, SIXTH))
    assert len(fifth) == 57 and len(sixth) == 58
    even = {name for name in fifth | sixth if int(sha256(name.encode()).hexdigest()[0], 16) % 2 == 0}
    assert even & fifth == FIFTH_HALF and even & sixth == SIXTH_HALF
    assert {name for name, kind in KINDS.items() if kind.split == "report"} == (fifth | sixth) - even


def test_what_nobody_has_looked_at_is_held_out() -> None:
    assert split_of("a kind of tomorrow") == "report"
    assert SEEDS["tune"] != SEEDS["report"] != 100  # 100 was the seed of a report that has been read


def test_the_tune_side_has_no_later_clean_variant() -> None:
    later = CLEANS.keys() - SEEN_CLEAN
    assert len(later) == 42 and CLEANS.keys() > SEEN_CLEAN
    for world in ("smollm2", "qwen", "moe"):
        assert not later & CLEAN_SEEDS["tune"][world].keys()
        runs = [kind.name for _, kinds in list(plan(world, "report"))[1:] for kind in kinds]
        assert {name for name in later if world in CLEANS[name].models} <= set(runs)


def test_two_hundred_and_three_clean_cases_are_in_the_report() -> None:
    rounds = [kinds for world in CLEAN_SEEDS["report"] for _, kinds in list(plan(world, "report"))[1:]]
    assert sum(map(len, rounds)) == 203


def test_families_have_about_the_same_shares_in_every_round() -> None:
    for seen in (SECOND, THIRD, FOURTH, KINDS.keys() - SEEN):
        counts = [Counter(KINDS[name].family for name in names) for names in (FIRST, seen)]
        for family in {kind.family for kind in KINDS.values()}:
            first, later = (count[family] / count.total() for count in counts)
            assert later and abs(first - later) < 0.1, family


def test_answers_that_count_are_names_of_causes() -> None:
    later = {"model_config", "logit_processors", "unreported_sampling", "padding", "sync_rounding", "parallelism"}
    for kind in (*KINDS.values(), *CLEANS.values()):
        named = {*kind.right, *kind.sane} - {"unknown", "none"}
        assert named <= CAUSES.keys() | later, kind.name
        assert not set(kind.right) & set(kind.sane), kind.name
        assert (kind.inject is None) != (kind.run is None), kind.name


# ------------------------------------------------------------------------------------------------- engine and sampler


@pytest.mark.parametrize("order", [Order(), Order(rows=1), Order(rows=5), Order(chunk=2)])
def test_without_a_fault_both_sides_agree_in_any_order(world: World, order: Order) -> None:
    made = Made("none", world.sample(order=order))
    assert k3(world, made).max() < SAME
    assert made.batch.logps.shape == (24, LENGTH)


CONTEXTS = {
    "rope_theta": e.of_model(contexts.rope_theta, 0.5),
    "rope_scaling": e.of_model(contexts.rope, lambda f: f / 1.5),
    "norm_eps": e.of_model(contexts.norm_eps, 0.1),
    "attention_scale": e.of_model(contexts.attention_scale, 0.8),
    "softcap": lambda _world: contexts.attention_logits(cap=1.0),
    "window": lambda _world: contexts.attention_logits(window=2),
    "logit_softcap": e.of_model(contexts.logits_changed, lambda x: contexts.softcapped(x, 2.0)),
    "activation": e.of_model(contexts.activation, torch.nn.GELU()),
    "embedding": lambda world: e.embedding_scaled(world, 1.2),
    "kv_fp8": lambda _world: contexts.kv_rounded(contexts.fp8_unscaled),
    "kv_int8": lambda _world: contexts.kv_rounded(contexts.int8),
    "int8": e.of_model(contexts.weights_rounded, contexts.int8),
    "int4": e.of_model(contexts.weights_rounded, contexts.int4_groups),
    "fp8": e.of_model(contexts.weights_rounded, contexts.fp8),
    "activations": e.of_model(contexts.inputs_rounded, contexts.fp8),
    "head": lambda world: e.head_changed(world, contexts.bf16),
    "edge_layers": e.edge_layers_int8,
    "bf16": e.cast("bfloat16"),
    "attention_dropout": e.of_model(contexts.attention_dropout, 0.3),
    "mlp_dropout": e.of_model(contexts.mlp_dropout, 0.3),
    "adapter_dropout": lambda world: contexts.adapter_dropout(world.weights, 0.3),
    "noise": t.noisy(0.05),
    "stale": lambda world: world.weights.at(VERSIONS - 1),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_changes_the_model_and_puts_everything_back(world: World, name: str) -> None:
    assert_changed_and_put_back(world, CONTEXTS[name])
    assert not world.model.training


def test_attention_that_is_not_capped_is_attention(world: World) -> None:
    ids, mask = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        plainly = world.model(ids, attention_mask=mask, position_ids=places).logits
        with contexts.attention_logits(cap=1e6, window=100):
            computed = world.model(ids, attention_mask=mask, position_ids=places).logits
    torch.testing.assert_close(computed[0, 2:], plainly[0, 2:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(computed[1], plainly[1], rtol=1e-4, atol=1e-4)


def test_theta_and_scaling_are_what_they_say(world: World) -> None:
    (rotary,) = contexts.modules_with(world.model, "inv_freq")
    before = rotary.inv_freq.clone()
    theta = world.model.config.rope_parameters["rope_theta"]
    with contexts.rope_theta(world.model, 0.5):
        share = torch.arange(0, 64, 2) / 64
        torch.testing.assert_close(rotary.inv_freq, (0.5 * theta) ** -share, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(rotary.inv_freq, before)


def test_versions_are_on_the_line_from_the_base(world: World) -> None:
    weights, name = world.weights, next(iter(world.weights.base))
    base, one = weights.base[name], weights.updates.versions[0][name]
    torch.testing.assert_close(weights.value(name, 2.5), base + 2.5 * one)
    torch.testing.assert_close(weights.value(name, VERSIONS, 0.5), base + 0.5 * VERSIONS * one)
    torch.testing.assert_close(weights.value(name, "other"), base + weights.updates.other[name])
    with weights.at(0):
        assert torch.equal(weights.parameters[name], base)
    torch.testing.assert_close(weights.parameters[name].data, base + VERSIONS * one)


LOGITS = torch.tensor([[2.0, -1.0, 0.5, 0.0]])


@pytest.mark.parametrize(
    ("drawing", "expected"),
    [
        (e.repetition(2.0), [1.0, -2.0, 0.5, 0.0]),  # the prompt holds 1, the completion 0
        (e.presence(0.7), [1.3, -1.0, 0.5, 0.0]),
        (e.frequency(0.7), [0.6, -1.0, 0.5, 0.0]),  # 0 was said twice
        (e.banned([3]), [2.0, -1.0, 0.5, -torch.inf]),
    ],
)
def test_penalties_by_hand(drawing: Any, expected: list[float]) -> None:
    _, reported = drawing(LOGITS.clone(), [[1]], [[0, 0]], torch.Generator().manual_seed(0))
    torch.testing.assert_close(reported, torch.tensor([expected]).log_softmax(-1))


def test_raw_log_probs_are_those_before_the_temperature() -> None:
    many = LOGITS.repeat(20_000, 1)
    drawn, reported = reporting_raw(Head(0.5))(many, [], [], torch.Generator().manual_seed(0))
    torch.testing.assert_close(reported[0], LOGITS[0].log_softmax(-1))
    share = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(share, (LOGITS[0] / 0.5).softmax(-1), rtol=0.0, atol=0.015)


@pytest.mark.parametrize(("leniency", "exact"), [(1.0, True), (3.0, False)])
def test_speculation_is_exact_unless_it_is_lenient(leniency: float, exact: bool) -> None:
    many = LOGITS.repeat(20_000, 1)
    drawn, _ = speculated(flatness=3.0, leniency=leniency)(many, [], [], torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=4) / len(drawn)
    assert ((share - LOGITS[0].softmax(-1)).abs().max() < 0.015) == exact


def test_the_sampler_reports_what_it_drew_from(world: World) -> None:
    generator = torch.Generator().manual_seed(5)
    ids, logps = sample(world.model, world.prompts, plain(Head(0.7)), max_tokens=5, stop=[1], generator=generator)
    scored = one_pass(world.model, world.prompts, ids, Head(0.7))
    for row, values in enumerate(logps):
        np.testing.assert_allclose(scored.logps[row, : len(values)], values, rtol=1e-4, atol=1e-5)


def test_a_processor_sees_what_was_said(world: World) -> None:
    seen = []

    def change(logits: Any, prompts: Any, said: Any) -> Any:
        seen.append((len(prompts), [len(row) for row in said]))
        return logits

    sample(world.model, world.prompts[:2], processed(change), max_tokens=3, stop=[], generator=torch.Generator())
    assert seen == [(2, [0, 0]), (2, [1, 1]), (2, [2, 2])]


# --------------------------------------------------------------------------------------------- trainer, book-keeping


def test_the_padded_pass_is_the_kits_own_scoring(world: World) -> None:
    batch, scored = world.clean
    found = world.score(batch, scorer=padded_pass(attended=False, positions="text"))
    for name in ("old_per_token_logps", "entropies", "rescored_per_token_logps"):
        np.testing.assert_allclose(found[name], scored[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("attended", "positions", "harmless"), [(False, "all", True), (True, "all", False), (False, "prompt", False)]
)
def test_padding_hurts_the_rows_that_have_it(world: World, attended: bool, positions: str, harmless: bool) -> None:
    batch, _ = world.clean
    made = Made("", batch, world.score(batch, scorer=padded_pass(attended=attended, positions=positions)))
    rows = k3(world, made).reshape(6, 4).max(1)
    longest = np.array([len(prompt) == 6 for prompt in world.prompts])
    assert rows[longest].max() < SAME
    assert (rows[~longest].max() < SAME) == harmless


def test_packing_leaks_into_every_second_row(world: World) -> None:
    batch, _ = world.clean
    rows = k3(world, Made("", batch, world.score(batch, scorer=t.packed)))
    assert rows[::2].max() < SAME < rows[1::2].min()


def test_dropout_is_in_the_noise_floor(world: World) -> None:
    """Where the trainer scores twice, it gives two answers."""
    made = t.scores_in("", e.of_model(contexts.attention_dropout, 0.3))(world)
    assert made.scored is not None
    twice = made.scored["rescored_per_token_logps"][:6] - made.scored["old_per_token_logps"][:6]
    assert np.nanmax(np.abs(twice)) > 0.01


LOGPS = np.array([[-1.0, -2.0, -3.0, -4.0]] * 2 + [[-5.0, -6.0, -7.0, np.nan]] * 2)


def test_bookkeeping_by_hand(world: World) -> None:
    np.testing.assert_allclose(t.cumulative(world, LOGPS)[0], [-1, -3, -6, -10])
    np.testing.assert_allclose(t.averaged(world, LOGPS)[2], [-6, -6, -6, np.nan])
    rows = np.arange(8.0)[:, None]
    assert t.rotated_rows(1)(world, rows)[:, 0].tolist() == [1, 2, 3, 0, 5, 6, 7, 4]
    assert t.rotated_rows(4)(world, rows)[:, 0].tolist() == [4, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize(("step", "first"), [(1, [np.nan, 0, 1, 2]), (2, [np.nan, np.nan, 0, 1]), (-1, [1, 2, 3, 4])])
def test_a_positive_shift_is_late(world: World, step: int, first: list[float]) -> None:
    batch, scored = world.clean
    made = t.shifted(step)(world)
    expected = [np.nan if np.isnan(place) else batch.logps[0, int(place)] for place in first]
    np.testing.assert_allclose(made.batch.logps[0, :4], expected)
    assert made.scored is scored


# ---------------------------------------------------------------------------------------------------- files and runs


def test_a_case_comes_back_from_its_file(world: World, tmp_path: Path) -> None:
    made = e.computes("int8", e.of_model(contexts.weights_rounded, contexts.int8), quantization="int8")(world)
    case = world.case("int8_weights", made)
    case.save(tmp_path)
    tested = {"reference": case.evidence.old_per_token_logps}
    case.save_tested(tmp_path, tested)
    (back,) = load_cases(tmp_path)
    assert isinstance(back, Case)
    assert (back.name, back.kind, back.prompt_ids) == ("tiny-000-int8_weights", "int8_weights", case.prompt_ids)
    np.testing.assert_array_equal(back.evidence.sampling_per_token_logps, case.evidence.sampling_per_token_logps)
    np.testing.assert_array_equal(back.evidence.tested["reference"], tested["reference"])
    assert back.evidence.engine is not None and back.evidence.engine.quantization == "int8"
    assert back.evidence.trainer is not None and back.evidence.trainer.quantization == "none"


def test_a_recorded_run_begins_clean_and_a_sync_that_fails_shows_later(world: World, tmp_path: Path) -> None:
    run, before = KINDS["sync_fails_from_half_way"].run, list(world.prompts)
    assert run is not None
    r.record(world, "sync_fails_from_half_way", run, tmp_path)
    (folder,) = tmp_path.glob("*.run")
    rollouts = read_rollouts(folder)
    assert rollouts is not None
    d, step = rollouts.log_ratio.astype(float), rollouts.steps[rollouts.row]
    assert np.abs(d[step <= r.STEPS // 2]).max() < 1e-3
    sizes = [np.abs(d[step == late]).mean() for late in (r.STEPS // 2 + 1, r.STEPS - 1)]
    assert 1e-3 < sizes[0] < sizes[1]
    assert attribute_run(rollouts, {}) is not None
    assert world.prompts == before


# ------------------------------------------------------------------------------------------------------------ scoring


def answer(kind: str, cause: str, confidence: float = 0.8, path: str = "probe", world: str = "qwen") -> Answer:
    clean = kind in CLEANS
    good = verdict_of(CLEANS[kind] if clean else KINDS[kind], cause, world)
    verdict = ("right" if good == "right" else "wrong") if clean else good
    return Answer(f"{kind}-{cause}", world, kind, path, cause, confidence, 100.0, verdict)


def test_verdicts() -> None:
    stale = KINDS["stale_lag_1"]
    given = [verdict_of(stale, cause) for cause in ("stale_weights", "other_weights", "unknown", "precision", "none")]
    assert given == ["right", "sane", "unknown", "wrong", "silent"]
    assert verdict_of(KINDS["clipped_logps"], "unknown") == "sane"
    assert verdict_of(KINDS["kv_fp8"], "routing", "moe") == "sane"
    assert verdict_of(KINDS["kv_fp8"], "routing", "qwen") == "wrong"


def test_a_summary_by_hand() -> None:
    found = [
        answer("stale_lag_1", "stale_weights", 0.95),
        answer("stale_lag_1", "precision", 0.95),  # wrong and confident
        answer("doubled_bos", "stale_weights", 0.3),  # wrong, but not confident
        answer("kv_fp8", "unknown"),
        answer("clean", "none"),
        answer("clean_threads", "precision"),
    ]
    row = summarize(found)["probe"]
    assert row["share"] == {"right": 0.25, "sane": 0.0, "unknown": 0.25, "wrong": 0.5, "silent": 0.0}
    assert row["right_or_sane_by_kind"] == round(0.5 / 3, 4)
    assert (row["confident_wrong"], row["false_alarms"], row["clean_cases"], row["kinds"]) == (0.25, 1, 2, 3)
    assert row["named_at_90"] == {"cases": 2, "right": 0.5}
    assert row["confusion"]["clean"] == {"none": 1, "precision": 1}
    assert row["by_family"]["weights"] == {"right": 1, "wrong": 1}


def test_totals_name_no_kind() -> None:
    lines = totals(summarize([answer("stale_lag_1", "stale_weights"), answer("doubled_bos", "precision")]))
    assert lines[2].startswith("| probe | 50.0 % | 0.0 % | 0.0 % | 50.0 % |")
    assert not any(name in line for line in lines for name in ("stale_lag_1", "doubled_bos"))


def test_small_faults_are_not_counted_but_hidden_ones_are() -> None:
    small = Answer("a", "qwen", "kv_fp8", "probe", "none", 1.0, 1.5, "silent")
    hidden = Answer("b", "qwen", "lossy_speculation", "probe", "none", 1.0, 0.0, "silent")
    assert not small.scored
    assert summarize([small, hidden])["probe"]["cases"] == 1


def test_the_last_bin_holds_certainty() -> None:
    rows = calibration([answer("stale_lag_1", "stale_weights", 1.0), answer("stale_lag_1", "precision", 0.9)])
    assert (rows[-1]["cases"], rows[-1]["right"], rows[-1]["confidence"]) == (2, 0.5, 0.95)
    assert sum(row["cases"] for row in rows) == 2


def test_tables_and_figure_are_written_between_the_markers(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "before\n<!-- tables of score.py -->\nFORMER\n<!-- tables of score.py -->\nafter\n"
    )
    found = [answer("stale_lag_1", "other_weights"), answer("clean", "none")]
    write_results(summarize(found), found, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "FORMER" not in text
    assert "| weights | stale_lag_1 | **other_weights** 1 |" in text
    assert markdown(summarize(found)) in text
    assert (tmp_path / "calibration.png").stat().st_size > 1000


def test_the_readme_lists_the_kinds() -> None:
    page = (Path(__file__).resolve().parents[2] / "benchmarks" / "faults" / "README.md").read_text()
    assert page.split(MARKER)[1].strip() == table()
    assert f"{len(KINDS)} kinds of fault" in page
