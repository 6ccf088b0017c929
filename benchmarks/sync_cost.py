"""What a weight sync costs, by transfer: SmolLM2-135M, LoRA r 16 on all linear layers.

    python benchmarks/sync_cost.py [--model FOLDER]

Starts an engine in this process and a vLLM server; prints bytes and seconds of a sync, and seconds to sample 16 x 24
tokens.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from trl_offpolicy.engines.colocate import ColocateEngine
from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.engines.server import ServerEngine
from trl_offpolicy.engines.server.client import ServerClient
from trl_offpolicy.engines.weights import ModelWeights

PORT = 8765
MEMORY = Path("/dev/shm")
"""A file system in memory, on Linux."""
PROMPTS = [list(range(100 + i, 140 + i)) for i in range(2)]
SAMPLING = Sampling(max_tokens=24, extra={"ignore_eos": True})


def measure(name: str, engine: Any, model: Any) -> None:
    """Two syncs (the first warms up), two generations; prints a row."""
    engine.bind(ModelWeights(model))
    engine.sync_weights(0)
    report = engine.sync_weights(1)
    engine.generate(PROMPTS, SAMPLING, n=8)
    start = time.perf_counter()
    engine.generate(PROMPTS, SAMPLING, n=8)
    sampling = time.perf_counter() - start
    print(f"{name:<28} {report.bytes / 1e6:9.1f} MB {report.seconds:7.2f} s a sync {sampling:7.2f} s to sample")


def main() -> None:
    """Measure all transfers that run here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/SmolLM2-135M-Instruct")
    path = str(Path(parser.parse_args().model).resolve())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, rank in (("colocate, memory (merged)", 0), ("colocate, adapter", 16)):
        engine: Any = ColocateEngine(path, dtype="float32", adapter_rank=rank, max_model_len=256, max_num_seqs=32)
        measure(name, engine, model)
        engine.close()
    command = [sys.executable, "-m", "trl_offpolicy.cli", "serve", "--model", path, "--port", str(PORT)]
    command += ["--lora-rank", "16", "--max-model-len", "256", "--beside-leftovers", "--", "--max-num-seqs", "32"]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{PORT}"
            ServerClient(url).wait_until_up()
            for transfer in ("adapter", "folder", "broadcast"):
                measure(f"server, {transfer}", ServerEngine(url, folder=folder + "/w", transfer=transfer), model)
            if MEMORY.is_dir():
                with tempfile.TemporaryDirectory(dir=MEMORY) as shared:
                    measure(
                        "server, folder in memory", ServerEngine(url, folder=shared + "/w", transfer="folder"), model
                    )
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
