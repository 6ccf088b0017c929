"""Scoring a recorded batch again: whose scores come out, what is concluded, and how it joins what the run shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import EOS, tiny_model, tiny_tokenizer

from trl_offpolicy.diagnosis.attribution.attribute import Attribution, attribute
from trl_offpolicy.diagnosis.attribution.evidence import Declared, TokenEvidence, padded
from trl_offpolicy.diagnosis.attribution.hypotheses import Bench
from trl_offpolicy.diagnosis.attribution.trials.endings import ENDS, other_ends
from trl_offpolicy.diagnosis.rescoring.renderings import _escaped, other_renderings
from trl_offpolicy.diagnosis.rescoring.rescore import Rescored, attribute_rescored, merged, rescore
from trl_offpolicy.diagnosis.rescoring.weights import Snapshot, holding, other_weights, precisions, weights_at_hand
from trl_offpolicy.engines.hf import Head, sample_completions, score_completions

PROMPTS = [[3 + n, 5, 9 + 2 * n] for n in range(4) for _ in range(6)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(attention_dropout=0.1).eval()


def batch(model: Any, *, engine: Head | None = None, trainer: Any = None) -> tuple[TokenEvidence, list[list[int]]]:
    """Tokens that the model sampled, scored by ``trainer`` (the model itself by default)."""
    chance = torch.Generator().manual_seed(0)
    ids, mu = sample_completions(model, PROMPTS, max_tokens=16, stop_ids=[EOS], head=engine, generator=chance)
    scored = score_completions(trainer or model, PROMPTS, ids)[0]
    mask = np.isfinite(scored.logps)
    said = Declared(dtype="float32", temperature=1.0)
    return TokenEvidence(
        sampling_per_token_logps=padded(mu, width=mask.shape[1]), old_per_token_logps=scored.logps,
        completion_mask=mask, token_ids=padded(ids, width=mask.shape[1], fill=0).astype(np.int64),
        group_ids=np.repeat(np.arange(4), 6), trainer=said,
    ), ids  # fmt: skip


def test_the_trainers_scores_come_out_and_the_cause_is_found(model: Any) -> None:
    evidence, ids = batch(model, engine=Head(0.8))
    found = rescore(evidence, Bench(model, PROMPTS, ids), step=3)
    assert found.attribution is not None and found.attribution.cause == "temperature" and "temperature" in found.tried
    assert "24 recorded responses of step 4 are the recorded trainer's" in found.text
    assert attribute_rescored(evidence, Bench(model, PROMPTS, ids)).detail == found.attribution.detail


def test_a_trainer_with_dropout_is_not_its_model(model: Any) -> None:
    model.train()
    try:
        evidence, ids = batch(model)  # the sampler has dropout of its own here, so it is scored without
        plain = score_completions(model.eval(), PROMPTS, ids)[0]
    finally:
        model.eval()
    evidence = replace(evidence, sampling_per_token_logps=plain.logps)
    found = rescore(evidence, Bench(model, PROMPTS, ids))
    assert found.attribution is not None and found.attribution.cause == "dropout"
    assert "with its dropout differ as much" in found.text
    without = tiny_model().eval()  # the same weights, but nothing that could drop
    found = rescore(evidence, Bench(without, PROMPTS, ids))
    assert found.attribution is not None and found.attribution.cause != "dropout"
    assert "are not the recorded trainer's" in found.text


def test_other_weights_conclude_nothing(model: Any) -> None:
    evidence, ids = batch(model, engine=Head(0.9))
    found = rescore(evidence, Bench(tiny_model(seed=5).eval(), PROMPTS, ids))
    assert found.attribution is None and "fit neither side" in found.text and not found.tried
    alone = attribute(evidence)
    together = attribute_rescored(evidence, Bench(tiny_model(seed=5).eval(), PROMPTS, ids))
    assert together.cause == alone.cause and together.reasons == (*alone.reasons, found.text)


# -------------------------------------------------------------------------------------------------------------- merge


@pytest.fixture(scope="module")
def some(model: Any) -> Attribution:
    return attribute(batch(model, engine=Head(0.8))[0])


def answer(some: Attribution, cause: str, basis: Any = "log-probs", **more: Any) -> Attribution:
    return replace(some, cause=cause, basis=basis, reasons=(f"{cause} by {basis}",), **more)


def test_what_was_tested_replaces_a_guess_and_takes_back_what_it_refutes(some: Attribution) -> None:
    int8 = Rescored(
        0, answer(some, "precision", "tested", detail="int8 weights"), "fits", 0.1, frozenset({"precision"})
    )
    assert merged(answer(some, "unknown"), int8, grown=False).detail == "int8 weights"
    nothing = Rescored(0, answer(some, "unknown", "tested"), "fits", 0.1, frozenset({"temperature"}))
    assert merged(answer(some, "temperature"), nothing, grown=False).cause == "unknown"  # tested, and refuted
    assert merged(answer(some, "tool_tokens"), nothing, grown=False).cause == "tool_tokens"  # not among the tests
    assert merged(answer(some, "stale_weights", "seen"), nothing, grown=False).cause == "stale_weights"


def test_a_step_that_agrees_denies_nothing_that_began_later(some: Attribution) -> None:
    agrees = Rescored(0, answer(some, "none"), "these fit", 0.0)
    for cause in ("stale_weights", "unknown"):
        found = merged(answer(some, cause), agrees, grown=True)
        assert found.cause == cause and "began later" in found.reasons[-1]
    assert "Save a checkpoint" in merged(answer(some, "unknown"), agrees, grown=True).next_test


def test_a_mismatch_that_has_grown_keeps_its_own_answer(some: Attribution) -> None:
    int8 = Rescored(
        0, answer(some, "precision", "tested", detail="int8 weights"), "fits", 1e-6, frozenset({"precision"})
    )
    found = merged(answer(some, "misalignment"), int8, grown=True)
    assert (found.cause, found.runner_up) == ("misalignment", "precision")
    assert any("precision int8 weights is there from step 1 on" in reason for reason in found.reasons)
    same = merged(answer(some, "precision"), int8, grown=True)
    assert same.cause == "precision" and same.basis == "tested"


# -------------------------------------------------------------------------------------------------- weights, prompts


def test_weights_are_found_in_the_folder_and_nowhere_else(tmp_path: Path, model: Any) -> None:
    assert weights_at_hand(tmp_path, {"model": "somebody/else"}) is None
    for step in (2, 10):
        model.save_pretrained(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-4").mkdir()  # sharded, or half written: no weights that can be read
    model.save_pretrained(tmp_path / "start")
    found = weights_at_hand(tmp_path, {"model": "start"})
    assert found is not None and [one.step for one in found.snapshots] == [0, 2, 10]
    assert found.base == str(tmp_path / "start")
    with pytest.raises(FileNotFoundError, match="--model must be a model on this machine"):
        weights_at_hand(tmp_path, {}, "somebody/else")


def test_earlier_weights_are_put_in_and_taken_out_again(tmp_path: Path, model: Any) -> None:
    other = tiny_model(seed=9)
    other.save_pretrained(tmp_path / "old")
    snapshots = [Snapshot(0, str(tmp_path / "old")), Snapshot(3, "here"), Snapshot(5, "later")]
    contexts = other_weights(model, snapshots[1], snapshots)
    assert list(contexts) == ["stale_weights:those of step 0"]
    ids = torch.tensor([[3, 4, 5]])
    before = model(input_ids=ids).logits
    with contexts["stale_weights:those of step 0"]():
        torch.testing.assert_close(model(input_ids=ids).logits, other(input_ids=ids).logits)
    assert torch.equal(model(input_ids=ids).logits, before)
    with holding(model, {}):
        assert torch.equal(model(input_ids=ids).logits, before)


def test_ways_to_compute_in_sixteen_bits(model: Any) -> None:
    assert list(precisions(model, {"dtype": "float32"})) == ["float32"]
    ways = precisions(model, {"dtype": "bfloat16"})
    ids = torch.tensor([[3, 4, 5]])
    exact, seen = model(input_ids=ids).logits, []
    for way in ways.values():
        with way():
            seen.append((model(input_ids=ids).logits.float() - exact).abs().max().item())
    assert len(seen) == 2 and all(0 < gap < 0.2 for gap in seen)
    assert torch.equal(model(input_ids=ids).logits, exact)


MESSAGES = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
TEMPLATE = MESSAGES + "{% if add_generation_prompt %}<assistant> {% endif %}"


def test_ends_with_thoughts_are_added_or_taken_off() -> None:
    tokenizer = tiny_tokenizer()
    assert other_ends(tokenizer, [[4, 5]]) == {}
    tokenizer.chat_template = TEMPLATE
    block, begun = (list(tokenizer(text)["input_ids"]) for text in ENDS.values())
    assert block and begun and block != begun
    added = other_ends(tokenizer, [[4, 5], [6]])
    assert added["an empty block of thoughts at the end"] == [[4, 5, *block], [6, *block]]
    taken = other_ends(tokenizer, [[4, 5, *block], [6, *block]])
    assert taken["an empty block of thoughts missing at the end"] == [[4, 5], [6]]


def test_prompts_are_read_back_and_rendered_in_other_ways() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    texts = ["<system> w1 w2 <user> w7 <assistant> ", "<system> w1 w2 <user> w8 w9 <assistant> "]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    found = other_renderings(tokenizer, texts, ids)
    ways = {"no generation prompt", "no system prompt", "empty system prompt", "no chat template"}
    ways |= {"system prompt in the user's turn", "the chat template twice"}
    assert ways < set(found) and all("thoughts" in name for name in set(found) - ways)
    assert found["no generation prompt"][1] == ids[1][:-1] and found["no chat template"][0] == [10]
    assert found["the chat template twice"][0] == tokenizer(f"<user> {texts[0]} <assistant>")["input_ids"]
    assert _escaped({"role": "user", "content": 'is a < "b"?'})["content"] == "is a &lt; &quot;b&quot;?"
    assert found["no system prompt"][0] == tokenizer("<user> w7 <assistant>")["input_ids"]
    plain = ["<user> w7 <assistant> "]
    assert "no system prompt" not in other_renderings(tokenizer, plain, [tokenizer(plain[0])["input_ids"]])
    assert all("thoughts" in name for name in other_renderings(tokenizer, ["w1 w2"], [[4, 5]]))  # no chat
    assert other_renderings(tiny_tokenizer(), texts, ids) == {}  # no template
