"""Seconds of a training step in turn and one generation ahead, with a real vLLM server and the real trainer.

    python benchmarks/async_step_time.py [--model FOLDER] [--rows 8] [--length 48] [--steps 5] [--shared]

The server is pinned to one core and the trainer to another in both modes, so that neither gains a core by waiting for
the other; with ``--shared`` both are pinned to the same one (there is nothing to gain then but waiting). LoRA, float32,
responses of a fixed length. Prints the median step of each mode without the first and the last (nothing is sampled
beside it), what it is made of, the ratio, and the ratio that perfect overlap would give:
(sample + learn + sync) / (max(sample, learn) + sync).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from trl_offpolicy.config import OffPolicyGRPOConfig
from trl_offpolicy.engines.server.client import ServerClient
from trl_offpolicy.trainer import OffPolicyGRPOTrainer

PORT = 8766
INNER = slice(1, -1)
"""The steps that count."""


class Clock(TrainerCallback):
    """Wall clock at the end of every step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """One more step."""
        self.ends.append(time.perf_counter())

    @property
    def step(self) -> float:
        """Median seconds of a step."""
        return statistics.median([b - a for a, b in pairwise(self.ends)][: INNER.stop])


@dataclass(frozen=True)
class Mode:
    """Median seconds: of a step, of the time that the trainer waited for rollouts in it, of its sync."""

    step: float
    wait: float
    sync: float


def train(options: argparse.Namespace, ahead: dict[str, Any]) -> Mode:
    """One short run."""
    prompts = [f"What is {i % 10} + {i // 10}? Explain step by step." for i in range(100)]
    with tempfile.TemporaryDirectory() as folder:
        args = OffPolicyGRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            use_vllm=True, vllm_mode="server", vllm_server_base_url=f"http://127.0.0.1:{PORT}",
            async_rollouts=ahead, offpolicy="paper/tis", engine={"transfer": options.transfer},
            generation_kwargs={"ignore_eos": True}, per_device_train_batch_size=options.rows, num_generations=4,
            max_completion_length=options.length, max_steps=options.steps, logging_steps=1, learning_rate=1e-5,
            save_strategy="no", write_report=False, noise_floor_steps=0, control=None, disable_tqdm=True,
        )  # fmt: skip
        clock = Clock()
        trainer = OffPolicyGRPOTrainer(
            options.model, lambda completions, **_: [float(len(text) % 5) for text in completions], args,
            train_dataset=Dataset.from_dict({"prompt": prompts}), callbacks=[clock],
            peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
        )  # fmt: skip
        trainer.train()
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if "loss" in row][INNER]
    seen = {
        name: statistics.median([row[key] for row in rows if (key := f"offpolicy/rollout/{name}") in row] or [0.0])
        for name in ("wait_seconds", "sync_seconds")
    }
    return Mode(clock.step, seen["wait_seconds"], seen["sync_seconds"])


def serve(options: argparse.Namespace, log: Any, core: int) -> subprocess.Popen[bytes]:
    """A server on one core."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "trl_offpolicy", "serve"]
    command += ["--model", options.model, "--port", str(PORT), "--max-model-len", "256"]
    command += ["--lora-rank", "8"] if options.transfer == "adapter" else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": str(core), "VLLM_CPU_KVCACHE_SPACE": "1"}
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def show(in_turn: Mode, ahead: Mode) -> None:
    """The table of one run."""
    print(f"{'':<12}{'step':>9}{'waiting':>9}{'sync':>9}   seconds (medians)")
    for name, mode in (("in turn", in_turn), ("one ahead", ahead)):
        print(f"{name:<12}{mode.step:9.2f}{mode.wait:9.2f}{mode.sync:9.2f}")
    sample, sync = in_turn.wait, in_turn.sync
    learn = in_turn.step - sample - sync
    print(f"sampling {sample:.2f} s, learning {learn:.2f} s: perfect overlap would give ", end="")
    print(f"{in_turn.step / (max(sample, learn) + sync):.2f}")
    print(f"in turn / one ahead = {in_turn.step / ahead.step:.2f}")


def main() -> None:
    """Both modes against one server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--transfer", choices=["folder", "adapter"], default="folder")
    parser.add_argument("--shared", action="store_true", help="both on one core")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    own, other = (cores[0], cores[0]) if options.shared else (cores[0], cores[1])
    os.sched_setaffinity(0, {own})
    with tempfile.TemporaryFile() as log:
        server = serve(options, log, other)
        try:
            ServerClient(f"http://127.0.0.1:{PORT}").wait_until_up(300)
            in_turn, ahead = (train(options, {"lag": lag}) for lag in (0, 1))
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    print(f"trainer on core {own}, server on core {other}")
    show(in_turn, ahead)


if __name__ == "__main__":
    main()
