"""The second round of kinds: what each injection does, by hand or on a tiny model, and that the clean variants are."""

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
import second_engine as s
import second_kinds
import second_trainer as y
import time_faults as r
import vllm_cases
from fault_checks import SAME, assert_changed_and_put_back, k3
from kinds import KINDS
from moe import tiny_moe
from sampler import plain, processed
from wall import SECOND
from weights import VERSIONS
from worlds import Batch, Made, World, one_pass

from trl_offpolicy.engines.hf import Head

CHANCE = torch.Generator().manual_seed(0)


# ----------------------------------------------------------------------------------------------- formats and contexts


def test_formats_by_hand() -> None:
    weight = torch.tensor([[0.5, -1.0, 0.7, 0.24] * 16])
    expected = [0.4407098, -1.0, 0.7229568, 0.2461123]
    torch.testing.assert_close(c.nf4(weight)[0, :4], torch.tensor(expected))
    block = torch.tensor([[6.0, -5.1, 2.4, 0.2] * 8])  # the largest is in [4, 8): scale 1
    assert c.mxfp4(block)[0, :4].tolist() == [6.0, -6.0, 2.0, 0.0]
    assert c.mxfp4(8 * block)[0, :4].tolist() == [48.0, -48.0, 16.0, 0.0]
    assert c.fp8_of_old_scale(torch.tensor([8.0, 1.0, -6.0]), 0.5).tolist() == pytest.approx([4.0, 1.0, -4.0], rel=0.04)
    assert c.int4_rows(torch.tensor([7.0, 1.4, -3.6])).tolist() == [7.0, 1.0, -4.0]
    assert c.tf32(torch.tensor([1 + 2**-10, 1 + 2**-12])).tolist() == [1 + 2**-10, 1.0]


CONTEXTS = {
    "residual": e.of_model(c.residual_rounded),
    "partial_sums": e.of_model(c.partial_sums, contexts.bf16),
    "branches": e.of_model(c.branches_scaled, 0.9),
    "yarn": e.of_model(c.yarn, 4.0, 4.0, 1.0),
    "tf32": e.of_model(c.tf32_products),
    "mlps": e.of_model(c.mlps_rounded, contexts.int4_groups),
    "mxfp4": e.of_model(contexts.weights_rounded, c.mxfp4),
    "old_scale": lambda _world: contexts.kv_rounded(lambda x: c.fp8_of_old_scale(x, 0.5)),
    "upper_kv": lambda _world: contexts.kv_rounded(c.int4_rows, lambda number: number > 0),
    "sink": lambda _world: contexts.attention_logits(sink=True),
    "second_window": lambda _world: contexts.attention_logits(window=2, layers=lambda number: number % 2 == 0),
    "shard": lambda world: c.first_shard_new(world, 4),
    "one_up": c.updates_one_layer_up,
    "mean": lambda world: c.averaged_versions(world, 0.7),
    "rows": lambda world: c.rows_lost(world, [5, 18]),
    "transposed": c.transposed,
    "gate_and_up": c.gate_and_up_swapped,
    "embedding_dropout": y.embedding_dropout(0.3),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_changes_the_model_and_puts_everything_back(world: World, name: str) -> None:
    assert_changed_and_put_back(world, CONTEXTS[name])


def test_a_window_in_no_layer_and_rounding_in_none_change_nothing(world: World) -> None:
    ids = torch.tensor([world.prompts[0]])
    with torch.no_grad():
        before = world.model(ids).logits
        with contexts.attention_logits(window=1, layers=lambda _n: False):
            assert torch.equal(world.model(ids).logits, before)
        with contexts.kv_rounded(torch.zeros_like, lambda _n: False):
            assert torch.equal(world.model(ids).logits, before)


def test_tiled_heads_are_the_same_where_each_has_its_own() -> None:
    query, key = torch.randn(1, 2, 3, 4, generator=CHANCE), torch.randn(1, 2, 3, 4, generator=CHANCE)
    module = type("Layer", (), {"layer_idx": 0})()
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as table

    def ask(heads: Any, **how: Any) -> Any:
        with contexts.attention_logits(**how):
            return table["sdpa"](module, heads, key, key, None)[0]

    torch.testing.assert_close(ask(query, tiled=True), ask(query))
    four = query.repeat(1, 2, 1, 1)  # heads a b a b
    assert (ask(four, tiled=True) - ask(four)).abs().max() > 1e-3
    torch.testing.assert_close(ask(four, tiled=True)[:, :, :2], ask(query))  # a and b get their own heads of keys


def test_decoded_tokens_alone_are_one_too_far(world: World) -> None:
    seen = []
    rotary = world.model.model.rotary_emb
    original = rotary.forward
    rotary.forward = lambda x, position_ids: (seen.append(position_ids[0, -1].item()), original(x, position_ids))[1]
    try:
        with c.decoded_one_further(world.model):
            world.sample(length=3)
    finally:
        if "forward" in vars(rotary):
            del rotary.forward
    assert seen == [5, 7, 8]  # the longest prompt has six tokens; right would be 5, 6, 7


def test_weights_by_hand(world: World) -> None:
    weights, parameters = world.weights, dict(world.model.named_parameters())
    name = "model.layers.1.mlp.gate_proj.weight"
    below = name.replace("layers.1", "layers.0")
    step, half = weights.updates.versions[0][name], len(weights.base[name]) // 2
    with c.first_shard_new(world, 4):
        torch.testing.assert_close(parameters[name][:half], weights.value(name, VERSIONS)[:half])
        torch.testing.assert_close(parameters[name][half:], weights.value(name, 1)[half:])
    with c.updates_one_layer_up(world):
        moved = VERSIONS * weights.updates.versions[0][below]
        torch.testing.assert_close(parameters[name].data, weights.base[name] + moved)
        torch.testing.assert_close(parameters[below].data, weights.base[below])
    with c.averaged_versions(world, 1.0):
        torch.testing.assert_close(parameters[name].data, weights.base[name] + VERSIONS / 2 * step)
    gate, up = (c.middle(world, f"mlp.{part}_proj.weight") for part in ("gate", "up"))
    right = parameters[up].data
    with c.gate_and_up_swapped(world):
        assert torch.equal(parameters[gate].data, right)


def test_a_sync_on_the_way_changes_the_second_half(world: World) -> None:
    batch = world.sample(inside=lambda: c.synced_on_the_way(world, 4, 12))
    old = world.score(batch, inside=lambda: world.weights.at(VERSIONS - 4))["old_per_token_logps"]
    np.testing.assert_allclose(batch.logps[:, :12], old[:, :12], atol=1e-4)  # tokens 0 to 11 are of the old weights
    assert np.nanmax(np.abs(batch.logps[:, 12:] - old[:, 12:])) > 1e-2
    assert torch.equal(world.weights.parameters["lm_head.weight"], world.weights.value("lm_head.weight", VERSIONS))


# ---------------------------------------------------------------------------------------------------------- a mixture


def test_routers_by_hand() -> None:
    gate = type("Gate", (), {"num_experts": 4})()
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]))
    scores, experts = logits.softmax(-1).topk(2)
    said = (logits, scores, experts)
    torch.testing.assert_close(c.renormalised(gate, None, said)[1][0], torch.tensor([4 / 7, 3 / 7]))
    _, dropped, _ = c.over_capacity_dropped(0.5)(gate, None, said)  # one token each: row 2 comes too late
    torch.testing.assert_close(dropped, torch.tensor([[0.4, 0.3], [0.4, 0.3], [0.0, 0.0]]))
    _, replayed, late = c.replayed_late(gate, None, said)
    assert late[1].tolist() == experts[0].tolist()
    torch.testing.assert_close(replayed[1], torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize("change", [c.renormalised, c.over_capacity_dropped(0.5), c.replayed_late])
def test_a_router_changes_and_comes_back(change: Any) -> None:
    model, ids = tiny_moe(0), torch.arange(2, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
        with c.routed(model, change):
            assert (model(ids).logits - before).abs().max() > 1e-3
        with c.jittered(model, 0.1):
            assert (model(ids).logits - before).abs().max() > 1e-3
        assert torch.equal(model(ids).logits, before)


# ------------------------------------------------------------------------------------------------------------ sampler

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 0.0]])


def reported(drawing: Any, prompts: Any, said: Any, logits: Any = LOGITS) -> list[float]:
    return list(drawing(logits.clone(), prompts, said, torch.Generator().manual_seed(0))[1][0].tolist())


@pytest.mark.parametrize(
    ("drawing", "expected"),
    [
        (s.no_repeated(2), [2.0, -1.0, -torch.inf, 0.0]),  # 1 2 ... 1: no 2 again
        (s.forced([3, 2], 2), [-torch.inf, -torch.inf, -torch.inf, 0.0]),
        (processed(s.first_suppressed), [2.0, -1.0, 0.5, 0.0]),  # not the first token
        (s.cut_then_tempered(0.9, 2.0), [1.0, -torch.inf, 0.25, 0.0]),
        (s.spread([0.5]), [4.0, -2.0, 1.0, 0.0]),
    ],
)
def test_processors_by_hand(drawing: Any, expected: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s, "COMPLETIONS", 1)
    found = torch.tensor(reported(drawing, [[1, 2]], [[0, 1]]))
    torch.testing.assert_close(found, torch.tensor(expected).log_softmax(-1))


def test_the_likeliest_first_token_is_suppressed() -> None:
    assert reported(processed(s.first_suppressed), [[1]], [[]])[0] == -math.inf


def test_the_end_becomes_likelier(world: World) -> None:
    found = [reported(s.ending_favoured(world, 1.2, 2), [[2]], [[0] * length])[1] for length in (1, 2, 3, 6)]
    assert found[0] == found[1] < found[2] < found[3]


def test_typical_sampling_leaves_out_the_unusual() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()  # entropy 1.22: -log p is .69, 1.61, 1.61, 2.30
    found = reported(s.typical(0.39), [[0]], [[]], logits)
    assert found == pytest.approx([-math.inf, math.log(0.5), math.log(0.5), -math.inf])


def test_reports_that_are_not_what_was_sampled_from() -> None:
    raw = LOGITS[0].log_softmax(-1).tolist()
    assert reported(s.raw_under_penalty(2.0), [[0]], [[0]]) == pytest.approx(raw)
    assert reported(s.divided_report(0.5), [[0]], [[]]) == pytest.approx([2 * value for value in raw])
    assert reported(s.reporting_logits, [[0]], [[]]) == LOGITS[0].tolist()
    many = LOGITS.repeat(8, 1)
    drawn, _ = s.one_greedy(many, [[0]] * 8, [[]] * 8, torch.Generator().manual_seed(1))
    assert drawn[[0, 4]].tolist() == [0, 0]


# --------------------------------------------------------------------------------------------- trainer, book-keeping

LOGPS = np.array([[-1.0, -2.0, -3.0], [-4.0, -5.0, np.nan], [-6.0, -7.0, -8.0], [-9.0, np.nan, np.nan]])


def test_bookkeeping_by_hand(world: World) -> None:
    np.testing.assert_array_equal(
        y.drifting(world, LOGPS), [[-1, -2, -3], [-3, -4, np.nan], [-4, -5, -6], [-6, np.nan, np.nan]]
    )
    assert y.last_zero(world, LOGPS.copy())[[0, 1, 3], [2, 1, 0]].tolist() == [0.0, 0.0, 0.0]
    eight = np.arange(8.0)[:, None]
    assert y.tiled(world, eight)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert y.first_of_group(world, eight)[:, 0].tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
    row = np.arange(18.0)[None]
    assert y.chunks_cut(world, row)[0, :16].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 17]
    assert y.rounded_bf16(world, np.array([[-1.0, -3.14159]])).tolist() == [[-1.0, -3.140625]]


def test_log_probs_of_the_prompt_and_of_rare_tokens(world: World) -> None:
    batch, _ = world.clean
    ranks = world.clean_scores.ranks
    zeroed = y.zero_outside_top(world, batch.logps.copy())
    np.testing.assert_array_equal(zeroed == 0, ranks >= 5)
    first = y.prompts_first(world, batch.logps.copy())
    echoed = one_pass(world.model, [batch.prompt_ids[0][:1]], [batch.prompt_ids[0][1:]], Head()).logps[0]
    np.testing.assert_allclose(first[0, :5], echoed, atol=1e-5)
    np.testing.assert_array_equal(first[0, 5:24], batch.logps[0, :19])


def test_labels_that_are_not_shifted(world: World) -> None:
    batch, _ = world.clean
    text = batch.prompt_ids[4] + batch.ids[4]
    with torch.no_grad():
        found = y.unshifted(world.model, batch.prompt_ids, batch.ids, Head()).logps
        logps = world.model(torch.tensor([text])).logits[0].log_softmax(-1)
    expected = [logps[place, text[place]].item() for place in range(len(batch.prompt_ids[4]), len(text))]
    np.testing.assert_allclose(found[4, : len(expected)], expected, atol=1e-4)


def test_parts_that_do_not_see_each_other(world: World) -> None:
    batch, scored = world.clean
    two = y.split_in(2, world.model, batch.prompt_ids, batch.ids, Head())
    prompt, ids = batch.prompt_ids[0], batch.ids[0]
    text = prompt + ids
    cut = len(text) // 2
    behind = one_pass(world.model, [text[cut : cut + 1]], [text[cut + 1 :]], Head()).logps[0]
    place = cut + 1 - len(prompt)
    np.testing.assert_allclose(two.logps[0, place : len(ids)], behind, atol=1e-5)
    np.testing.assert_allclose(two.logps[0, :place], scored["old_per_token_logps"][0, :place], atol=1e-5)


def test_a_temperature_twice_is_its_square(world: World) -> None:
    made = y.tempered_twice(0.8)(world)
    assert made.scored is not None
    once = world.score(made.batch, head=Head(0.64))
    np.testing.assert_allclose(made.scored["old_per_token_logps"], once["old_per_token_logps"])
    assert made.engine == made.trainer == {"temperature": 0.8}
    assert k3(world, made).mean() > 1e-4


# --------------------------------------------------------------------------------------------------- a real engine


class ModelAsEngine:
    """Takes the weights at a sync, as vLLM does, and samples with them later."""

    def __init__(self, world: World) -> None:
        self.world, self.version, self.weight_rounding = world, 0, None
        self.held: dict[str, torch.Tensor] = {}

    def sync_weights(self, version: int) -> None:
        self.version = version
        self.held = {name: p.detach().clone() for name, p in self.world.model.named_parameters()}

    def generate(self, prompts: Any, sampling: Any, *, n: int) -> Any:
        batch = World.sample(
            self.world, seen=[ids for ids in prompts for _ in range(n)], length=sampling.max_tokens,
            inside=lambda: c.parameters_set(self.world.model, self.held),
        )  # fmt: skip
        logps = [row[: len(ids)].tolist() for row, ids in zip(batch.logps, batch.ids, strict=True)]
        return type("Rollouts", (), {"completion_ids": batch.ids, "sampling_per_token_logps": logps})


def test_a_real_engine_gets_the_faulty_weights_and_prompts(world: World) -> None:
    real = vllm_cases.real_world(world, ModelAsEngine(world))
    stale = vllm_cases.made(real, "ema_weights", "float32")
    assert k3(real, stale).min() > SAME
    assert k3(real, Made("", real.sample())).max() < SAME  # the next sync brings the right weights back
    cut = real.sample(seen=[ids[1:] for ids in real.repeated()])
    assert cut.prompt_ids == real.repeated()
    assert k3(real, Made("", cut)).min() > SAME
    assert set(vllm_cases.INJECTED) - {"clean"} <= SECOND
    with pytest.raises(ValueError, match="drawing and order must be None"):
        real.sample(plain())


# -------------------------------------------------------------------------------------------------- clean, and runs


@pytest.mark.parametrize(
    "kind", [kind for kind in second_kinds.clean() if "int8" not in kind.name], ids=lambda k: k.name
)
def test_a_clean_variant_is_clean(world: World, kind: Any) -> None:
    assert k3(world, kind.inject(world)).max() < SAME


def test_the_rows_of_a_stale_replica_alternate(world: World) -> None:
    run = KINDS["one_of_two_replicas_stale"].run
    assert run is not None and run.change is not None
    step = r.STEPS - 1
    batch = world.sample(length=8)
    rows = k3(world, Made("", *run.change(world, step, batch, world.score(batch))))
    assert rows[::2].max() < SAME < rows[1::2].min()
    early = world.score(batch)
    assert run.change(world, 2, batch, early) == (batch, early)


def test_steps_of_the_runs() -> None:
    assert [y.restarted(step) for step in (5, 6, 10, 11)] == [5, 0, 0, 11]
    assert [step - y.sawtooth(step) for step in range(6)] == [0, 1, 2, 3, 0, 1]


def test_rows_come_back_in_another_order_in_every_third_step(world: World) -> None:
    batch = Batch([], [], np.arange(8.0)[:, None])
    moved = [bool((y.tiled_at_times(world, step, batch, {})[0].logps != batch.logps).any()) for step in range(4)]
    assert moved == [True, False, False, True]


def test_plain_draws_are_what_penalty_later_begins_with() -> None:
    first = reported(y.penalty_later(9), [[0]], [[]])
    assert first == reported(plain(), [[0]], [[]]) != reported(y.penalty_later(10), [[0]], [[]])
