"""The sixth round of kinds: what each injection does, by hand or on a tiny model, and that the clean variants are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "faults"))
import contexts
import engine_faults as e
import sixth_contexts as u
import sixth_engine as j
import sixth_kinds
import sixth_trainer as q
import third_trainer as z
from fault_checks import SAME, assert_changed_and_put_back, k3
from kind import Kind
from moe import tiny_moe
from second_contexts import routed
from small import make_tokenizer, training_texts
from sources import random_rows
from tasks import Task
from third_contexts import head_size, named
from third_engine import own_length
from weights import VERSIONS, Updates, Weights
from worlds import Batch, Made, World, one_pass

from trl_offpolicy.engines.hf import Head

FAMILIES = (
    sixth_kinds.prompts,
    sixth_kinds.sampling,
    sixth_kinds.architecture,
    sixth_kinds.precision,
    sixth_kinds.bookkeeping,
    sixth_kinds.weights,
    sixth_kinds.trainer,
    sixth_kinds.routing,
    sixth_kinds.mixtures,
    sixth_kinds.over_time,
)
KINDS = [kind for family in FAMILIES for kind in family() if kind.run is None]


def moved_at_random(model: Any) -> Weights:
    """A model with random updates in place of trained ones."""
    chance = torch.Generator().manual_seed(0)

    def moved(scale: float) -> dict[str, Any]:
        return {name: scale * p.std() * torch.randn(p.shape, generator=chance)
                for name, p in model.named_parameters() if p.dim() >= 2}  # fmt: skip

    step = moved(0.01)
    return Weights(model, Updates([{n: k * v for n, v in step.items()} for k in range(1, VERSIONS + 1)], moved(0.05)))


@pytest.fixture(scope="module")
def mixture() -> World:
    """The tiny mixture of experts."""
    return World("moe", 0, moved_at_random(tiny_moe(0)), random_rows(6, seed=3), [1], 0)


@pytest.fixture(scope="module")
def dense() -> World:
    """A tiny Qwen3 with a tokenizer, a chat template and questions; weights and updates are random."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer(training_texts()[::40])
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.25,
        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    task = Task(tokenizer)
    rows = task.rows(6, seed=5)
    return World(
        "qwen", 0, moved_at_random(Qwen3ForCausalLM(config).eval()), [row.prompt_ids for row in rows],
        [tokenizer.eos_token_id], tokenizer.bos_token_id, task, [row.question for row in rows],
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- every kind is injected


@pytest.mark.parametrize("name", ["dense", "mixture"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_kind_is_injected_or_hides(request: pytest.FixtureRequest, name: str, kind: Kind) -> None:
    """The two sides differ by more than twice the noise floor, or the kind is one of those that hide."""
    world: World = request.getfixturevalue(name)
    if world.name not in kind.models:
        return
    before = {name: parameter.clone() for name, parameter in world.model.named_parameters()}
    world.begin(kind.name)
    assert kind.inject is not None
    made = kind.inject(world)
    assert made.scored is None or made.scored["old_per_token_logps"].shape == made.batch.logps.shape
    with np.errstate(all="ignore"):
        differ = np.nanmean(k3(world, made))
    assert (differ < SAME) if kind.hidden else (differ > SAME)
    for name, parameter in world.model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_what_the_round_holds() -> None:
    names = [kind.name for family in FAMILIES for kind in family()]
    assert len(names) == len(set(names)) == 58 and len(sixth_kinds.clean()) == 8
    hidden = {kind.name for family in FAMILIES for kind in family() if kind.hidden}
    assert hidden == {
        "everything_greedy",
        "drafts_accepted_above_a_threshold",
        "first_logp_missing",
        "greedy_after_an_evaluation",
    }


CONTEXTS = {
    "long": e.of_model(u.long_factors),
    "theta": e.of_model(u.rope_theta_in, 0.2, lambda number: number % 2 == 1),
    "gates": e.of_model(u.gate_limited, 0.02),
    "int4": e.of_model(u.int4_of_groups, 8),
    "fp8": e.of_model(u.fp8_training),
    "bits": e.of_model(u.eight_bits_with_outliers),
    "kv": lambda _world: u.kv_of_eight_and_four_bits(),
    "activations": e.of_model(u.activations_rounded, lambda values: 2 * values),
    "half": lambda world: u.upper_half_old(world, 4),
    "rows": u.head_rows_lost,
    "adapter": lambda world: u.half_an_adapter_later(world, 15),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_changes_the_model_and_puts_everything_back(world: World, name: str) -> None:
    assert_changed_and_put_back(world, CONTEXTS[name])


# -------------------------------------------------------------------------------------------------- contexts, by hand


@torch.no_grad()
def test_frequencies_by_hand(world: World) -> None:
    (rotary,) = contexts.modules_with(world.model, "inv_freq")
    before = rotary.inv_freq.clone()
    with u.long_factors(world.model, 4.0):
        assert rotary.inv_freq[0] == before[0]
        torch.testing.assert_close(rotary.inv_freq[-1], before[-1] / 4)
    ids = torch.tensor([world.prompts[0]])
    with u.rope_theta_in(world.model, 0.2, lambda _number: True):
        assert torch.equal(rotary.inv_freq, before)  # only while a layer asks for its tables
        found = world.model(ids).logits
    with contexts.rope_theta(world.model, 0.2):
        torch.testing.assert_close(world.model(ids).logits, found)


@torch.no_grad()
def test_norms_over_one_head_are_those_over_all() -> None:
    norm = named(tiny_moe(0), "q_norm")[0][1]
    norm.weight.data.uniform_(0.5, 1.5)
    model = torch.nn.Module()
    model.add_module("q_norm", norm)
    x = torch.randn(1, 3, 2, norm.weight.shape[0])
    with u.norms_over_all_heads(model):
        torch.testing.assert_close(norm(x[:, :, :1]), norm.forward(x[:, :, :1]))
        found = norm(x)
    scale = (x.pow(2).mean((-2, -1), keepdim=True) + norm.variance_epsilon).sqrt()
    torch.testing.assert_close(found, norm.weight * x / scale)
    assert torch.equal(norm(x), norm.forward(x))


@torch.no_grad()
def test_formats_by_hand() -> None:
    values = torch.tensor([[7.0, 3.4, -1.2, 0.0, 70.0, -34.0, 5.1, 0.0]])
    assert u.int4_symmetric(values, 4).tolist() == [[7.0, 3.0, -1.0, 0.0, 70.0, -30.0, 10.0, 0.0]]
    linear = torch.nn.Linear(4, 2, bias=False)
    linear.weight.data = torch.tensor([[127.0, 1.3, 0.0, 0.25], [0.0, 127.0, 2.0, 1.0]])
    model = torch.nn.Sequential(linear)
    x = torch.tensor([[1.27, 0.0, -0.514, 100.0]])
    with u.eight_bits_with_outliers(model, threshold=6.0):  # the last column is exact, the others are integers
        found = model(x)
    assert found[0].tolist() == pytest.approx([1.27 * 127 + 25.0, 2.0 * -0.51 + 100.0], abs=1e-4)
    with u.eight_bits_with_outliers(model, threshold=0.0):
        torch.testing.assert_close(model(x), x @ linear.weight.T)


@torch.no_grad()
def test_gates_by_hand(world: World) -> None:
    (_, gate), (_, up) = named(world.model, "gate_proj")[0], named(world.model, "up_proj")[0]
    x = 50 * torch.ones(1, gate.weight.shape[1])
    with u.gate_limited(world.model, 0.5):
        assert gate(x).max() == 0.5 and gate(x).min() < -0.5
        assert up(x).abs().max() == 0.5


def test_weights_by_hand(world: World, mixture: World) -> None:
    assert u.saved_apart(world, "model.layers.1.input_layernorm.weight") and u.saved_apart(world, "lm_head.weight")
    assert not u.saved_apart(world, "model.layers.1.mlp.up_proj.weight")
    model, last = mixture.model, len(mixture.model.model.layers) - 1  # two heads of queries, two of keys
    parts = {
        part: dict(model.named_parameters())[f"model.layers.{last}.self_attn.{part}_proj.weight"] for part in "qkv"
    }
    q0, q1, k0, k1, v0, v1 = (half.clone() for part in "qkv" for half in parts[part].data.split(head_size(model)))
    with u.fused_qkv_read_in_order(mixture):
        read = [parts[part].data.clone() for part in "qkv"]
    for found, expected in zip(read, ((q0, k0), (v0, q1), (k1, v1)), strict=True):
        assert torch.equal(found, torch.cat(expected))
    head = world.model.lm_head.weight.data
    with u.head_rows_lost(world):
        found = world.model.lm_head.weight.data
        assert torch.equal(found[1], head.mean(0)) and torch.equal(found[0], head.mean(0))
        assert torch.equal(found[2:], head[2:])


@torch.no_grad()
def test_weights_that_arrive_on_the_way(world: World) -> None:
    weights, name = world.weights, "model.layers.0.mlp.up_proj.weight"
    step = torch.tensor([[5]])
    with weights.at(3), u.updated_in_flight(world, 9, back=3, tokens=2):  # step 9 of 15 is version 3 of 5
        for version in (2, 2, 3):
            torch.testing.assert_close(weights.parameters[name].data, weights.value(name, version))
            world.model(input_ids=step)
    torch.testing.assert_close(weights.parameters[name].data, weights.value(name, VERSIONS))
    upper, lower = f"model.layers.{e.middle_layer(world)}.mlp.up_proj.weight", name
    with u.upper_half_old(world, 4):
        torch.testing.assert_close(weights.parameters[upper].data, weights.value(upper, 1))
        torch.testing.assert_close(weights.parameters[lower].data, weights.value(lower, VERSIONS))


@torch.no_grad()
def test_experts_by_hand(mixture: World) -> None:
    model, ids = mixture.model, torch.arange(2, 20)[None]
    before = model(ids).logits
    begins = (
        lambda: u.experts_called(model, u.scores_on_the_input),
        lambda: u.map_of_the_last_rebalance(mixture),
        lambda: u.routers_rounded(model, contexts.bf16),
    )
    for begin in begins:
        with begin():
            assert (model(ids).logits - before).abs().max() > 1e-4
        assert torch.equal(model(ids).logits, before)
    with routed(model, u.router_in_float64):
        torch.testing.assert_close(model(ids).logits, before, atol=1e-4, rtol=1e-4)

    def same(_original: Any, hidden: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return hidden * scores + chosen

    hidden, scores = torch.tensor([[2.0]]), torch.tensor([[0.75, 0.25]])

    def squared(hidden: torch.Tensor, _chosen: torch.Tensor, _ones: torch.Tensor) -> torch.Tensor:
        return hidden**2

    found = u.scores_on_the_input(squared, hidden, torch.tensor([[3, 1]]), scores)
    assert found.tolist() == [[1.5**2 + 0.5**2]]
    experts = torch.arange(6)[:, None]  # two texts of three tokens
    _, _, replayed = u.of_the_next_request(2)(None, torch.zeros(0), (torch.zeros(6, 6), torch.zeros(6, 1), experts))
    assert replayed[:, 0].tolist() == [3, 4, 5, 0, 1, 2]


# ---------------------------------------------------------------------------------------------------- the engine's part

LOGITS = torch.log(torch.tensor([[0.51, 0.3, 0.14, 0.05]]))


def chance() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_penalties_by_hand() -> None:
    _, found = j.penalised_and_tempered(1.5, 0.5)(LOGITS.clone(), [[0]], [[1, 1]], chance())
    expected = (2 * (LOGITS - 1.5 * torch.tensor([0.0, 1.0, 0.0, 0.0]))).log_softmax(-1)
    torch.testing.assert_close(found, expected)
    _, found = j.repetition_of_the_prompt(2.0)(LOGITS.clone(), [[0, 2]], [[1]], chance())  # 1 was said, not asked
    torch.testing.assert_close(found, (LOGITS * torch.tensor([2.0, 1.0, 2.0, 1.0])).log_softmax(-1))


def test_what_is_drawn_and_reported() -> None:
    logits = LOGITS.expand(4000, -1)
    drawn, found = j.greedy(logits, [], [], chance())
    assert drawn.unique().tolist() == [0]
    torch.testing.assert_close(found, logits)
    drawn, found = j.accepted_above(0.4, 1.0)(logits, [], [], chance())  # only the likeliest is accepted
    torch.testing.assert_close(found, logits)
    assert (drawn == 0).float().mean().item() == pytest.approx(0.51 + 0.49 * 0.51, abs=0.03)
    four = LOGITS.expand(4, -1)
    _, found = j.raw_in_every_second_row(0.5)(four, [[1]] * 4, [[]] * 4, chance())
    torch.testing.assert_close(found[[0, 2]], (2 * four[:2]).log_softmax(-1))
    torch.testing.assert_close(found[[1, 3]], four[:2])


def test_settings_are_lost_in_every_third_row() -> None:
    four = LOGITS.expand(4, -1)
    for place, cool in ((8, False), (9, True)):
        _, found = j.settings_lost_at_a_resume(0.5)(four, [[1]] * 4, [[2] * place] * 4, chance())
        torch.testing.assert_close(found[[1, 2]], four[:2])
        expected = (2 * four[:2]).log_softmax(-1) if cool else four[:2]
        torch.testing.assert_close(found[[0, 3]], expected)


def test_both_sides_say_what_they_do(world: World) -> None:
    made = j.cut_on_both_sides(10, 40)(world)
    assert (made.engine, made.trainer) == ({"top_k": 10}, {"top_k": 40})
    assert made.scored is not None and (made.batch.logps > made.scored["old_per_token_logps"]).any()
    made = q.multiplied_by_the_temperature(0.8)(world)
    assert made.engine == made.trainer == {"temperature": 0.8}
    right = world.score(made.batch, head=Head(0.8))
    assert k3(world, Made("", made.batch, right)).max() < SAME < k3(world, made).min()
    made = j.seen_on_both("", lambda w: w.repeated(), e.next_group, e.cast("bfloat16"), dtype="bfloat16")(world)
    assert made.engine == made.trainer == {"dtype": "bfloat16"} and made.batch.prompt_ids == world.repeated()
    assert k3(world, made).mean() > 1e-3
    made = j.seen_and_inside("", lambda w: w.repeated(), e.cast("bfloat16"), dtype="bfloat16")(world)
    assert made.engine == {"dtype": "bfloat16"} and k3(world, made).min() > SAME
    assert j.update_of_zero(world).engine == {"weight_version": VERSIONS - 1}


def test_prompts_by_hand(world: World) -> None:
    middle, front = j.with_image(world, front=False), j.with_image(world, front=True)
    assert middle[0] == [5, 6, 7, 8, *[2] * 16, 9, 10] and front[0] == [5, *[2] * 16, 6, 7, 8, 9, 10]
    assert j.system_twice("?")[:2] == [("system", "Think step by step.")] * 2
    assert j.answered_before("?", "</a>")[1] == ("assistant", "The answer is 42.</a>")


# ---------------------------------------------------------------------------------- the trainer's and the book-keeping


@torch.no_grad()
def test_labels_that_are_shifted_twice(world: World) -> None:
    ids = [[40, 41, 42], [50, 51, 52]]
    found = q.labels_shifted_twice(world.model, world.prompts[:2], ids, Head()).logps
    for row, prompt in enumerate(world.prompts[:2]):
        text = [*prompt, *ids[row]]
        for place, token in enumerate(ids[row]):  # under what predicts the token before it
            seen = text[: len(prompt) + place - 1]
            expected = one_pass(world.model, [seen], [[token]], Head()).logps[0, 0]
            assert found[row, place] == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def test_scorers_by_hand(world: World) -> None:
    batch, scored = world.clean
    masked = world.score(batch, scorer=q.first_token_masked)["old_per_token_logps"]
    cut = [prompt[1:] for prompt in batch.prompt_ids]  # hidden, and positions do not matter
    np.testing.assert_allclose(masked, world.score(batch, seen=cut)["old_per_token_logps"], atol=1e-4)
    logits, tokens = LOGITS.clone(), torch.tensor([1])
    padded_head = q.of_a_padded_vocabulary(0.5)(logits, tokens)  # two rows with logit 0
    assert padded_head.exp().item() == pytest.approx(0.3 / 3)
    whole = world.score(batch, scorer=z.rescored(q.of_a_padded_vocabulary(0.05)))["old_per_token_logps"]
    assert np.nanmax(whole - scored["old_per_token_logps"]) < 0


def test_long_texts_are_cut(world: World) -> None:
    made = q.cut_on_the_left(world)
    rows = k3(world, made)
    sizes = np.array([len(p) + len(i) for p, i in zip(made.batch.prompt_ids, made.batch.ids, strict=True)])
    limit = int(made.fault.split()[2])
    assert (rows[sizes <= limit] < SAME).all() and (rows[sizes > limit] > SAME).all() and (sizes > limit).any()


def test_lists_by_hand(world: World) -> None:
    logps = -np.arange(1.0, 24 * 12 + 1).reshape(24, 12)
    moved = q.one_request_failed(world, logps.copy())
    np.testing.assert_array_equal(moved[:13], logps[:13])
    np.testing.assert_array_equal(moved[13:-1], logps[14:])
    assert not moved[-1].any()
    twice = q.prefix_twice(world, logps.copy())
    np.testing.assert_array_equal(twice[0], [*logps[0, :9], *logps[0, :3]])
    np.testing.assert_array_equal(twice[[1, 2]], logps[[1, 2]])
    first = q.first_missing(world, logps.copy())
    assert np.isnan(first[:, 0]).all() and np.isfinite(first[:, 1:]).all()
    kept = q.rejected_drafts_kept(world, logps.copy())
    own = kept[23][np.isin(kept[23], logps[23])]  # the row's own values, in their order, without the last ones
    np.testing.assert_array_equal(own, logps[23, : len(own)])
    assert any(not np.isin(row, logps).all() for row in kept)


def test_texts_by_hand(world: World) -> None:
    batch, _ = world.clean
    made = q.header_in_the_loss(world).batch
    assert made.prompt_ids[0] == world.prompts[0][:-3] and made.ids[0][:3] == world.prompts[0][-3:]
    assert made.ids[0][3:] == batch.ids[0] and not made.logps[0, :3].any()
    made = q.without_the_thoughts(world).batch
    long = next(row for row, ids in enumerate(batch.ids) if len(ids) > 11)
    assert made.ids[long] == batch.ids[long][10:] and made.prompt_ids == batch.prompt_ids
    np.testing.assert_array_equal(made.logps[long, : len(made.ids[long])], batch.logps[long, 10 : len(batch.ids[long])])
    made = q.stop_not_listed(world).batch
    for row, ids in enumerate(made.ids):
        size = min(len(batch.ids[row]), own_length(row))
        if row % 3 < 2 and len(batch.ids[row]) > 1:
            assert ids == batch.ids[row][: size - 1]
            np.testing.assert_array_equal(made.logps[row, : size - 1], batch.logps[row, 1:size])
        else:
            assert ids == batch.ids[row]


# ------------------------------------------------------------------------------------------- clean variants, and runs


@pytest.mark.parametrize("name", ["dense", "mixture"])
@pytest.mark.parametrize("kind", sixth_kinds.clean(), ids=lambda kind: kind.name)
def test_a_clean_variant_is_clean(request: pytest.FixtureRequest, name: str, kind: Kind) -> None:
    world: World = request.getfixturevalue(name)
    if world.name in kind.models:
        assert kind.inject is not None
        assert k3(world, kind.inject(world)).max() < SAME


def test_lengths_of_the_clean_variants(world: World) -> None:
    assert 24 < max(len(ids) for ids in j.long_responses(world).batch.ids) <= 48


def test_steps_of_the_runs(world: World, mixture: World) -> None:
    drawn, _ = q.greedy_later(10)(LOGITS.expand(50, -1), [], [], chance())
    assert drawn.unique().tolist() == [0]
    drawn, _ = q.greedy_later(9)(LOGITS.expand(50, -1), [], [], chance())
    assert len(drawn.unique()) > 1
    batch, scored = world.clean
    assert q.next_turn_later(world, 5, batch, scored)[1] is scored
    later, _ = q.next_turn_later(world, 6, batch, scored)
    turn = batch.prompt_ids[4][:5]
    assert later.ids[0] == [*batch.ids[0], *turn] and not later.logps[0, len(batch.ids[0]) : len(later.ids[0])].any()
    salt = world.salt
    mixed, found = q.first_group_prefetched(world, 15, batch, scored)
    world.salt = salt
    rows = k3(world, Made("", mixed, found))
    assert rows[:4].min() > SAME > rows[4:].max() and mixed.ids[4:] == batch.ids[4:]
    ids = torch.tensor([mixture.prompts[0]])
    with torch.no_grad():
        before = mixture.model(ids).logits
        for step, changed in ((5, False), (6, True)):
            with u.routers_in_bf16_later(mixture, step):
                assert torch.equal(mixture.model(ids).logits, before) != changed
    name = "model.layers.0.mlp.up_proj.weight"
    with world.weights.at(VERSIONS), u.half_an_adapter_later(world, 15):
        half = world.weights.base[name] + 0.5 * world.weights.updates.versions[-1][name]
        torch.testing.assert_close(world.weights.parameters[name].data, half)


def test_a_failure_and_a_lag(world: World) -> None:
    made = q.lagging_after_a_failure(3)(world)
    lag = Made("", world.sample(inside=lambda: world.weights.at(2)))
    assert made.batch.ids == lag.batch.ids and k3(world, made)[13:].mean() > 2 * k3(world, lag)[13:].mean()
    assert isinstance(made.batch, Batch) and k3(world, made)[:13].min() > SAME
