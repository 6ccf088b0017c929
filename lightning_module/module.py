"""GRPO with rollout correction, as a LightningModule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_module import models
from lightning_module.agents import Agents
from lightning_module.ahead import sample_ahead
from lightning_module.auto import AutoCorrection
from lightning_module.callbacks import RunFolder
from lightning_module.checkpoints import keep_whole, warn_of_lost_gradients
from lightning_module.compact import CompactRows
from lightning_module.control import Control
from lightning_module.data import PromptDataModule
from lightning_module.engines import (
    check_options,
    check_sampling,
    engine_type,
    float32_tensors,
    forward_of,
    fusion_of,
    reports_logps_of,
)
from lightning_module.entropy import Entropy
from lightning_module.exact import ExactCheck
from lightning_module.experts import Experts
from lightning_module.generation import Generation
from lightning_module.greedy import check_module_greedy
from lightning_module.measuring import Measuring
from lightning_module.optimization import gradient_norm, optimizer_and_schedule, window_size
from lightning_module.replay import replayed
from lightning_module.rewards import Rewards
from lightning_module.spec import fields_of_method, hyperparameters, resolve
from lightning_module.streams import HeldOut, MicroStep
from lightning_module.token_rewards import check_token_rewards
from lightning_module.validation import Validation
from trl_offpolicy.checks import check_bool
from trl_offpolicy.control.auto import starting_preset
from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.functional.collective import sum_ranks
from trl_offpolicy.objective.coefficients import ShapingControl, adapts, next_kl
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.objective.staging import stage
from trl_offpolicy.packages import check_model, warn_about_builds
from trl_offpolicy.rollouts.agents.guard import TIMEOUT
from trl_offpolicy.rollouts.batches import loss_reduction, policy_batch, recorded_rows, trainable
from trl_offpolicy.rollouts.compressed_forward import (
    INITIAL,
    check_kl_reference,
    compress_learner,
    parse_learner_kv_cache,
)
from trl_offpolicy.rollouts.duplicates import late_copies
from trl_offpolicy.rollouts.kept import kept_stats
from trl_offpolicy.rollouts.model_parts import is_flattened
from trl_offpolicy.rollouts.perturbed_forward import PerturbedForward, parse_perturbation
from trl_offpolicy.rollouts.rounded_forward import parse_learner_rounding, round_learner
from trl_offpolicy.rollouts.scoring import Scorer, Scores, measured_noise_floor, noise_floor_due
from trl_offpolicy.run_folder.layout import EVAL_PREFIX
from trl_offpolicy.types import PolicyBatch, Reduction

logger = logging.getLogger(__name__)

_STATE = "offpolicy"


class OffPolicyGRPOModule(LightningModule):
    """GRPO that knows which policy sampled each token.

    Args:
        model: folder or Hub name of a causal or vision-language LM, or a loaded one.
        reward_funcs: functions with TRL's signature, or their import paths ``package.module:name``; one or several.
        correction: see :func:`lightning_module.spec.resolve`: a preset's name, a mapping or a ``Correction``. None =
            ``paper/tis``, ``paper/logit-fusion`` with a teacher, or ``measure`` where the engine is the trainer
            itself. ``auto`` chooses by the batches.
        objective: fields of the objective to change, or an ``Objective``.
        advantages: estimator, its name or mapping; None = TRL's.
        engine: ``transformers``, ``vllm`` (in this process), ``server``; ``{type: ..., **arguments}``; or an engine.
            ``exact: true`` among the arguments: :mod:`trl_offpolicy.engines.exact`; ``logit_fusion`` among those of
            ``transformers``: a teacher takes part (:class:`~trl_offpolicy.engines.logit_fusion.LogitFusion`).
        sampling: a ``Sampling`` or its fields; the default of ``max_tokens`` is 128.
        adapter: fields of ``peft.LoraConfig`` (or a PEFT configuration); None = all weights learn.
        tokenizer: a tokenizer, or a processor for rows with images, or its name; None = that of ``model``.
        model_options: keyword arguments of ``from_pretrained``; the dtype is float32 unless ``dtype`` is given.
        reward_weights: weight of each reward function in the total; None = ones.
        optimizer: a function that makes the optimizer from the parameters; None = AdamW.
        learning_rate: AdamW's learning rate.
        weight_decay: AdamW's weight decay; norms and biases have none, as in ``transformers.Trainer``.
        lr_scheduler: a schedule's name in ``transformers.get_scheduler``.
        warmup_steps: optimizer steps in which the schedule warms up.
        gradient_checkpointing: whether to save memory by computing activations again in the backward.
        correct_threshold: a reward of at least this is a correct answer, for ``eval_pass@1``; None = not reported.
        noise_floor_steps: once in this many optimizer steps one micro-batch is scored twice; 0 = never.
        sync_check: whether to prove every weight sync on a probe.
        control: how the run is watched, as in the TRL trainer (``docs/control.md``).
        async_rollouts: sample generation batches ahead of learning, with ``engine: server``: a lag, or a mapping of
            :class:`~trl_offpolicy.rollouts.ahead.settings.AsyncSettings`. None: sample and learn in turn.
        replay: add groups of a replay buffer to each generation batch: ``{groups: 2, max_rows: 10000}``, or another
            mapping of :class:`~trl_offpolicy.rollouts.replay.settings.ReplaySettings`. None: every row is fresh.
        tools: functions that the model may call between its turns, or their import paths (``docs/lightning.md``).
        environment_factory: class (or function, or import path) of an object per rollout, whose methods are tools; or
            a mapping from names to such, which the column ``environment`` chooses from.
        rollout: ``f(prompts, engine, sampling)`` that samples in place of the loop, or its import path.
        max_tool_calling_iterations: most rounds of tool calls per completion; None = any number.
        tool_timeout: seconds that a call of a tool may take, then its answer is an error; None = any time, and tools
            run in the trainer's own thread.
        chat_template: template of messages in place of the tokenizer's: a Jinja text, or its file.
        response_template: how replies are read (``parse_response``): a mapping, or its JSON file.
        chat_template_kwargs: further variables of the chat template.
        check_token_ids: what happens if rows do not hold the ids that the engine sampled: ``warn``, ``raise``, ``off``.
        on_bad_rollout: what happens to a reply that cannot be used (empty, an id that the model does not know, a
            log-prob above 0): ``raise``, ``drop`` (it leaves the batch and its group's baseline), ``retry`` (it is
            asked for again, then dropped).
        token_rewards: whether what samples also returns rewards by token (a process reward model's), in a column
            ``token_rewards`` of ``rollout`` or in the ``Rollouts`` of an engine of one's own: for each completion a
            list with one number for each token. They are added to the rewards of the reward functions before the
            advantages are made (``docs/objectives.md``).
        entropy: TRL's entropy options by name (``entropy_coef``, ``use_adaptive_entropy``, ``entropy_target``,
            ``top_entropy_quantile``, ...): :class:`~trl_offpolicy.objective.coefficients.EntropyOptions`.
        mask_truncated_completions: whether completions that were cut at the longest length leave the loss.
        routing_replay: for a mixture of experts: ``r2`` replays the trainer's routing, ``r3`` the engine's, as in the
            TRL trainer (:class:`~trl_offpolicy.engines.routing.options.RoutingReplay`).
        freeze_router: whether the routers are not trained.
        freeze_router_bias: whether the routers' biases are not trained.
        router_aux_loss_coef: coefficient of the load-balancing loss; None = that of the model's configuration.
        trim_padding: true sorts the rows of an optimizer step into micro-batches of like length and cuts each to its
            own width, where the loss does not depend on the split, and leaves padding uncomputed where that pays;
            ``ranks`` does so with all ranks' rows, which change places; ``columns`` only cuts; false does neither.
        share_prefix: true computes a prompt once for its completions in a micro-batch, ``auto`` where that pays and is
            proved equal, false never (``docs/speed.md``).
        learner_rounding: ``engine`` computes the policy's own forward with linear weights that are rounded as the
            engine's ``weight_rounding`` rounds them, or a rounding such as ``fp8``
            (:mod:`trl_offpolicy.rollouts.rounded_forward`); None = it is not rounded.
        learner_kv_cache: ``engine`` computes the policy's own forward over what ``engine.kv_cache`` holds for each
            token, or a cache of its own, such as ``fp8`` (:mod:`trl_offpolicy.rollouts.compressed_forward`); None =
            over all keys and values.
        kl_reference: of what the KL term is: ``initial``, the model at the start; or ``dense_context``, the policy
            itself over all keys and values, at the weights when the batch is scored.
        perturbation: standard deviation of noise on the hidden states of the forwards that learn, or a mapping of
            :class:`~trl_offpolicy.rollouts.perturbed_forward.Perturbation`; None = no noise.

    Raises:
        ValueError: settings contradict each other; the message names the field.
    """

    policy: Any
    _objective: Objective

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        correction: Any = None,
        objective: Any = None,
        advantages: Any = None,
        engine: Any = "transformers",
        sampling: Any = None,
        adapter: Any = None,
        tokenizer: Any = None,
        model_options: dict[str, Any] | None = None,
        reward_weights: list[float] | None = None,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
        learning_rate: float = 1e-6,
        weight_decay: float = 0.0,
        lr_scheduler: str = "linear",
        warmup_steps: int = 0,
        gradient_checkpointing: bool = False,
        correct_threshold: float | None = None,
        noise_floor_steps: int = 100,
        sync_check: bool = True,
        control: Any = "warn",
        async_rollouts: Any = None,
        replay: Any = None,
        tools: Any = None,
        environment_factory: Any = None,
        rollout: Any = None,
        max_tool_calling_iterations: int | None = None,
        tool_timeout: float | None = TIMEOUT,
        chat_template: str | None = None,
        response_template: Any = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        check_token_ids: str = "warn",
        on_bad_rollout: str = "raise",
        token_rewards: bool = False,
        entropy: dict[str, Any] | None = None,
        mask_truncated_completions: bool = False,
        routing_replay: Any = "none",
        freeze_router: bool = False,
        freeze_router_bias: bool = False,
        router_aux_loss_coef: float | None = None,
        trim_padding: bool | str = True,
        share_prefix: bool | str = "auto",
        learner_rounding: Any = None,
        learner_kv_cache: Any = None,
        kl_reference: str = INITIAL,
        perturbation: Any = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        given |= fields_of_method(given, OffPolicyGRPOModule.__init__)
        check_model("model", model)
        self.save_hyperparameters(hyperparameters(given))
        self.settings = given
        self.agents = Agents(self)
        self._read_method()
        self._make_parts()
        self.policy = None
        self.step_logs: dict[str, float] = {}
        """Numbers of the last logging step, for callbacks."""
        self._restored: dict[str, Any] | None = None

    def _read_method(self) -> None:
        """Loss, correction, advantages and sampling, from the settings.

        Raises:
            ValueError: a setting is wrong, or the loss reads log-probs that the engine does not report.
        """
        given, engine = self.settings, self.settings["engine"]
        kind, fusion, reports = engine_type(engine), fusion_of(engine), reports_logps_of(engine)
        check_options(engine)
        check_token_rewards(given)
        sampler = kind if given["rollout"] is None else "own"  # a function may bring log-probs of its own
        default = "measure" if sampler == "transformers" and not reports else "paper/tis"
        default = default if fusion is None else "paper/logit-fusion"
        method = resolve(given["correction"], given["objective"], given["advantages"], default=default)
        self.entropy = Entropy(given["entropy"])
        self.preset = self.entropy.in_preset(method)
        self.objective = starting_preset(self.preset).objective
        sampling = given["sampling"]
        fields = {"max_tokens": 128, **(sampling if isinstance(sampling, dict) else {})}
        self.sampling = sampling if isinstance(sampling, Sampling) else Sampling(**fields)
        check_sampling(
            sampler,
            self.sampling,
            needs_sampling=self.objective.needs_sampling,
            arguments=engine if isinstance(engine, dict) else None,
            reports=reports,
        )

    def _make_parts(self) -> None:
        """What samples, scores, measures and watches: each reads its own settings.

        Raises:
            ValueError: a setting is wrong.
        """
        given, engine = self.settings, self.settings["engine"]
        of_engine = forward_of(engine)
        parse_learner_rounding(given["learner_rounding"], of_engine)
        cache = parse_learner_kv_cache(given["learner_kv_cache"], of_engine)
        has_kl = self.objective.kl is not None
        check_kl_reference(given["kl_reference"], cache=cache, has_kl=has_kl, where="objective.kl")
        parse_perturbation(given["perturbation"])
        check_bool(mask_truncated_completions=given["mask_truncated_completions"])
        self.experts = Experts(given)
        self.exact = ExactCheck(self)
        self.rewards = Rewards(given["reward_funcs"], given["reward_weights"], self.agents.rewards)
        self.measuring = Measuring(self.rewards.names)
        self.compact = CompactRows(self)
        self.scorer = Scorer(self.sampling, by_vllm=engine_type(engine) != "transformers", compact=self.compact.scoring)
        self.ahead = sample_ahead(self)  # None: sample and learn in turn
        self.replay = replayed(self)  # None: every row is fresh
        check_module_greedy(self)
        self.generation = Generation(self)
        self.validation = Validation(self, self.generation)
        self.strict_loading = given["adapter"] is None
        self.control = Control(given["control"])
        self.auto = AutoCorrection(self.preset)
        self.noise = PerturbedForward(None, None)  # the policy is not there yet

    @property
    def objective(self) -> Objective:
        """The loss. Controllers assign another one, which is used from the next micro-batch on."""
        return self._objective

    @objective.setter
    def objective(self, objective: Objective) -> None:
        stages = stage(objective, self.preset.advantages, token_rewards=self.settings["token_rewards"])
        assert stages is not None
        self._objective, self.stages = objective, stages

    # ---------------------------------------------------------------------------------------------------------- setup

    def setup(self, stage: str) -> None:
        """Check the sizes of the generation batches before a model or an engine is loaded.

        Raises:
            ValueError: R2 or replay cannot work with them.
        """
        if type(self.trainer.strategy).__name__.startswith("DeepSpeed"):
            warn_about_builds()
        keep_whole(self.trainer)
        prompts = getattr(self.trainer, "datamodule", None)
        if stage == TrainerFn.FITTING and isinstance(prompts, PromptDataModule):
            self.generation.check_sizes(prompts.plan)

    def configure_model(self) -> None:
        """Load the policy and, under ``ModelParallelStrategy``, shard it.

        Raises:
            ValueError: the strategy asks for tensor parallelism, which is not applied, or would shard a policy that
                another strategy has loaded whole.
        """
        models.check_mesh(self.device_mesh)
        if self.policy is not None:
            models.check_sharded(self.policy, self.device_mesh)
            return
        given = self.settings
        self.policy = models.load_policy(
            given["model"], given["model_options"], given["adapter"], checkpointing=given["gradient_checkpointing"]
        )
        self.experts.prepare(self.policy)
        of_engine = forward_of(given["engine"])
        round_learner(given["learner_rounding"], of_engine, self.policy)
        compress_learner(given["learner_kv_cache"], of_engine, self.policy)
        if self.objective.kl is not None and given["kl_reference"] == INITIAL:
            self.generation.keep_reference()
        if self.device_mesh is not None:
            models.shard(self.policy, self.device_mesh)

    def configure_optimizers(self) -> Any:
        """AdamW, or what ``optimizer`` makes, with a schedule that counts optimizer steps."""
        return optimizer_and_schedule(self.policy, self.settings, total_steps=self.trainer.estimated_stepping_batches)

    def configure_callbacks(self) -> list[Callback]:
        """Add a :class:`RunFolder`, unless the trainer has one or has no logger. The first hook that Lightning calls.

        Raises:
            ValueError: the strategy does not run on the trainer's devices.
        """
        models.check_devices(self.trainer)
        known = any(isinstance(callback, RunFolder) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        return [] if known or not self.trainer.loggers else [RunFolder()]

    def on_fit_start(self) -> None:
        """Build the engine, unless an earlier run of this module built it. Nothing of that run's numbers is left."""
        self.measuring = Measuring(self.rewards.names)
        self.generation.start()
        self.noise.close()  # of an earlier run that ended with an exception, after which Lightning tears nothing down
        self.noise = PerturbedForward(self.policy, parse_perturbation(self.settings["perturbation"]), self.device)
        self.compact.prepare()
        if self.ahead is not None:
            self.ahead.start(self.generation.engine)
        if self.replay is not None:
            self.replay.start()

    def on_train_start(self) -> None:
        """After a resume, restore the rollouts in use and the random state of the checkpoint."""
        if self._restored is not None:
            warn_of_lost_gradients(self.trainer)
        restored = self._restored or {}
        self.auto.start(self, restored.get("auto", {}))
        self.control.start(self, restored.get("control", {}))
        self.entropy.start(restored.get("entropy", {}))
        self.noise.load_state_dict(restored.get("perturbation", {}))
        self.generation.begin()
        if self._restored is not None:
            self.generation.load_state_dict(self._restored)
            if self.ahead is not None:
                self.ahead.load_state_dict(restored.get("ahead", {}))
            if self.replay is not None:
                self.replay.load_state_dict(restored.get("replay", {}))
            self._restored = None
        self.measuring.start()

    def on_validation_start(self) -> None:
        """Build the engine for ``trainer.validate``, ``test`` or ``predict``, which run without ``fit``.

        Within ``fit`` it is built, and what it holds is known. Training's random numbers are put aside.
        """
        self.noise.learning(False)
        if self.trainer.state.fn != TrainerFn.FITTING:
            self.generation.start()
        self.validation.begin()

    def teardown(self, stage: str) -> None:
        """Free the engine, if the module built it."""
        self.noise.close()
        if self.ahead is not None:
            self.ahead.close()
        if self.replay is not None:
            self.replay.close()
        self.generation.close()

    # ------------------------------------------------------------------------------------------------------- training

    def on_train_batch_start(self, batch: MicroStep, batch_idx: int) -> None:
        """Send the engine the current weights if the generation batch is new.

        Raises:
            TypeError: the batch is not one of a :class:`~lightning_module.PromptDataModule`.
        """
        _check_batch(batch, MicroStep)
        self.noise.learning(False)  # a sync, the old policy and the reference are those without it
        self.generation.prepare(batch)

    @float32_tensors()
    def training_step(self, batch: MicroStep, batch_idx: int) -> dict[str, Any]:
        """Sample if the generation batch is new, then compute the loss of one of its micro-batches."""
        inputs = self.generation.micro_batch(batch)
        self.noise.learning()
        scores = self.score(inputs, aux_loss=self.experts.balances)
        policy = policy_batch(
            inputs,
            scores.logps,
            version=self.trainer.global_step,
            entropies=scores.entropies,
            policy_mask=self.entropy.policy_mask(scores.entropies, trainable(inputs)),
        )
        self.auto.observe(batch, policy)
        reduction = self._reduction(batch, inputs, batch_idx)
        with self.measuring.clock.part("correction"):
            result = self.entropy.in_force(self.stages.late)(policy, reduction)
        if result.average is not None:
            inputs["past_average"] = result.average  # the next pass over these rows reads it
        loss = result.loss + self.experts.aux_term(scores.aux_loss, reduction)
        stats = result.stats.union(self.scorer.support_stats(scores, policy.mask)).union(self.experts.stats())
        stats = stats.union(kept_stats(inputs, policy.mask)).union(late_copies(inputs, policy))
        self.measuring.add_loss(loss, stats, policy)
        if scores.aux_loss is not None:
            self.measuring.add_mean("aux_loss", scores.aux_loss.detach())
        if self.entropy.has_bonus(self.objective):
            self.measuring.add_mean("policy_loss", self.objective.policy_loss_value(policy, result, reduction))
        self._measure_noise_floor(inputs, policy, batch_idx)
        with self.measuring.clock.part("recording"):
            record = recorded_rows(inputs, policy, result) if batch.iteration == 0 else None
        # Lightning divides the loss by accumulate_grad_batches; the reduction has done that already
        return {
            "loss": loss * self.trainer.accumulate_grad_batches,
            "rollouts": record,
            "step": self.trainer.global_step,
        }

    def score(
        self,
        inputs: dict[str, Any],
        *,
        batch_size: int | None = None,
        aux_loss: bool = False,
        in_order: bool = False,
        model: Any = None,
    ) -> Scores:
        """Log-probs of the completions under the current policy, routed as recorded if the rows have a record.

        ``model`` is what scores in its place; None = the policy.
        """
        model = self.policy if model is None else model
        with self.experts.replayed(model, inputs):
            in_order = in_order or self.experts.reads_rows_in_order(inputs)
            return self.scorer(model, inputs, batch_size=batch_size, aux_loss=aux_loss, in_order=in_order)

    def _reduction(self, batch: MicroStep, inputs: dict[str, Any], batch_idx: int) -> Reduction:
        """TRL's denominators, counted over the micro-batches that this optimizer step has."""
        size = window_size(self.trainer, batch_idx)
        return loss_reduction(
            inputs,
            accumulation=size,
            share=size / batch.plan.steps_per_generation,
            by_token=self.objective.aggregation == "token_mean",
            world_size=self.trainer.world_size,
            max_length=self.sampling.max_tokens,
        )

    def _measure_noise_floor(self, inputs: dict[str, Any], policy: PolicyBatch, batch_idx: int) -> None:
        """Score a micro-batch again, on the plain path, once in ``noise_floor_steps`` optimizer steps."""
        step, every = self.trainer.global_step, self.settings["noise_floor_steps"]
        place, size = batch_idx % self.trainer.accumulate_grad_batches, window_size(self.trainer, batch_idx)
        if not noise_floor_due(step, every, place, size=size) or self.noise.adds:  # other noise is no floor
            return
        again = partial(self.score, in_order=True)
        stats = measured_noise_floor(lambda rows, size: again(rows, batch_size=size).logps, inputs, policy)
        self.measuring.add_stats(stats)

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """From here on the step's time is that of the backward."""
        self.measuring.clock.begin("backward")

    def on_after_backward(self) -> None:
        """And until here."""
        self.measuring.clock.end("backward")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop on NaN, move the coefficients, and log. The only wait for the device per optimizer step.

        With ``top_entropy_quantile`` every micro-batch waits as well.
        """
        kl, shaping = self.objective.kl, ShapingControl(self.objective.shaping)
        together = adapts(kl) or self.entropy.adapts or shaping.moves
        step = self.measuring.end_step(sum_ranks if together else None)
        self.objective.check_step(step)
        if kl is not None and adapts(kl):
            self.objective = replace(self.objective, kl=next_kl(kl, step, world_size=self.trainer.world_size))
        if shaping.moves:
            shaping.end_step(step)
            self.objective = replace(self.objective, shaping=shaping.shaping)
        self.entropy.end_step(step, self.objective, self.measuring)
        self.control.compare_gradient(self)
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.trainer.fast_dev_run or (every and (self.trainer.global_step + 1) % every == 0):  # type: ignore[attr-defined]
            self._log_step(optimizer)
        self.noise.step()  # the log holds the scale that this step's forwards had

    def _log_step(self, optimizer: torch.optim.Optimizer) -> None:
        wrapped = self.trainer.strategy.model or self
        logs = {
            **self.measuring.close(self.objective, self.device),
            "grad_norm": gradient_norm(self.policy, flattened=is_flattened(wrapped)),
            "learning_rate": self.control.learning_rate(optimizer),
        }
        if "reward" in logs:  # as TRL does: only if completions were sampled
            logs["num_tokens"] = float(self.generation.num_tokens)
        logs |= self.auto.metrics() | self.noise.stats()
        logs |= self.control.observe(self, logs)
        self.step_logs = logs
        self.log_dict(logs, on_step=True, on_epoch=False, batch_size=1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After an optimizer step, end the run if the control session decided that."""
        self.control.end_step(self.trainer)

    def on_train_epoch_end(self) -> None:
        """Forget requests for generation batches that a callback's end of the epoch leaves out."""
        if self.ahead is not None:
            self.ahead.end_epoch()

    # ----------------------------------------------------------------------------------------------------- validation

    def on_validation_batch_start(self, batch: HeldOut, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Send the engine the current weights, unless it has them.

        Raises:
            TypeError: the batch is not one of a :class:`~lightning_module.PromptDataModule`.
        """
        _check_batch(batch, HeldOut)
        self.generation.prepare(batch)

    @float32_tensors()
    def validation_step(self, batch: HeldOut, batch_idx: int) -> None:
        """Sample held-out prompts and log their reward and pass@1."""
        self._log_held_out(batch, EVAL_PREFIX)

    def _log_held_out(self, batch: HeldOut, prefix: str) -> None:
        for name, metric in self.validation.observe(batch, prefix).items():
            self.log(name, metric, on_step=False, on_epoch=True, batch_size=1, prog_bar=name == f"{prefix}reward")

    def on_validation_epoch_end(self) -> None:
        """Take up training's noise again. Checkpoints are written after this."""
        self.validation.end()

    # ``trainer.test`` measures what validation measures, ``trainer.predict`` returns what was sampled
    on_test_start = on_predict_start = on_validation_start
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    @float32_tensors()
    def test_step(self, batch: HeldOut, batch_idx: int) -> None:
        """Sample test prompts and log their reward and pass@1 under ``test_``."""
        self._log_held_out(batch, "test_")

    @float32_tensors()
    def predict_step(self, batch: HeldOut, batch_idx: int) -> list[dict[str, Any]]:
        """Sample the test prompts: prompt, completion and rewards of each completion."""
        return self.validation.predict(batch)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add counters, controllers, rollouts in use and random states. With an adapter, drop the frozen weights."""
        parts = {"control": self.control, "auto": self.auto, "entropy": self.entropy, "agents": self.agents}
        parts |= {"perturbation": self.noise}
        parts |= {"ahead": self.ahead, "replay": self.replay}
        states = {name: part.state_dict() for name, part in parts.items() if part is not None}  # type: ignore[attr-defined]
        checkpoint[_STATE] = {**self.generation.state_dict(), **states}
        alone = isinstance(self.trainer.strategy, SingleDeviceStrategy | DDPStrategy)  # others save in another format
        if self.settings["adapter"] is not None and alone:
            trained = {f"policy.{name}" for name in models.trained_names(self.policy)}
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: value for name, value in weights.items() if name in trained}

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Lightning's method. Arguments that a checkpoint cannot hold (a model, functions) are given again by name.

        Raises:
            TypeError: one of them is missing; the message names it.
        """
        try:
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        except TypeError as error:
            if "required positional argument" not in str(error):
                raise
            missing = str(error).partition("argument")[2].partition(": ")[2]
            raise TypeError(
                f"{missing} must be given again: a checkpoint holds no loaded model and no function that has no import "
                "path. Use load_from_checkpoint(path, model=..., reward_funcs=...)."
            ) from error

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what :meth:`on_save_checkpoint` added; of a run only if one is resumed (``fit(ckpt_path=...)``).

        Lightning calls this too when weights are loaded for a new run, or to be validated.

        Raises:
            ValueError: the checkpoint lacks trained weights of the adapter.
        """
        state = checkpoint.get(_STATE)
        self.agents.check_restored((state or {}).get("agents", {}))
        resumed = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        self._restored = state if resumed else None
        if self.settings["adapter"] is not None and "state_dict" in checkpoint:
            trained = {f"policy.{name}" for name in models.trained_names(self.policy)}
            if missing := sorted(trained - set(checkpoint["state_dict"])):
                raise ValueError(
                    f"the checkpoint must hold all trained weights of the adapter, but lacks {len(missing)}, "
                    f"e.g. {missing[0]}."
                )


def _check_batch(batch: Any, expected: type) -> None:
    """Raise unless the loader is that of a data module of this package: a batch of rows is no generation plan."""
    if not isinstance(batch, expected):
        raise TypeError(
            f"the data must come from a lightning_module.PromptDataModule, whose batches ({expected.__name__}) say "
            f"which prompts are due, but got a batch of type {type(batch).__name__}. Use trainer.fit(module, "
            "PromptDataModule(rows)), with rows that have a 'prompt'."
        )
