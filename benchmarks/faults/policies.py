"""The policies of the suite: one model, real LoRA updates of it by version, and ways to change what it computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tasks import Task, reward
from torch import Tensor, nn

from trl_offpolicy.engines.hf import sample_completions

Delta = Mapping[str, tuple[Tensor, Tensor]]
"""Change of each linear weight, as two factors: up (out, r) and down (r, in)."""
VERSIONS = 4
"""GRPO steps; version 0 is the model itself."""
GROUP = 6


class Policy:
    """A causal LM whose weights are base + delta; deltas are kept by version."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.linears = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and "lm_head" not in name
        }
        self.base = {name: module.weight.detach().clone() for name, module in self.linears.items()}

    @torch.no_grad()
    def set_weights(self, delta: Delta | None = None, other: Delta | None = None, share: float = 0.0) -> None:
        """Base + (1 - share) delta + share other; None is the base model."""
        for name, module in self.linears.items():
            weight = self.base[name].clone()
            for part, scale in ((delta, 1 - share), (other, share)):
                if part is not None and scale:
                    up, down = part[name]
                    weight += scale * (up @ down)
            module.weight.copy_(weight)


def train_versions(path: str | Path, task: Task, *, seed: int, stop: list[int]) -> list[Delta]:
    """GRPO with LoRA: the weights' change after 1, 2, ... VERSIONS updates, each on samples of the one before."""
    model, optimizer = _with_lora(path, seed)
    generator = torch.Generator().manual_seed(seed)
    deltas = []
    for step in range(VERSIONS):
        rows = task.rows(4, seed=1000 * (seed + 1) + step)
        prompts = [row.prompt_ids for row in rows for _ in range(GROUP)]
        ids, _ = sample_completions(model, prompts, max_tokens=16, stop_ids=stop, generator=generator)
        rewards = torch.tensor([reward(task.tokenizer.decode(i), rows[n // GROUP].answer) for n, i in enumerate(ids)])
        grouped = rewards.view(-1, GROUP)
        advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        _update(model, optimizer, prompts, ids, advantages.flatten())
        deltas.append(_delta(model))
    return deltas


def train_other(path: str | Path, task: Task, *, seed: int, steps: int = 3) -> Delta:
    """Another adapter: supervised steps towards answers in capital letters."""
    model, optimizer = _with_lora(path, seed)
    for step in range(steps):
        rows = task.rows(8, seed=5000 * (seed + 1) + step)
        answers = [task.tokenizer(f"THE ANSWER IS {row.answer}.")["input_ids"] for row in rows]
        _update(model, optimizer, [row.prompt_ids for row in rows], answers, torch.ones(len(rows)))
    return _delta(model)


def _with_lora(path: str | Path, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), config)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=3e-4)


def _update(model: Any, optimizer: Any, prompts: Any, completions: Any, advantages: Tensor) -> None:
    """One step on mean over tokens of -advantage * log-prob."""
    width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    rows = [p + c for p, c in zip(prompts, completions, strict=True)]
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    place = torch.arange(width)
    begin = torch.tensor([[len(p)] for p in prompts])
    end = torch.tensor([[len(row)] for row in rows])
    mask = ((place >= begin) & (place < end))[:, 1:].float()
    keep = int(width - begin.min()) + 1
    logits = model(input_ids=ids, attention_mask=(place < end).long(), logits_to_keep=keep).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(-1, ids[:, -keep + 1 :].unsqueeze(-1)).squeeze(-1)
    mask = mask[:, -keep + 1 :]
    loss = -(logps * mask * advantages.unsqueeze(1)).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()


@torch.no_grad()
def _delta(model: Any) -> Delta:
    return {
        name.removeprefix("base_model.model."): (
            module.scaling["default"] * module.lora_B["default"].weight.clone(),
            module.lora_A["default"].weight.clone(),
        )
        for name, module in model.named_modules()
        if hasattr(module, "lora_B")
    }


@contextmanager
def dropped(
    policy: Policy, *, attention: float = 0.0, adapter: float = 0.0, delta: Delta | None = None
) -> Iterator[None]:
    """Dropout left on: on attention probabilities, or on the input of the adapter (LoRA dropout)."""
    hooks = []
    config = policy.model.config
    before = config.attention_dropout
    if adapter and delta is not None:
        for name, module in policy.linears.items():
            hooks.append(module.register_forward_hook(_adapter_dropout(delta[name], adapter)))
    if attention:
        policy.model.train()
        for module in policy.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = attention
    try:
        yield
    finally:
        policy.model.eval()
        for module in policy.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = before
        for hook in hooks:
            hook.remove()


def _adapter_dropout(delta: tuple[Tensor, Tensor], share: float) -> Any:
    def hook(_module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        (x,) = inputs
        up, down = delta
        return output + (nn.functional.dropout(x, share) - x) @ down.T @ up.T

    return hook
