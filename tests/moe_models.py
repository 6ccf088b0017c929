"""One tiny mixture of experts of each architecture whose routing can be replayed; float32, seeded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

EXPERTS, TOP_K, LAYERS, VOCABULARY = 8, 2, 3, 64
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "num_experts_per_tok": TOP_K,
}
_DEEPSEEK = {
    "moe_intermediate_size": 32, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
KINDS = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_SHAPE, head_dim=16, num_experts=EXPERTS, moe_intermediate_size=32, norm_topk_prob=True)
    ),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**_SHAPE, num_experts=EXPERTS)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_SHAPE, num_local_experts=EXPERTS)),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**_SHAPE, **_DEEPSEEK)),
}
"""DeepSeek-V3 has a dense first layer, two groups of experts and a correction bias."""


def moe_model(kind: str = "qwen3_moe", *, seed: int = 0) -> Any:
    """Three layers, eight experts of which two answer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = KINDS[kind]()
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("mlp.gate.weight", "e_score_correction_bias")):
                torch.nn.init.normal_(weight, std=0.25)
        return model.eval()


def batch(rows: int = 3, length: int = 7, *, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, attention mask), the first row left-padded, the last right-padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :2], mask[-1, -2:] = 0, 0
    return ids.masked_fill(mask == 0, 0), mask
