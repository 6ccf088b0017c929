"""The fifth round of kinds: what each injection does, by hand or on a tiny model, and that the clean variants are."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "faults"))
import contexts
import engine_faults as e
import fifth_contexts as w
import fifth_engine as k
import fifth_kinds
import fifth_trainer as n
import trainer_faults as t
from fault_checks import SAME, assert_changed_and_put_back, k3
from moe import tiny_moe
from sampler import plain
from second_contexts import routed
from third_contexts import named
from worlds import Batch, Made, World, one_pass, padded_pass

from trl_offpolicy.engines.hf import Head

CONTEXTS = {
    "llama3": e.of_model(w.llama3_rope),
    "table": lambda world: w.positions_clamped(world.model, 3),
    "embedding": e.of_model(w.embedding_rounded, contexts.bf16),
    "attention": e.of_model(w.attention_rounded, contexts.fp8),
    "fp8": e.of_model(w.fp8_products),
    "powers": e.of_model(contexts.weights_rounded, w.fp8_powers),
    "random": e.of_model(w.weights_randomly_rounded),
    "exchanged": e.of_model(w.layers_exchanged),
    "base": lambda world: w.other_base(world, 0.05),
    "deltas": lambda world: w.rounded_deltas(world, 9),
    "noise": e.of_model(w.embedding_noise, 5.0),
    "taken_out": lambda world: world.weights.at(5, -1.0),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_changes_the_model_and_puts_everything_back(world: World, name: str) -> None:
    assert_changed_and_put_back(world, CONTEXTS[name])


def test_formats_by_hand() -> None:
    rows = torch.tensor([[448.0, 1.0, -3.0], [0.448, 0.001, -0.003]])
    torch.testing.assert_close(w.fp8_rows(rows), rows, rtol=1e-6, atol=0.0)
    assert w.fp8_powers(torch.tensor([[448.0, 416.0, 17.0]])).tolist() == [[448.0, 416.0, 16.0]]
    values = torch.full((20_000,), 1 + 2**-9)  # a quarter of the way from 1 to the next bf16 number, 1 + 2^-7
    found = w.randomly_rounded("a name", values)
    assert set(found.tolist()) == {1.0, 1 + 2**-7} and abs(found.mean() - values.mean()) < 1e-4
    assert torch.equal(found, w.randomly_rounded("a name", values))


def test_frequencies_of_llama3(world: World) -> None:
    (rotary,) = contexts.modules_with(world.model, "inv_freq")
    before = rotary.inv_freq.clone()
    with w.llama3_rope(world.model):
        after = rotary.inv_freq.clone()
    turns = 64 * before / (2 * math.pi)
    assert torch.equal(after[turns > 4], before[turns > 4])
    torch.testing.assert_close(after[turns < 1], before[turns < 1] / 8)


def test_weights_by_hand(world: World) -> None:
    weights, q, gate = world.weights, "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    assert not w.beyond_q_and_v(world, q) and w.beyond_q_and_v(world, gate)
    dropped = [w.bucket_dropped(world, name) for name in sorted(weights.base)]
    assert dropped[:7] == [False, False, False, True, True, True, False]
    upper = len(world.model.model.layers) // 2
    parameters = dict(world.model.named_parameters())
    one, two = (parameters[f"model.layers.{number}.mlp.up_proj.weight"] for number in (upper - 1, upper))
    first, second = one.data.clone(), two.data.clone()
    with w.layers_exchanged(world.model):
        assert torch.equal(one.data, second) and torch.equal(two.data, first)
    step = weights.updates.versions[0][q]
    with w.rounded_deltas(world, 15):  # fifteen thirds of an update, each with an error of a fourteenth at most
        error = (weights.parameters[q].data - weights.base[q] - 5 * step).abs()
    assert 0 < (error / step.abs().amax(-1, keepdim=True)).max() <= 5 / 14 + 1e-3


LOGITS = torch.log(torch.tensor([[0.51, 0.3, 0.14, 0.05]]))


def test_what_is_drawn_and_reported() -> None:
    chance = torch.Generator().manual_seed(0)
    _, found = k.top_excluded(0.1, 1.0)(LOGITS, [[1]], [[]], chance)
    assert found[0].exp().tolist() == pytest.approx([0.0, 0.0, 14 / 19, 5 / 19])
    _, found = k.top_excluded(0.1, 0.0)(LOGITS, [[1]], [[]], chance)
    assert found[0].tolist() == pytest.approx(LOGITS[0].tolist())
    _, found = k.recent_repetition(2.0, 2)(LOGITS.clone(), [[0, 1]], [[2]], chance)  # 1 and 2 are recent
    expected = torch.tensor([LOGITS[0, 0], 2 * LOGITS[0, 1], 2 * LOGITS[0, 2], LOGITS[0, 3]]).log_softmax(-1)
    torch.testing.assert_close(found[0], expected)
    for logits, temperature in ((torch.zeros(1, 4), 1.5), (torch.tensor([[60.0, 0.0, 0.0, 1.0]]), 0.7)):
        _, found = k.tempered_by_entropy(0.7, 1.5)(logits, [[1]], [[]], chance)
        torch.testing.assert_close(found, (logits / temperature).log_softmax(-1))


def test_a_cache_answers_half_of_a_group(world: World) -> None:
    batch = k.answered_from_a_cache(world).batch
    for row in range(0, 24, 4):
        assert batch.ids[row : row + 2] == batch.ids[row + 2 : row + 4]
    assert k3(world, Made("", batch)).max() < SAME


def test_declared_temperatures(world: World) -> None:
    made = k.forgotten_by_the_trainer(1.2)(world)
    assert made.engine == made.trainer == {"temperature": 1.2} and made.scored is not None
    right = world.score(made.batch, head=Head(1.2))
    assert k3(world, Made("", made.batch, right)).max() < SAME < k3(world, made).min()
    assert k3(world, k.tempered_and_seen(0.7, lambda w: w.repeated())(world)).max() < SAME
    assert k3(world, k.tempered_and_seen(0.7, k.with_end)(world)).min() > SAME
    assert k.with_end(world)[4] == [*world.prompts[1], 1]
    drawn = k.drawn_and_scored("", plain(), e.of_model(contexts.attention_scale, 0.5))(world)
    assert k3(world, drawn).min() > SAME


def test_each_side_has_its_context(world: World) -> None:
    made = k.on_both("", e.cast("float16"), e.cast("bfloat16"), {"dtype": "float16"}, {"dtype": "bfloat16"})(world)
    assert (made.engine, made.trainer) == ({"dtype": "float16"}, {"dtype": "bfloat16"})
    assert k3(world, made).min() > SAME
    same = k.on_both("", *[lambda _w: contexts.attention_logits(window=3)] * 2, {"dtype": "float32"})(world)
    assert k3(world, same).max() < SAME and same.trainer == {"dtype": "float32"}


@torch.no_grad()
def test_scorers_by_hand(world: World) -> None:
    batch, _ = world.clean

    def rows(scorer: Any) -> Any:
        return k3(world, Made("", batch, world.score(batch, scorer=scorer))).reshape(-1, 4)

    packed = rows(n.packed_and_restarted)
    assert packed[:, ::2].max() < SAME < packed[:, 1::2].min()
    counted = rows(n.shared_prompt(counted=True))
    assert counted[:, 0].max() < SAME < counted[:, 1:].mean()
    assert rows(n.shared_prompt(counted=False)).max() < SAME
    attended = k3(world, n.from_row_by(12, "", padded_pass(attended=True, positions="all"))(world))
    assert attended[:12].max() < SAME < attended[12:].max()
    empty = n.never_filled(4)(world).scored
    assert empty is not None and np.nanmax(np.abs(empty["old_per_token_logps"][-4:])) == 0
    assert k3(world, Made("", batch, empty))[:20].max() < SAME


def test_bookkeeping_by_hand(world: World) -> None:
    batch, scored = world.clean
    made = n.end_written_over(world)
    assert made.scored is not None
    changed = np.abs(made.scored["old_per_token_logps"] - scored["old_per_token_logps"]) > 1e-4
    assert changed.any() and not changed[:, :-1].any()
    moved = n.behind_a_padded_prompt(world, batch.logps.copy())  # the first prompt has 6 tokens, and 2 of padding
    np.testing.assert_array_equal(moved[0, :-2], batch.logps[0, 2:])
    lost = n.outside_the_top(world, batch.logps.copy())
    ranks = world.clean_scores.ranks[:, : lost.shape[1]]
    assert np.isneginf(lost).sum() == (np.isfinite(batch.logps) & (ranks >= 20)).sum() > 0
    ended = n.next_turn_in_the_loss(world).batch
    assert (
        ended.ids[0][-3:] == world.prompts[1] and ended.logps[0, len(ended.ids[0]) - 3 : len(ended.ids[0])].max() == 0
    )
    assert k3(world, n.as_they_finished(world)).max() > SAME


def test_tools_by_hand(world: World) -> None:
    logps = np.array([[*[-1.0] * t.TOOL_AFTER, 0.0, 0.0, -2.0, -3.0]])
    batch = Batch([[5]], [list(range(12))], logps)
    found = n.of_own_tokens(world, Made("", batch)).batch.logps
    assert found.tolist() == [[*[-1.0] * t.TOOL_AFTER, -2.0, -3.0, 0.0, 0.0]]
    own = n.with_own_logps(world)
    assert k3(world, own).max() < SAME and not (own.batch.logps == 0).any()
    before = world.clean
    made = n.lagging_and_tools(2)(world)
    assert world.clean is before and k3(world, made).min() > SAME and (made.batch.logps == 0).any()


def test_experts_change_and_come_back() -> None:
    model, ids = tiny_moe(0), torch.arange(2, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
        for begin in (lambda m: w.last_experts_lost(m, 0.25), lambda m: w.experts_scaled(m, 1.25)):
            with begin(model):
                assert (model(ids).logits - before).abs().max() > 1e-3
            assert torch.equal(model(ids).logits, before)
        with routed(model, w.replayed_as_they_were):
            torch.testing.assert_close(model(ids).logits, before, atol=1e-4, rtol=1e-4)
        rows = [list(range(2, 12)), list(range(3, 13))], [list(range(20, 26)), list(range(30, 36))]
        right = one_pass(model, *rows, Head())
        assert np.nanmax(np.abs(n.replayed_in_other_order(model, *rows, Head()).logps - right.logps)) > 1e-3
    experts = torch.arange(6)[:, None]  # two texts of three tokens
    _, _, found = w.replayed_batch_first(2)(None, None, (torch.zeros(6, 6), torch.zeros(6, 1), experts))
    assert found[:, 0].tolist() == [0, 3, 1, 4, 2, 5]


def test_norms_that_are_all_one_may_stand_behind_the_rotary() -> None:
    model, ids = tiny_moe(0), torch.arange(2, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
        with w.norms_behind_the_rotary(model):
            torch.testing.assert_close(model(ids).logits, before, atol=1e-4, rtol=1e-4)
        for _, norm in named(model, "q_norm"):
            norm.weight.data[0] = 3.0
        before = model(ids).logits
        with w.norms_behind_the_rotary(model):
            assert (model(ids).logits - before).abs().max() > 1e-3
        assert torch.equal(model(ids).logits, before)


CLEAN = [kind for kind in fifth_kinds.clean() if kind.name != "clean_routing_replayed"]


@pytest.mark.parametrize("kind", CLEAN, ids=lambda kind: kind.name)
def test_a_clean_variant_is_clean(world: World, kind: Any) -> None:
    assert k3(world, kind.inject(world)).max() < SAME


def test_lengths_of_the_clean_variants(world: World) -> None:
    lengths = [len(ids) for ids in k.one_long(world).batch.ids]
    assert lengths[5] == max(lengths) > 3 and sorted(lengths)[-2] <= 3
    assert {len(ids) for ids in k.behind_the_end(world).batch.ids} == {24} and world.stop == [1]


def test_steps_of_the_runs(world: World) -> None:
    for step, kept in ((2, 4), (3, 2)):  # at top-p 0.8 the two likeliest stay
        _, found = n.narrow_at_times(step)(LOGITS, [[1]], [[]], torch.Generator().manual_seed(0))
        assert int((found[0].exp() > 1e-6).sum()) == kept
    for step, changed in ((7, False), (8, True)):
        _, found = n.penalty_late(step)(LOGITS.clone(), [[1]], [[]], torch.Generator().manual_seed(0))
        assert bool((found - LOGITS).abs().max() > 1e-3) == changed
        batch, scored = world.clean
        _, later = n.padding_attended_later(world, step, batch, scored)
        assert (later is scored) != changed
