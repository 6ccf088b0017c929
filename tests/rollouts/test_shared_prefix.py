"""Prompts computed once: equal log-probs and gradients, for the models that are said to be proved, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from rollouts.plain_and_shared import KINDS, LIMIT, assert_equal, both, model_of, prompts_among, rows_of, scores
from tiny_models import tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
)

from trl_offpolicy.rollouts import micro_batches
from trl_offpolicy.rollouts.one_sequence import _eager_of
from trl_offpolicy.rollouts.prompts import Prompts
from trl_offpolicy.rollouts.shared_prefix import (
    _FIXED_ROPE,
    PROVED,
    SharedPrefix,
    prompts_once,
    refusal,
    varying_rope,
)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_gradient_are_those_of_the_plain_path(kind: str, attention: str, counted: bool) -> None:
    assert_equal(model_of(kind, attn_implementation=attention), rows_of(2, 3), counted=counted)


@pytest.mark.parametrize(("groups", "copies", "mixed"), [(1, 4, False), (3, 2, True), (4, 1, False), (2, 4, True)])
def test_any_composition(groups: int, copies: int, mixed: bool) -> None:
    rows = rows_of(groups, copies, mixed=mixed)
    found = prompts_among(rows)
    assert len(found.ids) == groups and (found.repeats is None) == mixed
    assert_equal(model_of("llama"), rows, counted=False)


def test_rows_with_prompts_of_their_own() -> None:
    assert_equal(model_of("qwen2"), rows_of(3, 2), counted=False, shared=False)


def test_rows_without_padding() -> None:
    rows = rows_of(2, 3)
    rows["prompt_ids"], rows["completion_ids"] = rows["prompt_ids"] + 1, rows["completion_ids"] + 1
    rows |= {name: torch.ones_like(rows[name]) for name in ("prompt_mask", "completion_mask")}
    assert_equal(model_of("qwen3"), rows, counted=True)


def test_an_adapter() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"], r=4, init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(model_of("llama"), config)
    assert refusal(model) is None
    assert_equal(model, rows_of(2, 3), counted=False)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradient_checkpointing_computes_each_layer_again(attention: str, reentrant: bool) -> None:
    model, layers = model_of("qwen3", attn_implementation=attention), []
    reference = both(model, rows_of(2, 3), counted=False)[0]
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: layers.append(1))
    for weight in model.model.embed_tokens.parameters():
        weight.requires_grad_()
    rows = rows_of(2, 3)
    prompts = prompts_among(rows)
    logps = scores(model, rows, prompts, counted=False)
    (logps * torch.linspace(-1, 2, logps.numel()).view(logps.shape)).sum().backward()
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])  # type: ignore[union-attr]
    assert len(layers) == 4  # each of two layers twice
    torch.testing.assert_close(logps.detach(), reference[0], rtol=LIMIT, atol=LIMIT)
    torch.testing.assert_close(gradient, reference[1], rtol=LIMIT, atol=LIMIT * float(reference[1].abs().max()))


def test_rows_without_a_token() -> None:
    """Of a completion, and of a prompt's row that is all padding but its last token."""
    rows = rows_of(2, 3)
    rows["completion_mask"][1] = 0
    rows["prompt_mask"][3:, :-1] = 0
    assert_equal(model_of("llama"), rows, counted=True)


def test_bfloat16_differs_by_no_more_than_it_does_from_itself() -> None:
    rows, model = rows_of(2, 4, prompt=24), model_of("llama").to(torch.bfloat16)
    wide = model_of("llama")
    wide.load_state_dict(model.state_dict())
    truth = both(wide, rows, counted=False)[0]
    plain, shared = both(model, rows, counted=False)
    for number in (0, 1):  # log-probs, gradient
        own = float((plain[number].float() - truth[number]).norm())
        assert float((shared[number].float() - truth[number]).norm()) < 1.5 * own
        assert own > 0


def test_the_forward_of_the_model_comes_back() -> None:
    model, rows = model_of("llama"), rows_of(2, 3)
    before = scores(model, rows, None, counted=False)
    with pytest.raises(RuntimeError, match="within"), prompts_once(model, prompts_among(rows), counted=False):
        raise RuntimeError("within")
    assert "forward" not in model.model.__dict__
    assert torch.equal(scores(model, rows, None, counted=False), before)


# ------------------------------------------------------------------------------------------------------- where it pays


WHERE = [
    (512, 64, True),
    (64, 64, True),
    (64, 496, True),
    (64, 497, False),
    (8, 512, False),
    (36, 8, False),
    (37, 8, True),
]


@pytest.mark.parametrize(("prompt", "length", "expected"), WHERE)
def test_where_it_pays(prompt: int, length: int, expected: bool) -> None:
    """A group of eight saves seven prompts: at least 256 tokens, and one in ten."""
    ids = torch.ones(8, prompt + length, dtype=torch.long)
    shared, model = SharedPrefix("auto", counted=True), model_of("llama")
    assert (shared.prompts(model, ids, torch.ones_like(ids), prompt) is not None) is expected
    apart = torch.cat([torch.arange(8)[:, None], ids[:, 1:]], 1)
    assert shared.prompts(model, apart, torch.ones_like(ids), prompt) is None


@pytest.mark.parametrize(("share", "drop", "expected"), [
    ("auto", True, 4), (False, True, 8), (False, False, None), ("auto", False, None)
])  # fmt: skip
def test_padding_alone_may_pay(share: Any, drop: bool, expected: int | None) -> None:
    """Four short prompts of two rows each; most of the completions is padding."""
    ids = torch.arange(4).repeat_interleave(2)[:, None].expand(-1, 104)
    mask = torch.arange(104).expand(8, -1) < torch.tensor([104, 14, 14, 14, 14, 14, 14, 14])[:, None]
    found = SharedPrefix(share, counted=True, drop_padding=drop).prompts(model_of("llama"), ids, mask, 4)
    assert (None if found is None else len(found.ids)) == expected


class Waits(TorchDispatchMode):
    """The operations inside that would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        boolean = name == "index" and any(one is not None and one.dtype == torch.bool for one in args[1])
        if boolean or name in ("nonzero", "_local_scalar_dense", "equal", "unique_dim", "_unique2", "masked_select"):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_forward_of_known_rows_does_not_wait_for_the_device(
    known: bool, share: bool, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of others it makes one copy on the host. Nothing else may read a value, as a GPU could not go on."""
    monkeypatch.setattr(micro_batches, "LEAST_SAVED", 1)
    rows, model = rows_of(3, 4, prompt=30, mixed=mixed), model_of("llama")
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
    shared = SharedPrefix(share, counted=True, drop_padding=True)
    if known:
        shared.look_at([rows_of(2, 2), rows])
    copies: list[int] = []
    original = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: copies.append(self.numel()) or original(self))
    with Waits() as waits:
        prompts = shared.prompts(model, ids, mask, 30, shared.seen(rows))
        assert prompts is not None and prompts.are_shared is share
        logps = scores(model, rows, prompts, counted=True)
        logps.sum().backward()
    assert copies == ([] if known else [ids.numel()]) and not waits.seen
    torch.testing.assert_close(logps, scores(model, rows, None, counted=True), rtol=LIMIT, atol=LIMIT)


def test_rows_are_known_as_long_as_they_are_the_same() -> None:
    shared = SharedPrefix("auto", counted=True)
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
        rows = rows_of(2, 3)
        shared.look_at([rows])
        assert (shared.seen(dict(rows)) >= 0).tolist() == torch.cat(
            [rows["prompt_mask"], rows["completion_mask"]], 1
        ).bool().tolist()  # fmt: skip
        assert shared.seen({**rows, name: rows[name].clone()}) is None
        rows[name][0] = 0
        assert shared.seen(rows) is None
    del rows
    assert not len(shared._rows._known)
    off = SharedPrefix(False, counted=True)
    off.look_at([rows_of(2, 3)])
    assert not len(off._rows._known)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(("changed", "kind", "match"), [
    ({"sliding_window": 4}, "mistral", "sliding windows"),
    ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "qwen2", "sliding windows"),
    ({"attention_dropout": 0.1}, "llama", "dropout"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "llama", "rotary"),
])  # fmt: skip
def test_refusals(changed: dict[str, Any], kind: str, match: str) -> None:
    assert match in (refusal(model_of(kind, **changed)) or "")


@pytest.mark.parametrize(("rope", "varies"), [
    ({"rope_type": "default"}, None),
    ({"rope_type": "llama3", "factor": 8.0}, None),
    ({"rope_type": "proportional", "factor": 8.0}, None),
    ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'"),
    ({"type": "longrope"}, "'longrope'"),
    ({"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}}, "'longrope'"),
])  # fmt: skip
def test_rotary_embeddings_that_read_the_width(rope: dict[str, Any], varies: str | None) -> None:
    model = model_of("llama")
    model.config.rope_parameters = rope
    found = varying_rope(model)
    assert found is None if varies is None else found is not None and varies in found


def test_the_fixed_ones_are_those_whose_angles_do_not_change_with_the_length() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    varying = set()
    for kind, angles_of in ROPE_INIT_FUNCTIONS.items():
        config = model_of("llama").config
        config.rope_parameters = {
            "rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, **factors,
        }  # fmt: skip
        short, long = (angles_of(config, torch.device("cpu"), seq_len=size)[0] for size in (16, 100_000))
        if not torch.equal(short, long):
            varying.add(kind)
    assert varying == set(ROPE_INIT_FUNCTIONS) - set(_FIXED_ROPE) == {"dynamic", "longrope"}


def test_models_that_are_not_proved() -> None:
    assert "type 'gpt2' are not proved" in (refusal(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1))) or "")
    assert "type 'qwen3_moe' are not proved" in (refusal(tiny_model("qwen3_moe")) or "")
    assert {KINDS[kind][0].model_type for kind in KINDS} == set(PROVED)


def test_dropout_of_an_adapter() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model_of("llama"), peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1))
    assert "dropout" in (refusal(model) or "")


def test_auto_says_once_why_it_does_not_share(caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedPrefix("auto", counted=True)
    model = model_of("mistral", sliding_window=4)
    for _ in range(2):
        shared.prepare(model)
        assert not shared.possible(model)
    assert [record.message.count("sliding windows") for record in caplog.records] == [1]


@pytest.mark.parametrize(("mode", "drop"), [("auto", False), (False, True)])
def test_the_trainers_reason_holds_for_every_model(mode: Any, drop: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A reference, or the model of the old policy, may be met later."""
    shared, policy, reference = (
        SharedPrefix(mode, counted=True, drop_padding=drop),
        model_of("llama"),
        model_of("qwen3"),
    )
    shared.prepare(policy, refused="it is Monday")
    assert not shared.possible(policy) and not shared.possible(reference)
    assert caplog.text.count("it is Monday") == (1 if mode == "auto" else 0)
    shared = SharedPrefix(mode, counted=True, drop_padding=drop)
    shared.prepare(policy)
    assert shared.possible(policy) and shared.possible(reference)


def test_true_is_an_error_for_every_model_that_is_refused() -> None:
    policy, reference = model_of("llama"), model_of("mistral", sliding_window=4)
    with pytest.raises(ValueError, match=r"got true: the model has sliding windows"):
        SharedPrefix(True, counted=True).prepare(policy, reference)
    shared = SharedPrefix(True, counted=True)
    shared.prepare(policy)
    with pytest.raises(ValueError, match=r"got true: the model has sliding windows"):
        shared.possible(reference)  # not known at the start
    assert shared.possible(policy)


# ---------------------------------------------------------------------------------------------------------- self-check


def scorer(model: Any, spoil: Callable[[Tensor], Tensor] = lambda logps: logps) -> Callable[..., Tensor]:
    """``score(ids, mask, context)`` by the model's logits; ``spoil`` changes what the shared path returns."""

    def score(ids: Tensor, mask: Tensor, context: AbstractContextManager[None] | None) -> Tensor:
        with context or nullcontext():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logps = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0][:, -5:]
        return logps if context is None else spoil(logps)

    return score


def checked(mode: Any, score: Callable[..., Tensor], model: Any) -> tuple[SharedPrefix, bool]:
    rows, shared = rows_of(2, 3), SharedPrefix(True, counted=False)
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
    prompts = shared.prompts(model, ids, mask, 7)
    assert prompts is not None
    shared.mode = mode
    return shared, shared.proved(model, prompts, ids, mask, score)


def test_the_first_batch_is_compared_once() -> None:
    model = model_of("llama")
    calls = []

    def counting(ids: Tensor, mask: Tensor, context: Any) -> Tensor:
        calls.append(context is not None)
        return scorer(model)(ids, mask, context)

    shared, equal = checked("auto", counting, model)
    assert equal and shared.possible(model) and calls == [False, True, False, False]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_pass_without_trainable_weights_does_not_stand_for_the_gradient() -> None:
    """As the reference of an adapter's policy: its adapter switched off, nothing to train."""
    model = model_of("llama").requires_grad_(False)
    calls: list[bool] = []
    rows, shared = rows_of(2, 3), SharedPrefix(True, counted=False)
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
    prompts = shared.prompts(model, ids, mask, 7)
    shared.mode = "auto"

    def wrong_gradient(ids: Tensor, mask: Tensor, context: Any) -> Tensor:
        calls.append(context is not None)
        return scorer(model, lambda logps: logps + 0.1 * (logps - logps.detach()))(ids, mask, context)

    assert prompts is not None
    assert all(shared.proved(model, prompts, ids, mask, wrong_gradient) for _ in range(2))
    assert len(calls) == 4  # once
    model.requires_grad_(True)
    assert not shared.proved(model, prompts, ids, mask, wrong_gradient)


@pytest.mark.parametrize("spoil", [
    lambda logps: logps + 0.01, lambda logps: logps + 0.02 * (logps - logps.detach()), lambda logps: -logps
])  # fmt: skip
def test_a_model_that_differs_is_not_shared(
    spoil: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """Another value, another gradient, a wrong sign."""
    model = model_of("llama")
    shared, equal = checked("auto", scorer(model, spoil), model)
    assert not equal and not shared.possible(model)
    assert "differ from the plain path" in caplog.text
    with pytest.raises(RuntimeError, match="share_prefix must be auto or false here, but got true: on the first batch"):
        checked(True, scorer(model, spoil), model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_check_works_with_gradient_checkpointing(reentrant: bool) -> None:
    """The reentrant kind hides weights from ``torch.autograd.grad``; it is back after the check."""
    model, layers = model_of("llama"), []
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.model.layers[0].register_forward_pre_hook(lambda *_: layers.append(1))
    before = [layer._gradient_checkpointing_func for layer in model.model.layers]
    assert checked(True, scorer(model), model)[1]
    assert len(layers) == 8  # four scorings, each layer once more in the backward
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == before
    assert not checked("auto", scorer(model, lambda logps: logps + 0.02 * (logps - logps.detach())), model)[1]


def test_a_check_that_fails_is_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("llama")

    def broken(logps: Tensor) -> Tensor:
        raise NotImplementedError("no kernel for these rows.")

    shared, equal = checked("auto", scorer(model, broken), model)
    assert not equal and not shared.possible(model)
    assert "the plain path (NotImplementedError: no kernel for these rows)." in caplog.text
    with pytest.raises(RuntimeError, match=r"got true: .* \(NotImplementedError: no kernel for these rows\)"):
        checked(True, scorer(model, broken), model)
    assert "forward" not in model.model.__dict__  # the plain path is as it was


def test_keys_without_gradient_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect that equal log-probs do not show: a cache that detaches."""
    expand = Prompts.expand
    monkeypatch.setattr(Prompts, "expand", lambda self, values: expand(self, values).detach())
    model = model_of("llama")
    assert not checked("auto", scorer(model), model)[1]


def saved_bytes(model: Any, rows: dict[str, Tensor], prompts: Prompts | None) -> int:
    """Bytes that the forward keeps for the backward, weights left out; each memory is counted once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Any] = {}  # alive until the end, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logps = scores(model, rows, prompts, counted=True)
    size = sum(storage.nbytes() for storage in kept.values())
    logps.sum().backward()
    return size


@pytest.mark.parametrize(("prompt", "length", "least"), [(48, 6, 2.5), (24, 24, 1.3), (7, 40, 1.0)])
def test_shared_prompts_never_need_more_memory(prompt: int, length: int, least: float) -> None:
    """At the end of the forward, where a step has its peak; ``least`` = by how much it is less at these lengths."""
    model, rows = model_of("qwen3"), rows_of(2, 4, prompt=prompt, length=length)
    plain = saved_bytes(model, rows, None)
    shared = saved_bytes(model, rows, prompts_among(rows))
    assert shared * least <= plain
    apart = rows_of(8, 1, prompt=prompt, length=length)  # no prompt is shared: nothing is gained
    alone = saved_bytes(model, apart, prompts_among(apart))
    assert least == 1.0 or alone > 1.2 * shared


def test_eager_attention_is_found_where_a_class_that_extends_it_lives() -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

    own = type("OwnAttention", (LlamaAttention,), {"__module__": __name__})  # of a user's module, without the function
    assert _eager_of(object.__new__(own)) is eager_attention_forward
    with pytest.raises(ValueError, match="attn_implementation must be sdpa"):
        _eager_of(torch.nn.Linear(1, 1))
