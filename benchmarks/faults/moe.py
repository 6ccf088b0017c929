"""A tiny mixture of experts, and routers that decide in a lower precision than the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trl_offpolicy.diagnosis.attribution.contexts.precision import round_significant

EXPERTS = 8
VOCABULARY = 128


def tiny_moe(seed: int) -> Any:
    """Four layers, eight experts of which two answer, seeded weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = Qwen3MoeConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=EXPERTS, num_experts_per_tok=2,
            max_position_embeddings=256, initializer_range=0.25, tie_word_embeddings=False, eos_token_id=1,
        )  # fmt: skip
        return Qwen3MoeForCausalLM(config).eval()


@contextmanager
def rough_router(model: Any, bits: int, *, select_only: bool) -> Iterator[None]:
    """Routers see their input rounded to ``bits`` significant digits: some tokens go to other experts.

    Args:
        model: the mixture.
        bits: 8 = a router in bfloat16.
        select_only: only the choice is made so; the chosen experts' weights are the exact ones.
    """
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    originals = [gate.forward for gate in gates]

    def rough(original: Any, gate: Any) -> Any:
        def forward(hidden: Any) -> Any:
            result = original(round_significant(hidden, bits))
            if not select_only:
                return result
            logits, _, indices = result
            exact = (hidden.reshape(-1, gate.hidden_dim) @ gate.weight.T).softmax(-1).gather(1, indices)
            if gate.norm_topk_prob:
                exact = exact / exact.sum(-1, keepdim=True)
            return logits, exact, indices

        return forward

    for gate, original in zip(gates, originals, strict=True):
        gate.forward = rough(original, gate)
    try:
        yield
    finally:
        for gate in gates:
            del gate.forward
