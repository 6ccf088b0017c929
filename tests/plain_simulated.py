"""What a simulated engine should sample from, and log-probs of a batch, without the trainers."""

from __future__ import annotations

import copy
from typing import Any

import torch

from trl_offpolicy.engines.kv_cache import KVCache, set_kv_cache
from trl_offpolicy.engines.rounding import parse_rounding, round_weights

SPARSE = {"keep_first": 1, "keep_last": 2}


def as_the_engine(model: Any, engine: dict[str, Any]) -> Any:
    """A copy that holds rounded weights and has the cache, without a trainer."""
    other = copy.deepcopy(model)
    if "weight_rounding" in engine:
        rounding = parse_rounding(engine["weight_rounding"])
        other.load_state_dict(dict(round_weights(model.state_dict().items(), rounding)))
    if "kv_cache" in engine:
        set_kv_cache(other, KVCache(**engine["kv_cache"]))
    return other


@torch.no_grad()
def logps(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """(B, T), one row at a time and without padding."""
    found = torch.zeros(batch["completion_ids"].shape)
    for row, (prompt, completion) in enumerate(zip(batch["prompt_ids"], batch["completion_ids"], strict=True)):
        prompt = prompt[batch["prompt_mask"][row].bool()]
        completion = completion[batch["completion_mask"][row].bool()]
        logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        found[row, : len(completion)] = logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]
    return found
