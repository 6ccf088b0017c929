"""Makes rollouts when they are due: syncs and proves weights, samples, rewards, and decides on the whole batch."""

from __future__ import annotations

import atexit
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_module import deliberate, models
from lightning_module.callbacks import run_folder
from lightning_module.engines import (
    AUTOCAST,
    build_engine,
    check_one_each,
    computing_dtype,
    engine_numerics,
    float32_tensors,
    in_this_process,
    reports_logps_of,
)
from lightning_module.greedy import greedy_rewards
from lightning_module.host import Host
from lightning_module.prompts import Prompts
from lightning_module.rollouts import RolloutBuffer, collate, row_or_token_versions, without_truncated
from lightning_module.state import of_all_ranks, seed_random, set_random_state
from lightning_module.streams import BatchPlan, HeldOut, MicroStep
from trl_offpolicy.engines.engine import Engine, Rollouts, SyncReport
from trl_offpolicy.engines.hf import TransformersEngine
from trl_offpolicy.engines.images import image_token
from trl_offpolicy.engines.seeds import seed_of_rank
from trl_offpolicy.engines.sync import Gate, WeightSync, probe_of, raised_on_all_ranks
from trl_offpolicy.engines.sync_watch import UNKNOWN, WatchedSource
from trl_offpolicy.engines.truncation import truncation_of
from trl_offpolicy.engines.weights.source import ModelWeights
from trl_offpolicy.functional.collective import sum_ranks
from trl_offpolicy.objective.advantages import AdvantageInputs
from trl_offpolicy.objective.coefficients import ShapingControl
from trl_offpolicy.objective.staging import Stages
from trl_offpolicy.rollouts.agents import AgentBatch, Completions
from trl_offpolicy.rollouts.ahead.old_policy import OLD, PROXIMAL
from trl_offpolicy.rollouts.batches import advantage_inputs, decide, total_rewards, trainable
from trl_offpolicy.rollouts.compressed_forward import DENSE, in_dense_context
from trl_offpolicy.rollouts.duplicates import draws_as_scored, marked_duplicates
from trl_offpolicy.rollouts.greedy import reads_greedy
from trl_offpolicy.rollouts.images import check_completions
from trl_offpolicy.rollouts.kept import announce, collated
from trl_offpolicy.rollouts.scoring import Scorer, sequence_logps
from trl_offpolicy.rollouts.screening import Screened
from trl_offpolicy.rollouts.token_ids import run_entry
from trl_offpolicy.rollouts.token_rewards import not_finite, read_token_rewards
from trl_offpolicy.run_folder.layout import ENGINE_WEIGHTS_FOLDER, TOKEN_IDS
from trl_offpolicy.run_folder.writer import add_to_run
from trl_offpolicy.stats import Stats

logger = logging.getLogger(__name__)


class Sampled(NamedTuple):
    """Completions with their rewards.

    ``rows`` holds tensors under TRL's names, and ``images``, a list with one mapping of image inputs per row, if there
    are any. ``by_function`` (B, K) is the reward of each function, ``total`` (B,) is their weighted sum, ``lengths``
    (B,) counts sampled tokens, ``terminated`` (B,) says whether a completion ended by itself, ``completions`` are the
    texts or messages, ``prompts`` what the model saw, ``screened`` the rows that could not be used: they have neither
    tokens nor rewards. ``token_rewards`` holds the rewards by token of each completion, None = there are none.
    """

    rows: dict[str, Any]
    by_function: Tensor
    total: Tensor
    lengths: Tensor
    terminated: Tensor
    completions: Completions
    prompts: list[Any]
    screened: Screened
    token_rewards: list[list[float]] | None


class Generation:
    """Makes and keeps the rollouts of a module.

    Args:
        module: the module whose policy samples.
    """

    def __init__(self, module: Host) -> None:
        self._module = module
        self.engine: Engine | None = None
        self.num_tokens = 0
        self._groups = 0
        self._buffer: RolloutBuffer | None = None
        self._position = self._window = 0
        self._synced: int | None = None  # version of the weights that the engine has
        self._gate: Gate | None = None  # what may take an update back
        self._report: SyncReport | None = None  # of the last sync
        self._reference: nn.Module | None = None  # not a submodule: neither saved, sharded nor trained
        self._sync_weights: WeightSync | None = None
        self._prompts: Prompts | None = None
        self._begun: AgentBatch | None = None  # the batch that begins
        self._announced = False  # how the trainer's distribution is cut
        self._told_ids = False  # what the check of the first batch's ids showed

    # --------------------------------------------------------------------------------------------------------- engine

    @property
    def prompts(self) -> Prompts:
        """The tokenizer, with the ids that end a completion."""
        if self._prompts is None:
            self._prompts = Prompts.of(self._module.settings, self._module.policy)
        return self._prompts

    def check_sizes(self, plan: BatchPlan) -> None:
        """Raise unless R2 and replay can work with the sizes of the generation batches.

        Raises:
            ValueError: they cannot; the message names the option.
        """
        module = self._module
        module.experts.check_steps(plan.window / module.trainer.accumulate_grad_batches)
        if module.replay is not None:
            module.replay.check(plan)

    def start(self) -> None:
        """Build the engine, once. Every run then sends it the weights and proves them again."""
        module = self._module
        self._synced = self._sync_weights = self._begun = self._gate = self._report = None
        self._draw_apart()  # in every run: each sets Lightning's seed again on all ranks
        if self.engine is not None:
            return
        check_one_each(module.experts.engine, module.trainer.world_size)
        model = module.settings["model"]
        run = module.trainer.strategy.broadcast(uuid.uuid4().hex[:12])  # another one in each fit: names are not reused
        module.exact.check_precision()
        deliberate.check_teacher(module)
        module.agents.start(self.prompts)
        with engine_numerics(module.device):
            self.engine = build_engine(
                module.experts.engine,
                model_name=model if isinstance(model, str) else None,
                policy=lambda: module.policy,
                pad_token_id=self.prompts.pad,
                eos_token_ids=self.prompts.ends,
                run=run,
                folder=Path(module.trainer.default_root_dir) / ENGINE_WEIGHTS_FOLDER,
                rank=module.trainer.global_rank,
                rows=getattr(getattr(module.trainer, "datamodule", None), "micro_batch_size", None),
                truncated=module.sampling.truncated,
                tokenizer=self.prompts.tokenizer,
                autocast=computing_dtype(str(module.trainer.precision), module.device),
                wrapped=lambda: module.trainer.strategy.model,
            )
        self.engine.bind(ModelWeights(module.policy, is_main=module.trainer.is_global_zero))
        if in_this_process(self.engine):
            atexit.register(self.engine.close)

    def begin(self) -> None:
        """Begin training, once its control has begun.

        The rollouts of an earlier run of this module are forgotten: its generations have the same numbers. Updates are
        judged from now on. If a validation before training has sent the weights, its proof is the first judgement, as
        that of the first generation would be.
        """
        self._buffer, self._position, self._window = None, 0, 0
        self.num_tokens, self._told_ids, self._module.exact.found = 0, False, None
        self._gate = self._module.control.gate(self._module)
        if self._sync_weights is None:
            return
        self._sync_weights.gate, report = self._gate, self._report
        if self._gate is not None and report is not None and report.agreement is not None:
            self._gate.accepts(report.version, report.agreement)

    def _draw_apart(self) -> None:
        """Give this rank random numbers of its own, after the weights were made alike on all ranks.

        Under ``seed_everything`` all processes start with one seed, and copies of a prompt would be continued alike.
        The seeds are counted from that of the first rank, which never moves. So a further run, in which a rank may have
        its seed already, goes on with its numbers as the first rank does.
        """
        mesh, trainer = self._module.device_mesh, self._module.trainer
        alike = 1 if mesh is None else mesh["tensor_parallel"].size()  # these ranks compute one model together
        first = trainer.strategy.broadcast(torch.initial_seed())
        own = seed_of_rank(first, trainer.global_rank, tensor_parallel_size=alike) % 2**63
        if own != torch.initial_seed() % 2**63:
            seed_random(own)

    def close(self) -> None:
        """Free an engine that was built here, except vLLM in this process, which cannot be built a second time."""
        built = isinstance(self._module.settings["engine"], str | Mapping)
        if self.engine is None or not built or in_this_process(self.engine):
            return
        self.engine.close()
        self.engine = None

    def forget_sync(self) -> None:
        """Have the next generation sync and prove all weights again, whatever weights the engine has."""
        self._synced = None
        if (confirm := getattr(self.engine, "confirm", None)) is not None:
            confirm(False)  # what the engine has is in doubt, so nothing is left out from now on

    def keep_reference(self) -> None:
        """Keep a copy of the current weights, as the reference of a KL penalty."""
        self._reference = models.reference_of(self._module.policy)

    @property
    def is_trainer(self) -> bool:
        """True if the engine is the trainer's model: it samples in the trainer's precision and needs no proof."""
        return isinstance(self.engine, TransformersEngine)

    @property
    def reports_logps(self) -> bool:
        """True if the engine reports log-probs of what it samples."""
        return not self.is_trainer or reports_logps_of(self.engine)

    def prepare(self, batch: MicroStep | HeldOut) -> None:
        """Send the engine the current weights, if this batch will be sampled. All ranks call it.

        It is called before the strategy's forward begins, inside which FSDP1 cannot gather the weights.
        """
        if isinstance(batch, HeldOut) or self._is_new(batch):
            count = batch.num_generations if isinstance(batch, HeldOut) else batch.plan.num_generations
            self._begun = self._next(batch.prompts, count, learning=isinstance(batch, MicroStep))
            with self._numerics():
                self._sync(self._begun)

    def _next(self, prompts: Sequence[Mapping[str, Any]], count: int, *, learning: bool) -> AgentBatch | None:
        """The batch that begins; None = it is in flight."""
        ahead = self._module.ahead
        in_flight = learning and ahead is not None and ahead.in_flight
        return None if in_flight else self._module.agents.batch(prompts, count)

    def _is_new(self, step: MicroStep) -> bool:
        return self._buffer is None or self._buffer.generation != step.generation

    def _timed(self, part: str) -> AbstractContextManager[None]:
        """Count the block's time as a part of the training step; validations are not counted."""
        return self._module.measuring.clock.part(part, counted=self._module.trainer.training)

    def _numerics(self) -> AbstractContextManager[None]:
        """Inside it the engine computes, without gradient and in its own precision."""
        return torch.no_grad() if self.is_trainer else engine_numerics(self._module.device)

    def _sync(self, batch: AgentBatch | None) -> None:
        """Send the engine the current weights, unless it has them, and prove the sync. All ranks call it.

        Args:
            batch: what is sampled next. A run's first batch is never in flight: its prompts serve for the proofs.
        """
        module, version, engine = self._module, self._module.trainer.global_step, self.engine
        assert engine is not None
        if self._synced == version:
            return
        if self._sync_weights is None:
            assert batch is not None
            self._sync_weights = self._weight_sync(batch.request.prompt_ids)
            self._sync_weights.gate = self._gate
            source = ModelWeights(module.policy, is_main=module.trainer.is_global_zero)
            engine.bind(WatchedSource(source, self._sync_weights.watch))

        def send(version: int) -> SyncReport:
            with models.whole_weights(module.trainer.strategy.model):
                return engine.sync_weights(version)

        precision = getattr(engine, "precision", UNKNOWN)  # an engine of a user may not tell
        with nullcontext() if module.ahead is None else module.ahead.quiet():
            confirm = getattr(engine, "confirm", None)
            report = self._sync_weights(version, send=send, answer=engine.score, precision=precision, confirm=confirm)
        self._synced, self._report = version, report
        if module.trainer.training:
            module.measuring.clock.spend("sync", report.seconds)
        if not self.is_trainer:
            module.measuring.add_sync(report)

    def _weight_sync(self, prompt_ids: Sequence[Sequence[int]]) -> WeightSync:
        """The sync of this run. It is proved on the first prompts, unless the engine is the trainer's model."""
        module, policy = self._module, self._module.policy
        if self.is_trainer or not module.settings["sync_check"]:
            return WeightSync()

        def score(ids: Sequence[Sequence[int]]) -> list[list[float]]:
            scored = partial(sequence_logps, policy, ids, pad=self.prompts.pad)
            strategy = module.trainer.strategy
            with strategy.precision_plugin.forward_context(), float32_tensors():  # as a training step computes
                return models.in_forward(strategy.model, module, scored)

        picture = image_token(policy.config)  # the probe is text
        texts = [[token for token in ids if token != picture] for ids in prompt_ids]
        return WeightSync(
            probe_of(texts),
            score,
            without_adapter=partial(models.without_adapter, policy) if models.is_adapted(policy) else None,
            autocast=AUTOCAST.get(str(module.trainer.precision)),
        )

    # ------------------------------------------------------------------------------------------------------- sampling

    def sample(self, prompts: Sequence[Mapping[str, Any]], count: int, step: MicroStep | None = None) -> Sampled:
        """``count`` completions of each prompt, with rewards. All ranks call it.

        They are sampled at the current weights, unless the module samples ahead for the training step ``step``.
        """
        module, engine = self._module, self.engine
        assert engine is not None
        batch = self._begun or self._next(prompts, count, learning=step is not None)
        self._begun = None
        ahead = None if step is None else module.ahead
        deliberate.prepare_rollouts(module, engine, None if batch is None else batch.request, learning=step is not None)
        with self._timed("generation"), self._numerics():
            self._sync(batch)
            if ahead is not None:
                batch, completions = ahead.sample(engine, step, batch)
            else:
                assert batch is not None
                # Each rank calls its tools and functions by itself; the others would wait for one that fails.
                alone = module.agents.in_turns or module.agents.rollout is not None
                with raised_on_all_ranks(Exception) if alone else nullcontext():
                    completions = module.agents.sample(engine, batch)
        request, screen, rollouts = batch.request, batch.lane.screen, completions.rollouts
        by_token = self._token_rewards(rollouts)
        if bad := not_finite(by_token):
            screen.fail(bad)
        screened = screen.agree(rollouts.completion_ids, rollouts.sampling_per_token_logps, rollouts.tool_mask)
        rollouts = replace(rollouts, tool_mask=screened.mask_of(rollouts.completion_ids, rollouts.tool_mask))
        if ahead is not None:
            ahead.versions = rollouts.policy_versions
        rows: dict[str, Any] = collate(rollouts, pad=self.prompts.pad, device=module.device)
        rows |= self._kept_ids(rollouts)
        if request.images is not None:
            check_completions(rollouts.completion_ids, module.policy.config)
            rows["images"] = [one.inputs for one in request.images for _ in range(request.n)]
        lengths = trainable(rows).sum(-1)  # as TRL counts them, fillers among them
        rows["completion_mask"] = screened.without_tokens(rows["completion_mask"])
        rows |= module.experts.reported(module.policy, rows, rollouts)
        with self._timed("rewards"):
            by_function = module.rewards(
                completions.reward_rows(request),
                completions.completions,
                rollouts.completion_ids,
                **({} if request.environments is None else {"environments": request.environments}),
                trainer_state=self._trainer_state(),
                log_metric=module.measuring.add_reward_metric if module.trainer.training else _ignore,
                log_extra=_ignore,
            )
        screen.agree_on_scores()
        module.agents.give_back(batch)
        by_function = screened.without_rewards(by_function.to(module.device), local=True)
        ends = (*self.prompts.ends, self.prompts.pad)  # TRL counts both
        ended = [bool(row) and row[-1] in ends for row in rollouts.completion_ids]
        return Sampled(
            rows,
            by_function,
            total_rewards(by_function, module.rewards.weights),
            lengths,
            torch.tensor(ended, device=module.device),
            completions,
            [row["prompt"] for row in request.rows],
            screened,
            by_token,
        )

    def _token_rewards(self, rollouts: Rollouts) -> list[list[float]] | None:
        wanted = bool(self._module.settings["token_rewards"])
        return read_token_rewards(rollouts.token_rewards, rollouts.completion_ids, wanted=wanted, where=self._sampler)

    @property
    def _sampler(self) -> str:
        """What samples, in words."""
        return "engine" if self._module.settings["rollout"] is None else "rollout function"

    def _kept_ids(self, rollouts: Rollouts) -> dict[str, Any]:
        """The field of the rows with the tokens that truncated sampling kept; the first time it says which they are."""
        if not self._module.sampling.truncated:
            return {}
        found = collated(rollouts.sampling_mask, rollouts.completion_ids)
        if not self._announced:
            why = None if found else getattr(self.engine, "no_mask", None) or "the engine does not report them"
            announce(truncation_of(self._module.sampling.vllm_options()), reason=why)
            self._announced = True
        return found

    def _trainer_state(self) -> SimpleNamespace:
        """The fields of ``transformers.TrainerState`` that TRL's reward functions read."""
        trainer = self._module.trainer
        return SimpleNamespace(
            global_step=trainer.global_step, epoch=trainer.current_epoch, max_steps=trainer.max_steps
        )

    # ------------------------------------------------------------------------------------------------------- training

    def micro_batch(self, step: MicroStep) -> dict[str, Any]:
        """The rows of this micro-step. Samples first if its generation batch is new."""
        module = self._module
        if self._buffer is None or self._is_new(step):
            module.auto.end_generation(module)
            with self._timed("scoring"):
                rows = self._generate(step)
            self._buffer = RolloutBuffer.split(step.generation, rows, step.plan, module.compact.splitting(step.plan))
            module.compact.scoring.shared.look_at(self._buffer.micro_batches)
        self._position = step.position + 1
        self._window = step.plan.window
        return self._buffer.micro_batches[step.slot]

    @torch.no_grad()
    def _generate(self, step: MicroStep) -> dict[str, Any]:
        """A whole generation batch: rollouts, rewards, advantages, and the log-probs that the loss will read."""
        module, count = self._module, step.plan.num_generations
        self.check_sizes(step.plan)  # again: a callback may have changed accumulate_grad_batches
        sampled = self.sample(step.prompts, count, step)
        rows, device = sampled.rows, module.device
        module.measuring.completions.update(
            sampled.by_function, sampled.total, sampled.lengths, sampled.terminated, count
        )
        module.measuring.add_tools(sampled.completions)
        module.measuring.add_stats(sampled.screened.stats(module.device))
        module.measuring.add_stats(module.agents.guard_stats(module.device))
        module.measuring.add_stats(deliberate.measured(self.engine, module.device))
        if module.settings["mask_truncated_completions"]:
            without_truncated(rows, sampled.terminated)
        module.measuring.add_stats(self._check_ids(rows, sampled.completions))
        as_scored = self.is_trainer and draws_as_scored({"generation_kwargs": module.sampling.extra})
        as_scored &= module.agents.rollout is None
        module.measuring.add_stats(marked_duplicates(rows, group_size=count, drawn_as_scored=as_scored))
        trainer, groups = module.trainer, len(step.prompts)
        first = self._groups + trainer.global_rank * groups
        self._groups += groups * trainer.world_size
        rows["rewards"] = sampled.total
        rows["group_rewards"] = sampled.total.view(-1, count).repeat_interleave(count, dim=0)
        rows["group_ids"] = first + torch.arange(len(sampled.total), device=device) // count
        length, version = rows["completion_ids"].shape[1], trainer.global_step
        if module.ahead is None:  # which adds the versions that it knows itself
            rows["policy_versions"] = row_or_token_versions(
                sampled.completions.rollouts, length=length, current=version, device=device, where=self._sampler
            )
        self._count_tokens(rows, sampled.lengths)
        if module.objective.kl is not None:  # first: it may belong into the reward
            rows["ref_per_token_logps"] = self._score_reference(rows, step.plan.micro_batch_size)
        self._decide(rows, sampled, step)
        module.exact.check(rows, step.plan.micro_batch_size)
        module.auto.judge_first(module, rows, step.plan.micro_batch_size)
        if module.replay is None:
            return rows
        by_reference = partial(self._score_reference, size=step.plan.micro_batch_size)
        mixed: dict[str, Any] = module.replay.mixed(rows, step, pad=self.prompts.pad, score_reference=by_reference)
        if module.stages.early is not None:  # its rows are fresh and replayed ones
            score_old = partial(self._score_old, mixed, step.plan.micro_batch_size)
            self._run(replace(module.stages, advantages=None), mixed, None, score_old, keep_as=PROXIMAL)
        return mixed

    def _check_ids(self, rows: dict[str, Any], completions: Completions) -> Stats:
        """Whether the rows hold the ids that the engine sampled; ``run.json`` keeps the answer of the first batch."""
        module = self._module
        stats: Stats = module.agents.check_ids(rows, completions)
        if not self._told_ids:
            self._told_ids, folder = True, run_folder(module.trainer)
            entry = run_entry(stats, module.settings["check_token_ids"])
            if module.trainer.is_global_zero and not module.trainer.fast_dev_run:  # type: ignore[attr-defined]
                add_to_run(folder, TOKEN_IDS, entry)
        return stats

    def _count_tokens(self, rows: dict[str, Any], lengths: Tensor) -> None:
        counts = torch.stack([trainable(rows).sum(), lengths.sum() + rows["prompt_mask"].sum()])
        rows["num_items_in_batch"], sampled = sum_ranks(counts).unbind()
        self.num_tokens += int(sampled)

    def _decide(self, rows: dict[str, Any], sampled: Sampled, step: MicroStep) -> None:
        """Add advantages, the old log-probs if they will be read, and the decisions of a batch-wide correction."""
        module, stages = self._module, self._module.stages
        score_old = partial(self._score_old, rows, step.plan.micro_batch_size)
        if module.replay is not None:
            stages = replace(stages, early=None)  # decided when the replayed rows are there
        if self._misaligned(step) and not stages.needs_old:  # else `decide` scores them and leaves them in the rows
            rows["old_per_token_logps"] = score_old()[0]
        if module.ahead is not None:
            module.ahead.complete(rows, lambda model: score_old(model)[0])
        rows["advantages"] = torch.zeros_like(sampled.total)  # `decide` fills them
        greedy = self._greedy_rewards(step) if reads_greedy(stages) else None
        weights = module.rewards.weights
        inputs = advantage_inputs(  # of this rank
            rows, sampled.by_function, weights, rank=0, greedy=greedy, token_rewards=sampled.token_rewards
        )
        keep_as = OLD if module.ahead is None else module.ahead.name_of_scores
        self._run(stages, rows, inputs, score_old, keep_as=keep_as)

    def _greedy_rewards(self, step: MicroStep) -> Tensor:
        module, engine = self._module, self.engine
        assert engine is not None
        with self._timed("generation"), self._numerics():
            return greedy_rewards(module, engine, step.prompts, step.plan.num_generations, self._trainer_state())

    def _run(
        self,
        stages: Stages,
        rows: dict[str, Any],
        inputs: AdvantageInputs | None,
        score_old: Callable[[], tuple[Tensor, Tensor]],
        *,
        keep_as: str | None,
    ) -> None:
        """Run stages on a batch (:func:`~trl_offpolicy.rollouts.batches.decide`) and note their numbers."""
        module = self._module
        version = module.trainer.global_step
        stats = decide(stages, rows, inputs, score_old=score_old, version=version, keep_as=keep_as)
        if stats.groups:
            module.measuring.add_stats(stats)

    def _score_old(self, rows: dict[str, Any], size: int, model: Any = None) -> tuple[Tensor, Tensor]:
        """(B, T) log-probs at the current weights, and sums of their squared probabilities.

        ``model`` is what scores; None = the policy, as it is.
        """
        module = self._module
        with module.experts.recorded(module.policy if model is None else model, rows):
            scores = module.score(rows, batch_size=size, model=model)
        return scores.logps, scores.sum_sq_probs

    def _misaligned(self, step: MicroStep) -> bool:
        """True if this generation batch spans several optimizer steps and something reads what the old pass gives."""
        module = self._module
        reads = self.is_trainer or module.objective.proximal.reads_old or module.experts.records
        if module.ahead is not None:
            reads = module.ahead.reads_scores
        return reads and self._module.trainer.accumulate_grad_batches % step.plan.window != 0

    def _score_reference(self, rows: dict[str, Any], size: int) -> Tensor:
        """Log-probs of the reference model, over the whole distribution even if the engine truncates its own."""
        module, policy = self._module, self._module.policy
        scorer = Scorer(module.sampling, truncated=False, compact=module.compact.scoring)
        if module.settings["kl_reference"] == DENSE:
            with in_dense_context(policy):
                return scorer(policy, rows, batch_size=size).logps
        if self._reference is None:
            with models.without_adapter(policy):
                return scorer(policy, rows, batch_size=size).logps
        # It was copied when the model was loaded, before Lightning gave that another dtype (precision: bf16-true).
        self._reference.to(module.device)
        module.trainer.strategy.precision_plugin.convert_module(self._reference)
        return scorer(self._reference, rows, batch_size=size).logps

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Counters, the KL controller, and every rank's random state and rollouts in use. All ranks call it."""
        kl = self._module.objective.kl
        in_use = self._buffer is not None and self._position < self._window
        return {
            "version": self._module.trainer.global_step,
            "num_tokens": self.num_tokens,
            "groups": self._groups,
            "kl": {} if kl is None else kl.state_dict(),
            "shaping": ShapingControl(self._module.objective.shaping).state_dict(),
            "ranks": of_all_ranks(self._buffer if in_use else None),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`. If the number of ranks changed, rollouts in use are sampled again."""
        module, kl = self._module, self._module.objective.kl
        self.num_tokens, self._groups = state["num_tokens"], state["groups"]
        if kl is not None and kl.state_dict():
            module.objective = replace(module.objective, kl=kl.restored(state["kl"]))
        shaping = ShapingControl(module.objective.shaping)
        if shaping.moves:
            shaping.load_state_dict(state.get("shaping", {}))
            module.objective = replace(module.objective, shaping=shaping.shaping)
        if len(state["ranks"]) != module.trainer.world_size:
            logger.warning("The number of ranks differs from the checkpoint's: rollouts in use are sampled again.")
            return
        mine = state["ranks"][module.trainer.global_rank]
        set_random_state(mine["random"])
        if mine["rollouts"] is not None:
            on_host = module.experts.on_host
            self._buffer = RolloutBuffer.restored(mine["rollouts"], module.device, on_host=on_host)


def _ignore(name: str, value: object) -> None:
    """Does nothing; replaces TRL's ``log_extra`` (columns of its printed table), and ``log_metric`` in validation."""
