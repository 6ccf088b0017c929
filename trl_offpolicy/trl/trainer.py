"""OffPolicyGRPOTrainer: TRL's GRPOTrainer with the loss of :class:`~trl_offpolicy.Objective`.

``_compute_loss`` replaces TRL's: it gets log-probs once through TRL's method, makes a PolicyBatch, and applies the
objective. If TRL samples and learns with the same weights (aligned steps), old is the current policy and there is no
extra forward. ``_generate_and_score_completions`` decides what needs the whole generation batch (advantages, wide
corrections).
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import ProgressCallback
from transformers.trainer_utils import has_length
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer import grpo_trainer

from trl_offpolicy.control.auto import starting_preset
from trl_offpolicy.diagnosis.report.model_card import write_card
from trl_offpolicy.engines.hf import broken_weights_told
from trl_offpolicy.functional.masks import high_entropy_mask
from trl_offpolicy.metrics.trl_names import trl_names
from trl_offpolicy.objective.coefficients import (
    EntropyControl,
    EntropyOptions,
    ShapingControl,
    StepWindow,
    adapts,
    load_state,
    next_kl,
    save_state,
)
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.objective.staging import Stages
from trl_offpolicy.presets.frameworks.trl import GLOBAL_TOKEN_LOSSES
from trl_offpolicy.rollouts import batches, kept
from trl_offpolicy.rollouts.agents.guard import ToolGuard
from trl_offpolicy.rollouts.ahead.old_policy import OLD
from trl_offpolicy.rollouts.clock import StepClock
from trl_offpolicy.rollouts.compressed_forward import DENSE, compress_learner, in_dense_context, rounds_keys
from trl_offpolicy.rollouts.duplicates import draws_as_scored, late_copies, marked_duplicates
from trl_offpolicy.rollouts.greedy import reads_greedy
from trl_offpolicy.rollouts.rounded_forward import round_learner
from trl_offpolicy.rollouts.scoring import measured_noise_floor, noise_floor_due
from trl_offpolicy.rollouts.token_ids import TokenIdCheck, run_entry
from trl_offpolicy.run_folder.layout import ENGINE_WEIGHTS_FOLDER, METRICS_FILE, TOKEN_IDS
from trl_offpolicy.run_folder.writer import add_to_run
from trl_offpolicy.stats import PREFIX, Stats
from trl_offpolicy.trl.agents import TrainerAgents, agents_ahead, read_reply
from trl_offpolicy.trl.ahead import sample_ahead
from trl_offpolicy.trl.auto import choose_correction, judge_first, load_generation, save_generation
from trl_offpolicy.trl.callbacks import ShortProgressCallback, record_run, rollout_recorder
from trl_offpolicy.trl.checkpoints import resumed_from, saved_whole
from trl_offpolicy.trl.checks import check_before_loading, leaves_out_old, stages_of
from trl_offpolicy.trl.compact import CompactRows
from trl_offpolicy.trl.config import OffPolicyGRPOConfig, resolve_preset
from trl_offpolicy.trl.control import supervise
from trl_offpolicy.trl.engine import trl_engine
from trl_offpolicy.trl.exact import exact_run, prepare, wants_exact
from trl_offpolicy.trl.fusion import TrainerFusion
from trl_offpolicy.trl.greedy import check_trainer_greedy, greedy_rewards
from trl_offpolicy.trl.held_out import HeldOutMeans
from trl_offpolicy.trl.kept import TrainerKept
from trl_offpolicy.trl.perturbed import perturbed
from trl_offpolicy.trl.positions import counted_positions, told_positions
from trl_offpolicy.trl.rebinding import as_if_aligned, rebound
from trl_offpolicy.trl.routing import KEY, TrainerRouting, engine_options, scores_old
from trl_offpolicy.trl.run_description import run_description
from trl_offpolicy.trl.scoring import filtered_scoring, sum_sq_probs
from trl_offpolicy.trl.screening import TrainerScreen, made_in_guard
from trl_offpolicy.trl.simulated import TrainerSimulated
from trl_offpolicy.trl.sync import kept_on_fault, prove_syncs
from trl_offpolicy.trl.token_rewards import TrainerTokenRewards
from trl_offpolicy.types import ObjectiveOutput, PolicyBatch, Reduction

logger = logging.getLogger(__name__)


class OffPolicyGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPO that knows which policy sampled each token. Takes what ``trl.GRPOTrainer`` takes.

    Args:
        args: an :class:`OffPolicyGRPOConfig`; its ``offpolicy`` field names the correction.

    Raises:
        TypeError: ``args`` is not an ``OffPolicyGRPOConfig``.
        ValueError: the correction needs an engine that reports log-probs and there is none, or the sampling options
            make these incomparable with the trainer's.
    """

    reads_offpolicy: ClassVar[bool] = True
    """A trainer without it refuses an :class:`OffPolicyGRPOConfig`."""
    _agents: TrainerAgents | None = None
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "trl-offpolicy"]
    entropy_coef: float

    def __init__(self, model: Any, reward_funcs: Any, args: OffPolicyGRPOConfig, *rest: Any, **kwargs: Any) -> None:
        if not isinstance(args, OffPolicyGRPOConfig):
            raise TypeError(f"args must be an OffPolicyGRPOConfig, but got {type(args).__name__}.")
        given = _by_name(model, reward_funcs, args, *rest, **kwargs)
        has_rollout_func = given.get("rollout_func") is not None
        preset = resolve_preset(args, has_rollout_func=has_rollout_func)
        starting = starting_preset(preset)
        self.objective: Objective = starting.objective
        check_before_loading(args, self.objective, given)
        self._stages = stages_of(args, starting)
        has_sampler = args.reports_logps or has_rollout_func
        check_trainer_greedy(args, self._stages, given)
        self._leave_out_old = leaves_out_old(self.objective, self._stages, has_sampler=has_sampler)
        self._filtered = filtered_scoring(args, sampled_elsewhere=has_rollout_func)
        if wants_exact(args.engine):
            prepare(args, model, given)
        self._clock = StepClock()
        folder, rows = Path(args.output_dir) / ENGINE_WEIGHTS_FOLDER, args.per_device_train_batch_size
        self._guard = ToolGuard(timeout=args.tool_timeout)
        ahead = args.async_rollouts is not None
        with trl_engine(engine_options(args), folder=folder, rows=rows, seed=args.seed, ahead=ahead):
            super().__init__(**made_in_guard(given, self._guard))
        self.accelerator.backward = self._clock.timed("backward", self.accelerator.backward)
        round_learner(args.learner_rounding, args.engine, self.model, self.ref_model)
        compress_learner(args.learner_kv_cache, args.engine, self.model, self.ref_model)
        self._noise = perturbed(self)
        self._positions = told_positions(self.model, say=self.accelerator.is_main_process)
        # keys that are rounded were turned by their positions
        self._wants_positions = self._positions == "wanted" or rounds_keys(self.model)
        prove_syncs(self)
        self._routing = TrainerRouting(self)
        self._ahead = sample_ahead(self)  # None: sample and learn in turn
        self._kept = TrainerKept(self, self._filtered.truncation)
        self._fusion = TrainerFusion(self, args.logit_fusion)
        self._simulated = TrainerSimulated(self, args.simulated)
        reads_old = not self._leave_out_old
        self._old_here = scores_old(args, self._stages, reads_old=reads_old)
        self._old_here |= self._kept.scores_old(self._stages, reads_old=reads_old)
        self._screen = TrainerScreen(self, args.on_bad_rollout)
        self._token_rewards = TrainerTokenRewards(self, self._screen.screen)  # of what is screened
        self._guard.know(self._tokenizer, max_tokens=args.max_completion_length)
        self._screen.bound_environments(self, self._guard)
        self._agents = agents_ahead(self, given)  # None: TRL's own loop runs the tools, if there are any
        self._token_ids, self._told_token_ids = TokenIdCheck(self, args.check_token_ids), False
        self._kl = self.objective.kl  # its coefficient may move
        self._shaping = ShapingControl(self.objective.shaping)  # likewise
        if not self.use_adaptive_entropy:  # `offpolicy` may have set it
            self.entropy_coef = self.objective.entropy_coef
            self._entropy_bonus_enabled = self.entropy_coef != 0.0
        self._compact = CompactRows(self)
        self._window = StepWindow()
        self._place = 0  # of the next micro-batch in its optimizer step
        self._stats: dict[str, Stats] = {}
        self._rewards: Tensor | None = None  # (N, K): of all ranks, by function
        self._held_out = HeldOutMeans(self.reward_func_names, args.correct_threshold)
        self._row_counter = batches.RowCounter()
        self._recorder = rollout_recorder(self) if args.record_rollouts else None
        if self.pop_callback(ProgressCallback) is not None:  # absent in notebooks and with disable_tqdm
            self.add_callback(ShortProgressCallback)
        record_run(self, run_description(args, preset, self), report=args.write_report)
        self._exact = exact_run(self)  # None: the configuration does not ask for it
        self._auto = choose_correction(self, preset)  # None: the correction is the configured one
        self._control = supervise(self, args.control_spec, has_sampler=has_sampler)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _first_pass(self) -> bool:
        """True on the first pass over a generation batch."""
        window = self.args.steps_per_generation * self.num_iterations
        return bool(self._step % window < self.args.steps_per_generation)

    # ---------------------------------------------------------------------------------------------- generation batch

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        """TRL's method; a prompt without a token is an error that names it."""
        if self._agents is not None and self._agents.landed:
            return self._agents.tokenize_prompts()
        tokenized = super()._tokenize_prompts(prompts)
        batches.check_prompts(tokenized[0], prompts)
        return tokenized

    def _generate(self, prompts: list[Any]) -> Any:
        """TRL's method, with bounded tools; then all ranks agree on the replies that cannot be used."""
        self._screen.screen.end_of_resets()
        if self.tools:
            for tools in (*self._sync_tool_dicts, *self._async_tool_dicts):
                tools.update({name: self._guard.wrap(tool) for name, tool in tools.items()})
        reading = rebound(grpo_trainer, parse_response=read_reply)
        with self._clock.part("generation", counted=self.model.training), reading:
            generated = super()._generate(prompts)
        prompt_ids, completions, tool_mask, texts, logps, *others = generated
        if not self.model.training:
            self._held_out.sampled(completions, tool_mask)
        tool_mask = self._screen.agree(completions, tool_mask, logps)
        return prompt_ids, completions, tool_mask, texts, logps, *others

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's method; what transformers' ``generate`` keeps of a truncated distribution is noted."""
        if self._agents is not None and self._agents.landed:
            return self._agents.generate_single_turn()
        sample = partial(self._simulated.turn, partial(self._fusion.turn, super()._generate_single_turn))
        with broken_weights_told():
            return self._kept.turn(sample, prompt_ids, *args, **kwargs)

    def _tool_call_loop(self, *args: Any) -> Any:
        """TRL's method; of a batch that was sampled ahead, the loop has ended already."""
        if self._agents is not None and self._agents.landed:
            return self._agents.tool_call_loop()
        return super()._tool_call_loop(*args)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Keep the rewards of every completion of all ranks, because TRL's batch does not carry them."""
        with self._clock.part("rewards", counted=self.model.training):
            by_function: Tensor = self._screen.rewards(super()._calculate_rewards(*args, **kwargs))
        self._rewards = by_function
        return by_function

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """TRL's batches, read through a lookahead if prompts are sent to the engine before they are due."""
        items = epoch_iterator if self._ahead is None else self._ahead.items(epoch_iterator)
        return super().get_batch_samples(items, num_batches, device)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's method; rows of like length or of one prompt meet in a micro-batch, which is cut to its own width."""
        self._noise.learning(False)  # a sync, the old policy and the reference are those without it
        scoring = self._clock.part("scoring", counted=self.model.training)  # next to nothing without a new generation
        with scoring, rebound(grpo_trainer, split_tensor_dict=self._compact.split):
            return super()._prepare_inputs(generation_batch)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._auto is not None and self.model.training:
            self._auto.end_generation(self.state.global_step)
        self._screen.screen.begin()
        self._fusion.begin(inputs)
        aligned = as_if_aligned(self.args) if self._leave_out_old or self._old_here else nullcontext()
        sampled = nullcontext(inputs) if self._agents is None else self._agents.batch(inputs)
        with aligned, kept_on_fault(self, self._recorder), sampled as rows:
            output: dict[str, Any] = super()._generate_and_score_completions(rows)
        self._add_stats(self._mode, self._screen.output(output))
        self._add_stats(self._mode, self._fusion.stats())
        if self.tools:
            self._add_stats(self._mode, self._guard.stats(self.accelerator.device))
        self._add_stats(self._mode, self._check_token_ids(output))
        if self.model.training:
            self._add_stats("train", self._duplicates(output))
        elif self._rewards is not None:
            total = batches.total_rewards(self._rewards, self.reward_weights)
            self._held_out.add(self._rewards, total, self.accelerator.gather)
        output |= self._row_counter.fields(self, output, self._rewards)
        output |= self._routing.engine_fields(output)
        output |= self._kept.fields(output)
        if self.args.kl_reference == DENSE:
            output["ref_per_token_logps"] = self._score_dense(output)
        if self._old_here:
            output["old_per_token_logps"] = self._score_old(output, self._mode, with_sums=False)[0]
        if self._ahead is not None and self.model.training:
            self._ahead.complete(output)
        if self._stages is not None:
            greedy = greedy_rewards(self, inputs) if reads_greedy(self._stages) else None
            self._decide(output, self._stages, self._mode, greedy)
        if self._exact is not None and self.model.training:
            self._exact.check(output)
        if self._auto is not None and self._auto.undecided and self.model.training:
            judge_first(self, self._auto, output)
        return output

    def _check_token_ids(self, output: dict[str, Any]) -> Stats:
        stats = self._token_ids(output)
        if self.model.training and not self._told_token_ids:
            self._told_token_ids, entry = True, run_entry(stats, self.args.check_token_ids)
            if self.accelerator.is_main_process:
                add_to_run(self.args.output_dir, TOKEN_IDS, entry)
        return stats

    def _duplicates(self, output: dict[str, Any]) -> Stats:
        own_model = not self.use_vllm and self.rollout_func is None
        as_scored = own_model and draws_as_scored(vars(self.args))
        return marked_duplicates(output, group_size=self.num_generations, drawn_as_scored=as_scored)

    def _decide(self, output: dict[str, Any], stages: Stages, mode: str, greedy: Tensor | None = None) -> None:
        """Run what needs the whole generation batch before TRL shuffles and splits it. Results travel with the rows."""
        inputs = None
        if stages.advantages is not None:
            assert self._rewards is not None
            rank = self.accelerator.process_index
            by_token = self._token_rewards.take()
            inputs = batches.advantage_inputs(
                output, self._rewards, self.reward_weights, rank=rank, greedy=greedy, token_rewards=by_token
            )
        stats = batches.decide(
            stages,
            output,
            inputs,
            score_old=lambda: self._score_old(output, mode, with_sums=stages.needs_sum_sq_probs),
            version=self.state.global_step,
            keep_as=self._name_of_scores,
        )
        self._add_stats(mode, stats)
        if stages.advantages is not None:
            # TRL has put its own into the table of completions
            by_row = batches.row_advantages(output["advantages"], batches.trainable(output))
            batches.replace_last(self._logs["advantages"], self.accelerator.gather(by_row).tolist())

    @property
    def _name_of_scores(self) -> str | None:
        """The key for log-probs at the current weights, which are pi_old unless rows are of older ones."""
        return OLD if self._ahead is None else self._ahead.name_of_scores

    def _score_old(
        self, output: dict[str, Any], mode: str, *, with_sums: bool, model: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T) log-probs of the old policy and, if wanted, sums of its squared probabilities, without gradient.

        ``model`` is what scores; None = the trained model, as it is.
        """
        model = self.model if model is None else model
        size = self.args.per_device_train_batch_size if mode == "train" else self.args.per_device_eval_batch_size
        head = {"temperature": self.temperature, "cast_lm_head_to_fp32": self.args.cast_lm_head_to_fp32}
        with (
            torch.no_grad(),
            self._routing.recorded(model, output),
            disable_gradient_checkpointing(model, self.args.gradient_checkpointing_kwargs),
            sum_sq_probs(self.accelerator.unwrap_model(model), wanted=with_sums, **head) as sums,
        ):
            compact = not with_sums and not self._routing.records  # these read the forwards in order
            old = self._score(model, output, batch_size=size, compact=compact)[0]
        return old, sums.completions(old.shape[1])

    def _score_dense(self, output: dict[str, Any]) -> Tensor:
        """(B, T) log-probs of the policy over all keys and values, at the weights of now."""
        train, args = self._mode == "train", self.args
        size = args.per_device_train_batch_size if train else args.per_device_eval_batch_size
        with (
            torch.no_grad(),
            in_dense_context(self.model),
            self._filtered.whole(),
            disable_gradient_checkpointing(self.model, args.gradient_checkpointing_kwargs),
        ):
            logps: Tensor = self._score(self.model, output, batch_size=size)[0]
        return logps

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's method, but on the truncated distribution (current and old policy) and with positions of the text."""
        score = partial(self._filtered, super()._get_per_token_logps_and_entropies, self.ref_model)
        with counted_positions(model, wanted=self._wants_positions):
            return self._compact.score(score, model, *args, **kwargs)

    def _score(
        self, model: Any, inputs: dict[str, Any], *, batch_size: int | None = None, compact: bool = True, **wanted: bool
    ) -> Any:
        """Score the completions with TRL's method: (log-probs (B, T), entropies, auxiliary loss)."""
        with self._routing.replayed(model, inputs):
            return self._get_per_token_logps_and_entropies(
                model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                inputs["completion_ids"].size(1),
                batch_size,
                compact=compact and KEY not in inputs,  # routing is replayed row by row
                kept_ids=inputs.get(kept.KEY),
                seen=self._compact.seen(inputs),
                **wanted,
                **{name: inputs.get(name) for name in batches.MODEL_INPUTS},
            )

    # ---------------------------------------------------------------------------------------------------------- loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mode = self._mode
        self._noise.learning(mode == "train")
        logps, entropies, aux_loss = self._score(
            model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        batch = batches.policy_batch(
            inputs,
            logps,
            version=self.state.global_step,
            entropies=entropies,
            policy_mask=self._high_entropy_mask(inputs, entropies),
        )
        reduction = self._reduction(inputs, mode)
        if self._auto is not None and mode == "train" and self._first_pass:
            self._auto.observe(batch)
        with self._clock.part("correction", counted=mode == "train"):
            result = self._current_objective()(batch, reduction)
        if result.average is not None:
            inputs["past_average"] = result.average  # the dict is TRL's buffer: it comes back with its rows
        of_cut = self._filtered.stats(batch.mask).union(kept.kept_stats(inputs, batch.mask))
        stats = result.stats.union(of_cut).union(self._routing.stats())
        self._add_stats(mode, stats.union(late_copies(inputs, batch)))
        if mode == "train":
            self._window.add(batch, result.stats)
            if self.accelerator.sync_gradients:
                self._end_step()
        with self._clock.part("recording", counted=mode == "train"):
            self._record(inputs, batch, result, mode)
        if mode == "train":
            self._measure_noise_floor(model, inputs, batch)
        if self._entropy_bonus_enabled:
            self._log_policy_loss(batch, result, reduction, mode)
        return result.loss if aux_loss is None else result.loss + self._scaled_aux_loss(aux_loss, mode)

    def _high_entropy_mask(self, inputs: dict[str, Any], entropies: Tensor) -> Tensor | None:
        if self.top_entropy_quantile >= 1.0:
            return None
        # not TRL's method, which fails above 2^24 tokens
        return high_entropy_mask(entropies, batches.trainable(inputs), top=self.top_entropy_quantile)

    def _current_objective(self) -> Objective:
        """The objective of the loss step, with its current coefficients."""
        objective = self.objective if self._stages is None else self._stages.late
        if adapts(self._kl):
            objective = replace(objective, kl=self._kl)
        if self._shaping.moves:
            objective = replace(objective, shaping=self._shaping.shaping)
        if not self.use_adaptive_entropy:
            return objective
        return replace(objective, entropy_coef=self._entropy_control.in_force)

    @property
    def _entropy_control(self) -> EntropyControl:
        """The adaptive coefficient, from the attributes that TRL keeps in checkpoints."""
        options = EntropyOptions(**{item.name: getattr(self.args, item.name) for item in fields(EntropyOptions)})
        return EntropyControl(options, self.entropy_coef, self._last_world_entropy)

    def _end_step(self) -> None:
        """Stop on NaN and move the coefficients; this is the only wait for the device per optimizer step."""
        together = adapts(self._kl) or self.use_adaptive_entropy or self._shaping.moves
        step = self._window.close(partial(self.accelerator.reduce, reduction="sum") if together else None)
        self.objective.check_step(step)
        if self._kl is not None and adapts(self._kl):
            self._kl = next_kl(self._kl, step, world_size=self.accelerator.num_processes)
        self._shaping.end_step(step)
        if self.use_adaptive_entropy:
            moved = self._entropy_control.after(step.mean_entropy)
            self.entropy_coef, self._last_world_entropy = moved.coef, moved.measured
        if self._entropy_bonus_enabled:
            self._metrics["train"]["entropy_coef"].append(self.entropy_coef)
        for name, value in self._noise.stats().items():
            self._metrics["train"][name].append(value)

    def _reduction(self, inputs: dict[str, Any], mode: str) -> Reduction:
        by_token = self.loss_type in GLOBAL_TOKEN_LOSSES
        return batches.trainer_reduction(self, inputs, train=mode == "train", by_token=by_token)

    def _scaled_aux_loss(self, aux_loss: Tensor, mode: str) -> Tensor:
        self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux_loss.detach()).mean().item())
        accumulation = self.current_gradient_accumulation_steps if mode == "train" else 1
        scaled: Tensor = self.router_aux_loss_coef * aux_loss / accumulation
        return scaled

    # --------------------------------------------------------------------------------------------- what is measured

    def _add_stats(self, mode: str, stats: Stats) -> None:
        known = self._stats.get(mode)
        self._stats[mode] = stats if known is None else known.merge(stats)

    def _measure_noise_floor(self, model: Any, inputs: dict[str, Any], batch: PolicyBatch) -> None:
        """Score a micro-batch again, on the plain path, once in ``noise_floor_steps`` optimizer steps."""
        place, size = self._place, self.current_gradient_accumulation_steps
        self._place = 0 if self.accelerator.sync_gradients else place + 1
        due = noise_floor_due(self.state.global_step, self.args.noise_floor_steps, place, size=size)
        if not due or self._noise.adds:  # other noise would be taken for the floor
            return
        again = partial(self._score, model, compact=False)
        stats = measured_noise_floor(lambda rows, size: again(rows, batch_size=size)[0], inputs, batch)
        self._add_stats("train", stats)

    def _log_policy_loss(self, batch: PolicyBatch, result: ObjectiveOutput, reduction: Reduction, mode: str) -> None:
        loss = self.objective.policy_loss_value(batch, result, reduction)
        self._metrics[mode]["policy_loss"].append(self.accelerator.gather(loss).nanmean().item())

    def _record(self, inputs: dict[str, Any], batch: PolicyBatch, result: ObjectiveOutput, mode: str) -> None:
        """Record each rollout once, on the first pass over its generation batch."""
        if self._recorder is None or mode != "train" or not self._first_pass:
            return
        self._recorder.add(self.state.global_step, **batches.recorded_rows(inputs, batch, result))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Reduce the stats over ranks in one collective, add them under TRL's and this kit's names, and log."""
        mode = self._mode
        if mode == "eval":
            self._metrics[mode].update({name: [value] for name, value in self._held_out.close().items()})
        if (stats := self._stats.pop(mode, None)) is not None:
            values = stats.logged(self.accelerator.gather)
            chosen = self._auto.metrics() if self._auto is not None and mode == "train" else {}
            for key, value in {**values, **trl_names(self.objective, values), **chosen}.items():
                self._metrics[mode][key].append(value)
        written = self._write_rollouts(mode)
        if mode == "train" and (times := self._metrics[mode].get("step_time")):
            # TRL's step_time ends before it logs
            for part, seconds in self._clock.close(sum(times) + written, steps=len(times)).items():
                self._metrics[mode][f"{PREFIX}time/{part}"].append(seconds)
        super().log(logs, start_time)

    def _write_rollouts(self, mode: str) -> float:
        """Write the recorded rollouts; seconds that it took. The device's work on them is waited for here."""
        if self._recorder is None:
            return 0.0
        started = time.monotonic()
        with self._clock.part("recording", counted=mode == "train"):
            self._recorder.flush()
        return time.monotonic() - started

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's method; ``eval_reward``, ``eval_pass@1`` and the like are then means over the held-out prompts."""
        prompts = dataloader.dataset if has_length(dataloader.dataset) else None
        self._held_out.begin(None if prompts is None else len(prompts) * self.num_generations_eval)
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def create_model_card(self, model_name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """TRL's card, with the correction, its citation, the diagnosis table and the recipe.

        Without a name the model is called as its repository on the Hub or its folder is.
        """
        name = model_name or Path(self.hub_model_id or self.args.output_dir).resolve().name
        super().create_model_card(name, *args, **kwargs)
        if self.is_world_process_zero() and (Path(self.args.output_dir) / METRICS_FILE).exists():
            write_card(self.args.output_dir)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """TRL's method. With ``resume_from_checkpoint=True`` it goes on from the newest checkpoint that is whole.

        Raises:
            RunFolderError: on all ranks: no checkpoint is whole, another run has the folder, or the disk is full.
        """
        return super().train(resumed_from(self, resume_from_checkpoint), *args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """The method of transformers, which looks at ``max_steps`` only after a step: a complete run trains no more."""
        if self.state.global_step < self.state.max_steps:
            return super()._run_epoch(*args, **kwargs)
        logger.warning(
            "Nothing is left to train: the checkpoint has taken %d steps, and max_steps is %d.",
            self.state.global_step,
            self.state.max_steps,
        )
        self.control.should_training_stop = True
        return None

    @property
    def _stateful(self) -> dict[str, Any]:
        """What goes on from a checkpoint, by its name there."""
        parts = {"control": self._control, "auto": self._auto, "shaping": self._shaping, "perturbation": self._noise}
        return {**parts, "groups": self._row_counter}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with saved_whole(self, trial) as folder:
            super()._save_checkpoint(model, trial)
            if self._auto is not None:
                save_generation(self._auto, folder, writes=self.args.should_save)
            if self.args.should_save:
                self._save_parts(folder)

    def _save_parts(self, folder: Path) -> None:
        """Write into a checkpoint what TRL's does not hold."""
        save_state(folder, self._kl, **self._stateful)
        if self._ahead is not None:
            self._ahead.save(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._kl = load_state(Path(checkpoint), self._kl, **self._stateful)
            if self._auto is not None:
                load_generation(self, self._auto, Path(checkpoint))
            if self._ahead is not None:
                self._ahead.load(Path(checkpoint))


def _by_name(*args: Any, **kwargs: Any) -> Mapping[str, Any]:
    """The arguments of ``GRPOTrainer`` by name, however they were given."""
    return inspect.signature(GRPOTrainer).bind_partial(*args, **kwargs).arguments
