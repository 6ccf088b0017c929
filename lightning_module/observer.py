"""Measures a LightningModule that somebody else wrote: one callback, and the log-probs that its step has anyway."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_module.callbacks import RunRecords
from lightning_module.module import OffPolicyGRPOModule
from lightning_module.spec import resolve
from trl_offpolicy.control import parse_control
from trl_offpolicy.control.session import ControlSession
from trl_offpolicy.functional.collective import gather_rows
from trl_offpolicy.rollouts.batches import policy_batch, recorded_rows
from trl_offpolicy.rollouts.duplicates import duplicate_stats_here
from trl_offpolicy.stats import Stats
from trl_offpolicy.types import PolicyBatch

logger = logging.getLogger(__name__)

Fields = Callable[[Any, Any], Mapping[str, Any]]

REQUIRED = ("per_token_logps", "sampling_per_token_logps", "completion_mask")
RECORDED = ("prompt_ids", "prompt_mask", "completion_ids")
"""What ``rollouts.parquet`` also needs."""
_BATCH_FIELDS = frozenset(item.name for item in fields(PolicyBatch)) - {"current_version"}
_KNOWN = _BATCH_FIELDS | {*RECORDED, "tool_mask"}


class OffPolicyObserver(RunRecords):
    """Measures, records and diagnoses a LightningModule of your own, and changes nothing in it.

    ``training_step`` returns a dict with ``loss`` and, under these names, tensors that it has anyway (Lightning
    detaches them): ``per_token_logps``, ``sampling_per_token_logps`` and ``completion_mask``, each (B, T) in nats or
    bool. Further ones are read if they are there: any field of :class:`~trl_offpolicy.PolicyBatch`
    (``old_per_token_logps``, ``advantages``, ``rewards``, ``group_ids``, ``policy_versions``, ...), ``tool_mask``, and
    for ``rollouts.parquet`` ``prompt_ids``, ``prompt_mask`` and ``completion_ids``.

    A step that returns nothing is not measured. A module that passes over a batch several times returns the ids in the
    first pass alone, or they are recorded again.

    Args:
        method: the correction whose weights are measured, though nothing applies them; what
            :func:`lightning_module.spec.resolve` takes.
        fields: ``fields(outputs, batch)`` returns that mapping, if the step returns it under other names; None = what
            the step returned.
        control: ``warn`` prints findings, ``stop`` also ends the run when one is critical; None or ``off``: neither.
        folder: of the run; None = the logger's.
        rollouts: whether to record every rollout, if the step returns its ids.
        report: whether to print the summary and write ``report.html`` at the end.
        tokenizer: turns recorded ids into text; None = they stay numbers.

    Raises:
        ValueError: ``control`` would change the run, or a setting is unknown.
    """

    def __init__(
        self,
        method: Any = "measure",
        fields: Fields | None = None,
        control: Any = "warn",
        folder: str | None = None,
        rollouts: bool = True,
        report: bool = True,
        tokenizer: Any = None,
    ) -> None:
        self.preset = resolve(method)
        self.spec = parse_control(control)
        if self.spec is not None and self.spec.policy == "act":
            raise ValueError("control must be warn, stop or off, but got act: an observer changes nothing.")
        super().__init__(folder, rollouts, report)
        self.tokenizer = tokenizer
        self._fields = fields
        self._stats = Stats({})
        self._version = self._responses = 0
        self._logged: int | None = None  # the optimizer step of the last row
        self._restored: dict[str, Any] = {}
        self._session: ControlSession | None = None

    # ---------------------------------------------------------------------------------------------------------- events

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the run folder. All ranks call it.

        Raises:
            TypeError: the module is this kit's own.
        """
        if isinstance(pl_module, OffPolicyGRPOModule):
            raise TypeError(
                "OffPolicyObserver is for a module of your own, but got an OffPolicyGRPOModule, which measures and "
                "records all this itself (RunFolder sets where)."
            )
        folder = self._where(trainer)
        self._stats, self._responses = Stats({}), 0  # of an earlier run that ended between two rows
        self._begin(trainer, folder, lambda: self._description(trainer, pl_module), self._decode)
        self._logged = trainer.global_step
        if self.spec is not None:
            self._session = ControlSession(
                self.spec, say=partial(print, flush=True), broadcast=trainer.strategy.broadcast
            )
            self._session.load_state_dict(self._restored)
            self._restored = {}
            self._session.begin(folder, trainer.global_step, records=not trainer.fast_dev_run)  # type: ignore[attr-defined]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the version of the weights that this step computes with."""
        self._version = trainer.global_step

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure this micro-batch; after an optimizer step that is logged, log the numbers of all ranks.

        Raises:
            TypeError: the step returned no mapping.
            ValueError: a tensor is missing, or its name is not known; the message names it.
        """
        if not outputs and self._fields is None:  # Lightning lets a step return None
            return
        given = outputs if self._fields is None else self._fields(outputs, batch)
        rows = _checked(given, own=self._fields is not None)
        self._check_advantages(rows)
        policy = _policy_batch(rows, version=self._version)
        result = self.preset.objective(policy)
        self._stats = self._stats.merge(result.stats)
        if all(isinstance(rows.get(name), Tensor) for name in ("completion_ids", "group_ids")):
            duplicates = duplicate_stats_here(
                rows["completion_ids"], policy.mask, rows["sampling_per_token_logps"], rows["group_ids"]
            )
            self._stats = self._stats.merge(duplicates)
        self._responses += len(policy.mask)
        if self._recorder is not None and all(isinstance(rows.get(name), Tensor) for name in RECORDED):
            self._recorder.add(self._version, **recorded_rows(rows, policy, result))
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step != self._logged and every and step % every == 0:
            self._log(trainer, pl_module, steps=step - (self._logged or 0))
            self._logged = step

    def _check_advantages(self, rows: Mapping[str, Any]) -> None:
        """Raise if the method reads advantages that the step did not return: it would keep everything, unseen."""
        correction = self.preset.correction
        readers = [] if correction is None else [type(one).__name__ for one in correction.keep if one.reads_advantages]
        if readers and rows.get("advantages") is None:
            raise ValueError(f"training_step must also return advantages, which {', '.join(readers)} of method reads.")

    def state_dict(self) -> dict[str, Any]:
        """What control remembers, for a checkpoint."""
        return {} if self._session is None else self._session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict` when training starts."""
        self._restored = state_dict

    # --------------------------------------------------------------------------------------------------------- logging

    def _log(self, trainer: Trainer, pl_module: LightningModule, *, steps: int) -> None:
        """Reduce over ranks, log, write and judge a row. All ranks call it."""
        values = self._stats.logged(gather_rows)
        responses = self._responses * trainer.world_size // max(steps, 1)
        self._stats, self._responses = Stats({}), 0
        known = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if self._session is not None:
            values |= self._session.observe(
                trainer.global_step,
                {**known, **values},
                responses=responses,
                world_size=trainer.world_size,
                is_main=trainer.is_global_zero,
            )
            if self._session.stop:
                trainer.should_stop = True
        pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)
        if self._writer is not None:
            self._writer.log(trainer.global_step, {"epoch": trainer.current_epoch, **known, **values})
        if self._recorder is not None:
            self._recorder.flush()

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids)) if self.tokenizer is None else str(self.tokenizer.decode(ids))

    def _description(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        described = self.preset.described()
        return {
            "model": type(pl_module).__name__,
            **described,
            "preset": f"{described['preset']}, measured by OffPolicyObserver and not applied",
            "trainer": f"lightning, {type(trainer.strategy).__name__}, {trainer.world_size} processes",
            "control": repr(self.spec),
        }


def _checked(given: Any, *, own: bool) -> dict[str, Any]:
    """The tensors of a step by name.

    Args:
        given: what the step, or the user's function, returned.
        own: True = the user's function made it, so that an unknown name is a mistake.
    """
    if not isinstance(given, Mapping):
        raise TypeError(
            "training_step must return a dict with loss and the tensors to measure "
            f"({', '.join(REQUIRED)}), but returned {type(given).__name__}. Or give OffPolicyObserver(fields=...)."
        )
    if missing := [name for name in REQUIRED if not isinstance(given.get(name), Tensor)]:
        raise ValueError(
            f"training_step must return (B, T) tensors {', '.join(REQUIRED)}, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; it returned {', '.join(map(str, given)) or 'nothing'}."
        )
    if own and (unknown := sorted(set(given) - _KNOWN)):
        raise ValueError(f"fields must return some of {', '.join(sorted(_KNOWN))}, but got {', '.join(unknown)}.")
    return {name: value for name, value in given.items() if name in _KNOWN}


def _policy_batch(rows: Mapping[str, Any], *, version: int) -> PolicyBatch:
    """The batch of a step. Without advantages they are 0, which only the loss reads then."""
    none = torch.zeros(len(rows["completion_mask"]), device=rows["completion_mask"].device)
    others = {name: rows.get(name) for name in ("entropies", "policy_mask", "sum_sq_probs")}
    batch = policy_batch({"advantages": none, **rows}, rows["per_token_logps"], version=version, **others)
    return replace(batch, turn_ids=rows["turn_ids"]) if rows.get("turn_ids") is not None else batch
