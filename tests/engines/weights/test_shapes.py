"""Names and shapes before a sync: what another model differs in, and what engines may call otherwise."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model

from trl_offpolicy.engines.engine import SyncError
from trl_offpolicy.engines.server.engine import ServerEngine
from trl_offpolicy.engines.weights.lora import LORA_MODULES, adapted_modules, lora_arguments
from trl_offpolicy.engines.weights.shapes import why_not, why_not_adapter, with_place
from trl_offpolicy.engines.weights.source import ModelWeights
from trl_offpolicy.engines.worker import _lora_modules
from trl_offpolicy.trl.engine import TRLEngine


def sent_by(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in ModelWeights(model).merged()}


def held(model: Any = None, **more: Any) -> dict[str, Any]:
    """The answer of an engine with the weights of ``model``; the real one's is tested with vLLM."""
    shapes = {name: list(shape) for name, shape in sent_by(model or tiny_model()).items()}
    return {"shapes": shapes, "tied": {}, "experts": 0, "head": True, "quantized": False, **more}


def test_the_same_model_fits() -> None:
    assert why_not(sent_by(tiny_model()), [held()]) is None


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"num_hidden_layers": 3}, "sends 3 layers (model.layers.*) and the engine has 2: model.layers.2 would"),
        ({"num_hidden_layers": 1}, "model.layers.1 of the engine would keep its old weights"),
        ({"intermediate_size": 96}, "gate_proj.weight has shape (96, 64) in the trainer, but (64, 64) in the engine"),
        ({"hidden_size": 128}, "embed_tokens.weight has shape (128, 128) in the trainer, but (128, 64)"),
        ({"vocab_size": 130}, "embed_tokens.weight has shape (130, 64) in the trainer, but (128, 64)"),
        ({"num_attention_heads": 2}, "q_proj.weight has shape (128, 64) in the trainer, but (64, 64)"),
        ({"attention_bias": True}, "q_proj.bias is in the trainer's model, but not in the engine's"),
        ({"tie_word_embeddings": True}, "the engine has a lm_head.weight of its own"),
    ],
)  # fmt: skip
def test_another_model_is_told(shape: dict[str, int], said: str) -> None:
    assert said in str(why_not(sent_by(tiny_model(**shape)), [held()]))


def test_a_bias_that_would_keep_its_values() -> None:
    reason = why_not(sent_by(tiny_model()), [held(tiny_model(attention_bias=True))])
    assert reason is not None and "would keep its values" in reason


def test_what_engines_do_is_no_difference() -> None:
    ours = sent_by(tiny_model(tie_word_embeddings=True))
    tied = held(tiny_model(tie_word_embeddings=True), tied={"lm_head.weight": "model.embed_tokens.weight"}, head=False)
    assert why_not(ours, [tied]) is None
    ours = sent_by(tiny_model())
    transposed = held()
    transposed["shapes"]["model.embed_tokens.weight"].reverse()
    transposed["shapes"]["model.layers.0.mlp.up_proj.weight"].append(1)
    assert why_not(ours, [transposed]) is None
    unknown = held()
    unknown["shapes"]["model.layers.0.mlp.up_proj.weight"] = None
    assert why_not(ours, [unknown]) is None
    renamed = {**held(), "shapes": {f"language_{name}": shape for name, shape in held()["shapes"].items()}}
    assert why_not(ours, [renamed]) is None
    fewer = held(quantized=True)
    fewer["shapes"]["model.layers.0.mlp.up_proj.bias"] = [64]
    assert why_not(ours, [fewer]) is None


def test_layers_that_are_split_over_workers_count_together() -> None:
    whole = held()
    halves = [
        {**whole, "shapes": {n: s for n, s in whole["shapes"].items() if f"layers.{other}." not in n}}
        for other in (0, 1)
    ]
    assert why_not(sent_by(tiny_model()), halves) is None
    assert why_not(sent_by(tiny_model()), halves[:1]) is not None


def test_experts() -> None:
    stack = "model.layers.0.mlp.experts"
    ours = {f"{stack}.{n}.{part}_proj.weight": (32, 64) for n in range(4) for part in ("gate", "up")}
    answer = {"shapes": {f"{stack}.w13_weight": [32, 64]}, "tied": {}, "experts": 4, "head": True, "quantized": False}
    assert why_not(ours, [answer]) is None
    assert "4 experts a layer, the engine's 8" in str(why_not(ours, [{**answer, "experts": 8}]))
    assert "the engine's model is a mixture of experts" in str(why_not(sent_by(tiny_model()), [answer]))
    assert "the trainer's model is a mixture of experts" in str(why_not(ours, [held()]))
    granite = {"model.layers.0.block_sparse_moe.input_linear.weight": (4, 64, 64)}  # no expert in its names
    assert (
        why_not(granite, [{**answer, "shapes": {"model.layers.0.block_sparse_moe.experts.w13_weight": None}}]) is None
    )
    wider = {**answer, "shapes": {f"{stack}.w13_weight": [48, 64]}}
    assert "has shape (32, 64) in the trainer, but (48, 64)" in str(why_not(ours, [wider]))


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({}, "None"),
        ({"intermediate_size": 96}, "mlp.down_proj has 96 inputs, but the engine's module has 64"),
        ({"num_attention_heads": 2}, "q_proj has 128 outputs, but the engine's module has 64"),
        ({"num_hidden_layers": 3}, "model.layers.2 would have no place"),
        ({"num_hidden_layers": 1}, "None"),  # an adapter need not touch every layer
    ],
)
def test_an_adapter_of_another_model_is_told(shape: dict[str, int], said: str) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapter = ModelWeights(get_peft_model(tiny_model(**shape), config)).adapter()
    assert adapter is not None
    sent = {name: tuple(tensor.shape) for name, tensor in adapter.tensors.items()}
    assert said in str(why_not_adapter(sent, [held()]))


@pytest.mark.parametrize(("wrapped", "refused"), [(None, False), (["q_proj", "up_proj"], False), (["q_proj"], True)])
def test_an_adapter_that_the_engine_would_drop_in_part(wrapped: Any, refused: bool) -> None:
    adapter = ModelWeights(
        get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    ).adapter()
    assert adapter is not None
    sent = {name: tuple(tensor.shape) for name, tensor in adapter.tensors.items()}
    reason = why_not_adapter(sent, [held(lora_modules=wrapped)])
    assert (reason is not None) is refused
    assert not refused or "the adapter is on up_proj, and the engine would drop it there" in str(reason)


def test_a_packed_module_is_wrapped_whole() -> None:
    model = SimpleNamespace(packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj"], "gate_up_proj": ["up_proj"]})
    found = _lora_modules(model, SimpleNamespace(target_modules=["q_proj", "o_proj"]))
    assert found == ["k_proj", "o_proj", "q_proj", "qkv_proj"]
    assert _lora_modules(model, SimpleNamespace(target_modules=None)) is _lora_modules(model, None) is None


def test_an_engine_in_the_process_wraps_what_the_adapter_is_on() -> None:
    model = get_peft_model(
        tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "up_proj", "lm_head"], ensure_weight_tying=False)
    )
    attention = model.get_submodule("base_model.model.model.layers.0.self_attn")
    attention.add_module("qkv_proj", copy.deepcopy(attention.q_proj))  # as in Phi-3
    assert adapted_modules(model) == (*LORA_MODULES, "qkv_proj")
    assert lora_arguments(2, adapted_modules(model))["lora_target_modules"][-1] == "qkv_proj"


TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}, {"target_modules": ["lm_head"]}],
)
def test_a_head_that_a_tied_engine_would_drop(options: dict[str, Any]) -> None:
    adapter = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options})
    model = get_peft_model(tiny_model(tie_word_embeddings=True), adapter)
    engine = held(tiny_model(tie_word_embeddings=True), tied=TIED, head=False)
    assert "lm_head.weight that differs from its embeddings" in str(why_not(sent_by(model), [engine]))
    assert "ensure_weight_tying: true" in str(why_not(sent_by(model), [{**engine, "quantized": True}]))
    assert why_not(sent_by(model), [held()]) is None  # an engine with a head of its own takes it
    named = list(ModelWeights(model).merged())
    with pytest.raises(SyncError, match="its embeddings: it would drop the other"):
        list(with_place(named, engine["shapes"], TIED))
    with pytest.raises(SyncError, match="would drop the other"):  # vLLM's Gemma has no head at all
        list(with_place(named, engine["shapes"], {}))
    assert list(with_place(named, held()["shapes"], {})) == named


def test_a_head_that_is_one_with_the_embeddings_has_a_place() -> None:
    options = {"modules_to_save": ["lm_head"], "ensure_weight_tying": True}
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    for model in (
        tiny_model(tie_word_embeddings=True),
        get_peft_model(tiny_model(tie_word_embeddings=True), adapter),
    ):
        engine = held(tiny_model(tie_word_embeddings=True), tied=TIED, head=False)
        assert why_not(sent_by(model), [engine]) is None
        named = list(ModelWeights(model).merged())
        assert list(with_place(named, engine["shapes"], TIED)) == named


@pytest.mark.parametrize(("mode", "ties", "refused"), [("server", True, True), ("server", False, False)])
def test_trls_own_transfers_refuse_it_by_the_models_configuration(mode: str, ties: bool, refused: bool) -> None:
    adapter = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(tiny_model(tie_word_embeddings=ties), adapter)
    engine: Any = SimpleNamespace(model=model, mode=mode, _on_server=False, _reloads=False)
    passed = TRLEngine._with_place(engine, ModelWeights(model).merged())
    if refused:
        with pytest.raises(SyncError, match="would drop the other"):
            list(passed)
    else:
        assert "lm_head.weight" in dict(passed)


def test_an_adapter_is_not_sent_on_top_of_merged_weights() -> None:
    """They hold it already."""
    server = SimpleNamespace(_routes={"/v1/load_lora_adapter"}, transfer="auto", weight_rounding=None)

    def takes(sent: str | None, adapter: str | None) -> bool:
        return bool(ServerEngine.takes_adapter.fget(SimpleNamespace(**vars(server), _sent=sent, _adapter=adapter)))  # type: ignore[attr-defined]

    assert takes(None, None) and takes("folder", "policy-1") and not takes("folder", None)
