"""A LightningModule that knows nothing of this kit."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from tiny_models import tiny_model

SHIFT, ROWS, LENGTH, BATCHES = 0.3, 4, 6, 6


class Stranger(pl.LightningModule):
    """REINFORCE on given words, as somebody else may write it. The engine is too sure of every token.

    Args:
        returns: turns the tensors of a step into what it returns.
        shift: by how many nats the engine's log-probs are too large.
    """

    def __init__(self, returns: Any = lambda loss, tensors: {"loss": loss, **tensors}, *, shift: float = SHIFT) -> None:
        super().__init__()
        self.model, self.returns, self.shift = tiny_model(), returns, shift

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        logits = self.model(batch).logits[:, :-1]
        logps = logits.log_softmax(-1).gather(-1, batch[:, 1:, None]).squeeze(-1)
        advantages = torch.linspace(-1, 1, len(batch))
        tensors = {
            "per_token_logps": logps,
            "sampling_per_token_logps": logps.detach() + self.shift,
            "completion_mask": torch.ones_like(logps, dtype=torch.bool),
            "advantages": advantages,
            "rewards": advantages,
            "prompt_ids": batch[:, :1],
            "prompt_mask": torch.ones_like(batch[:, :1]),
            "completion_ids": batch[:, 1:],
        }
        self.log("reward", advantages.mean())
        return self.returns(-(logps.mean(1) * advantages).mean(), tensors)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        random = torch.Generator().manual_seed(3)
        batches = [torch.randint(3, 128, (ROWS, LENGTH + 1), generator=random) for _ in range(BATCHES)]
        return torch.utils.data.DataLoader(batches, batch_size=None)
