"""OffPolicyObserver on a module that is somebody else's, on two processes or on one.

python tests/lightning/observer_run.py FOLDER one|ddp|fsdp2

``one`` has in each of its batches those of both ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lightning_runs import trainer
from lightning_shards import strategy_of
from lightning_strangers import BATCHES, LENGTH, ROWS, Stranger
from tiny_models import tiny_tokenizer

from lightning_module import OffPolicyObserver, models


class OfRank(Stranger):
    """Its engine's log-probs are shifted and noisy by the words, and its rewards are those of the rows' words."""

    def __init__(self, ranks: int) -> None:
        super().__init__(self.with_noise)
        self.ranks = ranks

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            models.shard(self.model, self.device_mesh)

    @staticmethod
    def with_noise(loss: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        ids = tensors["completion_ids"]
        rewards = (ids.sum(1) % 7).float()
        mask = torch.arange(ids.shape[1]) < 2 + ids[:, :1] % (LENGTH - 1)  # of several lengths
        sampling = tensors["sampling_per_token_logps"] + 0.2 * ids.float().sin()
        loss = -(torch.where(mask, tensors["per_token_logps"], 0.0).sum(1) * rewards).mean() / LENGTH
        groups = {"rewards": rewards, "advantages": rewards - 3.0}
        return {"loss": loss, **tensors, **groups, "completion_mask": mask, "sampling_per_token_logps": sampling}

    def train_dataloader(self) -> Any:
        random = torch.Generator().manual_seed(3)
        batches = [torch.randint(3, 128, (ROWS, LENGTH + 1), generator=random) for _ in range(BATCHES)]
        if self.ranks == 1:
            batches = [torch.cat(pair) for pair in zip(batches[::2], batches[1::2], strict=True)]
        else:
            batches = batches[self.trainer.global_rank :: 2]
        return torch.utils.data.DataLoader(batches, batch_size=None)


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    ranks = 1 if kind == "one" else 2
    observer = OffPolicyObserver(method="paper/tis", tokenizer=tiny_tokenizer())
    owner = trainer(folder / kind, max_epochs=1, devices=ranks, strategy=strategy_of(kind, on_gpu=False),
                    callbacks=[observer], use_distributed_sampler=False)  # fmt: skip
    owner.fit(OfRank(ranks))
    logged = {name: float(value) for name, value in owner.callback_metrics.items() if name.startswith("offpolicy")}
    torch.save(logged, folder / f"{kind}-{owner.global_rank}.pt")


if __name__ == "__main__":
    main()
