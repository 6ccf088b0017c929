"""What of the weights a sync leaves out: only what the engine has, and only after a proof."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from trl_offpolicy.engines.weights.changed import ChangedWeights, digest, unit_of
from trl_offpolicy.engines.weights.source import ModelWeights


class Engine:
    """Keeps what it is sent; ``lost`` = it was started anew."""

    def __init__(self, model):
        self.model, self.sent, self.weights, self.names = model, ChangedWeights(), {}, []

    def sync(self, *, proven: bool | None = True, whole: bool = False) -> int:
        self.names = []
        for name, tensor in self.sent.select(ModelWeights(self.model).merged(), whole=whole):
            self.names.append(name)
            self.weights[name] = tensor.clone()
        again = False if proven is None else self.sent.confirm(proven)
        assert again is (proven is False and self.sent.sent_part)
        return sum(self.weights[name].nbytes for name in self.names)

    def agrees(self) -> bool:
        own = dict(ModelWeights(self.model).merged())
        return own.keys() == self.weights.keys() and all(torch.equal(own[name], self.weights[name]) for name in own)


def step(model, *, among=None):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (among is None or among(name)):
                parameter.add_(torch.randn_like(parameter), alpha=0.05)


def adapted(model, *targets):
    return get_peft_model(model, LoraConfig(r=2, target_modules=list(targets), task_type="CAUSAL_LM"))


def size_of(model, part=""):
    return sum(tensor.nbytes for name, tensor in ModelWeights(model).merged() if part in name)


def test_of_merged_weights_only_the_adapted_modules_travel(fresh_model):
    model = adapted(fresh_model(), "q_proj", "v_proj")
    engine = Engine(model)
    assert engine.sync() == size_of(model)
    for _ in range(3):
        step(model)
        # keys and the output projection belong to the unit of queries and values
        assert engine.sync() == size_of(model, ".self_attn.") < size_of(model) / 2
        assert engine.agrees()
    assert all(".self_attn." in name for name in engine.names)


def test_of_full_weights_frozen_layers_and_embeddings_stay(fresh_model):
    model = fresh_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers.1." in name)
    engine = Engine(model)
    engine.sync()
    step(model)
    assert engine.sync() == size_of(model, ".layers.1.") and engine.agrees()


def test_where_all_weights_change_all_travel_and_none_is_summed_again(fresh_model, monkeypatch):
    model = fresh_model()
    engine = Engine(model)
    for _ in range(2):
        step(model)
        assert engine.sync() == size_of(model)
    summed = []
    monkeypatch.setattr("trl_offpolicy.engines.weights.changed.digest", lambda tensor: summed.append(1))
    step(model)
    assert engine.sync() == size_of(model) and engine.agrees() and not summed and not engine.sent.sent_part


def test_a_weight_that_goes_back_is_sent_again(fresh_model):
    """As a gate does that takes an update back: the engine has the update."""
    model = fresh_model()
    engine = Engine(model)
    first = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine.sync()
    step(model, among=lambda name: ".mlp." in name)
    engine.sync()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(first[name])
    assert engine.sync() == size_of(model, ".mlp.") and engine.agrees()


def test_a_layer_that_begins_to_learn_later_travels_from_then_on(fresh_model):
    model = fresh_model()
    engine = Engine(model)
    engine.sync()
    for part in (".mlp.", "o_proj"):
        step(model, among=lambda name, part=part: part in name)
        engine.sync()
        assert engine.agrees()
    assert any(".mlp." in name for name in engine.names) and any("k_proj" in name for name in engine.names)


@pytest.mark.parametrize("proven", [None, False])
def test_without_a_proof_everything_travels(fresh_model, proven):
    model = adapted(fresh_model(), "q_proj")
    engine = Engine(model)
    for _ in range(3):
        assert engine.sync(proven=proven) == size_of(model)
        step(model)


def test_after_a_failed_proof_everything_travels_from_then_on(fresh_model):
    model = adapted(fresh_model(), "q_proj")
    engine = Engine(model)
    engine.sync()
    step(model)
    assert engine.sync(proven=False) < size_of(model)  # says that all should be sent
    for _ in range(2):
        assert engine.sync() == size_of(model) and engine.agrees()


def test_after_a_sync_that_broke_off_everything_travels_once(fresh_model):
    model = adapted(fresh_model(), "q_proj")
    engine = Engine(model)
    engine.sync()
    step(model)
    next(engine.sent.select(ModelWeights(model).merged()))  # and then the connection breaks
    assert engine.sync() == size_of(model) and engine.agrees()
    step(model)
    assert engine.sync() == size_of(model, ".self_attn.") and engine.agrees()


def test_a_first_sync_that_broke_off_leaves_no_half_table(fresh_model):
    """A unit of which only the first names were summed would else travel without the others."""
    model = fresh_model()
    engine = Engine(model)
    breaking = engine.sent.select(ModelWeights(model).merged())
    while "q_proj" not in next(breaking)[0]:
        pass
    assert engine.sync() == size_of(model) and engine.sync() == size_of(model)
    step(model, among=lambda name: "k_proj" in name)
    assert engine.sync() == size_of(model, ".self_attn.") and engine.agrees()


def test_weights_that_were_sent_before_the_first_proof_are_not_those_it_proves(fresh_model):
    model = fresh_model()
    engine = Engine(model)
    first = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine.sync(proven=None)
    step(model)
    engine.sync(proven=True)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(first[name])
    engine.sync()
    assert engine.agrees()


def test_where_all_has_moved_a_whole_sync_needs_no_checksums(fresh_model, monkeypatch):
    """As through a folder, whose server wants whole weights once there is nothing to leave out."""
    model = fresh_model()
    engine = Engine(model)
    for _ in range(2):
        step(model)
        engine.sync()
    monkeypatch.setattr("trl_offpolicy.engines.weights.changed.digest", lambda tensor: pytest.fail("summed again"))
    for _ in range(2):
        step(model)
        assert engine.sync(whole=not engine.sent.partial) == size_of(model) and not engine.sent.partial


def test_if_nothing_changed_a_small_weight_travels(fresh_model):
    """As in a warm-up from a learning rate of 0: engines are asked to load something."""
    model = fresh_model()
    engine = Engine(model)
    engine.sync()
    assert 0 < engine.sync() < size_of(model) / 20 and len(engine.names) == 1 and engine.sent.sent_part
    step(model)
    assert engine.sync() == size_of(model) and engine.agrees()


def test_an_engine_that_lost_its_weights_gets_all(fresh_model):
    model = adapted(fresh_model(), "q_proj")
    engine = Engine(model)
    engine.sync()
    step(model)
    engine.weights = {}
    assert engine.sync(whole=True) == size_of(model) and engine.agrees()


def test_weights_that_are_freed_once_they_have_passed_arrive_whole():
    """As with ZeRO-3: the unchanged weight of a unit that changes is sent after it has passed."""

    def gathered(second):
        for name, value in (("q", 1.0), ("k", second), ("v", 3.0)):
            tensor = torch.full((4,), value)
            yield f"model.layers.0.self_attn.{name}_proj.weight", tensor
            tensor.fill_(torch.nan)

    sent = ChangedWeights()
    for _ in sent.select(gathered(2.0)):
        pass
    sent.confirm(True)
    got = [(name[-13:-12], float(tensor[0])) for name, tensor in sent.select(gathered(5.0))]
    assert got == [("q", 1.0), ("k", 5.0), ("v", 3.0)]


def test_units_are_what_engines_fuse():
    layer = "model.layers.2"
    together = [f"{layer}.mlp.experts.{i}.{name}.weight" for i in (0, 5) for name in ("up_proj", "gate_proj")]
    assert {unit_of(name) for name in [*together, f"{layer}.mlp.gate.weight"]} == {f"{layer}.mlp"}
    qkv = [f"{layer}.self_attn.{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")]
    assert {unit_of(name) for name in qkv} == {f"{layer}.self_attn"}
    for before in ("model.vision_tower.encoder.layer.0", "layers.0", "visual.resblocks.3"):
        assert unit_of(f"{before}.attention.q_proj.weight") == unit_of(f"{before}.attention.k_proj.bias")
    assert (
        unit_of("0.weight") == "0"
        and unit_of("lm_head.weight") == "lm_head"
        and unit_of("model.norm.weight") == "model.norm"
    )
    assert unit_of("scale") == "scale"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_checksum_sees_one_bit_the_shape_and_the_dtype(dtype):
    tensor = torch.arange(12).to(dtype)
    other = tensor.clone()
    other.view(torch.uint8)[7] ^= 1
    assert digest(tensor) == digest(tensor.clone()) != digest(other)
    assert digest(tensor) != digest(tensor.view(3, 4)) and digest(tensor) != digest(tensor.to(torch.float16))
    columns = tensor.view(3, 4).t()
    assert digest(columns) == digest(columns.contiguous()) and digest(torch.tensor(1.0)) != digest(torch.tensor(2.0))
