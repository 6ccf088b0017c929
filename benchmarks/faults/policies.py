"""Real updates of the suite's models: GRPO steps by version, and another adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tasks import Task, reward
from torch import Tensor
from weights import VERSIONS, Change, Updates

from trl_offpolicy.engines.hf import sample_completions

GROUP = 6
EMBEDDING_STEP = 1e-4
"""What the embedding of the large model moves by over all versions: AdamW's first steps, whose size is the rate."""
Rows = Sequence[Sequence[int]]
Ask = Callable[[int], tuple[list[list[int]], list[Any]]]
"""Step -> prompts, and what a reward needs to know of each."""
Reward = Callable[[list[int], Any], float]


def of_task(task: Task, seed: int) -> tuple[Ask, Reward]:
    """Prompts and rewards of reasoning-gym."""

    def ask(step: int) -> tuple[list[list[int]], list[Any]]:
        rows = task.rows(4, seed=1000 * (seed + 1) + step)
        return [row.prompt_ids for row in rows], [row.answer for row in rows]

    return ask, lambda ids, answer: reward(task.tokenizer.decode(ids), answer)


def capitals(task: Task, seed: int) -> Callable[[int], tuple[Rows, Rows]]:
    """Step -> prompts and answers in capital letters, for another adapter."""

    def pairs(step: int) -> tuple[Rows, Rows]:
        rows = task.rows(8, seed=5000 * (seed + 1) + step)
        answers = [task.tokenizer(f"THE ANSWER IS {row.answer}.")["input_ids"] for row in rows]
        return [row.prompt_ids for row in rows], answers

    return pairs


def adapters(path: str | Path, task: Task, *, seed: int, stop: list[int]) -> Updates:
    """Of the large model: LoRA by GRPO, LoRA by supervision, and steps of the embedding, which is tied to the head."""
    model, optimizer = _with_lora(path, seed)
    ask, rewarded = of_task(task, seed)
    versions = [dict(_delta(model)) for _ in _grpo(model, optimizer, ask, rewarded, seed=seed, stop=stop)]
    model, optimizer = _with_lora(path, seed + 1)
    pairs = capitals(task, seed)
    for step in range(3):
        prompts, answers = pairs(step)
        _update(model, optimizer, prompts, answers, torch.ones(len(prompts)))
    moved = _embedding_sign(path, pairs(9))
    for number, version in enumerate(versions, start=1):
        version["model.embed_tokens.weight"] = (EMBEDDING_STEP * number / VERSIONS * moved).half()
    return Updates(list(versions), _delta(model))


def full_updates(model: Any, ask: Ask, rewarded: Reward, pairs: Callable[[int], tuple[Rows, Rows]], *, seed: int,
                 stop: list[int], rate: float) -> Updates:  # fmt: skip
    """Of a small model: all parameters by GRPO, and by supervision."""
    base = {name: p.detach().clone() for name, p in model.named_parameters()}

    def moved() -> dict[str, Change]:
        return {name: p.detach() - base[name] for name, p in model.named_parameters()}

    def restore() -> None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(base[name])

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    versions = [moved() for _ in _grpo(model, optimizer, ask, rewarded, seed=seed, stop=stop)]
    restore()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for step in range(3):
        prompts, answers = pairs(step)
        _update(model, optimizer, prompts, answers, torch.ones(len(prompts)))
    other = moved()
    restore()
    return Updates(versions, other)


def _grpo(model: Any, optimizer: Any, ask: Ask, rewarded: Reward, *, seed: int, stop: list[int]) -> Any:
    """Yields after each of VERSIONS updates, each on samples of the one before."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(VERSIONS):
        asked, known = ask(step)
        prompts = [ids for ids in asked for _ in range(GROUP)]
        ids, _ = sample_completions(model, prompts, max_tokens=16, stop_ids=stop, generator=generator)
        rewards = torch.tensor([rewarded(row, known[n // GROUP]) for n, row in enumerate(ids)])
        grouped = rewards.view(-1, GROUP)
        advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        _update(model, optimizer, prompts, ids, advantages.flatten())
        yield step


def _with_lora(path: str | Path, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), config)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=3e-4)


def _loss(model: Any, prompts: Rows, completions: Rows, advantages: Tensor) -> Tensor:
    """Mean over tokens of -advantage * log-prob."""
    rows = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    place = torch.arange(width)
    begin = torch.tensor([[len(p)] for p in prompts])
    end = torch.tensor([[len(row)] for row in rows])
    mask = ((place >= begin) & (place < end))[:, 1:].float()
    keep = int(width - begin.min()) + 1
    logits = model(input_ids=ids, attention_mask=(place < end).long(), logits_to_keep=keep).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(-1, ids[:, -keep + 1 :].unsqueeze(-1)).squeeze(-1)
    mask = mask[:, -keep + 1 :]
    return -(logps * mask * advantages.unsqueeze(1)).sum() / mask.sum()


def _update(model: Any, optimizer: Any, prompts: Rows, completions: Rows, advantages: Tensor) -> None:
    loss = _loss(model, prompts, completions, advantages)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()


def _embedding_sign(path: str | Path, pairs: tuple[Rows, Rows]) -> Tensor:
    """Minus the sign of the embedding's gradient on a few answers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weight = model.get_input_embeddings().weight
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is weight)
    prompts, answers = pairs
    _loss(model, prompts, answers, torch.ones(len(prompts))).backward()
    return -weight.grad.sign()


@torch.no_grad()
def _delta(model: Any) -> dict[str, Change]:
    return {
        name.removeprefix("base_model.model.") + ".weight": (
            module.scaling["default"] * module.lora_B["default"].weight.clone(),
            module.lora_A["default"].weight.clone(),
        )
        for name, module in model.named_modules()
        if hasattr(module, "lora_B")
    }
