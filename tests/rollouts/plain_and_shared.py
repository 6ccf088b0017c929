"""Models and rows on which prompts computed once are compared with the plain path."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trl_offpolicy.rollouts.prompts import Prompts, prompts_of_rows
from trl_offpolicy.rollouts.shared_prefix import prompts_once

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1,
}  # fmt: skip
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "smollm": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True, "num_attention_heads": 3,
                                               "num_key_value_heads": 1, "hidden_size": 24}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
}  # fmt: skip
LIMIT = 1e-5
"""Absolute plus relative to the largest entry, float32."""


def model_of(kind: str, **changed: Any) -> PreTrainedModel:
    config, make, own = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: PreTrainedModel = make(config(**{**SHAPE, **own, **changed}))
    return model.train()


def rows_of(groups: int, copies: int, prompt: int = 7, length: int = 5, *, mixed: bool = False) -> dict[str, Tensor]:
    """Ragged prompts and completions; with ``mixed`` the copies of a prompt do not lie beside each other."""
    random = torch.Generator().manual_seed(groups)
    ids = torch.randint(2, 64, (groups, prompt), generator=random).repeat_interleave(copies, 0)
    begin = torch.randint(0, prompt - 2, (groups,), generator=random).repeat_interleave(copies)
    prompt_mask = torch.arange(prompt) >= begin[:, None]
    completion = torch.randint(2, 64, (groups * copies, length), generator=random)
    mask = torch.arange(length) < torch.randint(1, length + 1, (groups * copies,), generator=random)[:, None]
    rows = {
        "prompt_ids": ids * prompt_mask, "prompt_mask": prompt_mask.long(),
        "completion_ids": completion * mask, "completion_mask": mask.long(),
    }  # fmt: skip
    apart = torch.arange(groups * copies).view(groups, copies).t().flatten()
    return {name: value[apart] for name, value in rows.items()} if mixed else rows


def scores(model: Any, rows: dict[str, Tensor], prompts: Prompts | None, *, counted: bool) -> Tensor:
    """(B, T) log-probs by the model's own logits; with ``prompts`` through the shared path."""
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
    width, context = rows["prompt_ids"].shape[1], nullcontext()
    positions: dict[str, Tensor] = {}
    if prompts is not None:
        ids, mask = ids[:, width - 1 :], mask[:, width - 1 :]
        context = prompts_once(model, prompts, counted=counted)  # type: ignore[assignment]
    elif counted:
        positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with context:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **positions).logits
    length = rows["completion_ids"].shape[1]
    logps = logits[:, -length - 1 : -1].log_softmax(-1).gather(-1, rows["completion_ids"][..., None])[..., 0]
    return torch.where(rows["completion_mask"].bool(), logps, 0.0)


def prompts_among(rows: dict[str, Tensor], *, shared: bool = True) -> Prompts:
    """The prompts of rows, in common or each row's own."""
    ids, mask = (torch.cat([rows[f"prompt_{kind}"], rows[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask"))
    return prompts_of_rows(ids, mask, rows["prompt_ids"].shape[1], shared=shared)[0]


def both(model: Any, rows: dict[str, Tensor], *, shared: bool = True, **how: Any) -> list[tuple[Tensor, Tensor]]:
    """(log-probs, gradient of all weights) on the plain path and in one sequence."""
    found, weights = [], [p for p in model.parameters() if p.requires_grad]
    for prompts in (None, prompts_among(rows, shared=shared)):
        logps = scores(model, rows, prompts, **how)
        loss = (logps * torch.linspace(-1, 2, logps.numel(), device=logps.device).view(logps.shape)).sum()
        gradients = torch.autograd.grad(loss, weights)
        found.append((logps.detach(), torch.cat([gradient.flatten() for gradient in gradients])))
    return found


def assert_equal(model: Any, rows: dict[str, Tensor], limit: float = LIMIT, **how: Any) -> None:
    (logps, gradient), (shared_logps, shared_gradient) = both(model, rows, **how)
    torch.testing.assert_close(shared_logps, logps, rtol=limit, atol=limit)
    torch.testing.assert_close(shared_gradient, gradient, rtol=limit, atol=limit * float(gradient.abs().max()))
