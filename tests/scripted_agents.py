"""An agent whose replies are known: a byte tokenizer with the calculator's templates, and a scripted engine."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning_runs import Played
from tiny_models import tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trl_offpolicy.engines.engine import Rollouts, Sampling

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "agent_calculator"
SPECIAL = ("<pad>", "<|im_end|>", "<|im_start|>")


@cache
def _bytes() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def byte_tokenizer() -> Any:
    """One token a byte, with the templates of the calculator recipe."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_bytes(), pad_token="<pad>", eos_token="<|im_end|>", padding_side="left"
    )
    tokenizer.chat_template = (RECIPE / "chat_template.jinja").read_text()
    tokenizer.response_template = json.loads((RECIPE / "response_template.json").read_text())
    return tokenizer


def byte_model() -> Any:
    """A tiny model of that vocabulary."""
    return tiny_model(vocab_size=len(SPECIAL) + 256, max_position_embeddings=1024, initializer_range=0.1)


def call(name: str, **arguments: Any) -> str:
    """The text of a tool call."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The sum.
    """
    return a + b


async def later(word: str) -> str:
    """Say a word again, later.

    Args:
        word: The word.

    Returns:
        The word.
    """
    await asyncio.sleep(0)
    if word == "bad":
        raise RuntimeError("no such word")
    return word * 2


REPLIES = (
    "7<|im_end|>",
    call("add", a=3, b=4) + "<|im_end|>",
    "Let me see. " + call("add", a=1, b=2) + call("later", word="x") + call("add", a=5, b=6) + "<|im_end|>",
    call("add", a="one") + "<|im_end|>",  # a wrong argument
    call("nothing", a=1) + "<|im_end|>",  # no such tool
    call("later", word="bad") + "<|im_end|>",
    "<tool_call>\n{not json</tool_call><|im_end|>",
    call("add", a=3, b=4),  # cut before its end
    '<tool_call>\n{"name": "add"}\n</tool_call><|im_end|>',  # no arguments
)


class Script:
    """What the policy says after a context: one of the replies, chosen by the context and by how often it was asked.

    Args:
        replies: texts of turns.
        noise: standard deviation of what is added to the log-probs of ``model``, nats.
        model: gives the model whose log-probs are the truth; None = any numbers.
        forgetful: whether the count starts again with every request.
    """

    def __init__(
        self,
        replies: Sequence[str] = REPLIES,
        *,
        noise: float = 0.1,
        model: Callable[[], Any] | None = None,
        forgetful: bool = False,
    ) -> None:
        tokenizer = byte_tokenizer()
        self.replies = [tokenizer(text)["input_ids"] for text in replies]
        self.noise, self.model, self.forgetful = noise, model, forgetful
        self.asked: dict[tuple[int, ...], int] = {}

    def __call__(self, context: Sequence[int], most: int) -> tuple[list[int], list[float]]:
        key = tuple(context)
        times = self.asked[key] = self.asked.get(key, 0) + 1
        drawn = random.Random(f"{hash(key)} {times}")
        ids = list(drawn.choice(self.replies))[:most]
        return ids, [value + drawn.gauss(0.0, self.noise) for value in self._true(list(context), ids)]

    @torch.no_grad()
    def _true(self, context: list[int], ids: list[int]) -> list[float]:
        if self.model is None:
            return [-1.0] * len(ids)
        logits = self.model()(input_ids=torch.tensor([context + ids])).logits[0, len(context) - 1 : -1]
        values: list[float] = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
        return values


class ScriptedEngine(Played):
    """An engine of the engine layer that follows a script. ``requests`` holds (number of prompts, n, max_tokens)."""

    def __init__(self, script: Script) -> None:
        super().__init__([])
        self.script = script
        self.requests: list[tuple[int, int, int]] = []
        if script.model is None:
            return
        script.model = lambda: self.source.model

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        self.requests.append((len(prompt_ids), n, sampling.max_tokens))
        if self.script.forgetful:
            self.script.asked.clear()
        prompts = [list(ids) for ids in prompt_ids for _ in range(n)]
        turns = [self.script(prompt, sampling.max_tokens) for prompt in prompts]
        return Rollouts(
            prompt_ids=prompts,
            completion_ids=[ids for ids, _ in turns],
            sampling_per_token_logps=[logps for _, logps in turns],
            policy_versions=[[self.version or 0] * len(ids) for ids, _ in turns],
            finish_reasons=["stop" if ids and ids[-1] == 1 else "length" for ids, _ in turns],
        )
