"""The fourth round of kinds: what each injection does, by hand or on a tiny model, and that the clean variants are."""

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
import fourth_contexts as v
import fourth_engine as h
import fourth_kinds
import fourth_trainer as u
import second_contexts as c
from fault_checks import SAME, assert_changed_and_put_back, k3
from moe import tiny_moe
from sampler import plain
from worlds import Batch, Made, World, one_pass, padded_pass

from trl_offpolicy.engines.hf import Head

CONTEXTS = {
    "chunks": lambda _world: v.in_chunks(4),
    "sharpened": lambda _world: v.sharpened_by_place(0.5, 2),
    "scores": lambda _world: v.scores_rounded(contexts.bf16),
    "no_rotary": lambda world: v.layer_without_rotary(world.model, 1),
    "nvfp4": e.of_model(v.nvfp4_products),
    "adapter": v.adapter_rounded,
    "fused_head": e.of_model(v.fused_head_in_bf16),
    "pile": v.merges_pile_up,
    "dummy": v.left_at_dummy_values,
    "buffer": e.of_model(v.rotary_buffer_lost),
    "magnitudes": v.magnitudes_ignored,
    "in_turn": lambda world: u.layers_in_turn(world, 6),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_changes_the_model_and_puts_everything_back(world: World, name: str) -> None:
    assert_changed_and_put_back(world, CONTEXTS[name])


def test_attention_that_is_not_changed_is_attention(world: World) -> None:
    for inside in (v.in_chunks(1000), v.sharpened_by_place(0.0, 8), v.scores_rounded(lambda values: values)):
        made = Made("", world.sample(length=6, inside=lambda inside=inside: inside))
        assert k3(world, made).max() < SAME


def test_formats_by_hand() -> None:
    row = torch.tensor([[6.0, 3.0, 0.5, 0.0] * 4 + [0.06, 0.03, 0.005, 0.0] * 4])
    torch.testing.assert_close(v.nvfp4(row), row, rtol=0.07, atol=1e-3)
    weight = torch.arange(32.0)[None]
    step = 31 / 15
    torch.testing.assert_close(v.zero_points_off_by_one(weight), contexts.int4_groups(weight) - step)


def test_weights_by_hand(world: World) -> None:
    weights, name = world.weights, "model.layers.1.mlp.gate_proj.weight"
    parameter, base, step = weights.parameters[name], weights.base[name], weights.updates.versions[0][name]
    with v.merges_pile_up(world):
        torch.testing.assert_close(parameter.data, base + 15 * step)
    with v.magnitudes_ignored(world):
        torch.testing.assert_close(parameter.data.norm(dim=1), base.norm(dim=1))
    with u.layers_in_turn(world, 6):  # layer 1 was sent in step 5, layer 0 in step 4
        torch.testing.assert_close(parameter.data, base + 5 / 3 * step)


def test_what_is_drawn_and_reported() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]).repeat(8, 1))
    _, found = h.narrow_top_p(0.9)(logits, [[1]] * 8, [[]] * 8, torch.Generator().manual_seed(0))
    assert found[0].exp().tolist() == pytest.approx([0.625, 0.375, 0.0, 0.0])
    drawn, found = h.one_seed(logits.repeat(20, 1), [[1]] * 160, [[]] * 160, torch.Generator().manual_seed(0))
    assert (drawn.view(-1, 4) == drawn[::4, None]).all() and len(set(drawn.tolist())) > 2
    assert found[0].tolist() == pytest.approx(logits[0].tolist())
    _, marked = h.watermarked(1.0)(logits, [[1]] * 4 + [[2]] * 4, [[]] * 8, torch.Generator().manual_seed(0))
    assert torch.equal(marked[0], marked[3]) and not torch.equal(marked[0], logits[0])
    late = h.at_places(plain(Head(0.5)), lambda place: place == 1)
    for said, temperature in (([], 1.0), ([0], 0.5)):
        _, found = late(logits, [[1]] * 8, [said] * 8, torch.Generator().manual_seed(0))
        assert found[0].tolist() == pytest.approx((logits[0] / temperature).log_softmax(-1).tolist())


def test_each_row_has_its_server(world: World) -> None:
    made = h.of_servers("", [None, lambda w: w.weights.at(0)], lambda row: row % 2)(world)
    rows = k3(world, made)
    assert rows[::2].max() < SAME < rows[1::2].min()


def test_bookkeeping_by_hand(world: World) -> None:
    logps = np.array([[-1.0, -2.0, -3.0, -4.0], [-5.0, -6.0, np.nan, np.nan]])
    found = u.of_steps(world, logps.copy())
    assert found[:, 0].tolist() == [-1.0, -5.0] and np.array_equal(np.isnan(found), np.isnan(logps))
    assert set(found[0].tolist()) < {-1.0, -2.0, -3.0, -4.0}
    assert u.zeros(world, logps)[0].tolist() == [0.0] * 4
    lost = u.lost_at_an_abort(world, np.full((6, 12), -1.0))
    assert (lost == 0).sum(1).tolist() == [9, 0, 0, 9, 0, 0]
    copied = u.copied_from_the_trainer(world)
    assert k3(world, copied).max() == 0
    ended = u.padding_in_the_loss(world).batch
    assert len({len(ids) for ids in ended.ids}) == 1 and np.isfinite(ended.logps).all()
    cut = u.cut_on_two_sides(world).batch
    assert max(map(len, cut.ids)) == 16
    np.testing.assert_array_equal(cut.logps, world.clean[0].logps[:, :16])


@torch.no_grad()
def test_scorers_by_hand(world: World) -> None:
    batch, scored = world.clean
    right = scored["old_per_token_logps"]
    given = (world.model, batch.prompt_ids, batch.ids, Head())
    moved = u.sorted_by_length(put_back=False)(*given).logps
    first = u.by_length(batch.prompt_ids, batch.ids)[0]
    same = min(len(batch.ids[0]), len(batch.ids[first]))
    np.testing.assert_allclose(moved[0, :same], right[first, :same], atol=1e-4)
    shards = np.abs(u.labels_within_shards(4)(*given).logps - right) > 1e-4
    assert (shards.sum(1) <= 3).all() and shards.any()
    rows = k3(world, Made("", batch, world.score(batch, scorer=u.padded_in_the_middle(counted=True))))
    lengths = np.array([len(prompt) for prompt in batch.prompt_ids])
    assert rows[lengths == lengths.max()].max() < SAME < rows[lengths < lengths.max()].mean()


def test_a_part_of_the_rows_is_scored_otherwise(world: World) -> None:
    rows = k3(world, u.from_row(12, "", lambda w: w.weights.at(0))(world))
    assert rows[:12].max() < SAME < rows[12:].min()
    rows = k3(world, u.untempered_from_row(16, 0.7)(world))
    assert rows[:16].max() < SAME < rows[16:].min()


def test_experts_change_and_come_back() -> None:
    model, ids = tiny_moe(0), torch.arange(2, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
        for begin in (v.replayed_from_the_layer_before, lambda model: c.routed(model, v.sigmoid_scores)):
            with begin(model):
                assert (model(ids).logits - before).abs().max() > 1e-3
            assert torch.equal(model(ids).logits, before)
        with v.experts_of_two_ranks(model):
            torch.testing.assert_close(model(ids).logits, before, atol=1e-4, rtol=1e-4)
        assert torch.equal(model(ids).logits, before)
        rows = [list(range(2, 12))], [list(range(20, 26))]
        right = padded_pass(attended=False, positions="text")(model, *rows, Head())
        assert np.nanmax(np.abs(u.cached_prompts_not_replayed(model, *rows, Head()).logps - right.logps)) > 1e-3


CLEAN = [kind for kind in fourth_kinds.clean() if kind.name not in ("clean_experts_of_two_ranks", "clean_second_turn")]


@pytest.mark.parametrize("kind", CLEAN, ids=lambda k: k.name)
def test_a_clean_variant_is_clean(world: World, kind: Any) -> None:
    assert k3(world, kind.inject(world)).max() < SAME


def test_steps_of_the_runs(world: World) -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0]])
    for step, temperature in ((0, 1.25), (15, 0.85)):
        _, found = u.cooling_run(step)(logits, [[1]], [[]], torch.Generator().manual_seed(0))
        assert found[0].tolist() == pytest.approx((logits[0] / temperature).log_softmax(-1).tolist(), abs=1e-5)
    batch = Batch([], [], np.array([[-1.0, math.nan]]))
    assert u.logps_lost(world, 5, batch, {})[0] is batch and u.logps_lost(world, 9, batch, {})[0] is batch
    np.testing.assert_array_equal(u.logps_lost(world, 7, batch, {})[0].logps, [[0.0, math.nan]])
    right = world.weights.parameters["lm_head.weight"].data.clone()
    with u.evaluated_adapter(world, 4):
        assert torch.equal(world.weights.parameters["lm_head.weight"].data, right)
    with u.evaluated_adapter(world, 7):
        assert not torch.equal(world.weights.parameters["lm_head.weight"].data, right)


def test_one_pass_is_what_rows_in_parts_are(world: World) -> None:
    batch, scored = world.clean
    with torch.no_grad():
        found = u.scored_in_parts(5, one_pass)(world.model, batch.prompt_ids, batch.ids, Head())
    np.testing.assert_allclose(found.logps, scored["old_per_token_logps"], atol=1e-4)
