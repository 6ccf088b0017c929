"""Two steps on two processes under a strategy of Lightning; every rank leaves what it saw.

python tests/lightning/sharded_run.py FOLDER ddp|fsdp2|fsdp|zero3    # the last two need two GPUs
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning_runs import Played, Watch, data, module, trainer
from torch.distributed.tensor import DTensor
from trainer_runs import Engine
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class Words(Played):
    """Words by prompt, log-probs near -5; what was synced is kept."""

    def __init__(self) -> None:
        super().__init__([])
        self.weights: dict[str, torch.Tensor] = {}

    def sync_weights(self, version: int) -> Any:
        self.weights = {name: value.detach().clone() for name, value in self.source.merged()}
        return super().sync_weights(version)

    def generate(self, prompt_ids: Any, sampling: Any, *, n: int = 1) -> Any:
        prompts = [list(ids) for ids in prompt_ids for _ in range(n)]
        words = Engine()
        words.random.manual_seed(sum(map(sum, prompts)))
        completions = [words._words() for _ in prompts]
        logprobs = [[-5.0] * len(ids) for ids in completions]
        self.calls.append({"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs})
        return super().generate(prompt_ids, sampling, n=n)


class Shards(Watch):
    """Keeps full weights after each step."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pass

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        named = pl_module.policy.named_parameters()
        full = {name: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in named}
        self.weights.append({name: value.clone() for name, value in full.items()})
        self.logs.append(dict(pl_module.step_logs))


def main() -> None:
    torch.set_num_threads(1)
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    pl.seed_everything(1, verbose=False)
    on_gpu = kind in ("fsdp", "zero3")
    sharded = {"data_parallel_size": 2, "tensor_parallel_size": 1, "process_group_backend": "gloo"}
    strategy = {
        "ddp": lambda: "ddp",
        "fsdp2": lambda: ModelParallelStrategy(**sharded),
        "fsdp": lambda: FSDPStrategy(auto_wrap_policy={LlamaDecoderLayer}),
        "zero3": lambda: DeepSpeedStrategy(stage=3),
    }[kind]()
    watch, engine = Shards(), Words()
    ours = module(engine, optimizer=partial(torch.optim.SGD, lr=0.1), correction="paper/tis")
    owner = trainer(folder, devices=2, strategy=strategy, max_steps=2, callbacks=[watch],
                    accelerator="gpu" if on_gpu else "cpu")  # fmt: skip
    owner.fit(ours, data())
    parameters = list(ours.policy.parameters())
    local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    seen = {
        "weights": watch.weights, "logs": watch.logs, "world": owner.world_size, "engine": engine.weights,
        "sharded": all(isinstance(p, DTensor) for p in parameters),
        "share": local / sum(p.numel() for p in parameters),
    }  # fmt: skip
    torch.save(seen, folder / f"{kind}-{owner.global_rank}.pt")


if __name__ == "__main__":
    main()
