"""Routing replay on a mixture of experts with a real vLLM: mismatch with and without R3, by precision of the engine.

    python benchmarks/moe_routing.py [--responses 64] [--length 48] [--seeds 3] [--json FILE]

A float32 Qwen3-MoE (four layers, eight experts of which two answer) in transformers and in vLLM. The engine's weights
are rounded at the sync; the trainer's are exact. The log-probs of the same responses are scored twice: routed freely,
and sent to the experts that the engine chose.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.faults.moe import VOCABULARY, tiny_moe
from trl_offpolicy.engines.colocate import ColocateEngine
from trl_offpolicy.engines.engine import Rollouts, Sampling
from trl_offpolicy.engines.weights import ModelWeights
from trl_offpolicy.functional.routing import ROUTING_DIAGNOSTICS, routing_moments
from trl_offpolicy.metrics import ratio_metrics
from trl_offpolicy.routing import record, replay

ROUNDINGS = ("none", "int8", "fp8", "int4", "int3")
SHOWN = ("logp_diff_mean", "logp_diff_max", "kl_k3", "chi2_token")


def prompts(count: int, *, seed: int) -> list[list[int]]:
    """Random prompts of 4 to 20 tokens."""
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 21, (count,), generator=chance).tolist()
    return [torch.randint(2, VOCABULARY, (length,), generator=chance).tolist() for length in lengths]


def padded(rows: Sequence[Any], *, fill: Any) -> Tensor:
    """Rows of different lengths, filled on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True, padding_value=fill)


@torch.no_grad()
def scored(model: Any, rollouts: Rollouts) -> dict[str, Any]:
    """Agreement of the routing, and the mismatch of free and of replayed log-probs."""
    assert rollouts.sampling_per_token_logps is not None and rollouts.routed_experts is not None
    rows = [p + c for p, c in zip(rollouts.prompt_ids, rollouts.completion_ids, strict=True)]
    ids, attended = padded(rows, fill=0), padded([[1] * len(row) for row in rows], fill=0)
    prompt_parts = [[float("nan")] * (len(prompt) - 1) for prompt in rollouts.prompt_ids]
    known = zip(prompt_parts, rollouts.sampling_per_token_logps, strict=True)
    sampling = padded([unknown + logps for unknown, logps in known], fill=float("nan"))
    # int16: vLLM's own report has as few bytes as its experts need, and -1 fits in no unsigned ones
    routes = padded([torch.as_tensor(row).to(torch.int16) for row in rollouts.routed_experts], fill=-1)
    routes = torch.nn.functional.pad(routes, (0, 0, 0, 0, 0, ids.shape[1] - routes.shape[1]), value=-1)

    def logps() -> Tensor:
        logits = model(input_ids=ids, attention_mask=attended).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)

    with record(model) as recorded:
        free = logps()
    with replay(model, routes):
        replayed = logps()
    moments = routing_moments(recorded.routed_experts, routes)
    result: dict[str, Any] = {name: float(finalize(moments)) for name, finalize in ROUTING_DIAGNOSTICS.items()}
    for name, values in (("free", free), ("replayed", replayed)):
        metrics = ratio_metrics(prefix="")
        metrics.update(values, sampling.nan_to_num(), sampling.isfinite())
        result[name] = {key: float(value) for key, value in metrics.compute().items() if key in SHOWN}
    return result


def main() -> None:
    """Print one row for each rounding and seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    with TemporaryDirectory() as folder:
        tiny_moe(0).save_pretrained(folder)
        engine = ColocateEngine(
            folder, dtype="float32", return_routing=True, skip_tokenizer_init=True, max_model_len=128, max_num_seqs=32
        )
        for seed in range(options.seeds):
            model = tiny_moe(seed)
            engine.bind(ModelWeights(model))
            for rounding in ROUNDINGS:
                engine.weight_rounding = None if rounding == "none" else rounding
                engine.sync_weights(seed)
                sampling = Sampling(max_tokens=options.length, extra={"ignore_eos": True, "detokenize": False})
                rollouts = engine.generate(prompts(options.responses, seed=seed), sampling)
                found.append({"seed": seed, "rounding": rounding, **scored(model, rollouts)})
                print(json.dumps(found[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
