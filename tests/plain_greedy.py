"""The greedy completion of a prompt, token by token from the model's plain logits."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def plain_greedy(model: Any, prompt: list[int], *, length: int, ends: set[int]) -> list[int]:
    """Up to ``length`` tokens, each the most likely one; the last one may be one of ``ends``."""
    found: list[int] = []
    while len(found) < length and not (found and found[-1] in ends):
        found.append(int(model(input_ids=torch.tensor([prompt + found])).logits[0, -1].argmax()))
    return found
