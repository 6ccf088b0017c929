"""Replay of the sampling mask in the TRL trainer: :mod:`trl_offpolicy.rollouts.kept` with TRL's engines and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trl_offpolicy.engines.kept import KeptStore, recorded_kept
from trl_offpolicy.functional.truncated_sampling import KeptIds, Truncation
from trl_offpolicy.objective.staging import Stages
from trl_offpolicy.rollouts.batches import trainable
from trl_offpolicy.rollouts.kept import KEY, announce, checked
from trl_offpolicy.trl.rebinding import is_aligned


class TrainerKept:
    """Joins what the engine kept with the rows of a trainer's generation batches.

    Args:
        trainer: the built trainer.
        truncation: how its distribution is cut; nothing is joined where it is not.
    """

    def __init__(self, trainer: Any, truncation: Truncation) -> None:
        self._trainer, self._truncation = trainer, truncation
        self._said = False
        self._store: KeptStore | None = None
        self._generates = False  # the trainer's model itself samples, by transformers' `generate`
        if not truncation:
            return
        if trainer.use_vllm:
            self._store = trainer.vllm_generation.kept
        elif not trainer.use_transformers_continuous_batching:
            self._store, self._generates = KeptStore(), True

    def scores_old(self, stages: Stages | None, *, reads_old: bool) -> bool:
        """True if the kit must make the pass for old log-probs: TRL makes its own before the kept ids are joined.

        Args:
            stages: what is decided on the whole generation batch. If that needs old log-probs, it makes the pass.
            reads_old: True if the objective reads old log-probs.
        """
        made = stages is not None and stages.needs_old
        return self._store is not None and reads_old and not made and not is_aligned(self._trainer.args)

    def turn(self, sample: Callable[..., Any], prompt_ids: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> Any:
        """TRL's ``_generate_single_turn``, of which the kept ids are noted where transformers samples."""
        if not self._generates:
            return sample(prompt_ids, *args, **kwargs)
        assert self._store is not None
        with recorded_kept(self._trainer.accelerator.unwrap_model(self._trainer.model)) as recorder:
            found = sample(prompt_ids, *args, **kwargs)
        for row, (prompt, completion) in enumerate(zip(prompt_ids, found[0], strict=True)):
            self._store.add(prompt, completion, recorder.row(row, len(completion)))
        return found

    def fields(self, output: dict[str, Any]) -> dict[str, list[KeptIds]]:
        """The kept ids of a generation batch's rows.

        Raises:
            ValueError: they are those of other tokens.
        """
        if not self._truncation:
            return {}
        if not self._said:
            self._said = True
            announce(self._truncation, reason=self._reason)
        if self._store is None:
            return {}
        sampled = trainable(output).cpu()
        found = []
        for row, (prompt, completion) in enumerate(self._texts(output)):
            tokens = sampled[row, : len(completion)].tolist()
            # nothing is learned from a row without sampled tokens, and its turns are not looked for
            kept = self._store.of_row(prompt, completion, tokens) if any(tokens) else None
            found.append(checked(kept, completion, row))
        self._store.clear()
        return {KEY: found}

    @property
    def _reason(self) -> str | None:
        """Why the kept ids are not known; None if they are."""
        if self._store is not None:
            return None
        trainer = self._trainer
        return str(trainer.vllm_generation.no_mask) if trainer.use_vllm else "generate_batch does not report them"

    @staticmethod
    def _texts(output: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
        """Prompt and completion of each row, without padding."""

        def rows(part: str) -> list[list[int]]:
            ids, mask = output[f"{part}_ids"].cpu(), output[f"{part}_mask"].cpu().bool()
            return [row[here].tolist() for row, here in zip(ids, mask, strict=True)]

        return list(zip(rows("prompt"), rows("completion"), strict=True))
