"""Faults that reach a part of a batch: some responses, a part of each, or each in its own way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from trl_offpolicy.diagnosis.attribution.attribute import attribute
from trl_offpolicy.diagnosis.attribution.bench import Bench
from trl_offpolicy.diagnosis.attribution.contexts import changes, layouts, precision
from trl_offpolicy.diagnosis.attribution.contexts.prefixes import cached_tokens, score_after
from trl_offpolicy.diagnosis.attribution.evidence import Declared, TokenEvidence
from trl_offpolicy.diagnosis.attribution.hypotheses import _head_of, run_hypotheses
from trl_offpolicy.diagnosis.attribution.trials.heads import _bias_values, logits_of, sampling_tests
from trl_offpolicy.diagnosis.attribution.trials.search import Search, differing
from trl_offpolicy.diagnosis.attribution.trials.weight_parts import chosen_versions
from trl_offpolicy.engines.hf import Head, score_completions
from trl_offpolicy.functional.truncated_sampling import Truncation

LENGTH = 16
CHANCE = np.random.default_rng(0)
PROMPTS = [[2, *CHANCE.integers(3, 90, 18 + group).tolist()] for group in range(4) for _ in range(2)]
IDS = [CHANCE.integers(3, 90, LENGTH).tolist() for _ in PROMPTS]
ROWS = np.arange(len(PROMPTS))[:, None]
EXACT = Declared(dtype="float32", quantization="none")
VERSIONS = {"stale_weights:version 1": 0.05, "stale_weights:version 2": 0.03, "wrong_adapter:no adapter": 0.08}
"""Size of the change of each set of weights at hand; each is another change."""


@contextmanager
def version(model: Any, name: str) -> Any:
    """The weights of one of :data:`VERSIONS`."""
    start = 1000 * list(VERSIONS).index(name)
    with ExitStack() as stack, torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            before = weight.detach().clone()
            stack.callback(lambda weight=weight, before=before: weight.data.copy_(before))
            generator = torch.Generator().manual_seed(start + number)
            weight += VERSIONS[name] * torch.randn(weight.shape, generator=generator)
        yield


def scored(model: Any, head: Head | None = None) -> Any:
    return score_completions(model, PROMPTS, IDS, heads=[head or Head()])[0].logps


def inside(model: Any, context: Any, head: Head | None = None) -> Any:
    with context:
        return scored(model, head)


def search_of(model: Any, engine: Any, trainer: Any, **bench: Any) -> Search:
    """A search in which all rows are scored, before any test."""
    evidence = TokenEvidence(
        sampling_per_token_logps=engine, old_per_token_logps=trainer, completion_mask=np.ones(engine.shape, bool)
    )
    return Search(evidence, Bench(model, PROMPTS, IDS, rows=8, **bench), lambda _text: None)


def answer(model: Any, engine: Any, trainer: Any = None, *, declared: Declared | None = EXACT) -> Any:
    evidence = TokenEvidence(
        sampling_per_token_logps=engine, old_per_token_logps=scored(model) if trainer is None else trainer,
        completion_mask=np.ones(engine.shape, bool), token_ids=np.array(IDS), group_ids=np.arange(len(IDS)) // 2,
        engine=declared, trainer=declared,
    )  # fmt: skip
    weights = {name: partial(version, model, name) for name in VERSIONS}
    bench = Bench(model, PROMPTS, IDS, weights=weights, stop_ids=[1], pad_ids=[0], rows=4)
    return attribute(run_hypotheses(evidence, bench))


# ------------------------------------------------------------------------------------------------------ some responses


def other_temperature(model: Any) -> Any:
    return scored(model, Head(0.7))


def int4(model: Any) -> Any:
    return inside(model, precision.rounded_weights(model, "int4"))


def cut_prompt(model: Any) -> Any:
    return score_completions(model, [ids[3:] for ids in PROMPTS], IDS)[0].logps


@pytest.mark.parametrize(
    ("fault", "cause"), [(other_temperature, "temperature"), (int4, "precision"), (cut_prompt, "prompt_difference")]
)
@pytest.mark.parametrize("rows", [(1, 6), (0, 2, 3)])
def test_a_fault_of_some_responses_is_named(model: Any, fault: Callable[[Any], Any], cause: str, rows: Any) -> None:
    engine = np.where(np.isin(ROWS, rows), fault(model), scored(model))
    found = answer(model, engine)
    assert found.cause == cause and found.confidence >= 0.9, (found.cause, found.detail, found.reasons)
    if cause != "prompt_difference":  # rows with the prompts as they are belong to that answer
        assert f"in {len(rows)} of {len(PROMPTS)} responses" in found.detail or "in each response" in found.detail


def test_what_differs_from_a_token_on_is_tested_there(model: Any) -> None:
    engine = scored(model)
    engine[:, 6:] = int4(model)[:, 6:]
    found = answer(model, engine)
    assert found.cause == "precision" and found.detail.startswith("int4 weights"), (found.cause, found.detail)


def test_a_fault_of_all_tokens_has_no_part(model: Any) -> None:
    found = answer(model, other_temperature(model))
    assert (found.cause, found.detail) == ("temperature", "0.7")


def test_the_part_that_differs_lies_between_its_first_and_last_token() -> None:
    engine = np.full((3, 40), -1.0)
    trainer = engine.copy()
    trainer[0, 10:31:2] = -2.0
    trainer[1, 5:20] = -2.0
    evidence = TokenEvidence(
        sampling_per_token_logps=engine, old_per_token_logps=trainer, completion_mask=np.ones((3, 40), bool)
    )
    part = differing(evidence)
    assert part is not None and part.sum(1).tolist() == [21, 15, 0]
    assert part[0, 10:31].all() and part[1, 5:20].all()


@pytest.mark.parametrize(("first", "last"), [(0, 40), (0, 5)])
def test_no_part_where_nearly_all_or_hardly_any_token_differs(first: int, last: int) -> None:
    engine = np.full((2, 40), -1.0)
    trainer = engine.copy()
    trainer[:, first:last] = -1.5
    evidence = TokenEvidence(
        sampling_per_token_logps=engine, old_per_token_logps=trainer, completion_mask=np.ones((2, 40), bool)
    )
    assert differing(evidence) is None


def test_noise_in_some_responses_is_not_named(model: Any) -> None:
    noise = np.where(np.isin(ROWS, (2, 5)), CHANCE.normal(0, 0.3, (len(PROMPTS), LENGTH)), 0.0)
    found = answer(model, scored(model) + noise)
    assert found.cause == "unknown", (found.cause, found.detail, found.reasons)


# ---------------------------------------------------------------------------------------------- each in its own way


def test_a_greedy_request_is_one_at_temperature_0(model: Any) -> None:
    """Its log-probs are 0, and its tokens the most likely ones: no log-probs that were lost."""
    logits = logits_of(model, PROMPTS, IDS, range(8), Head())
    likeliest = logits.values.argmax(1).numpy().reshape(len(IDS), LENGTH)
    ids = [likeliest[row].tolist() if row % 4 == 3 else IDS[row] for row in range(len(IDS))]
    # greedy tokens change what comes after them: only the first is sure to be the most likely one
    target = np.zeros(LENGTH)
    found = sampling_tests(
        logits_of(model, PROMPTS[:1], [ids[0]], [0], Head()), target, np.zeros(LENGTH), np.zeros(LENGTH)
    )
    np.testing.assert_array_equal(found["temperature:0 (greedy)"].numpy(), target)
    lost = answer(model, np.where(ROWS % 4 == 3, 0.0, scored(model)))
    assert "greedy" not in lost.detail and lost.cause != "temperature"


def test_a_temperature_of_each_response_is_found(model: Any) -> None:
    heads = [Head(0.6 + 0.1 * row) for row in range(len(PROMPTS))]
    engine = np.stack([scored(model, head)[row] for row, head in enumerate(heads)])
    found = answer(model, engine)
    assert found.cause == "temperature" and "another in each response" in found.detail, (found.cause, found.detail)


def test_a_temperature_that_falls_along_the_responses_is_found(model: Any) -> None:
    engine = np.stack([scored(model, Head(1.4 - 0.05 * place))[:, place] for place in range(LENGTH)], 1)
    found = answer(model, engine)
    assert found.cause == "temperature" and "in each part of the responses" in found.detail, (found.cause, found.detail)


def test_weights_of_each_response_and_weights_that_change_within_one(model: Any) -> None:
    first, second = (inside(model, version(model, name)) for name in list(VERSIONS)[:2])
    replicas = answer(model, np.where(ROWS % 2 == 0, first, second))
    assert replicas.cause == "stale_weights" and replicas.detail.startswith("each response as in "), replicas.reasons
    assert "version 1" in replicas.detail and "version 2" in replicas.detail
    in_flight = answer(model, np.where(np.arange(LENGTH) < 4 + ROWS, first, second))
    assert in_flight.cause == "stale_weights" and in_flight.detail.startswith("parts of the responses as in "), (
        in_flight.reasons
    )


def test_versions_are_chosen_by_row_and_by_part() -> None:
    target = np.array([[0.0] * 4 + [1.0] * 2, [1.0] * 6])
    whole, within = chosen_versions([np.zeros((2, 6)), np.ones((2, 6)), np.full((2, 6), 7.0)], target)
    assert whole[:, 0].tolist() == [0, 1]
    assert within.tolist() == [[0, 0, 0, 0, 1, 1], [1] * 6]


def test_a_prefix_cache_that_was_kept_over_a_sync_is_found(model: Any) -> None:
    weights = {"stale_weights:version 1": partial(version, model, "stale_weights:version 1")}
    search = search_of(model, scored(model), scored(model) + 0.1, weights=weights)
    engine = score_after(search, weights["stale_weights:version 1"], 16, range(8))
    assert np.abs(engine - scored(model)).max() > 1e-3
    found = answer(model, engine)
    assert found.cause == "stale_weights" and "prefix cache, blocks of 16" in found.detail, (found.cause, found.detail)


def test_a_prefix_cache_without_a_full_block_changes_nothing(model: Any) -> None:
    search = search_of(model, scored(model), scored(model) + 0.1)
    found = score_after(search, partial(version, model, "stale_weights:version 1"), 64, range(8))
    np.testing.assert_allclose(found, scored(model), atol=1e-4)
    assert [cached_tokens(length, 16) for length in (1, 16, 17, 40)] == [0, 0, 16, 32]


# ------------------------------------------------------------------------------------------------------- two at once


def test_other_weights_at_another_temperature_are_both_named(model: Any) -> None:
    engine = inside(model, version(model, "wrong_adapter:no adapter"), Head(1.15))
    found = answer(model, engine)
    assert found.cause == "wrong_adapter" and "no adapter, and temperature 1.15" in found.detail, found.reasons
    assert [cause for cause, _ in found.parts] == ["wrong_adapter", "temperature"]


def test_a_top_k_that_the_tokens_do_not_reach_is_found(model: Any) -> None:
    """The rarest token of the batch has rank 16 or so; 20 tokens are kept."""
    logits = logits_of(model, PROMPTS, IDS, range(8), Head())
    own = logits.values.gather(1, logits.ids[:, None])
    target = (own[:, 0] - logits.values.topk(20, 1).values.logsumexp(1)).double().numpy()
    ranks = (logits.values > own).sum(1).double().numpy()
    kept = torch.from_numpy(ranks < 17)  # the tokens at hand
    part = replace(
        logits, values=logits.values[kept], ids=logits.ids[kept], rows=logits.rows[kept], places=logits.places[kept],
        contexts=[context for context, keep in zip(logits.contexts, kept, strict=True) if keep],
    )  # fmt: skip
    top_logps = logits.values.log_softmax(1).max(1).values.double().numpy()
    found = sampling_tests(part, target[kept], ranks[kept], top_logps[kept])
    np.testing.assert_allclose(found["truncated_sampling:top_k 20"].numpy(), target[kept], atol=1e-4)


# --------------------------------------------------------------------------------------------- what a side cannot have


def test_a_trainer_has_no_kv_cache(model: Any) -> None:
    evidence = TokenEvidence(
        sampling_per_token_logps=scored(model), old_per_token_logps=scored(model) + CHANCE.normal(0, 0.05, (8, LENGTH)),
        completion_mask=np.ones((len(IDS), LENGTH), bool),
    )  # fmt: skip
    tested = run_hypotheses(evidence, Bench(model, PROMPTS, IDS, stop_ids=[1], pad_ids=[0], rows=2)).tested
    assert any(name.startswith("trainer:precision") for name in tested)
    assert not any("cache" in name for name in tested)


def test_a_prompt_that_is_attended_both_ways_is_another_model(model: Any) -> None:
    engine = layouts.score_in_layout(model, PROMPTS, IDS, layouts.Layout(both_ways=True), prompt_width=22)
    found = answer(model, engine)
    assert found.cause == "model_config" and "both ways" in found.detail, (found.cause, found.detail)


def test_a_test_that_leaves_most_tokens_out_explains_nothing(model: Any) -> None:
    search = search_of(model, scored(model), scored(model) + 0.3)
    some = search.evidence.sampling_per_token_logps.copy()
    some[:, 4:] = np.nan
    assert search.add("misalignment:moved far", some) > 1.0


def test_top_p_without_the_token_that_reaches_it_is_told_apart(model: Any) -> None:
    logits = logits_of(model, PROMPTS, IDS, range(8), Head())
    ranked, order = logits.values.softmax(1).sort(1, descending=True)
    kept = ranked.cumsum(1) <= 0.9
    kept[:, 0] = True
    drawn = order[:, 0].clone()
    part = replace(logits, ids=drawn)  # the most likely tokens, which are always kept
    target = (part.plain - torch.log((ranked * kept).sum(1))).double().numpy()
    found = sampling_tests(part, target, np.zeros(len(drawn)), ranked[:, 0].log().double().numpy())
    name = "truncated_sampling:top_p 0.9 without the token that reaches it"
    np.testing.assert_allclose(found[name].numpy(), target, atol=1e-4)


# ------------------------------------------------------------------------------------------------ traces without tests


def drawn(rows: int = 12, length: int = 24, *, greedy: bool = False) -> tuple[Any, Any, Any]:
    """Log-probs and entropies of tokens that were drawn, or of the most likely ones, and the tokens."""
    chance = np.random.default_rng(0)
    logits = chance.normal(0, 2.0, (rows, length, 30))
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = (logps + (0 if greedy else chance.gumbel(size=logps.shape))).argmax(-1)
    own = np.take_along_axis(logps, ids[..., None], -1)[..., 0]
    return own, -(np.exp(logps) * logps).sum(-1), ids


def traced(engine: Any, trainer: Any, entropies: Any = None, ids: Any = None) -> Any:
    return attribute(
        TokenEvidence(
            sampling_per_token_logps=engine, old_per_token_logps=trainer, completion_mask=np.ones(trainer.shape, bool),
            entropies=entropies, token_ids=ids, group_ids=np.arange(len(trainer)) // 4,
        )
    )  # fmt: skip


def test_zeros_that_were_lost_and_zeros_of_tokens_alone_in_a_nucleus() -> None:
    own, entropies, _ = drawn()
    lost = traced(np.zeros_like(own), own, entropies)
    assert lost.cause == "misalignment" and "lost" in lost.reasons[0]
    likely = np.where(np.random.default_rng(1).random(own.shape) < 0.2, -0.05, own)
    nucleus = traced(np.where(likely == -0.05, 0.0, likely), likely)
    assert nucleus.cause != "misalignment", nucleus.reasons


def test_greedy_rows_are_likelier_than_draws() -> None:
    own, entropies, _ = drawn(rows=16)
    greedy = np.arange(16)[:, None] % 4 == 3
    likeliest = np.where(greedy, drawn(rows=16, greedy=True)[0], own)
    found = traced(np.where(greedy, 0.0, likeliest), likeliest, entropies)
    assert found.cause == "temperature" and "greedy" in found.reasons[0], found.reasons


def test_minus_the_entropies_are_no_log_probs() -> None:
    own, entropies, _ = drawn()
    found = traced(-entropies, own, entropies)
    assert found.cause == "misalignment" and "minus the entropies" in found.reasons[0]


def test_copies_and_lost_log_probs_are_told_where_both_sides_agree() -> None:
    own, _, ids = drawn()
    assert traced(own, own, ids=ids).cause == "none"
    own, ids = own.copy(), ids.copy()
    own[1], ids[1] = own[0], ids[0]
    copied = traced(own, own, ids=ids)
    assert copied.cause == "repeated_draws" and "17%" in copied.reasons[0]
    ids[4], own[4] = ids[8], own[8]  # of another group: no copy
    assert traced(own[2:], own[2:], ids=ids[2:]).cause != "repeated_draws"
    lost = np.where(np.arange(len(own))[:, None] == 5, np.nan, own)
    found = traced(lost, own)
    assert found.cause == "nonfinite" and "8.3%" in found.reasons[0] and "engine" in found.reasons[0]


def test_rows_of_a_sorted_batch_that_was_not_put_back(model: Any) -> None:
    plain = scored(model)
    found = answer(model, plain, plain[::-1].copy())
    assert found.cause == "misalignment" and "swapped rows" in found.detail, (found.cause, found.detail)


def test_entropies_that_are_not_known_are_no_log_probs() -> None:
    own, entropies, _ = drawn()
    noisy = own + np.random.default_rng(1).normal(0, 0.05, own.shape)
    for known in (np.full_like(own, np.nan), np.where(np.arange(len(own))[:, None] == 0, entropies, np.nan)):
        assert traced(noisy, own, known).cause != "misalignment"


def test_a_token_that_a_truncation_cuts_is_not_missing() -> None:
    own, _, _ = drawn()
    cut = own.copy()
    cut[0, 0] = -np.inf
    assert traced(own, cut).cause == "none"


def test_an_engine_that_gives_minus_infinity_to_rare_tokens_has_lost_them() -> None:
    """They were drawn from the whole distribution: without them the others look likelier than draws."""
    own, entropies, _ = drawn(rows=40)
    found = traced(np.where(own < np.quantile(own, 0.2), -np.inf, own), own, entropies)
    assert found.cause == "nonfinite" and "20.0%" in found.reasons[0], found.reasons


@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_a_token_that_was_written_over_the_last_ones(model: Any, side: str) -> None:
    plain = scored(model)
    ids = [[*row[:-1], 1] for row in IDS]
    ends = score_completions(model, PROMPTS, ids, heads=[Head()])[0].logps
    sides = (ends, plain) if side == "engine" else (plain, ends)
    found = answer(model, *sides)
    assert (found.cause, found.detail) == ("misalignment", "log-prob of token 1 in place of the batch's"), found


def test_packed_rows_whose_positions_begin_again(model: Any) -> None:
    """The first row has none before it and stays as it is; all others attend the one before them."""
    packed = layouts.score_packed(model, PROMPTS, IDS, range(len(IDS)), width=LENGTH, head=Head())
    plain = scored(model)
    assert np.allclose(packed[0], plain[0], atol=1e-5) and np.abs(packed[1:] - plain[1:]).max(1).min() > 1e-3
    found = answer(model, plain, packed)
    assert found.cause == "padding" and "positions begin again" in found.detail, found


def test_biases_need_ten_places_each(model: Any) -> None:
    logits = logits_of(model, PROMPTS, IDS, range(2), Head())
    target = logits.plain.numpy() + np.random.default_rng(0).normal(0, 2, len(logits.ids))
    assert len(target) < 60 and len(_bias_values(logits, target, ())) <= len(target) // 10


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("truncated_sampling:top_p 0.9, top_k 20", Truncation(top_p=0.9, top_k=20)),
        ("truncated_sampling:top_p 0.9 without the token that reaches it", None),
        ("temperature:0 (greedy)", None),
    ],
)
def test_a_head_follows_from_the_name_of_its_test(name: str, expected: Truncation | None) -> None:
    head = _head_of(name, Head())
    assert (head is None) if expected is None else (head is not None and head.truncation == expected)


def test_rows_that_were_cut_to_save_memory_still_count(model: Any) -> None:
    """A large vocabulary leaves room for a few tokens of each row."""
    search = search_of(model, other_temperature(model), scored(model))
    begun = np.where(np.arange(LENGTH) < 4, other_temperature(model), np.nan)
    assert search.add("temperature:0.7", begun, cut=True) < 1e-6


def test_an_adapter_of_the_head_offers_no_other_head() -> None:
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(tiny_model(), LoraConfig(target_modules=["lm_head", "q_proj"]))
    assert changes.head_changes(wrapped) == {}
    assert changes.head_changes(tiny_model())
