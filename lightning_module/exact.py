"""``engine: {exact: true}`` in Lightning: what it asks of the trainer, and the check of the first generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_module.callbacks import run_folder
from lightning_module.engines import wants_exact
from lightning_module.host import Host
from trl_offpolicy.diagnosis.probe.exactness import Exactness, ask_exact, judge_generation, report_exactness
from trl_offpolicy.rollouts.batches import trainable


class ExactCheck:
    """Checks the first generation of a run with an exact engine; does nothing for other engines.

    Args:
        module: the module, with its settings.

    Raises:
        ValueError: an option of the engine contradicts ``exact``.
    """

    def __init__(self, module: Host) -> None:
        self._module = module
        self._wanted = wants_exact(module.settings["engine"])
        self.found: Exactness | None = None
        """What the check found; None before it."""

    def check_precision(self) -> None:
        """Raise if the trainer computes in another precision than its weights have.

        Raises:
            ValueError: ``precision`` is mixed.
        """
        precision = str(self._module.trainer.precision)
        if self._wanted and "mixed" in precision:
            raise ValueError(
                f"precision must not be mixed with engine.exact: true, but got {precision!r}: autocast rounds what the "
                "engine does not. For bfloat16 load the model in it (model_options: {dtype: bfloat16})."
            )

    @torch.no_grad()
    def check(self, rows: dict[str, Tensor], size: int) -> None:
        """Compare engine and trainer once, on a generation batch; it costs two forwards over it.

        Args:
            rows: the generation batch.
            size: rows of a micro-batch.
        """
        module: Any = self._module
        if not self._wanted or self.found is not None or "sampling_per_token_logps" not in rows:
            return
        mask = trainable(rows)
        old = module.score(rows, batch_size=size).logps
        again = module.score(rows, batch_size=size // 2).logps if size > 1 else None
        generation = module.generation
        asked = ask_exact(generation.engine, module.policy, generation.prompts.tokenizer, rows=size)
        self.found = judge_generation(rows["sampling_per_token_logps"], old, again, mask, asked=asked)
        folder = run_folder(module.trainer)
        if module.trainer.is_global_zero and not module.trainer.fast_dev_run:
            report_exactness(self.found, folder)
