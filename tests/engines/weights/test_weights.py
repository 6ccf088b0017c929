"""The trainer's weights as an engine wants them: names, merging, nothing changed in place."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from moe_models import KINDS, moe_model
from peft import LoraConfig, get_peft_model
from processes import run_command
from safetensors.torch import load_file

from trl_offpolicy.engines.weights.source import ModelWeights, plain_name


def state(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def adapted(model, **options):
    defaults = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    peft = get_peft_model(model, LoraConfig(**{**defaults, **options}))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    return peft


def test_a_plain_model_gives_its_own_weights(fresh_model):
    model = fresh_model()
    merged = dict(ModelWeights(model).merged())
    assert list(merged) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(merged[name], value) for name, value in model.named_parameters())


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_of_experts_gives_what_its_checkpoint_holds(kind, lora, tmp_path):
    """vLLM passes over the stacked experts of transformers 5 without an error."""
    model = moe_model(kind)
    model.save_pretrained(tmp_path)
    expected = {name: load_file(path)[name] for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["o_proj"])) if lora else model
    merged = dict(ModelWeights(wrapped).merged())
    buffers = {name for name in expected if name.endswith("e_score_correction_bias")}
    assert merged.keys() == expected.keys() - buffers and sum(".experts.0." in name for name in merged) > 0
    assert all(torch.equal(value, expected[name]) for name, value in merged.items())


def test_lora_is_merged_as_peft_merges_it_and_the_model_is_left_alone(fresh_model):
    model = adapted(fresh_model())
    before = state(model)
    merged = {name: value.clone() for name, value in ModelWeights(model).merged()}
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    expected = dict(model.merge_and_unload().named_parameters())
    assert set(merged) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value.data, atol=1e-6, rtol=1e-5)
    changed = [name for name in merged if not torch.equal(merged[name], fresh_model().get_parameter(name))]
    assert len(changed) == 4  # two layers, two modules


@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe"])
def test_lora_on_the_experts_is_merged_and_does_not_travel_alone(kind, tmp_path):
    """PEFT's ``all-linear`` takes stacked experts and the router along, as parameters, one wrapper in another."""
    model = get_peft_model(moe_model(kind), LoraConfig(r=4, target_modules="all-linear"))
    assert any("experts.base_layer.lora_A" in name for name, _ in model.named_parameters())
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    sent = {name: tensor.clone() for name, tensor in ModelWeights(model).merged()}
    before = {name: tensor.clone() for name, tensor in ModelWeights(moe_model(kind)).merged()}
    assert ModelWeights(model).adapter() is None
    model.merge_and_unload().save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    assert expected.keys() <= sent.keys() == before.keys()
    for name, value in expected.items():
        torch.testing.assert_close(sent[name], value, atol=1e-6, rtol=1e-5, msg=name)
    moved = {name for name, value in before.items() if not torch.equal(value, sent[name])}
    assert any(".experts.0." in name for name in moved) and any(".gate.weight" in name for name in moved)


def test_a_thousand_syncs_do_not_wear_the_weights(fresh_model):
    """TRL merges and unmerges in place: in low precision the base weights drift."""
    model = adapted(fresh_model()).to(torch.bfloat16)
    before = state(model)
    for _ in range(20):
        for _ in ModelWeights(model).merged():
            pass
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())


def test_tied_weights_are_sent_once():
    from tiny_models import tiny_model

    model = tiny_model()
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    names = [name for name, _ in ModelWeights(model).merged()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_an_adapter_stands_alone_only_if_it_is_all_of_the_policy(fresh_model):
    adapter = ModelWeights(adapted(fresh_model())).adapter()
    assert adapter is not None
    assert len(adapter.tensors) == 8 and all(name.startswith("base_model.model.") for name in adapter.tensors)
    assert adapter.config["target_modules"] == ["down_proj", "q_proj"]
    assert ModelWeights(fresh_model()).adapter() is None and not ModelWeights(fresh_model()).has_adapter
    for options in (
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["lm_head"]},
        {"use_dora": True},
        {"bias": "all"},
    ):
        assert ModelWeights(adapted(fresh_model(), **options)).adapter() is None


def test_modules_to_save_replace_the_original(fresh_model):
    model = adapted(fresh_model(), modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.zero_()
    merged = dict(ModelWeights(model).merged())
    assert merged["lm_head.weight"].abs().max() == 0
    assert set(merged) == {name for name, _ in fresh_model().named_parameters()}


def test_dora_cannot_be_merged_and_says_so(fresh_model):
    with pytest.raises(NotImplementedError, match="plain LoRA"):
        dict(ModelWeights(adapted(fresh_model(), use_dora=True)).merged())


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("base_model.model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
        ("model.layers.0._checkpoint_wrapped_module.mlp.weight", "model.layers.0.mlp.weight"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.weight"),
    ],
)
def test_plain_names(name, plain):
    assert plain_name(name) == plain


@pytest.mark.integration
def test_sharded_weights_are_gathered_and_merged_on_every_rank():
    script = Path(__file__).with_name("sharded_run.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = run_command(command, seconds=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(ranks) == 2
    for rank in ranks:
        for kind in ("full", "lora"):
            assert rank[kind]["difference"] < 1e-6 and rank[kind]["adapter"] == 0
            assert rank[kind]["sharded"] == 1.0
            assert 0.4 < rank[kind]["local_share"] < 0.6
