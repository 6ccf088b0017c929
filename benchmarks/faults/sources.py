"""The worlds of the suite: SmolLM2-135M-Instruct, a small Qwen3-like model, a tiny Qwen3 mixture of experts."""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from moe import EXPERTS, VOCABULARY, tiny_moe
from policies import adapters, capitals, full_updates, of_task
from small import small_dense
from tasks import Task
from weights import VERSIONS, Updates, Weights
from worlds import PROMPTS, World

from trl_offpolicy.diagnosis.rescoring.renderings import other_renderings
from trl_offpolicy.engines.hf import Ids

MODEL = ".cache/SmolLM2-135M-Instruct"
WORLDS = ("smollm2", "qwen", "moe")
RATE = 2e-4
"""AdamW's rate for the small models' updates."""


class Sources:
    """Makes worlds; models and their updates are made once and kept in ``folder``.

    Args:
        folder: of trained models and updates.
        model: path of SmolLM2.
    """

    def __init__(self, folder: Path, model: str = MODEL) -> None:
        self.folder, self.path = folder, model
        folder.mkdir(parents=True, exist_ok=True)

    def world(self, name: str, seed: int) -> World:
        """One model with the prompts of one seed."""
        made = {"smollm2": self._smollm2, "vllm": self._smollm2, "qwen": self._qwen, "moe": self._moe}[name](seed)
        return made  # vllm_cases.py samples with another engine from the same model

    # ------------------------------------------------------------------------------------------------------- models

    @cached_property
    def _large(self) -> tuple[Weights, Task]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.path)
        task = Task(tokenizer)
        updates = self._kept("smollm2", lambda: adapters(self.path, task, seed=0, stop=[tokenizer.eos_token_id]))
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()
        return Weights(model, updates), task

    @cached_property
    def _small(self) -> tuple[Weights, Task]:
        model, tokenizer = small_dense(self.folder / "small")
        task, stop = Task(tokenizer), [tokenizer.eos_token_id]
        ask, rewarded = of_task(task, 0)
        updates = self._kept(
            "qwen", lambda: full_updates(model, ask, rewarded, capitals(task, 0), seed=0, stop=stop, rate=RATE)
        )
        return Weights(model, updates), task

    def _kept(self, name: str, make: Any) -> Updates:
        path = self.folder / f"updates-{name}.pt"
        if not path.exists():
            start = time.monotonic()
            updates = make()
            torch.save((updates.versions, updates.other), path)
            print(f"made the updates of {name} in {time.monotonic() - start:.0f} s", flush=True)
        return Updates(*torch.load(path))

    # ------------------------------------------------------------------------------------------------------- worlds

    def _smollm2(self, seed: int) -> World:
        return self._of_task("smollm2", seed, *self._large)

    def _qwen(self, seed: int) -> World:
        return self._of_task("qwen", seed, *self._small)

    def _of_task(self, name: str, seed: int, weights: Weights, task: Task) -> World:
        rows = task.rows(PROMPTS, seed=seed)
        return World(
            name, seed, weights, [row.prompt_ids for row in rows], [task.tokenizer.eos_token_id],
            task.tokenizer.bos_token_id, task, [row.question for row in rows],
        )  # fmt: skip

    def _moe(self, seed: int) -> World:
        model = tiny_moe(seed)

        def rewarded(ids: list[int], _known: Any) -> float:
            return sum(token < VOCABULARY // 2 for token in ids) / len(ids)

        def ask(step: int) -> tuple[list[list[int]], list[Any]]:
            return random_rows(4, seed=7000 + 10 * seed + step), [None] * 4

        def pairs(step: int) -> tuple[list[list[int]], list[list[int]]]:
            return random_rows(8, seed=8000 + 10 * seed + step), random_rows(8, seed=9000 + 10 * seed + step)

        updates = self._kept(
            f"moe-{seed}", lambda: full_updates(model, ask, rewarded, pairs, seed=seed, stop=[1], rate=RATE)
        )
        prompts = random_rows(PROMPTS, seed=seed)
        return World("moe", seed, Weights(model, updates), prompts, [1], 0, declared={"experts": EXPERTS})


def random_rows(count: int, *, seed: int) -> list[list[int]]:
    """Prompts of 8 to 16 random tokens."""
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 17, (count,), generator=chance).tolist()
    return [torch.randint(2, VOCABULARY, (length,), generator=chance).tolist() for length in lengths]


def weights_at_hand(world: World) -> dict[str, Any]:
    """Contexts with other weights that a probe can try: earlier versions; the adapter off, scaled, or another one."""
    last = VERSIONS
    found: dict[str, Any] = {
        f"stale_weights:version {number} of {last}": _holding(world, number) for number in range(last - 1, 0, -1)
    }
    found["wrong_adapter:no adapter"] = _holding(world, 0)
    found["wrong_adapter:adapter at half its scale"] = _holding(world, last, 0.5)
    found["wrong_adapter:adapter at twice its scale"] = _holding(world, last, 2.0)
    found["wrong_adapter:another adapter"] = _holding(world, "other")
    return found


def _holding(world: World, version: Any, scale: float = 1.0) -> Any:
    return lambda: world.weights.at(version, scale)


def prompts_at_hand(world: World, ids: Ids) -> dict[str, Ids]:
    """The prompts of a case in other renderings, as the doctor makes them; none where prompts are no text."""
    if world.task is None:
        return {}
    return other_renderings(world.task.tokenizer, world.task.tokenizer.batch_decode(ids), ids)
