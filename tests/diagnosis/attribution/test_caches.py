"""A compressed KV cache is named by its rule, from where the mismatch begins and by scoring again.

The limits were set with the cases of ``TUNED``; those of ``KEPT_BACK`` were run once, after that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from trl_offpolicy.diagnosis.attribution.attribute import attribute
from trl_offpolicy.diagnosis.attribution.evidence import Declared, TokenEvidence, differences, padded
from trl_offpolicy.diagnosis.attribution.hypotheses import Bench, run_hypotheses
from trl_offpolicy.diagnosis.attribution.trials.caches import capacity
from trl_offpolicy.diagnosis.fixes import fix_of
from trl_offpolicy.engines.hf import sample_completions, score_completions
from trl_offpolicy.engines.kv_cache import KVCache, with_kv_cache

PROMPTS = [[3 + i, 9, 40 + i][: 1 + i % 3] for i in range(6) for _ in range(4)]
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
TUNED = {"two and six": (KVCache(keep_first=2, keep_last=6), 0, {})}
KEPT_BACK: dict[str, tuple[KVCache, int, dict[str, Any]]] = {
    "one and eight": (KVCache(keep_first=1, keep_last=8), 3, {}),
    "four and five, other heads": (KVCache(keep_first=4, keep_last=5), 5, HEADS),
    "five and three, four layers": (KVCache(keep_first=5, keep_last=3), 7, {"num_hidden_layers": 4}),
}


def sampled(model: Any, *, seed: int = 0) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    return sample_completions(model, PROMPTS, max_tokens=16, stop_ids=[1], generator=generator)


def evidence_of(model: Any, ids: Any, logps: Any) -> TokenEvidence:
    (scores,), (again,) = (score_completions(model, PROMPTS, ids, rows=rows) for rows in (16, 3))
    return TokenEvidence(
        sampling_per_token_logps=padded(logps),
        old_per_token_logps=scores.logps,
        completion_mask=np.isfinite(scores.logps),
        rescored_per_token_logps=again.logps,
        entropies=scores.entropies,
        token_ids=padded(ids, fill=0).astype(np.int64),
        group_ids=np.arange(len(ids)) // 4,
    )


def answer(model: Any, ids: Any, logps: Any) -> Any:
    bench = Bench(model, PROMPTS, ids, stop_ids=[1], pad_ids=[0])
    return attribute(run_hypotheses(evidence_of(model, ids, logps), bench))


@pytest.mark.parametrize("case", [*TUNED, *KEPT_BACK])
def test_the_rule_of_the_cache_is_found(case: str) -> None:
    rule, seed, shape = (TUNED | KEPT_BACK)[case]
    model = tiny_model(seed=seed, **shape).eval()
    with with_kv_cache(model, rule):
        ids, logps = sampled(model, seed=seed)
    found = answer(model, ids, logps)
    assert (found.cause, found.detail, found.basis) == ("compressed_cache", f"KV cache of {rule.text}", "tested")
    assert found.explained > 0.999 and found.confidence >= 0.9


def test_without_the_model_it_is_not_guessed() -> None:
    model = tiny_model().eval()
    with with_kv_cache(model, KVCache(keep_first=2, keep_last=6)):
        ids, logps = sampled(model)
    found = attribute(evidence_of(model, ids, logps).at_level("logps"))
    assert found.cause == "unknown" and "trl-offpolicy probe" in found.next_test


def test_a_rule_that_is_not_tested_stays_unknown() -> None:
    """Only keys 3 to 8 are kept beside the last two: the length is right, and no rule of first and last ones fits."""

    class Middle(KVCache):
        def kept(self, visible: Any) -> Any:
            rank = visible.cumsum(-1)
            return visible & (((rank > 2) & (rank <= 8)) | (rank > rank[..., -1:] - 2))

    model = tiny_model().eval()
    with with_kv_cache(model, Middle(keep_first=1, keep_last=1)):
        ids, logps = sampled(model)
    assert answer(model, ids, logps).cause == "unknown"


def test_where_the_mismatch_begins() -> None:
    gap = np.zeros((3, 12))
    gap[0, 7:], gap[1, 5:], gap[2, :] = 0.2, -0.1, np.nan
    assert capacity(gap, [3, 5, 50], noise=1e-6) == 9  # the first context of ten tokens differs in both
    gap[1, 6:] = 0.0
    assert capacity(gap, [3, 5, 50], noise=1e-6) is None  # most later tokens agree
    assert capacity(np.full((3, 12), 0.2), [3, 5, 7], noise=1e-6) is None  # the first token differs already
    assert capacity(np.zeros((3, 12)), [3, 5, 7], noise=1e-6) is None
    gap[0, 7:], gap[1, 5:] = 0.2, -0.1
    assert capacity(gap, [3, 5, 50], noise=0.05) is None  # within the noise


def test_the_search_is_not_begun_for_other_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding and other prompts differ from the first token on."""
    model = tiny_model().eval()
    ids, logps = sampled(model)
    noisy = [[value + 0.01 for value in row] for row in logps]
    noted: list[str] = []
    run_hypotheses(evidence_of(model, ids, noisy), Bench(model, PROMPTS, ids), note=noted.append)
    assert noted and not any("KV cache of" in name for name in noted)


def test_declared_caches_are_compared() -> None:
    sparse = KVCache(keep_first=4, keep_last=64)
    engine = Declared(kv_cache=sparse.text, dtype="float32")
    found = differences(engine, Declared(kv_cache="auto"))["compressed_cache"]
    text = "the engine's KV cache holds the first 4 and last 64 tokens, the trainer's all tokens"
    assert found.certain and found.text == text
    assert not differences(engine, Declared(kv_cache=sparse.text))
    for whole in ("auto", None, "float32"):  # the learner repeats what the engine does not do
        found = differences(Declared(kv_cache=whole, dtype="float32"), Declared(kv_cache=sparse.text))
        assert list(found) == ["compressed_cache"] and "holds all tokens, the trainer's the first 4" in str(found)
        assert found["compressed_cache"].certain is (whole is not None)  # None: it may do the same, unsaid
    said = differences(Declared(kv_cache="auto"), Declared(kv_cache="fp8"))["precision"]
    assert said.certain and said.text == "keys and values stored as fp8 in the trainer"
    assert not differences(Declared(), Declared(kv_cache="fp8"))["precision"].certain
    known = differences(Declared(dtype="bfloat16"), Declared(kv_cache="fp8", dtype="float32"))["precision"]
    assert known.certain and known.text.startswith("dtype bfloat16 in the engine")  # the types do differ
    other = differences(engine, Declared(kv_cache="the first 4 and last 32 tokens"))["compressed_cache"]
    assert other.text.endswith("holds the first 4 and last 64 tokens, the trainer's the first 4 and last 32 tokens")
    assert "precision" in differences(Declared(kv_cache="fp8"), Declared(kv_cache="auto"))
    assert not differences(Declared(kv_cache="fp8"), Declared(kv_cache="fp8"))


def test_the_fix_is_that_of_the_run() -> None:
    sparse = {"keep_first": 4, "keep_last": 64}
    run = {"settings": {"engine": {"kv_cache": sparse}}}
    fix = fix_of("compressed_cache", run)
    assert fix is not None and fix.yaml == "learner_kv_cache: engine\n"
    lightning = fix_of("compressed_cache", {"settings": {**run["settings"], "framework": "lightning"}})
    assert lightning is not None and lightning.yaml == "model: {learner_kv_cache: engine}\n"
    other = fix_of("compressed_cache", {"settings": {"engine": {"dtype": "bfloat16"}}})
    assert other is not None and "keep_first" in other.yaml
    learner = fix_of("compressed_cache", {"settings": {"engine": {}, "learner_kv_cache": sparse}})
    assert learner is not None and learner.yaml == "learner_kv_cache: null\n"
    rounded = fix_of("precision", {"settings": {"engine": {"kv_cache": {**sparse, "rounding": "fp8"}}}})
    assert rounded is not None and rounded.yaml == "engine: {kv_cache: {keep_first: 4, keep_last: 64}}\n"
