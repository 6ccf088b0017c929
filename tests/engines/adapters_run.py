"""Adapters that vLLM would scale otherwise or drop a part of, to a real vLLM with a tied head; prints one JSON line.

python tests/engines/adapters_run.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from trl_offpolicy.engines.colocate import ColocateEngine
from trl_offpolicy.engines.engine import SyncError
from trl_offpolicy.engines.weights.source import Adapter, ModelWeights
from trl_offpolicy.rollouts.scoring import sequence_logps

PROBE = [[5, 6, 7, 20, 33, 4], [8, 9, 10, 11]]
LAYER = "model.layers.0.self_attn.q_proj"


def main() -> None:
    """Sync each adapter, and compare engine and trainer."""
    path = save_tiny_model(Path(sys.argv[1]) / "model", tie_word_embeddings=True)
    engine = ColocateEngine(
        str(path), dtype="float32", adapter_rank=8, max_model_len=64, enforce_eager=True, max_num_seqs=8
    )
    found: dict[str, Any] = {}
    scaled = {"alpha_pattern": {LAYER: 64}}
    # those that are sent alone come first, because merged weights replace the base on which they belong
    for name, options, kind in (
        ("plain", {}, ModelWeights),
        ("scaled, alone", scaled, Alone),
        ("scaled", scaled, ModelWeights),
        ("pissa", {"init_lora_weights": "pissa"}, ModelWeights),
    ):
        model = adapted(path, **options)
        engine.bind(kind(model))
        found[name] = [engine.sync_weights(len(found)).kind, apart(engine, model)]
    model = adapted(path, modules_to_save=["lm_head"])
    engine.bind(ModelWeights(model))
    try:
        found["head"] = [engine.sync_weights(len(found)).kind, apart(engine, model)]
    except SyncError as error:
        found["head"] = [str(error)]
    print(json.dumps(found))


class Alone(ModelWeights):
    """Sends an adapter alone although it does not stand alone."""

    def adapter(self) -> Adapter:
        """The adapter as PEFT saves it."""
        from peft import get_peft_model_state_dict

        config = self.model.peft_config["default"].to_dict()
        plain = {name: value for name, value in config.items() if isinstance(value, int | float | str | dict | None)}
        tensors = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(self.model).items()}
        return Adapter({**plain, "target_modules": ["q_proj"]}, tensors)


def adapted(path: Path, **options: Any) -> Any:
    """A PEFT model whose adapter, and saved head, have been trained."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                scale = 0.2 if "lora_" in name else 0.05
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def apart(engine: ColocateEngine, model: Any) -> float:
    """Largest difference of the log-probs, nats."""
    own, its = sequence_logps(model, PROBE, pad=0), engine.score(PROBE)
    return max(abs(a - b) for row, other in zip(own, its, strict=True) for a, b in zip(row, other, strict=True))


if __name__ == "__main__":
    main()
