"""A real engine with prefix caching: weights are replaced with and without a reset of the cache; prints one JSON line.

    python tests/engines/prefix_cache_run.py FOLDER

For each case the largest |log mu - log pi| of sampled tokens, pi being transformers with the new weights, and the
difference that the proof of a sync (prompt log-probs) sees.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_models import save_tiny_model, tiny_model

from trl_offpolicy.engines import colocate
from trl_offpolicy.engines.colocate import ColocateEngine, score_in_process
from trl_offpolicy.engines.engine import Sampling

PROMPT = list(range(3, 43))
"""Longer than a block of the cache."""


@torch.no_grad()
def trainer_logps(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def measure(engine: ColocateEngine, model: Any) -> dict[str, float]:
    """Largest differences in nats on fresh samples, and on the probe of the sync check."""
    rollouts = engine.generate([PROMPT], Sampling(max_tokens=12), n=8)
    assert rollouts.sampling_per_token_logps is not None
    gaps = [
        (trainer_logps(model, PROMPT, ids) - torch.tensor(logps)).abs().max().item()
        for ids, logps in zip(rollouts.completion_ids, rollouts.sampling_per_token_logps, strict=True)
    ]
    probe = torch.tensor(score_in_process(engine.llm, [PROMPT])[0])
    return {"sampled": max(gaps), "probe": (trainer_logps(model, PROMPT[:1], PROMPT[1:]) - probe).abs().max().item()}


def main() -> None:
    """Same weights; new ones without a reset; the same with it."""
    folder = save_tiny_model(Path(sys.argv[1]) / "model")
    engine = ColocateEngine(str(folder), dtype="float32", max_model_len=64, enable_prefix_caching=True, block_size=32)
    before, after = tiny_model(), tiny_model(seed=1)
    found = {"same weights": measure(engine, before)}
    reset = colocate.reset_prefix_cache
    colocate.reset_prefix_cache = lambda llm: None  # type: ignore[assignment]
    colocate.reload_in_process(engine.llm, after.named_parameters())
    found["kept"] = measure(engine, after)
    colocate.reset_prefix_cache = reset
    reset(engine.llm)
    found["reset"] = measure(engine, after)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
