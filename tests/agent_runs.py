"""Tiny agents without vLLM: a ``rollout_func`` that calls a tool, and a tokenizer for TRL's own tool loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tiny_models import EOS, FIRST_WORD, VOCABULARY, WORDS, tiny_tokenizer

TOOL_WORDS = (FIRST_WORD + 100, FIRST_WORD + 101, FIRST_WORD + 102)
"""What the tool always answers."""
SHORT_TURNS = {"stop_token_ids": [*range(8, len(VOCABULARY), 8)]}
"""Sampling options of a tiny model whose turns have eight tokens or so; every second one calls the tool."""
GARBAGE = -7.0
"""Log-prob that stands at tool tokens: no result may depend on it."""
TEMPLATE = (
    "{% for one in messages %}{{ one['role'] }} {{ one['content'] }} "
    "{% for call in one.get('tool_calls') or [] %}{{ call['function']['name'] }} "
    "{{ call['function']['arguments'] | tojson }} {% endfor %}<eos> {% endfor %}"
)


class Agent:
    """A ``rollout_func`` of two or three turns: words, tool output, words; the trainer's log-probs plus noise as mu.

    Args:
        noise: standard deviation of the noise, nats.
        post_noise: that of the tokens behind the first tool output.
        changed: index of the first row whose ids are not those that were sampled, None = all are.
    """

    def __init__(self, *, noise: float = 0.1, post_noise: float | None = None, changed: int | None = None) -> None:
        self.noise, self.post_noise, self.changed = noise, noise if post_noise is None else post_noise, changed
        self.random = torch.Generator().manual_seed(0)
        self.garbage = GARBAGE
        self.says_ids = True

    @torch.no_grad()
    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        rows = [self._row(trainer.model, ids, i) for i, ids in enumerate(prompt_ids)]
        completions, masks, logprobs = (list(part) for part in zip(*rows, strict=True))
        sampled = [[t for t, own in zip(*row, strict=True) if own] for row in zip(completions, masks, strict=True)]
        if self.changed is not None:
            sampled[self.changed] = [sampled[self.changed][0], FIRST_WORD + 99, *sampled[self.changed][2:]]
        output = {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs, "env_mask": masks}
        return {**output, "sampled_ids": sampled} if self.says_ids else output

    def _row(self, model: Any, prompt: list[int], index: int) -> tuple[list[int], list[int], list[float]]:
        turns = [self._words() for _ in range(2 + index % 2)]
        ids, mask, after = [*turns[0]], [1] * len(turns[0]), [0] * len(turns[0])
        for turn in turns[1:]:
            ids += [*TOOL_WORDS, *turn]
            mask += [0] * len(TOOL_WORDS) + [1] * len(turn)
            after += [1] * (len(TOOL_WORDS) + len(turn))
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        true = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        scale = torch.tensor([self.post_noise if late else self.noise for late in after])
        noisy = true + scale * torch.randn(len(ids), generator=self.random)
        own = torch.tensor(mask).bool()
        return ids, mask, torch.where(own, noisy, torch.tensor(self.garbage)).tolist()

    def _words(self) -> list[int]:
        length = int(torch.randint(2, 4, (), generator=self.random))
        return torch.randint(FIRST_WORD, len(VOCABULARY) - 30, (length,), generator=self.random).tolist()


def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.

    Returns:
        Three words.
    """
    return " ".join(VOCABULARY[i] for i in TOOL_WORDS)


def tool_tokenizer() -> Any:
    """The word tokenizer with a template for tools, that reads a reply whose first word is even as a tool call."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = {"defaults": {"role": "assistant"}}  # TRL asks whether there is one

    def parse_response(ids: list[int], **_: Any) -> dict[str, Any]:
        text = tokenizer.decode([token for token in ids if token != EOS])
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if ids and ids[0] % 2 == 0:
            call = {"name": "lookup", "arguments": {"word": text.split(" ")[0]}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        return message

    tokenizer.parse_response = parse_response
    return tokenizer


def closed(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.

    Returns:
        Nothing.
    """
    raise OSError("the library is closed")


closed.__name__ = "lookup"


def count_letters(completions: Any, **_: Any) -> list[float]:
    """A reward that differs within every group."""
    return [float(sum(map(ord, str(one))) % 7) for one in completions]


class Library:
    """An environment with that tool, whose reward says how often it was asked and how long the prompt is.

    ``made`` counts the instances.
    """

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.asked = 0

    def reset(self, prompt: Any, **_: Any) -> str:
        """Begin again; tells the model something."""
        self.asked, self.about = 0, prompt[-1]["content"]
        return " w7"

    def lookup(self, word: str) -> str:
        """Look a word up.

        Args:
            word: The word.

        Returns:
            Three words.
        """
        self.asked += 1
        return lookup(word)

    def get_reward(self) -> float:
        """What it was asked, and what of."""
        return self.asked + len(self.about) / 100


def conversations(count: int = 8) -> list[dict[str, Any]]:
    """Prompts as messages, all different."""
    return [{"prompt": [{"role": "user", "content": " ".join(WORDS[i : i + 1 + i % 3])}]} for i in range(count)]


def first_prompts(count: int = 2) -> list[list[int]]:
    """Token ids of the first conversations."""
    prompts = [row["prompt"] for row in conversations(count)]
    found = tool_tokenizer().apply_chat_template(prompts, tools=[lookup], add_generation_prompt=True)
    ids: list[list[int]] = found["input_ids"]
    return ids


def turns(mask: np.ndarray) -> int:
    """Number of turns of a completion, by its mask of sampled tokens, (T,) bool."""
    return int((mask & ~np.concatenate([[False], mask[:-1]])).sum())
