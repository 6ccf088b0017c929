"""Syncs of merged LoRA weights to a real vLLM in this process, of which only the changed travel; prints one JSON line.

    python tests/engines/changed_run.py FOLDER KIND [--target o_proj] [--spoil]

KIND names a tiny model. ``--spoil`` changes the engine behind the trainer's back, as another process might, in weights
that the next sync would leave out.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from trl_offpolicy.engines.colocate import ColocateEngine, reload_in_process
from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.engines.sync import WeightSync
from trl_offpolicy.engines.sync_watch import WatchedSource
from trl_offpolicy.engines.weights.source import ModelWeights
from trl_offpolicy.rollouts.scoring import sequence_logps

PROBE = [[5, 6, 7, 20, 33, 4], [8, 9, 10, 11]]
STEPS = 4


def main() -> None:
    """Sync, step, sync, ...; after each, compare engine and trainer on tokens that the proof has not seen."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind")
    parser.add_argument("--target", default="o_proj")
    parser.add_argument("--spoil", action="store_true")
    options = parser.parse_args()
    path = save_tiny_model(options.folder / "model", options.kind)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=[options.target], task_type="CAUSAL_LM"))
    engine = ColocateEngine(str(path), dtype="float32", max_model_len=64, enforce_eager=True, max_num_seqs=8)
    sync = WeightSync(PROBE, lambda ids: sequence_logps(model, ids, pad=0))
    engine.bind(WatchedSource(ModelWeights(model), sync.watch))
    total = sum(tensor.nbytes for _, tensor in ModelWeights(model).merged())
    unseen = [[40, 41, 42, 43, 44, 45, 46]]
    reports, apart, moved, before = [], [], [], None
    for version in range(STEPS):
        if options.spoil and version == 2:
            other = [(name, torch.randn_like(t)) for name, t in ModelWeights(model).merged() if "embed" in name]
            reload_in_process(engine.llm, other, part=True)
        report = sync(version, send=engine.sync_weights, answer=engine.score, confirm=engine.confirm)
        reports.append(asdict(report))
        own, its = sequence_logps(model, unseen, pad=0)[0], engine.score(unseen)[0]
        apart.append(max(abs(a - b) for a, b in zip(own, its, strict=True)))
        moved += [] if before is None else [max(abs(a - b) for a, b in zip(own, before, strict=True))]
        before = own
        engine.generate(PROBE, Sampling(max_tokens=4))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
    print(json.dumps({"total": total, "reports": reports, "apart": apart, "moved": moved}))


if __name__ == "__main__":
    main()
