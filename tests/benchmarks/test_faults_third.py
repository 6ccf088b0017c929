"""The third round of kinds: what each injection does, by hand or on a tiny model, and that the clean variants are."""

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
import second_contexts as c
import third_contexts as x
import third_engine as g
import third_kinds
import third_trainer as z
from fault_checks import SAME, assert_changed_and_put_back, k3
from moe import tiny_moe
from sampler import plain, processed
from weights import VERSIONS
from worlds import Batch, Made, World, one_pass

from trl_offpolicy.engines.hf import Head

CONTEXTS = {
    "interleaved": e.of_model(x.interleaved_rope),
    "partial": e.of_model(x.partial_rotary),
    "both_ways": lambda _world: x.both_ways(),
    "biases": e.of_model(x.with_biases, 0.5),
    "norms": e.of_model(x.norms_rounded, contexts.bf16),
    "tables": e.of_model(x.rope_tables_rounded, contexts.bf16),
    "block_scales": e.of_model(x.block_scales_late),
    "skipped": e.of_model(x.last_layer_skipped),
    "dropped": e.of_model(x.layers_dropped, 0.9),
    "both_adapters": x.both_adapters,
    "twice": x.added_twice,
    "largest": lambda world: x.largest_changes(world, 4, 0.1),
    "merged": lambda world: x.merged(world, contexts.bf16),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_changes_the_model_and_puts_everything_back(world: World, name: str) -> None:
    torch.manual_seed(0)
    assert_changed_and_put_back(world, CONTEXTS[name])


def test_formats_by_hand() -> None:
    weight = torch.ones(4, 4)
    weight[2:] = 4.0
    assert torch.equal(x.fp8_blocks(weight, 2), weight)
    assert x.fp8_blocks(weight, 2, late=1)[:, 0].tolist() == [4.0, 4.0, 1.0, 1.0]
    odd = torch.arange(15.0).view(3, 5)
    torch.testing.assert_close(x.fp8_blocks(odd, 2), odd, rtol=0.07, atol=0.07)


def test_weights_by_hand(world: World) -> None:
    weights, name = world.weights, "model.layers.1.mlp.gate_proj.weight"
    parameter, base, step = weights.parameters[name], weights.base[name], weights.updates.versions[0][name]
    with x.both_adapters(world):
        torch.testing.assert_close(parameter.data, base + VERSIONS * step + weights.updates.other[name])
    with x.added_twice(world):
        torch.testing.assert_close(parameter.data, base + (VERSIONS + 1) * step)
    with x.largest_changes(world, 4, 0.1):
        new = (parameter.data - weights.value(name, 1)).abs() > 1e-9
        assert new.float().mean().item() == pytest.approx(0.1, abs=0.02)
        torch.testing.assert_close(parameter.data[new], weights.value(name, VERSIONS)[new])


def test_prompts_are_old_and_decoded_tokens_are_new(world: World) -> None:
    seen: list[tuple[int, bool]] = []
    new = world.weights.value("lm_head.weight", VERSIONS)

    def hook(_module: Any, inputs: Any) -> None:
        seen.append((inputs[0].shape[1], torch.equal(world.model.lm_head.weight.data, new)))

    handle = world.model.lm_head.register_forward_pre_hook(hook)
    before = g.CHUNK
    g.CHUNK = 4
    try:
        made = g.old_prefix(4)(world)
    finally:
        g.CHUNK = before
        handle.remove()
    assert [fresh for _, fresh in seen[:3]] == [False, True, True]  # four tokens, the last two, the first decoded one
    assert k3(world, made).mean() > SAME


@pytest.mark.parametrize("begin", [e.of_model(x.int8_prefill), lambda world: z.prefixes_kept(world, 8)])
def test_prompts_alone_are_computed_otherwise(world: World, begin: Any) -> None:
    names = ("model.layers.0.self_attn.q_proj.weight", "lm_head.weight")
    right = [world.weights.value(name, VERSIONS) for name in names]
    made = Made("", world.sample(length=6, inside=lambda: begin(world)))
    assert all(torch.equal(world.weights.parameters[n].data, value) for n, value in zip(names, right, strict=True))
    assert k3(world, made).mean() > SAME


def test_an_image_takes_four_positions(world: World) -> None:
    seen = []
    rotary = world.model.model.rotary_emb
    original = rotary.forward
    rotary.forward = lambda given, position_ids: (seen.append(position_ids[0].tolist()), original(given, position_ids))[
        1
    ]
    try:
        made = g.grid_of_an_image(world)
    finally:
        del rotary.forward
    assert seen[0][:2] == [0, 1] and seen[0][2:18] == [2 + n // 4 for n in range(16)]
    assert seen[0][18:] == [6, 7, 8, 9] and seen[1] == [10]
    assert len(made.batch.prompt_ids[0]) == len(world.prompts[0]) + 16
    assert k3(world, made).mean() > SAME


def test_interleaved_pairs_are_those_of_neighbours(world: World) -> None:
    size = x.head_size(world.model)
    module = world.model.model.layers[0].self_attn.q_proj
    values = torch.randn(1, 1, world.model.config.hidden_size)
    right = module(values)[0, 0, :size]
    with x.interleaved_rope(world.model):
        found = module(values)[0, 0, :size]
    torch.testing.assert_close(found[: size // 2], right[0::2])
    torch.testing.assert_close(found[size // 2 :], right[1::2])


# ---------------------------------------------------------------------------------------------------------- a mixture


def test_routers_by_hand() -> None:
    gate = type("Gate", (), {"weight": torch.ones(4, 2)})()
    logits = torch.log(torch.tensor([[0.4, 0.05, 0.3, 0.25], [0.4, 0.3, 0.2, 0.1]]))
    scores, experts = logits.softmax(-1).topk(2)
    said = (logits, scores, experts)
    _, found, chosen = x.within_a_group(gate, torch.zeros(2), said)
    assert chosen.tolist() == [[2, 3], [0, 1]]  # 0.3 + 0.25 is more than 0.4 + 0.05
    torch.testing.assert_close(found[0], torch.tensor([0.3, 0.25]))
    _, warm, same = x.router_tempered(1e6)(gate, torch.zeros(2), said)
    assert torch.equal(same, experts)
    torch.testing.assert_close(warm, torch.full((2, 2), 0.25), atol=1e-4, rtol=0)
    _, exact, _ = x.selected_with_bias(0.0)(gate, torch.zeros(2), said)
    torch.testing.assert_close(exact, scores)


def test_experts_change_and_come_back() -> None:
    model, ids = tiny_moe(0), torch.arange(2, 20)[None]
    its = type("World", (), {"model": model})()
    makers = [
        lambda: x.query_heads_moved(its),
        lambda: c.routed(model, x.within_a_group),
        lambda: c.routed(model, x.selected_with_bias(0.1)),
        lambda: c.routed(model, x.router_tempered(0.5)),
        lambda: x.shared_expert(model, 0.3),
        lambda: x.experts_rounded(model, contexts.fp8),
    ]
    with torch.no_grad():
        before = model(ids).logits
        for begin in makers:
            with begin():
                assert (model(ids).logits - before).abs().max() > 1e-3
            assert torch.equal(model(ids).logits, before)
        with x.experts_permuted(its):
            torch.testing.assert_close(model(ids).logits, before, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------------ sampler

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 0.0]])


def reported(drawing: Any, said: Any, rows: int = 1) -> list[list[float]]:
    logits = LOGITS.repeat(rows, 1)
    found = drawing(logits, [[1]] * rows, [said] * rows, torch.Generator().manual_seed(0))[1]
    return [list(row) for row in found.tolist()]


def test_what_is_drawn_and_reported() -> None:
    raw = LOGITS[0].log_softmax(-1).tolist()
    half = g.by_row(lambda row: row == 1, processed(g.likeliest_alone))
    assert reported(half, [], 2)[0] == pytest.approx(raw)
    assert reported(half, [], 2)[1] == [0.0, -math.inf, -math.inf, -math.inf]
    assert reported(g.greedy_from(2), [0, 0])[0] == pytest.approx(raw)
    many = LOGITS.repeat(50, 1)
    for said, greedy in (([0], False), ([0, 0], True)):
        drawn, _ = g.greedy_from(2)(many, [[1]] * 50, [said] * 50, torch.Generator().manual_seed(0))
        assert bool((drawn == 0).all()) == greedy
    first = (LOGITS / 2.0).log_softmax(-1)[0].tolist()
    assert reported(g.cooling(2.0, 1.0), [])[0] == pytest.approx(first)
    assert reported(g.cooling(2.0, 1.0), [0] * 23)[0] == pytest.approx(raw)
    assert reported(g.head_in_pieces, [])[0] == pytest.approx(raw)


# --------------------------------------------------------------------------------------------- trainer, book-keeping


def test_bookkeeping_by_hand(world: World) -> None:
    logps = np.array([[-1.0, -2.0, -3.0], [-4.0, -5.0, np.nan]])
    np.testing.assert_array_equal(z.flipped(world, logps.copy()), [[-3, -2, -1], [-5, -4, np.nan]])
    long = -np.arange(1.0, 14.0)[None]
    found = z.late_in_the_second_turn(world, long)[0]
    assert found.tolist() == [*long[0, :10], *long[0, 9:12]]
    lost = z.with_sentinels(world, np.full((40, 40), -1.0))
    assert set(np.unique(lost)) == {-9999.0, -1.0} and (lost == -9999).mean() == pytest.approx(1 / 30, abs=0.015)


def test_padding_on_the_left_and_an_end_that_was_appended(world: World) -> None:
    batch, _ = world.clean
    made = z.padded_on_the_left(world)
    row = next(n for n, ids in enumerate(made.batch.ids) if 14 <= len(ids) < 20)
    length, width = len(made.batch.ids[row]), made.batch.logps.shape[1]
    expected = [0.0] * (width - length) + batch.logps[row, : 2 * length - width].tolist()
    np.testing.assert_array_equal(made.batch.logps[row, :length], expected)
    ended = z.end_appended(world).batch
    rows = [n for n, ids in enumerate(ended.ids) if len(ids) == g.own_length(n) + 1]
    assert rows and all(ended.ids[n][-1] == world.stop[0] and ended.logps[n, len(ended.ids[n]) - 1] == 0 for n in rows)


@torch.no_grad()
def test_scorers_by_hand(world: World) -> None:
    batch, scored = world.clean
    right = scored["old_per_token_logps"]
    given = (world.model, batch.prompt_ids, batch.ids, Head())
    np.testing.assert_allclose(z.rescored(z.smoothed(0.0))(*given).logps, right, atol=1e-4)
    np.testing.assert_allclose(z.one_by_one(*given).logps, right, atol=1e-4)
    assert np.nanmin(z.rescored(z.of_half_the_vocabulary)(*given).logps - right) > 0
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert z.of_half_the_vocabulary(logits, torch.tensor([1])).item() == pytest.approx(2 - math.log(math.e + math.e**2))


def test_quarters_in_the_order_of_the_ranks(world: World) -> None:
    batch, _ = world.clean
    prompt, ids = batch.prompt_ids[0], batch.ids[0]
    whole = one_pass(world.model, [prompt[:1]], [prompt[1:] + ids], Head()).logps[0]
    third, last = (np.array_split(whole, 4)[part] for part in (2, 3))
    moved = z.zigzag(world.model, batch.prompt_ids, batch.ids, Head()).logps[0, : len(ids)]
    np.testing.assert_allclose(moved[-len(third) :], third, atol=1e-5)
    assert not np.isin(last, moved).any() or len(ids) > 2 * len(third)


def test_half_of_the_rows_have_another_adapter(world: World) -> None:
    rows = k3(world, z.adapter_left_on(world))
    assert rows[:12].max() < SAME < rows[12:].min()


# -------------------------------------------------------------------------------------------------- clean, and runs

CLEAN = [kind for kind in third_kinds.clean() if "experts" not in kind.name and "float64" not in kind.name]


@pytest.mark.parametrize("kind", CLEAN, ids=lambda k: k.name)
def test_a_clean_variant_is_clean(world: World, kind: Any) -> None:
    assert k3(world, kind.inject(world)).max() < SAME


def test_steps_of_the_runs() -> None:
    assert [z.resumed(step) for step in (8, 9, 15)] == [8, 4, 10]
    assert [step - z.shrinking(step) for step in (0, 4, 6, 9, 12, 15)] == [0, 4, 3, 2, 0, 0]
    assert reported(z.config_later(5), []) == reported(plain(), []) != reported(z.config_later(6), [])


def test_log_probs_of_the_step_before(world: World) -> None:
    late = z.StepBehind(begin=1)
    first = Batch([], [], np.array([[-1.0, -2.0], [-3.0, np.nan]]))
    second = Batch([], [], np.array([[-5.0, -6.0, -7.0], [-8.0, -9.0, np.nan]]))
    assert late(world, 0, first, {})[0] is first
    found = late(world, 1, second, {})[0].logps
    np.testing.assert_array_equal(found, [[-1.0, -2.0, 0.0], [-3.0, 0.0, np.nan]])


def test_some_steps_of_a_run_are_wrong(world: World) -> None:
    batch = world.sample(length=8)
    scored = world.score(batch)
    assert z.other_prompts(world, 3, batch, scored)[0] is batch
    assert k3(world, Made("", *z.other_prompts(world, 4, batch, scored))).mean() > SAME
    assert z.kept_for_three_steps(world, 3, batch, scored)[1] is scored
    assert k3(world, Made("", *z.kept_for_three_steps(world, 14, batch, scored))).mean() > SAME
