"""A simulated engine in a Lightning module, as in the TRL trainer.

That both sides are one policy is read off the mean distance, which is 1e-6 then and above 0.1 otherwise. Of thousands
of numbers one may lie at the edge of a rounding step, and fall to its other side in a batch of another shape.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_runs import Rows, Watch, data, module, trainer
from plain_simulated import SPARSE, as_the_engine, logps
from tiny_models import tiny_model

from lightning_module.engines import build_engine, check_options
from trl_offpolicy.engines.hf import TransformersEngine
from trl_offpolicy.rollouts.compressed_forward import parse_simulated

pytestmark = pytest.mark.integration

CASES: dict[str, dict[str, Any]] = {
    "evicting": {"kv_cache": SPARSE},
    "one precision": {"kv_cache": {"rounding": "fp8", "scale": 0.02}, "weight_rounding": "fp8"},
}
NAMES = {"kv_cache": "learner_kv_cache", "weight_rounding": "learner_rounding"}


def run(folder: Path, engine: dict[str, Any], steps: int = 1, **options: Any) -> tuple[Any, Rows, Watch]:
    ours, rows, watch = module({"type": "transformers", **engine}, **options), Rows(), Watch()
    trainer(folder, callbacks=[rows, watch], max_steps=steps, accumulate_grad_batches=2).fit(ours, data())
    return ours, rows, watch


@pytest.mark.parametrize("case", CASES)
def test_the_sampling_policy_is_the_engine_and_a_learner_alike_has_a_ratio_of_one(case: str, tmp_path: Path) -> None:
    engine = CASES[case]
    other = as_the_engine(tiny_model(), engine)
    ours, rows, watch = run(tmp_path / "plain", engine)
    batch, mask = rows.batches[0], rows.batches[0]["completion_mask"].bool()
    expected, plain = logps(other, batch), logps(tiny_model(), batch)
    torch.testing.assert_close(batch["sampling_per_token_logps"][mask], expected[mask], rtol=0, atol=1e-3)
    ratio = (plain - expected)[mask].double()
    divergence = float((ratio.exp() - ratio - 1).mean())
    assert watch.logs[0]["offpolicy/mismatch/kl_k3"] == pytest.approx(divergence, rel=0.02) and divergence > 1e-4
    assert ours.preset.name == "paper/tis" and ours.generation.reports_logps

    learner = {NAMES[name]: "engine" for name in engine}
    _, _, watch = run(tmp_path / "alike", engine, steps=2, **learner)
    assert all(row["offpolicy/mismatch/logp_diff_mean"] < 1e-3 for row in watch.logs) and len(watch.logs) == 2


def test_an_engine_that_is_built_is_repeated_as_well(tmp_path: Path) -> None:
    policy = tiny_model()
    simulated = parse_simulated({"kv_cache": SPARSE, "weight_rounding": "fp8"})
    engine = TransformersEngine(lambda: policy, pad_token_id=0, eos_token_ids=[1], simulated=simulated)
    options = {"learner_kv_cache": "engine", "learner_rounding": "engine", "sync_check": True, "model": policy}
    rows, watch = Rows(), Watch()
    ours = module(engine, **options)
    trainer(tmp_path, callbacks=[rows, watch], max_steps=2, accumulate_grad_batches=2).fit(ours, data())
    assert ours.generation.reports_logps
    assert all(row["offpolicy/mismatch/logp_diff_mean"] < 1e-3 for row in watch.logs) and len(watch.logs) == 2
    plain = TransformersEngine(lambda: policy, pad_token_id=0, eos_token_ids=[1])
    for option in ("learner_kv_cache", "learner_rounding"):
        with pytest.raises(ValueError, match=rf"must be given with {option} 'engine', but it is absent"):
            module(plain, **{option: "engine"})


def test_the_reference_is_the_policy_in_its_dense_context(tmp_path: Path) -> None:
    options = {"learner_kv_cache": "engine", "kl_reference": "dense_context", "objective": {"kl": {"coef": 0.5}}}
    ours, rows, watch = run(tmp_path, {"kv_cache": SPARSE}, **options)
    batch, mask = rows.batches[0], rows.batches[0]["completion_mask"].bool()
    dense = logps(tiny_model(), batch)
    torch.testing.assert_close(batch["ref_per_token_logps"][mask], dense[mask], rtol=0, atol=1e-3)
    gap = (dense - batch["sampling_per_token_logps"])[mask].double()
    assert watch.logs[0]["offpolicy/loss/kl"] == pytest.approx(float((gap.exp() - gap - 1).mean()), rel=0.02)
    assert ours.generation._reference is None


def test_what_does_not_go_together_is_refused(model_folder: Any) -> None:
    for kind in ("vllm", "server"):
        with pytest.raises(ValueError, match=rf"^engine\.kv_cache must be left out with engine\.type '{kind}', as"):
            check_options({"type": kind, "kv_cache": SPARSE})
    with pytest.raises(ValueError, match=r"^engine\.kv_cache\.keep_first and keep_last must be given together"):
        module({"type": "transformers", "kv_cache": {"keep_first": 1}})
    with pytest.raises(ValueError, match=r"^learner_kv_cache must be given with kl_reference 'dense_context'"):
        module("transformers", kl_reference="dense_context")
    with pytest.raises(ValueError, match=r"^objective\.kl must be given with kl_reference 'dense_context'"):
        module("transformers", kl_reference="dense_context", learner_kv_cache=SPARSE)
    spec = {"type": "transformers", "kv_cache": SPARSE, "logit_fusion": str(model_folder("llama"))}
    with pytest.raises(ValueError, match=r"^engine\.logit_fusion must be left out with a simulated engine"):
        build_engine(spec, model_name=None, policy=tiny_model, pad_token_id=0, eos_token_ids=[1], run="", folder=Path())


PRESETS: dict[str, dict[str, Any]] = {
    "paper/qarl": {},
    "paper/shadow-mask": CASES["evicting"],
    "paper/jet-rl": CASES["one precision"],
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_brings_its_part_and_both_sides_are_one_policy(name: str, tmp_path: Path) -> None:
    ours, rows, watch = run(tmp_path, PRESETS[name], steps=2, correction=name)
    batch, mask = rows.batches[0], rows.batches[0]["completion_mask"].bool()
    assert all(row["offpolicy/mismatch/logp_diff_mean"] < 1e-3 for row in watch.logs) and len(watch.logs) == 2
    assert float((batch["sampling_per_token_logps"] - logps(tiny_model(), batch))[mask].abs().max()) > 0.01
    assert ours.preset.name == name and (watch.logs[0]["offpolicy/loss/kl"] > 1e-3) == (name == "paper/shadow-mask")


NEEDS = {
    "paper/dora": "engine.transfer is no option of 'transformers'",
    "paper/periodic-async": "async_rollouts must be left out with engine 'transformers'",
    "paper/qerl": "engine.norm_noise is no option of 'transformers'",
    **dict.fromkeys(("paper/shadow-mask", "paper/jet-rl"), "must be given with learner_"),
    **dict.fromkeys(
        ("paper/alp", "paper/mipu", "paper/vcpo"), "correction must not read the sampling policy when engine"
    ),
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_preset_without_the_engine_that_it_needs_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(NEEDS[name])):
        module("transformers", correction=name)
