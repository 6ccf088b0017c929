"""A simulated engine in the TRL trainer: its log-probs reach the loss; a learner that computes alike has ratio 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_greedy import plain_greedy
from plain_simulated import SPARSE, as_the_engine, logps
from tiny_models import EOS, score_last_word, tiny_model
from trainer_runs import LENGTH, generation_batches, records

from trl_offpolicy.diagnosis.doctor import examine
from trl_offpolicy.engines.kv_cache import KVCache, kv_cache_of

pytestmark = pytest.mark.integration

CASES: dict[str, dict[str, Any]] = {
    "evicting": {"kv_cache": SPARSE},
    "fp8 cache": {"kv_cache": {"rounding": "fp8", "scale": 0.02}},
    "fp8 weights": {"weight_rounding": "fp8"},
    "one precision": {"kv_cache": {"rounding": "fp8", "scale": 0.02}, "weight_rounding": "fp8"},
}

CAUSES = {"evicting": "compressed_cache", "fp8 cache": "precision"}
"""What the doctor says of the run. Rounded weights of this tiny model differ by more than FP8 does in a real one."""


def learner_of(engine: dict[str, Any]) -> dict[str, str]:
    names = {"kv_cache": "learner_kv_cache", "weight_rounding": "learner_rounding"}
    return {names[name]: "engine" for name in engine}


@pytest.mark.parametrize("case", CASES)
def test_what_samples_is_the_engine_and_the_mismatch_is_measured(case: str, build: Callable[..., Any]) -> None:
    trainer = build(None, engine=CASES[case], max_steps=1)
    made = generation_batches(trainer)
    trainer.train()
    batch, mask = made[0], made[0]["completion_mask"].bool()
    expected, plain = logps(as_the_engine(tiny_model(), CASES[case]), batch), logps(tiny_model(), batch)
    torch.testing.assert_close(batch["sampling_per_token_logps"][mask], expected[mask], rtol=0, atol=1e-3)
    assert float((expected - plain)[mask].abs().max()) > 0.02  # the test could not fail otherwise
    ratio = (plain - expected)[mask].double()
    row = records(trainer)[0]
    assert row["offpolicy/mismatch/kl_k3"] == pytest.approx(float((ratio.exp() - ratio - 1).mean()), rel=0.02)
    assert trainer.args.preset.name == "paper/tis"
    assert kv_cache_of(trainer.model) is None and trainer.model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(trainer.model.model.layers[0].mlp.up_proj)
    if case in CAUSES:
        found = examine(trainer.args.output_dir).attribution
        assert found is not None and (found.cause, found.basis) == (CAUSES[case], "declared")


@pytest.mark.parametrize("case", CASES)
def test_a_learner_that_computes_alike_has_a_ratio_of_one(case: str, build: Callable[..., Any]) -> None:
    engine = CASES[case]
    trainer = build(None, engine=engine, **learner_of(engine), max_steps=2)
    made = generation_batches(trainer)
    trainer.train()
    rows = records(trainer)
    assert rows[0]["offpolicy/mismatch/logp_diff_mean"] < 1e-3 and rows[1]["offpolicy/mismatch/logp_diff_mean"] < 1e-3
    assert rows[0]["offpolicy/weight/mean"] == pytest.approx(1.0, abs=1e-5)
    moved = logps(as_the_engine(tiny_model(), engine), made[1]) - logps(as_the_engine(trainer.model, {}), made[1])
    assert moved[made[1]["completion_mask"].bool()].abs().max() > 1e-4  # it learned


def test_the_reference_is_the_policy_in_its_dense_context(build: Callable[..., Any]) -> None:
    """The first step against KL(compressed || dense), k3 on the sampled tokens, and its gradient by autograd."""
    kl = {"objective": {"kl": {"coef": 0.5}}}
    options = {"learner_kv_cache": "engine", "kl_reference": "dense_context", "offpolicy": kl}
    trainer = build(None, engine={"kv_cache": SPARSE}, **options, max_steps=1)
    made = generation_batches(trainer)
    trainer.train()
    batch, mask = made[0], made[0]["completion_mask"].bool()
    dense = logps(tiny_model(), batch)
    torch.testing.assert_close(batch["ref_per_token_logps"][mask], dense[mask], rtol=0, atol=1e-3)
    gap = (dense - logps(as_the_engine(tiny_model(), {"kv_cache": SPARSE}), batch))[mask].double()
    expected = float((gap.exp() - gap - 1).mean())
    assert expected > 0.01 and records(trainer)[0]["offpolicy/loss/kl"] == pytest.approx(expected, rel=0.02)
    assert trainer.ref_model is None and kv_cache_of(trainer.model) == KVCache(**SPARSE)


def test_the_greedy_completion_of_remax_is_the_engines(build: Callable[..., Any], tokenizer: Any) -> None:
    engine = {"weight_rounding": "int3"}
    trainer = build(None, engine=engine, offpolicy={"preset": "paper/tis", "advantages": "remax"}, max_steps=1)
    made = generation_batches(trainer)
    trainer.train()
    batch, found = made[0], {}
    for who, model in {"engine": as_the_engine(tiny_model(), engine), "learner": tiny_model()}.items():
        prompts = [
            ids[mask.bool()].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        ]
        greedy = [plain_greedy(model, ids, length=LENGTH, ends={EOS}) for ids in prompts]
        baseline = score_last_word(tokenizer.batch_decode(greedy, skip_special_tokens=True))
        found[who] = batch["rewards"] - torch.tensor(baseline)
    torch.testing.assert_close(batch["advantages"], found["engine"])
    assert not torch.allclose(found["engine"], found["learner"])  # the test could not fail otherwise


def test_what_does_not_go_together_is_refused(make_args: Callable[..., Any], build: Callable[..., Any]) -> None:
    engine = {"kv_cache": SPARSE}
    with pytest.raises(ValueError, match=r"^engine\.kv_cache must be left out with use_vllm: true, as vLLM cannot"):
        build(None, engine=engine, use_vllm=True)
    with pytest.raises(ValueError, match=r"^engine\.kv_cache must be left out with a rollout_func"):
        build(lambda prompts, trainer: {}, engine=engine)
    with pytest.raises(ValueError, match=r"engine\.weight_rounding must be left out with use_transformers_continuous"):
        build(None, engine={**engine, "weight_rounding": "fp8"}, use_transformers_continuous_batching=True)
    with pytest.raises(ValueError, match=r"^engine\.kv_cache must be given with learner_kv_cache 'engine'"):
        make_args(learner_kv_cache="engine")
    with pytest.raises(ValueError, match=r"^learner_kv_cache\.keep_first and keep_last must be given together"):
        make_args(learner_kv_cache={"keep_last": 2})
    dense = {"learner_kv_cache": SPARSE, "kl_reference": "dense_context"}
    with pytest.raises(ValueError, match=r"^kl_reference must be one of .* but got 'dense'\.$"):
        make_args(kl_reference="dense")
    with pytest.raises(ValueError, match=r"^learner_kv_cache must be given with kl_reference 'dense_context'"):
        make_args(kl_reference="dense_context", offpolicy={"objective": {"kl": {"coef": 0.1}}})
    with pytest.raises(ValueError, match=r"^offpolicy\.objective\.kl must be given with kl_reference"):
        make_args(**dense)
    with pytest.raises(ValueError, match=r"^beta must be 0 with kl_reference 'dense_context', .* but got 0\.1\."):
        make_args(**dense, beta=0.1)
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.3"):
        build(None, engine=engine, repetition_penalty=1.3)


def test_the_presets_bring_the_learners_part(make_args: Callable[..., Any]) -> None:
    args = make_args(engine={"kv_cache": SPARSE}, offpolicy="paper/shadow-mask")
    assert (args.learner_kv_cache, args.kl_reference, args.beta) == ("engine", "dense_context", 0.0)
    kl = args.preset.objective.kl
    assert kl is not None and kl.beta == 0.1
    args = make_args(engine={"kv_cache": "fp8", "weight_rounding": "fp8"}, offpolicy="paper/jet-rl")
    assert (args.learner_kv_cache, args.learner_rounding, args.kl_reference) == ("engine", "engine", "initial")
    for name in ("paper/shadow-mask", "paper/jet-rl"):
        with pytest.raises(ValueError, match=r"^engine\.kv_cache must be given with learner_kv_cache 'engine'"):
            make_args(offpolicy=name, engine={"weight_rounding": "fp8"})


def test_qarl_runs_on_generate(build: Callable[..., Any]) -> None:
    """The preset rounds what samples and what learns alike, without vLLM."""
    trainer = build(None, offpolicy={"preset": "paper/qarl", "options": {"rounding": "int4"}}, max_steps=2)
    assert trainer.args.engine == {"weight_rounding": "int4"} and trainer.args.learner_rounding == "engine"
    made = generation_batches(trainer)
    trainer.train()
    assert max(row["offpolicy/mismatch/logp_diff_mean"] for row in records(trainer)[:2]) < 1e-3
    batch, mask = made[0], made[0]["completion_mask"].bool()
    assert float((batch["sampling_per_token_logps"] - logps(tiny_model(), batch))[mask].abs().max()) > 0.02


NEEDS: dict[str, str] = {
    **dict.fromkeys(
        ("paper/dora", "paper/periodic-async"), r"^async_rollouts must be left out with use_vllm False: an"
    ),
    **dict.fromkeys(
        ("paper/shadow-mask", "paper/jet-rl"), r"^engine\.\w+ must be given with learner_\w+ 'engine', but"
    ),
}
READS = ("paper/alp", "paper/mipu", "paper/vcpo", "paper/logit-fusion", "paper/kpop")


@pytest.mark.parametrize("name", NEEDS)
def test_a_preset_without_the_engine_that_it_needs_is_refused(make_args: Callable[..., Any], name: str) -> None:
    with pytest.raises(ValueError, match=NEEDS[name]):
        make_args(offpolicy=name)


@pytest.mark.parametrize("name", READS)
def test_a_preset_that_reads_an_engine_is_refused_without_one(build: Callable[..., Any], name: str) -> None:
    with pytest.raises(ValueError, match=r"^offpolicy must not read the sampling policy when use_vllm is False"):
        build(None, offpolicy=name)


def test_without_vllm_the_noise_of_qerl_is_refused_as_in_lightning(build: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"^engine\.norm_noise is no option of 'transformers'"):
        build(None, offpolicy="paper/qerl")
    with pytest.raises(ValueError, match=r"^engine\.norm_noise is no option of 'transformers'"):
        build(None, engine={"norm_noise": True, "weight_rounding": "int8"})
