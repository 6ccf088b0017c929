"""Record and replay of the routing on four architectures, against routers written by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from moe_models import EXPERTS, KINDS, LAYERS, TOP_K, batch, moe_model
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from torch import Tensor

from trl_offpolicy.engines.routing import RouteStorageError, find_routers, record, replay
from trl_offpolicy.functional.routing import expert_flip_rates

kinds = pytest.mark.parametrize("kind", KINDS)


def run(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of a loss that reads every attended token."""
    ids, mask = batch()
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask).logits
    (logits.log_softmax(-1)[..., 3] * mask).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def chosen(model: Any) -> Tensor:
    with record(model) as recorded, torch.no_grad():
        ids, mask = batch()
        model(input_ids=ids, attention_mask=mask)
    return recorded.routed_experts


def other_experts(model: Any) -> Tensor:
    """A record that no router of the model would make."""
    return (chosen(model) + 1) % EXPERTS


def same(first: tuple[Tensor, dict[str, Tensor]], second: tuple[Tensor, dict[str, Tensor]]) -> bool:
    return torch.equal(first[0], second[0]) and all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def by_hand(kind: str, gate: Any, given: Tensor) -> Any:
    """A router that was written from the papers: it weighs the given (N, k) ids."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
        picked = torch.stack([logits[torch.arange(len(given)), given[:, k]] for k in range(TOP_K)], dim=1)
        if kind == "deepseek_v3":
            score = 1 / (1 + (-picked).exp())
            weights = 2.5 * score / score.sum(-1, keepdim=True)
        elif kind == "olmoe":  # not renormalised
            weights = picked.exp() / logits.exp().sum(-1, keepdim=True)
        else:
            weights = picked.exp() / picked.exp().sum(-1, keepdim=True)
        return logits, weights, given

    return forward


@kinds
def test_without_a_change_nothing_changes(kind: str) -> None:
    """Bit for bit: outputs and all gradients, with recording and with replay."""
    model = moe_model(kind)
    free = run(model)
    with record(model) as recorded:
        assert same(free, run(model))
    routes = recorded.routed_experts
    assert routes.shape == (*batch()[0].shape, LAYERS - (kind == "deepseek_v3"), TOP_K) and routes.dtype == torch.int8
    with replay(model, routes) as replayed:
        assert same(free, run(model))
    assert replayed.moments["choices"] == routes[..., 0].numel() and replayed.moments["flips"] == 0
    assert same(free, run(model)), "nothing may stay behind"


@kinds
def test_other_experts_are_weighed_by_the_gate_as_it_is_now(kind: str) -> None:
    model = moe_model(kind)
    routes = other_experts(model)
    free = run(model)
    with replay(model, routes) as replayed, record(model) as recorded:
        logits, gradients = run(model)
    assert torch.equal(recorded.routed_experts, routes) and replayed.moments["flips"] > 0
    assert (logits - free[0]).abs().max() > 0.1
    for index, (router,) in enumerate(find_routers(model).of_layer):
        router.module.forward = by_hand(kind, router.module, routes[:, :, index].reshape(-1, TOP_K).long())
    expected, expected_gradients = run(model)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], atol=5e-5, rtol=1e-3, msg=name)
    assert all(gradients[f"{router.path}.weight"].abs().max() > 1e-3 for (router,) in find_routers(model).of_layer)


@pytest.mark.parametrize("reentrant", [False, True])
@kinds
def test_checkpointing_sees_the_same_record_after_replay_has_ended(kind: str, reentrant: bool) -> None:
    model = moe_model(kind).train()
    routes = other_experts(model)
    ids, mask = batch()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        with replay(model, routes) as replayed:
            loss = (model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)[..., 3] * mask).sum()
        with replay(model, chosen(model)), torch.no_grad():  # another record in between
            model(input_ids=ids, attention_mask=mask)
        counted = replayed.moments["choices"]
        loss.backward()
        assert replayed.moments["choices"] == counted == routes[..., 0].numel(), "a second run may not count"
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    checkpointed = gradients()
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    free = run(model)[1]
    assert any(not torch.equal(free[name], plain[name]) for name in plain)


@kinds
def test_with_lora(kind: str) -> None:
    """Adapters on the attention; the record of the plain model is that of the wrapped one."""
    model = moe_model(kind)
    routes = other_experts(model)
    names = ["q_a_proj", "o_proj"] if kind == "deepseek_v3" else ["q_proj", "v_proj"]
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=names, init_lora_weights=False))
    with replay(wrapped, routes), record(wrapped) as recorded:
        logits, gradients = run(wrapped)
    assert torch.equal(recorded.routed_experts, routes)
    assert gradients and all("lora_" in name for name in gradients)
    merged, (ids, mask) = wrapped.merge_and_unload(), batch()
    with replay(merged, routes), torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids, attention_mask=mask).logits, logits, atol=5e-5, rtol=1e-4)


def test_an_adapter_on_the_router_is_trained_under_replay() -> None:
    """PEFT's wrapper of a parameter calls the router, whose logits then hold the adapter."""
    wrapped = get_peft_model(
        moe_model(), LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.gate.weight"])
    )
    with replay(wrapped, other_experts(wrapped)):
        _, gradients = run(wrapped)
    assert any("mlp.gate" in name and gradient.abs().max() > 0 for name, gradient in gradients.items())


def test_tokens_without_a_record_route_freely() -> None:
    model = moe_model()
    natural, routes = chosen(model), other_experts(model)
    routes[0, 2:] = -1  # a whole row behind the padding
    routes[1, 3:] = -1  # the end of a row, where nothing before it is free
    with replay(model, routes) as replayed, record(model) as recorded:
        run(model)
    used = recorded.routed_experts
    assert torch.equal(used[routes >= 0], routes[routes >= 0])
    assert torch.equal(used[0, 2:], natural[0, 2:]), "padding before it does not reach this row"
    assert torch.equal(used[1, 3:, 0], natural[1, 3:, 0]), "the first router sees embeddings and attention only"
    assert replayed.moments["choices"] == (routes[..., 0] >= 0).sum()
    empty = torch.full_like(routes, -1)
    free = run(model)
    with replay(model, empty):
        assert same(free, run(model))


def test_micro_batches_take_the_rows_in_turn_and_begin_again() -> None:
    model = moe_model()
    ids, mask = batch(rows=4)
    with record(model) as recorded:
        whole = model(input_ids=ids, attention_mask=mask).logits
    routes = (recorded.routed_experts + 1) % EXPERTS
    with replay(model, routes):
        whole = model(input_ids=ids, attention_mask=mask).logits
        halves = [model(input_ids=ids[i : i + 2], attention_mask=mask[i : i + 2]).logits for i in (0, 2)]
        again = [model(input_ids=ids[i : i + 1], attention_mask=mask[i : i + 1]).logits for i in range(4)]
    torch.testing.assert_close(torch.cat(halves), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat(again), whole, atol=1e-5, rtol=1e-5)
    with record(model) as recorded:
        for i in (0, 2):
            model(input_ids=ids[i : i + 2], attention_mask=mask[i : i + 2])
    assert torch.equal(recorded.routed_experts, (routes - 1) % EXPERTS)


def test_moments_count_the_masked_tokens_and_enforce_false_changes_nothing() -> None:
    model = moe_model()
    natural = chosen(model)
    routes = natural.clone()
    routes[1, 4, 1, 0] = next(e for e in range(EXPERTS) if e not in natural[1, 4, 1])  # one of two experts, one layer
    routes[2, 0, 0] = natural[2, 0, 0].flip(-1)  # another order is no flip
    mask = torch.zeros(natural.shape[:2], dtype=torch.bool)
    mask[1, 3:6], mask[2, 0] = True, True
    free = run(model)
    with replay(model, routes, mask=mask, enforce=False) as replayed:
        assert same(free, run(model))
    found = replayed.moments
    assert {name: found[name] for name in found.layout.sums} == {
        "choices": 4 * LAYERS, "shared": 4 * LAYERS - 0.5, "flips": 1.0,
    }  # fmt: skip
    rates = expert_flip_rates(found).view(LAYERS, EXPERTS)
    assert {(layer, expert) for layer, expert in rates.nonzero().tolist()} == {
        (1, int(natural[1, 4, 1, 0])), (1, int(routes[1, 4, 1, 0])),
    }  # fmt: skip
    assert rates.max() == 1 / 4  # one of the layer's four tokens


def test_a_copy_of_the_model_has_its_own_replay() -> None:
    model = moe_model()
    free = run(model)
    routes = other_experts(model)
    twin = copy.deepcopy(model)
    with replay(model, routes):
        changed = run(model)
        assert same(free, run(twin))
    with replay(twin, routes):
        assert same(changed, run(twin)) and same(free, run(model))


def test_records_are_kept_on_the_host_and_bounded() -> None:
    model = moe_model()
    ids, mask = batch()
    with record(model, device="cpu") as recorded:
        model(input_ids=ids, attention_mask=mask)
    size = ids.numel() * LAYERS * TOP_K
    assert recorded.routed_experts.device.type == "cpu" and recorded.routed_experts.nbytes == size
    with record(model, limit_gib=size / 2**30) as recorded:
        model(input_ids=ids, attention_mask=mask)
        with pytest.raises(RouteStorageError, match=r"limit_gib must be at least .* for 42 tokens of 6 bytes"):
            model(input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda r: r.float(), TypeError, "must be signed integers"),
        (lambda r: r.to(torch.uint8), TypeError, "must be signed integers"),
        (lambda r: r[:, :, :2], ValueError, r"must have shape \(B, L, 3, 2\)"),
        (lambda r: r[:, :-1], ValueError, "one entry for each of 7 positions, but got 6"),
        (lambda r: r[:-1], ValueError, "must have a row for each of the batch, but got 2"),
    ],
)
def test_records_that_do_not_fit(change: Any, error: type[Exception], message: str) -> None:
    model = moe_model()
    routes = change(chosen(model))
    with pytest.raises(error, match=message), replay(model, routes):
        run(model)
    run(model)


def test_models_without_a_known_router() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    with pytest.raises(ValueError, match=r"must be a mixture of experts.*got LlamaForCausalLM"), record(tiny_model()):
        pass
    other = GptOssForCausalLM(
        GptOssConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_local_experts=2,
                     num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="got GptOssTopKRouter"), record(other):
        pass
    model = moe_model()
    with record(model), pytest.raises(RuntimeError, match="must not be open already"), record(model):
        pass
    with pytest.raises(ValueError, match="at least one forward"), record(model) as recorded:
        _ = recorded.routed_experts
