"""The prompts of a GRPO run, as a ``LightningDataModule``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule

from lightning_module.state import run_seed
from lightning_module.streams import BatchPlan, HeldOutStream, PromptStream, Row
from trl_offpolicy.parts import imported


class PromptDataModule(LightningDataModule):
    """Prompts for :class:`~lightning_module.OffPolicyGRPOModule`.

    A generation batch is ``steps_per_generation`` micro-batches on every rank and holds whole prompt groups. An epoch
    is one pass over the prompts. It uses each micro-batch of completions ``num_iterations`` times.

    Args:
        dataset: training rows with a "prompt" (text or messages), whose other columns go to the reward functions; or
            ``package.module:function`` (or a function) that returns training and validation rows; or the name of a
            Hub data set.
        val_dataset: validation rows; None = those that ``dataset`` returns, if any.
        dataset_options: keyword arguments of that function, or of ``load_dataset``.
        micro_batch_size: completions per ``training_step`` and rank.
        num_generations: completions per prompt.
        steps_per_generation: micro-batches per generation batch; None = the trainer's ``accumulate_grad_batches``.
        num_iterations: passes over each generation batch.
        shuffle: whether to draw a new order of the prompts each epoch; ``overfit_batches`` turns it off.
        seed: seed of that order; None = that of ``seed_everything``.
        val_batch_size: prompts per validation batch and rank.
        val_generations: completions per validation prompt.
        test_dataset: rows of ``trainer.test`` and ``trainer.predict``, in the batches of validation; None = the
            validation rows.

    Raises:
        ValueError: the sizes would split a prompt group between generation batches.
    """

    def __init__(
        self,
        dataset: Any,
        val_dataset: Any = None,
        dataset_options: dict[str, Any] | None = None,
        micro_batch_size: int = 8,
        num_generations: int = 8,
        steps_per_generation: int | None = None,
        num_iterations: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
        val_batch_size: int = 8,
        val_generations: int = 1,
        test_dataset: Any = None,
    ) -> None:
        super().__init__()
        given = {"dataset": dataset, "val_dataset": val_dataset, "test_dataset": test_dataset}
        self.save_hyperparameters(ignore=[name for name, value in given.items() if not _plain(value)])
        self.dataset, self.val_dataset, self.test_dataset = dataset, val_dataset, test_dataset
        self.dataset_options = dataset_options or {}
        self.micro_batch_size, self.num_generations = micro_batch_size, num_generations
        self.steps_per_generation, self.num_iterations = steps_per_generation, num_iterations
        self.shuffle, self.seed = shuffle, seed
        self.val_batch_size, self.val_generations = val_batch_size, val_generations
        self._train: Sequence[Row] | None = None
        self._val: Sequence[Row] | None = None
        self._test: Sequence[Row] | None = None
        if steps_per_generation is not None:
            self._plan(steps_per_generation)

    def setup(self, stage: str) -> None:
        """Make or load the rows. They are the same on every rank."""
        if self._train is None:
            self._train, brought = load_rows(self.dataset, self.dataset_options)
            self._val = brought if self.val_dataset is None else load_rows(self.val_dataset, {})[0]
            self._test = self._val if self.test_dataset is None else load_rows(self.test_dataset, {})[0]

    def train_dataloader(self) -> PromptStream:
        """A stream of this rank's micro-steps: one for each ``training_step``."""
        assert self.trainer is not None and self._train is not None
        trainer = self.trainer
        return PromptStream(
            self._train,
            self.plan,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            shuffle=self.shuffle and not trainer.overfit_batches,  # type: ignore[attr-defined]
            seed=run_seed() if self.seed is None else self.seed,
            epoch_length=lambda: trainer.num_training_batches,
        )

    def val_dataloader(self) -> Any:
        """Held-out prompts of this rank; an empty loader if there are no validation rows."""
        return self._held_out(self._val)

    def test_dataloader(self) -> Any:
        """The prompts of ``test_dataset`` of this rank, or of validation."""
        return self._held_out(self._test)

    def predict_dataloader(self) -> Any:
        """The prompts of :meth:`test_dataloader`."""
        return self.test_dataloader()

    def _held_out(self, rows: Sequence[Row] | None) -> Any:
        assert self.trainer is not None
        if not rows:
            return []
        place = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        return HeldOutStream(rows, self.val_batch_size, self.val_generations, **place)

    @property
    def plan(self) -> BatchPlan:
        """The sizes of the generation batches. It needs the trainer if ``steps_per_generation`` is not given."""
        if self.steps_per_generation is not None:
            return self._plan(self.steps_per_generation)
        assert self.trainer is not None
        return self._plan(self.trainer.accumulate_grad_batches)

    def _plan(self, steps_per_generation: int) -> BatchPlan:
        return BatchPlan(
            micro_batch_size=self.micro_batch_size,
            num_generations=self.num_generations,
            steps_per_generation=steps_per_generation,
            num_iterations=self.num_iterations,
        )


def load_rows(dataset: Any, options: Mapping[str, Any]) -> tuple[Sequence[Row], Sequence[Row] | None]:
    """Training and validation rows from the ``dataset`` of a :class:`PromptDataModule`."""
    if isinstance(dataset, str) and ":" not in dataset:
        from datasets import load_dataset

        splits = load_dataset(dataset, **options)
        return splits["train"], next((splits[name] for name in ("validation", "test") if name in splits), None)
    source = imported(dataset) if isinstance(dataset, str) else dataset
    if not callable(source):
        return source, None
    made = source(**options)
    return (made[0], made[1]) if isinstance(made, tuple) else (made, None)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str)
