"""Watches a stock ``trl.GRPOTrainer`` or ``trl.RLOOTrainer``; this is what :func:`trl_offpolicy.attach` does.

Five methods of the trainer are wrapped. Each calls the original and returns its result. The measurements use the
log-probs that TRL's loss computes and the contents of its batches, so no forward is added.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from math import nan
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import pad

from trl_offpolicy import presets
from trl_offpolicy.control import parse_control
from trl_offpolicy.engines.colocate import reload_in_process
from trl_offpolicy.engines.truncation import truncation_of
from trl_offpolicy.engines.weights.source import ModelWeights
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.presets.frameworks.trl import TRLOptions
from trl_offpolicy.presets.preset import Preset
from trl_offpolicy.rollouts import batches
from trl_offpolicy.rollouts.duplicates import draws_as_scored, late_copies, marked_duplicates
from trl_offpolicy.stats import Stats
from trl_offpolicy.trl.callbacks import record_run, rollout_recorder
from trl_offpolicy.trl.control import ControlCallback, watch
from trl_offpolicy.trl.engine import TRLEngine
from trl_offpolicy.trl.positions import THEIRS, positions_under_padding

logger = logging.getLogger(__name__)

_WRAPPED = (
    "_calculate_rewards", "_generate_and_score_completions", "_get_per_token_logps_and_entropies", "_compute_loss",
    "log",
)  # fmt: skip


class Observer:
    """Measures and records a stock trainer. See :func:`trl_offpolicy.attach`.

    Args:
        trainer: the trainer to watch.
        control: ``warn``, ``stop`` or a mapping with one of these policies; None = no control.
        record_rollouts: whether to write ``rollouts.parquet``.
        write_report: whether to print the summary and write ``report.html`` at the end.

    Raises:
        TypeError: the trainer is neither a ``trl.GRPOTrainer`` nor a ``trl.RLOOTrainer``.
        ValueError: it is an OffPolicyGRPOTrainer, it is attached already, or ``control`` would change the run.
    """

    def __init__(
        self, trainer: GRPOTrainer | RLOOTrainer, *, control: Any, record_rollouts: bool, write_report: bool
    ) -> None:
        _check(trainer)
        spec = parse_control(control)
        if spec is not None and spec.policy == "act":
            raise ValueError("control must be warn, stop or off, but got act: attach measures, it changes nothing.")
        self.trainer = trainer
        self.preset = presets.get("measure") if _has_own_loss(trainer) else trl_preset(trainer)
        self._stats: dict[str, Stats] = {}
        self._rewards: Tensor | None = None
        self._row_counter = batches.RowCounter()
        self._scores: tuple[Tensor, Tensor | None] | None = None
        self._in_loss = False
        self._kept: _Kept | None = None  # while RLOO makes a generation batch
        self._said: set[str] = set()
        if positions_under_padding(trainer.model) != "fine":
            self._say(THEIRS)
        self._recorder = rollout_recorder(trainer) if record_rollouts else None
        self._callbacks: list[Any] = [record_run(trainer, _description(trainer), report=write_report)]
        if spec is not None:
            self._callbacks.append(ControlCallback(spec))
            watch(trainer, self._callbacks[1])
        for name in _WRAPPED:
            setattr(trainer, name, partial(getattr(self, name.strip("_")), getattr(trainer, name)))
        trainer._offpolicy_observer = self
        self._engine = trainer.vllm_generation if _drops_logps(trainer) else None
        if self._engine is not None:
            self._asked_before = getattr(self._engine, "logprobs", None)
            self._engine.logprobs = 0  # RLOO asks vLLM for none; 0 = that of the sampled token
            self._engine.generate = partial(self.generate, self._engine.generate)
        self._syncs_in_memory = syncs_in_memory(trainer)

    @property
    def objective(self) -> Objective:
        """The objective that TRL's options describe, including TRL's own correction."""
        return self.preset.objective

    def detach(self) -> None:
        """Remove the wrappers and callbacks, so that the trainer is as before."""
        for name in (*_WRAPPED, "_offpolicy_observer"):
            delattr(self.trainer, name)
        for callback in self._callbacks:
            self.trainer.remove_callback(callback)
        if self._engine is not None:
            del self._engine.generate
            self._engine.logprobs = self._asked_before
        if self._syncs_in_memory:
            del self.trainer.vllm_generation.sync_weights

    @property
    def _mode(self) -> str:
        return "train" if self.trainer.model.training else "eval"

    # ------------------------------------------------------------------------------------------- around TRL's methods

    def calculate_rewards(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Keep TRL's (N, K) rewards of all ranks."""
        self._rewards = original(*args, **kwargs)
        return self._rewards

    def generate_and_score_completions(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Add group, version and reward of each row to TRL's batch. TRL's loss does not read them."""
        self._kept = _Kept() if isinstance(self.trainer, RLOOTrainer) else None
        output = original(*args, **kwargs)
        if self._kept is not None:
            output |= self._kept.fields(output)
            self._kept = None
        output |= self._row_counter.fields(self.trainer, output, self._rewards)
        if self._mode == "train":
            size, as_scored = self.trainer.num_generations, scores_what_it_drew(self.trainer)
            self._add_stats("train", marked_duplicates(output, group_size=size, drawn_as_scored=as_scored))
        return output

    def generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keep the engine's log-probs (NaN where it has none), which RLOO drops."""
        answer = original(*args, **kwargs)
        if self._kept is not None:
            self._kept.sampling = [[nan if token[0] is None else token[0] for token in row] for row in answer[2]]
        return answer

    def get_per_token_logps_and_entropies(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keep the first log-probs and entropies that the loss computes, detached."""
        scores = original(*args, **kwargs)
        if self._in_loss and self._scores is None:
            entropies = scores[1]
            self._scores = scores[0].detach(), None if entropies is None else entropies.detach()
        if self._kept is not None and self._kept.old is None:  # RLOO scores the policy first, then the reference
            self._kept.old = scores[0].detach()
        return scores

    def compute_loss(self, original: Callable[..., Any], model: Any, inputs: dict[str, Any]) -> Any:
        """Return TRL's loss unchanged, after measuring on its log-probs."""
        self._in_loss, self._scores = True, None
        try:
            loss = original(model, inputs)
        finally:
            self._in_loss = False
        self._measure(inputs)
        return loss

    def log(self, original: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the diagnostics since the last logging step, over all ranks, to TRL's logs."""
        if (stats := self._stats.pop(self._mode, None)) is not None:
            for key, value in stats.logged(self.trainer.accelerator.gather).items():
                self.trainer._metrics[self._mode][key].append(value)
        if self._recorder is not None:
            self._recorder.flush()
        original(logs, *args, **kwargs)

    # ------------------------------------------------------------------------------------------------------ measuring

    @torch.no_grad()
    def _measure(self, inputs: dict[str, Any]) -> None:
        """Add the diagnostics of a micro-batch. If something cannot be measured, warn once and go on."""
        if self._scores is None:
            return self._say("nothing is measured: the loss did not compute log-probs by TRL's own method")
        logps, entropies = self._scores
        self._scores = None
        if "sampling_per_token_logps" not in inputs:
            self._say("there are no log-probs of the engine: the mismatch cannot be measured (use_vllm is off?)")
        try:
            batch = batches.policy_batch(inputs, logps, version=self.trainer.state.global_step, entropies=entropies)
            objective = self.objective
            if "sampling_per_token_logps" not in inputs and objective.needs_sampling:
                objective = replace(objective, correction=None)
            result = objective(batch)
        except (ValueError, TypeError) as error:
            return self._say(f"a micro-batch is not measured: {error}")
        mode = self._mode
        self._add_stats(mode, result.stats.union(late_copies(inputs, batch)))
        # a rollout is recorded once, on the first pass over its generation batch
        args = self.trainer.args
        first_pass = self.trainer._step % (args.steps_per_generation * args.num_iterations) < args.steps_per_generation
        if self._recorder is not None and mode == "train" and first_pass:
            self._recorder.add(self.trainer.state.global_step, **batches.recorded_rows(inputs, batch, result))

    def _add_stats(self, mode: str, stats: Stats) -> None:
        self._stats[mode] = self._stats.get(mode, Stats({})).merge(stats)

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("trl_offpolicy.attach: %s.", what)


@dataclass
class _Kept:
    """What ``trl.RLOOTrainer`` computes for a generation batch, but leaves out of it."""

    sampling: list[list[float]] | None = None
    old: Tensor | None = None

    def fields(self, output: dict[str, Any]) -> dict[str, Tensor]:
        """(B, T) log-probs of the engine and of the old policy, under the names of GRPO's batch."""
        found = {} if self.old is None else {"old_per_token_logps": self.old}
        if self.sampling is not None:
            ids = output["completion_ids"]
            rows = pad([torch.tensor(row) for row in self.sampling], padding_value=0.0, padding_side="right")
            wide = torch.zeros(ids.shape, device=ids.device)
            wide[:, : rows.shape[1]] = rows
            found["sampling_per_token_logps"] = wide
        return found


def _has_own_loss(trainer: GRPOTrainer | RLOOTrainer) -> bool:
    """True if ``GRPOConfig``'s options do not describe the loss of a trainer of TRL: RLOO, and GMPO.

    TRL's GMPO is a subclass of GRPOTrainer. It reads neither ``loss_type`` nor the correction that ``GRPOConfig`` has
    on by default.
    """
    loss: Any = type(trainer)._compute_loss
    return loss is not GRPOTrainer._compute_loss and loss.__module__.startswith("trl.")


def scores_what_it_drew(trainer: Any) -> bool:
    """True if the trainer's model samples, and from the distribution that TRL scores: all of it, at its temperature."""
    options = vars(trainer.args)
    own_model = not trainer.use_vllm and getattr(trainer, "rollout_func", None) is None
    return own_model and draws_as_scored(options) and not truncation_of(options)


def _drops_logps(trainer: Any) -> bool:
    """True if the trainer throws the engine's log-probs away."""
    return isinstance(trainer, RLOOTrainer) and trainer.use_vllm


def syncs_in_memory(trainer: GRPOTrainer | RLOOTrainer) -> bool:
    """Give TRL's own engine a sync that works on a CPU, where TRL's reaches for a device; True if that was needed."""
    engine: Any = getattr(trainer, "vllm_generation", None)
    stock = engine is not None and not isinstance(engine, TRLEngine) and engine.mode == "colocate"
    if not stock or trainer.accelerator.device.type != "cpu":
        return False
    if hasattr(engine.llm, "llm_engine") and not hasattr(engine.llm.llm_engine, "model_executor"):
        raise ValueError(
            "trainer must have vLLM in its own process, but its engine runs in another one, where weights cannot be "
            "passed in memory. Call trl_offpolicy.engines.environment.prepare_environment() before you build the "
            "trainer, or set VLLM_ENABLE_V1_MULTIPROCESSING=0."
        )
    weights = ModelWeights(trainer.model)
    engine.sync_weights = lambda: reload_in_process(engine.llm, weights.merged())
    logger.warning("trl_offpolicy.attach: TRL's weight sync needs a GPU; on this CPU weights are passed in memory.")
    return True


def trl_preset(trainer: GRPOTrainer) -> Preset:
    """The preset that a stock trainer's options describe: TRL's loss, and TRL's correction if it is on."""
    options = {item.name: getattr(trainer.args, item.name) for item in fields(TRLOptions)}
    options["vllm_importance_sampling_correction"] &= options["use_vllm"]
    options["use_vllm"] |= trainer.rollout_func is not None
    return presets.from_trl(**options)


_FROM_TEACHER = "which learns from a teacher's distribution at each position: no ratio to the sampler is in its loss"
_FROM_DATA = "which learns from a data set: nothing is sampled"
NOT_WATCHED = {
    "AsyncGRPOTrainer": "which has the engine's log-probs, but no generation batch, and rows without padding: "
    "trl_offpolicy.async_grpo measures and corrects it",
    "SDPOTrainer": "which asks vLLM for no log-probs, and whose loss has a teacher's term",
    "IWOPDTrainer": "whose engine's log-probs are part of its advantage, log teacher - log mu: the mismatch is in the "
    "target, not in a ratio",
    "OnlineDPOTrainer": "which learns which of two samples is preferred: no ratio to the sampler is in its loss",
    "A2POTrainer": "which samples with the trainer's own model: there is no mismatch",
    **dict.fromkeys(
        (
            "SDFTTrainer", "DistillationTrainer", "ServerDistillationTrainer", "AsyncDistillationTrainer",
            "GOLDTrainer", "GKDTrainer",
        ),
        _FROM_TEACHER,
    ),
    **dict.fromkeys(
        ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "CPOTrainer", "ORPOTrainer", "TPOTrainer"),
        _FROM_DATA,
    ),
}  # fmt: skip
"""Why a trainer of TRL 1.16 cannot be watched, by the name of its class."""


def why_not_watched(cls: type) -> str:
    """The reason for a class, or for the trainer of TRL that it is made from, or what watches one of Lightning."""
    if any(base.__module__.split(".")[0] in ("lightning", "pytorch_lightning") for base in cls.__mro__):
        return "which is Lightning's: lightning_module.OffPolicyObserver, a callback of its trainer, watches it"
    named = (NOT_WATCHED.get(base.__name__) for base in cls.__mro__)
    return next((reason for reason in named if reason is not None), "whose batches attach does not know")


def _check(trainer: Any) -> None:
    if not isinstance(trainer, GRPOTrainer | RLOOTrainer):
        raise TypeError(
            f"trainer must be a trl.GRPOTrainer or a trl.RLOOTrainer, but got {type(trainer).__name__}, "
            f"{why_not_watched(type(trainer))}. docs/integrations.md says for each trainer of TRL what can be done."
        )
    if hasattr(trainer, "_stages"):
        raise ValueError("trainer must be TRL's own, but got an OffPolicyGRPOTrainer, which measures all this itself.")
    if hasattr(trainer, "_offpolicy_observer"):
        raise ValueError("trainer must not be attached twice.")


def _description(trainer: GRPOTrainer | RLOOTrainer) -> dict[str, Any]:
    args, is_rloo, own_loss = trainer.args, isinstance(trainer, RLOOTrainer), _has_own_loss(trainer)
    corrects = not own_loss and args.use_vllm and args.vllm_importance_sampling_correction
    if args.use_vllm:
        engine = f"vllm {args.vllm_mode}"
    else:
        engine = "transformers generate" if is_rloo or trainer.rollout_func is None else "rollout_func"
    return {
        "model": getattr(trainer.model.config, "_name_or_path", ""),
        "preset": "stock TRL, measured by trl_offpolicy.attach",
        "correction": f"TRL's own, {args.vllm_importance_sampling_mode}" if corrects else "none",
        "objective": f"TRL's own, {type(trainer).__name__ if own_loss else f'loss_type={args.loss_type}'}",
        "advantages": "TRL's",
        "engine": engine,
    }
