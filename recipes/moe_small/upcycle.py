"""Make a small mixture of experts from a dense Llama: "sparse upcycling" (Komatsuzaki et al. 2022, arXiv:2212.05055).

    python recipes/moe_small/upcycle.py [--model DIR] [--output DIR] [--experts 4] [--chosen 2] [--noise 0.1]

Every expert is the dense feed-forward network plus noise, and the routers are random. Without noise the mixture
computes what the dense model does, whatever the routers choose. The result is a Mixtral, which transformers and vLLM
both load.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

CACHE = Path(__file__).resolve().parents[2] / ".cache"
MARKER = "upcycling-complete"
COMMON = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "pad_token_id",
    "bos_token_id", "eos_token_id", "rope_parameters",
)  # fmt: skip
"""Options that a Llama and a Mixtral share."""


def mixture_config(dense: LlamaConfig, experts: int, chosen: int) -> MixtralConfig:
    """The shape of the mixture.

    Args:
        dense: of the model whose feed-forward networks become experts.
        experts: their number in a layer.
        chosen: how many of them compute each token.

    Raises:
        ValueError: a number that cannot be, or a model with biases, which a Mixtral does not have.
    """
    if not 1 <= chosen <= experts:
        raise ValueError(f"chosen must be from 1 to {experts} (the number of experts), but got {chosen}.")
    if dense.attention_bias or dense.mlp_bias:
        raise ValueError("model must be a Llama without biases, but its attention or feed-forward network has them.")
    common = {name: getattr(dense, name) for name in COMMON}
    return MixtralConfig(**common, num_local_experts=experts, num_experts_per_tok=chosen, sliding_window=None)


@torch.no_grad()
def upcycled(
    dense: LlamaForCausalLM, *, experts: int = 4, chosen: int = 2, noise: float = 0.1, seed: int = 0
) -> MixtralForCausalLM:
    """The mixture of experts.

    Args:
        dense: the model whose feed-forward networks become experts; it is not changed.
        experts: their number in a layer.
        chosen: how many of them compute each token; their weights sum to 1.
        noise: standard deviation of what is added to an expert's matrix, as a share of that of the matrix. With 0 all
            experts are equal, and so is what the mixture computes.
        seed: of noise and routers.

    Raises:
        ValueError: see :func:`mixture_config`.
    """
    random = torch.Generator().manual_seed(seed)
    moe = MixtralForCausalLM(mixture_config(dense.config, experts, chosen)).to(dense.dtype)
    # attention, norms, embeddings and head have the same names in both
    missing, _ = moe.load_state_dict(dense.state_dict(), strict=False)
    for name in missing:
        if ".mlp." not in name:
            raise ValueError(f"model must be a Llama, but it has no {name}.")
    for before, after in zip(dense.model.layers, moe.model.layers, strict=True):
        fused = torch.cat([before.mlp.gate_proj.weight, before.mlp.up_proj.weight])
        _fill(after.mlp.experts.gate_up_proj, fused, noise, random)
        _fill(after.mlp.experts.down_proj, before.mlp.down_proj.weight, noise, random)
        # inputs of a router are normalised, so that its logits have a standard deviation near 1
        after.mlp.gate.weight.normal_(std=dense.config.hidden_size**-0.5, generator=random)
    return moe


def _fill(stack: Tensor, matrix: Tensor, noise: float, random: torch.Generator) -> None:
    """Set every expert's matrix of ``stack`` (experts, out, in) to ``matrix`` (out, in) plus noise of its own."""
    for expert in stack:
        own = torch.randn(matrix.shape, generator=random)
        expert.copy_(matrix + noise * matrix.std() * own)


def main() -> int:
    """Make the mixture if it is not there; print its folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=CACHE / "SmolLM2-135M-Instruct", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=CACHE / "SmolLM2-MoE-4x135M", help="default: %(default)s")
    parser.add_argument("--experts", type=int, default=4, help="in each layer (default: %(default)s)")
    parser.add_argument("--chosen", type=int, default=2, help="experts that compute a token (default: %(default)s)")
    parser.add_argument("--noise", type=float, default=0.1, help="of experts, relative (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    args = parser.parse_args()
    options = {name: getattr(args, name) for name in ("experts", "chosen", "noise", "seed")}
    made = f"{args.model.resolve().name}, {options}\n"
    marker = args.output / MARKER
    if marker.exists() and marker.read_text() != made:
        parser.error(f"--output must be another folder: {args.output} holds {marker.read_text().strip()}.")
    if not marker.exists():
        if args.output.exists() and any(args.output.iterdir()):
            parser.error(f"--output must be a new or an empty folder, but {args.output} holds something else.")
        if not (args.model / "config.json").exists():
            parser.error(
                f"--model must be a folder with a Llama, but got {args.model}. `make model` prepares the default."
            )
        _save(upcycled(LlamaForCausalLM.from_pretrained(args.model), **options), args.model, args.output, made)
    print(f"model ready: {args.output}")
    return 0


def _save(moe: MixtralForCausalLM, source: Path, output: Path, made: str) -> None:
    """Written beside the target and renamed, so that a part of a model is never taken for one."""
    temporary = output.with_name(output.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    moe.save_pretrained(temporary)
    AutoTokenizer.from_pretrained(source).save_pretrained(temporary)
    (temporary / "README.md").write_text(f"A mixture of experts made by recipes/moe_small/upcycle.py from {made}")
    (temporary / MARKER).write_text(made)
    temporary.rename(output)


if __name__ == "__main__":
    sys.exit(main())
