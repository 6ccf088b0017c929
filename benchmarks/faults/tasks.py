"""Prompts of the suite: procedural tasks of reasoning-gym, rendered with the model's chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KINDS = ("basic_arithmetic", "letter_counting", "spell_backward", "calendar_arithmetic", "chain_sum", "gcd")
SYSTEM = "Think step by step."


@dataclass(frozen=True)
class Row:
    """One prompt."""

    question: str
    answer: str
    prompt_ids: list[int]


class Task:
    """Makes prompts; another seed gives others."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def rows(self, count: int, *, seed: int) -> list[Row]:
        import reasoning_gym

        found = []
        for place in range(count):
            kind = KINDS[(seed + place) % len(KINDS)]
            item = reasoning_gym.create_dataset(kind, size=1, seed=97 * seed + place)[0]
            found.append(Row(item["question"], str(item["answer"]), self.render(item["question"])))
        return found

    def render(
        self, question: str, *, system: str | None = SYSTEM, template: bool = True, generation: bool = True
    ) -> list[int]:
        """Token ids of a question as a chat prompt, or as plain text."""
        if not template:
            return list(self.tokenizer(question)["input_ids"])
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": question})
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=generation, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def reward(text: str, answer: str) -> float:
    """Right answer in the text, and a little for short words: groups need spread from the start."""
    words = text.split()
    return float(answer in text) + 0.5 * sum(len(word) <= 4 for word in words) / max(1, len(words))
