"""Steps on two processes under a strategy of Lightning, or on one; every rank leaves what it saw.

python tests/lightning/sharded_run.py FOLDER one|ddp|fsdp2|fsdp|zero3 [--lora] [--named] [--resume] [--share] [--gpu]

Two steps, a validation and a checkpoint; with --resume one step more from that checkpoint. With --named the model is
loaded from FOLDER/model, with --share each prompt is computed once. ``one`` is one process, which has the rows of both.
At the end the model is written for ``from_pretrained``.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import lightning.pytorch as pl
from lightning_runs import Played, data, module, trainer
from lightning_shards import LORA, PROMPTS, Shards, strategy_of
from tiny_models import tiny_model
from torch.distributed.tensor import DTensor
from trainer_runs import MICRO_BATCH, Engine

from lightning_module import SaveModel
from trl_offpolicy.rollouts.scoring import sequence_logps

STEPS = 2


class Words(Played):
    """Words by prompt, log-probs near -5. It keeps the weights of the last sync, and scores the probe with them."""

    def __init__(self) -> None:
        super().__init__([])
        self.weights: dict[str, torch.Tensor] = {}

    def sync_weights(self, version: int) -> Any:
        self.weights = {name: value.detach().clone() for name, value in self.source.merged()}
        return super().sync_weights(version)

    def generate(self, prompt_ids: Any, sampling: Any, *, n: int = 1) -> Any:
        prompts = [list(ids) for ids in prompt_ids for _ in range(n)]
        words, completions = Engine(), []
        for ids in prompt_ids:
            words.random.manual_seed(sum(ids))
            completions += [words._words() for _ in range(n)]
        logprobs = [[-5.0] * len(ids) for ids in completions]
        call = {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}
        self.calls = [*self.calls[: len(self.prompts)], call]
        return super().generate(prompt_ids, sampling, n=n)

    def score(self, ids: Any) -> list[list[float]]:
        own = tiny_model(seed=9)
        own.load_state_dict({name: value.cpu() for name, value in self.weights.items()})
        return sequence_logps(own, ids, pad=0)


def share_of_rank(policy: Any, whole: int) -> float:
    """The share of the policy's elements that this rank holds. Under ZeRO-3 parameters have a ``ds_tensor``."""

    def local(parameter: torch.nn.Parameter) -> torch.Tensor:
        if isinstance(parameter, DTensor):
            return parameter.to_local()
        return getattr(parameter, "ds_tensor", parameter)

    return sum(local(parameter).numel() for parameter in policy.parameters()) / whole


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind")
    for flag in ("--lora", "--named", "--resume", "--share", "--gpu"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    name = given.kind + "-lora" * given.lora + "-share" * given.share
    watch, engine = Shards(), Words()
    saver, ranks = SaveModel(str(given.folder / f"{name}-model")), 1 if given.kind == "one" else 2
    ours = module(engine, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5), correction="paper/tis",
                  adapter=LORA if given.lora else None, sync_check=True,
                  share_prefix=given.share, gradient_checkpointing=given.share,
                  model=str(given.folder / "model") if given.named else tiny_model())  # fmt: skip
    owner = trainer(given.folder, devices=ranks, strategy=strategy_of(given.kind, on_gpu=given.gpu),
                    callbacks=[watch, saver], accelerator="gpu" if given.gpu else "cpu",
                    max_steps=STEPS + given.resume, val_check_interval=1, limit_val_batches=1)  # fmt: skip
    checkpoint = given.folder / f"{name}.ckpt"
    sizes = {"micro_batch_size": 2 * MICRO_BATCH // ranks, "val_batch_size": 4 // ranks}
    prompts = data(PROMPTS[4:], val_dataset=PROMPTS[:4], **sizes)
    shared: list[None] = []  # forwards in which a prompt was computed once
    once = ours.compact._shared.context
    ours.compact._shared.context = lambda *args: (shared.append(None), once(*args))[1]
    owner.fit(ours, prompts, ckpt_path=checkpoint if given.resume else None)
    if not given.resume:
        owner.save_checkpoint(checkpoint)
    whole = sum(value.numel() for value in watch.weights[0].values())
    seen = {
        "weights": watch.weights, "logs": watch.logs, "world": owner.world_size, "engine": engine.weights,
        "share": share_of_rank(ours.policy, whole), "shared": len(shared),
        "reward": float(owner.callback_metrics["eval_reward"]),
    }  # fmt: skip
    torch.save(seen, given.folder / f"{name}{'-resumed' * given.resume}-{owner.global_rank}.pt")


if __name__ == "__main__":
    main()
