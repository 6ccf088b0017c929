"""Configuration of the TRL trainer: ``GRPOConfig`` plus ``offpolicy`` and ``engine``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, cast, get_args

import torch
import yaml
from transformers import Trainer
from trl import GRPOConfig

from trl_offpolicy import presets
from trl_offpolicy.checks import check_bool, check_choice, check_number, check_positive, check_whole, read_switch
from trl_offpolicy.control import ControlSpec, parse_control
from trl_offpolicy.control.auto import starting_preset
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.correction.terms import OffPolicySequenceMask
from trl_offpolicy.engines.logit_fusion import LogitFusion
from trl_offpolicy.engines.settings import EngineSettings
from trl_offpolicy.objective.advantages import AdvantageEstimator
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.parts import as_mapping, read_numbers
from trl_offpolicy.presets.frameworks.trl import AGGREGATION, TRLOptions
from trl_offpolicy.presets.parsing import (
    parse_advantages,
    parse_correction,
    parse_objective,
    parse_preset,
    plain_method,
)
from trl_offpolicy.presets.preset import Preset
from trl_offpolicy.rollouts.agents.guard import TIMEOUT, check_tool_timeout
from trl_offpolicy.rollouts.ahead.checks import check_config
from trl_offpolicy.rollouts.ahead.settings import AsyncSettings
from trl_offpolicy.rollouts.compressed_forward import (
    INITIAL,
    SimulatedSampler,
    check_kl_reference,
    parse_learner_kv_cache,
    parse_simulated,
)
from trl_offpolicy.rollouts.perturbed_forward import parse_perturbation
from trl_offpolicy.rollouts.rounded_forward import parse_learner_rounding
from trl_offpolicy.rollouts.screening import check_on_bad_rollout
from trl_offpolicy.rollouts.token_ids import CheckTokenIds
from trl_offpolicy.trl import exact
from trl_offpolicy.trl.routing import check_replay

_TRL_FIELDS = tuple(item.name for item in fields(TRLOptions))
_LOSS_FIELDS = (
    "loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "sapo_temperature_pos",
    "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
)  # fmt: skip
_OBJECTIVE_SOURCE = {
    "policy_loss": _LOSS_FIELDS,
    "aggregation": ("loss_type",),
    "kl": ("beta",),
    "entropy_coef": ("entropy_coef",),
}
_ADVANTAGE_SOURCE = {"advantages": ("scale_rewards", "multi_objective_aggregation")}


@dataclass
class OffPolicyGRPOConfig(GRPOConfig):  # type: ignore[misc]
    """``GRPOConfig`` with rollout correction.

    Args:
        offpolicy: a preset's name, e.g. ``paper/tis`` (``trl_offpolicy.presets.names()`` lists them); or a mapping
            ``{preset: ..., options: {...}, correction: {...}, objective: {...}}``; with ``framework: verl`` (skyrl,
            slime, areal, openrlhf, ...) in place of ``preset``, ``options`` are that framework's own; ``file`` in place
            of ``options`` reads them from its configuration file or launch script. ``advantages: rloo``
            (or ``{type: grpo, scale: none}``) replaces TRL's advantages. ``auto`` chooses among corrections by the
            batches (:mod:`trl_offpolicy.control.auto`). Or an object: a ``Preset``, a
            ``Correction``, or an ``Objective``, which defines the whole loss (TRL's loss fields then keep their
            defaults). Default: ``paper/tis`` with vLLM, ``paper/logit-fusion`` with a teacher, else ``measure``
            (diagnostics only).
        engine: keyword arguments for vLLM's ``LLM`` in colocate mode (``dtype``, ``enforce_eager``,
            ``quantization``, ``max_model_len``, ...), and the kit's options ``transfer`` (how weights reach it),
            ``weight_rounding`` (round them at every sync), ``exact`` (bring engine and trainer together, and check
            that they are: :mod:`trl_offpolicy.engines.exact`), ``check_sync``, ``folder``, ``timeout``, ``retries``:
            see :class:`~trl_offpolicy.engines.settings.EngineSettings`. Without vLLM ``logit_fusion`` lets a teacher
            take part in the rollouts (:class:`~trl_offpolicy.engines.logit_fusion.LogitFusion`), ``weight_rounding``
            rounds what ``generate`` samples with, and ``kv_cache`` compresses its keys and values
            (:class:`~trl_offpolicy.engines.kv_cache.KVCache`).
        async_rollouts: sample generation batches ahead of learning, with a server: a lag (1 = the server samples the
            next batch while the trainer learns from this one), or a mapping ``{lag: 2, partial: continue, old_logps:
            snapshot}`` (:class:`~trl_offpolicy.rollouts.ahead.settings.AsyncSettings`). None: sample and learn in turn.
        record_rollouts: whether to write every rollout to ``rollouts.parquet`` in ``output_dir``, and the text of the
            tokens of the worst 8 responses of each rank to ``worst_responses``, for the report.
        write_report: whether to print the summary and write ``report.html`` at the end of training.
        control: ``warn`` prints a line for every new finding, ``stop`` also ends the run when it is critical, ``act``
            runs the controllers; or a mapping ``{policy: act, controllers: {length_guard: {...}}, thresholds: {...}}``
            (:func:`~trl_offpolicy.control.parse_control`). None or ``off``: the run is not watched.
        check_token_ids: what happens if rows do not hold the ids that the engine sampled: ``warn`` (once per run),
            ``raise``, or ``off``. A few rows of every generation batch are compared. Text that was tokenized again
            may have other ids.
        on_bad_rollout: what happens to a reply that cannot be used (empty or missing, an id that the model does not
            know, a log-prob above 0): ``raise`` ends the run with the reason, ``drop`` goes on without it (its group's
            baseline is made without it), ``retry`` asks for it again, twice, and then drops it.
        tool_timeout: seconds that a call of a tool may take, then its answer is an error. None: any time, and tools run
            in the trainer's own thread.
        token_rewards: whether the ``rollout_func`` also returns rewards by token (a process reward model's), in a
            column ``token_rewards``: for each completion a list with one number for each token. They are added to the
            rewards of the reward functions before the advantages are made (``docs/objectives.md``).
        routing_replay: for a mixture of experts. ``r2`` sends the tokens of every pass over a batch to the experts
            that the trainer chose at the weights that sampled, ``r3`` to those that the engine chose; ``none`` routes
            freely. Or a mapping ``{mode: r3, device: cpu, limit_gib: 8}``
            (:class:`~trl_offpolicy.engines.routing.options.RoutingReplay`).
        freeze_router: do not train the routers.
        freeze_router_bias: do not train the routers' biases.
        learner_rounding: ``engine`` computes the trainer's own forward with linear weights that are rounded as
            ``engine.weight_rounding`` rounds the engine's, so that both sides are one policy; or a rounding such as
            ``fp8``, for an engine with quantised kernels. Gradients pass straight through; what is saved is not rounded
            (:mod:`trl_offpolicy.rollouts.rounded_forward`). None = the forward is not rounded.
        learner_kv_cache: ``engine`` computes the trainer's own forward over what ``engine.kv_cache`` holds for each
            token, so that both sides are one policy; or a cache of its own, such as ``fp8`` or ``{keep_first: 4,
            keep_last: 64}`` (:mod:`trl_offpolicy.rollouts.compressed_forward`). None = over all keys and values.
        kl_reference: of what the KL term is: ``initial``, the model at the start; or ``dense_context``, the policy
            itself over all keys and values, at the weights when the batch is scored, which ``offpolicy.objective.kl``
            then distils into the compressed context.
        perturbation: standard deviation of noise on the hidden states of the forwards that learn (ALP), or a mapping
            of :class:`~trl_offpolicy.rollouts.perturbed_forward.Perturbation`. None = no noise.
        noise_floor_steps: once in this many optimizer steps, one micro-batch is scored again in another batch size.
            ``offpolicy/noise_floor/*`` is how far the trainer then differs from itself. 0 = never.
        trim_padding: ``true`` sorts the rows of an optimizer step into micro-batches of like length and cuts each to
            its own width, where the loss does not depend on the split (bnpo does: then it only cuts, and says so).
            Padding that is left is not computed where that pays. ``ranks`` does so with the rows of all ranks, which
            change places so that each rank computes about as many tokens. ``columns`` only cuts; ``false`` leaves TRL's
            padding.
        share_prefix: ``true`` computes a prompt once for its completions in a micro-batch, ``auto`` where that pays and
            is proved equal, ``false`` never (``docs/speed.md``).
        tiled_head: ``true`` computes log-probs and entropies of the completions with this kit's head, in tiles of 128
            tokens; ``false`` with TRL's, in tiles of 4096 x 32768 logits, which on a CPU projects prompts as well;
            ``auto`` takes TRL's only where it has Triton kernels, or with ``engine: {exact: true}``. Less memory
            (``docs/speed.md``). A truncated distribution takes the kit's, prompt learning TRL's.
        correct_threshold: a reward of at least this is a correct answer. Evaluation then logs ``eval_pass@1``, the
            share of correct completions. None = not logged.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *GRPOConfig._VALID_DICT_FIELDS, "offpolicy", "engine", "control", "routing_replay", "async_rollouts",
        "learner_rounding", "learner_kv_cache", "perturbation",
    ]  # fmt: skip

    offpolicy: dict[str, Any] | str | Correction | Objective | Preset | None = field(  # the parser takes the second
        default=None,
        metadata={
            "help": "Rollout correction: a preset's name (e.g. 'paper/tis'), or a mapping with the keys preset (or "
            "framework), options, correction, objective, advantages. Default: paper/tis with vLLM, measure without."
        },
    )
    engine: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Keyword arguments for vLLM's LLM in colocate mode (dtype, enforce_eager, quantization, "
            "max_model_len, ...) and the kit's own: transfer (auto, memory, folder, adapter, nccl), weight_rounding "
            "(int8, int4, fp8, ...), kv_cache (without vLLM: fp8, or keep_first and keep_last), exact "
            "(true: engine and trainer as equal as can be), check_sync, folder, timeout, retries."
        },
    )
    async_rollouts: dict[str, Any] | str | int | None = field(  # the parser takes the second: JSON comes as text
        default=None,
        metadata={
            "help": "Sample ahead with a vLLM server: generation batches that may be in flight while the trainer "
            "learns (a lag, 1 = one-step off-policy), or a mapping with the keys lag, partial (continue, finish, "
            "keep), old_logps (recompute_proximal, snapshot, model, ewma, balance, refuse), ewma_decay. Default: "
            "sample and learn in turn."
        },
    )
    record_rollouts: bool = field(
        default=True, metadata={"help": "Write every training rollout to rollouts.parquet in output_dir."}
    )
    write_report: bool = field(
        default=True, metadata={"help": "At the end of training print the summary and write report.html in output_dir."}
    )
    control: dict[str, Any] | str | None = field(
        default="warn",
        metadata={
            "help": "Watching the run: warn (a line for every new finding), stop (also end it, with a checkpoint), act "
            "(run the controllers), off; or a mapping with the keys policy, controllers, thresholds, patience, risk, "
            "gradient_cosine."
        },
    )
    check_token_ids: str = field(
        default="warn",
        metadata={
            "help": "If a few rows of a generation batch do not hold the ids that the engine sampled: warn, raise, or "
            "off (no check)."
        },
    )
    on_bad_rollout: str = field(
        default="raise",
        metadata={
            "help": "A reply that cannot be used (empty, an id outside the vocabulary, a log-prob above 0): raise, "
            "drop (the step goes on without it), or retry (ask for it again, then drop it)."
        },
    )
    tool_timeout: float | None = field(
        default=TIMEOUT,
        metadata={
            "help": "Seconds that a call of a tool may take; then its answer is an error and the step goes on. None: "
            "any time, and tools run in the trainer's own thread."
        },
    )
    token_rewards: bool = field(
        default=False,
        metadata={
            "help": "The rollout_func returns a column token_rewards, one number for each token of each completion; "
            "they are added to the rewards before the advantages are made."
        },
    )
    routing_replay: dict[str, Any] | str | None = field(
        default="none",
        metadata={
            "help": "Mixture of experts: replay the trainer's routing (r2) or the engine's (r3), or none; or a mapping "
            "with the keys mode, device (model, cpu), limit_gib."
        },
    )
    freeze_router: bool = field(default=False, metadata={"help": "Mixture of experts: do not train the routers."})
    freeze_router_bias: bool = field(
        default=False, metadata={"help": "Mixture of experts: do not train the routers' biases."}
    )
    learner_rounding: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Round the linear weights in the trainer's own forward: engine (as engine.weight_rounding), or a "
            "rounding (int8, int4, fp8, ..., or a mapping). Default: not rounded."
        },
    )
    learner_kv_cache: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Compute the trainer's own forward over a compressed KV cache: engine (as engine.kv_cache), fp8, "
            "or a mapping with the keys keep_first, keep_last, rounding, scale. Default: over all keys and values."
        },
    )
    kl_reference: str = field(
        default=INITIAL,
        metadata={
            "help": "Of what the KL term is: initial (the model at the start), or dense_context (the policy itself "
            "without learner_kv_cache)."
        },
    )
    perturbation: dict[str, Any] | str | None = field(  # the parser takes the second: numbers come as text
        default=None,
        metadata={
            "help": "Noise on the hidden states of the forwards that learn (ALP): its standard deviation as a share of "
            "their size, or a mapping with the keys std, largest, learn, learning_rate. Default: none."
        },
    )
    noise_floor_steps: int = field(
        default=100,
        metadata={
            "help": "Every so many optimizer steps, score one micro-batch twice (in another batch size) and log how "
            "far the trainer differs from itself as offpolicy/noise_floor. 0 = never."
        },
    )
    trim_padding: str = field(
        default="true",
        metadata={
            "help": "true: micro-batches of rows of like length, each cut to its own width (only cut where the loss "
            "depends on the split); ranks: the same with the rows of all ranks, so that each computes as many tokens; "
            "columns: only cut; false: TRL's padding."
        },
    )
    share_prefix: str = field(
        default="auto",
        metadata={
            "help": "Compute a prompt once for its completions in a micro-batch: auto (where it pays), true, false."
        },
    )
    tiled_head: str = field(
        default="false",
        metadata={
            "help": "Log-probs in tiles of 128 tokens, of completions alone: auto (where TRL has no Triton kernels), "
            "true, false (TRL's head)."
        },
    )
    correct_threshold: float | None = field(
        default=None,
        metadata={
            "help": "A reward of at least this is a correct answer: evaluation then logs eval_pass@1, the share of "
            "correct ones. Default: not logged."
        },
    )
    vllm_importance_sampling_correction: bool = field(
        default=False,
        metadata={"help": "TRL's own correction. Must stay False here: `offpolicy` takes its place."},
    )
    disable_dropout: bool = field(
        default=True,
        metadata={
            "help": "Dropout makes the trainer's log-probs random and shows up as mismatch; off by default here."
        },
    )

    def __post_init__(self) -> None:
        _read_mappings(self)
        _take_fields_of_method(self)
        if exact.wants_exact(self.engine):
            exact.check_config(self)
        super().__post_init__()
        if self.device.type == "cpu":
            self._setup_devices = torch.device("cpu")  # torch.load cannot resume on accelerate's cpu:1
        if self.vllm_importance_sampling_correction:
            raise ValueError(
                "vllm_importance_sampling_correction must be False: it would correct a second time. Set "
                "offpolicy to the correction you want (e.g. paper/tis; presets.from_trl gives TRL's own)."
            )
        _refuse_trl_correction(self)
        if not isinstance(self.engine, dict | None):
            raise ValueError(f"engine must be a mapping of vLLM arguments, but got {self.engine!r}.")
        EngineSettings.parse(self.engine)
        parse_perturbation(self.perturbation)
        parse_learner_rounding(self.learner_rounding, self.engine)
        parse_learner_kv_cache(self.learner_kv_cache, self.engine)
        self.noise_floor_steps = read_numbers(self.noise_floor_steps)
        check_whole("noise_floor_steps", self.noise_floor_steps, least=0)
        check_positive(temperature=self.temperature)  # TRL divides the logits by it
        self.correct_threshold = read_numbers(self.correct_threshold)
        if self.correct_threshold is not None:
            check_number("correct_threshold", self.correct_threshold)
        check_bool(record_rollouts=self.record_rollouts, write_report=self.write_report)
        check_bool(token_rewards=self.token_rewards)
        check_bool(freeze_router=self.freeze_router, freeze_router_bias=self.freeze_router_bias)
        self.trim_padding = cast("str", read_switch("trim_padding", self.trim_padding, ["columns", "ranks"]))
        self.share_prefix = cast("str", read_switch("share_prefix", self.share_prefix, ["auto"]))
        self.tiled_head = cast("str", read_switch("tiled_head", self.tiled_head, ["auto"]))
        check_choice("check_token_ids", self.check_token_ids, get_args(CheckTokenIds))
        check_on_bad_rollout(self.on_bad_rollout)
        self.tool_timeout = read_numbers(self.tool_timeout)
        check_tool_timeout(self.tool_timeout)
        check_replay(self)
        parse_control(self.control)
        # a wrong option fails here, not after the model is loaded
        objective = starting_preset(resolve_preset(self)).objective
        if (ahead := AsyncSettings.parse(self.async_rollouts)) is not None:
            check_config(self, ahead, objective)
        _check_reference(self, objective)
        wants_model = objective.kl is not None and self.kl_reference == INITIAL
        if wants_model and self.beta == 0.0:  # type: ignore[has-type]
            assert objective.kl is not None
            self._beta_of_kl = objective.kl.beta
            self.beta = objective.kl.beta  # or TRL would not load the reference model

    @property
    def distributed_state(self) -> Any:
        """As of transformers. TRL's GRPOTrainer asks for it before it loads a model, and is refused then.

        Raises:
            TypeError: the trainer is not an ``OffPolicyGRPOTrainer``: it would train without any correction.
        """
        _refuse_other_trainers(sys._getframe(1).f_locals.get("self"))
        try:
            return self.__dict__["distributed_state"]
        except KeyError:
            raise AttributeError("distributed_state is not set before the devices are.") from None

    @distributed_state.setter
    def distributed_state(self, state: Any) -> None:
        self.__dict__["distributed_state"] = state

    def get_process_log_level(self) -> int:
        """The log level. Every trainer asks for it when it is built; one that does not read ``offpolicy`` is refused.

        Raises:
            TypeError: the trainer is not an ``OffPolicyGRPOTrainer``: it would train without any correction.
        """
        _refuse_other_trainers(sys._getframe(1).f_locals.get("self"))
        level: int = super().get_process_log_level()
        return level

    @property
    def normalize_advantages(self) -> bool:
        """An option of ``RLOOConfig``. TRL's RLOOTrainer reads it before it asks for the log level, and is refused.

        Raises:
            TypeError: always.
        """
        raise _wrong_trainer("RLOOTrainer", ", with offpolicy: trl/rloo for the same loss")

    def to_dict(self) -> dict[str, Any]:
        """TRL's dict, for loggers and JSON. An object in ``offpolicy`` becomes the mapping with the same meaning."""
        return {**super().to_dict(), "offpolicy": plain_method(self.offpolicy)}

    @property
    def logit_fusion(self) -> LogitFusion | None:
        """The option ``engine.logit_fusion``: a teacher that takes part in the rollouts; None = there is none."""
        return EngineSettings.parse(cast("Mapping[str, Any] | None", self.engine)).logit_fusion

    @property
    def simulated(self) -> SimulatedSampler | None:
        """What ``generate`` samples from in place of the trainer's policy; None = from that, or vLLM samples."""
        return None if self.use_vllm else parse_simulated(self.engine)

    @property
    def reports_logps(self) -> bool:
        """True if what samples, without a ``rollout_func``, reports log-probs of its own."""
        return bool(self.use_vllm) or self.logit_fusion is not None or self.simulated is not None

    @property
    def control_spec(self) -> ControlSpec | None:
        """The field ``control``, parsed; None = the run is not watched."""
        return parse_control(self.control)

    @property
    def preset(self) -> Preset:
        """The objective that these options describe."""
        return resolve_preset(self)


def resolve_preset(args: OffPolicyGRPOConfig, *, has_rollout_func: bool = False) -> Preset:
    """The preset of a configuration: TRL's loss fields give the objective, ``offpolicy`` the correction and overrides.

    Args:
        args: the configuration.
        has_rollout_func: whether a ``rollout_func`` samples. It reports log-probs even without vLLM;
            ``off_policy_mask_threshold`` then reads them, as in TRL.

    Raises:
        ValueError: a key or value is unknown, or a quantity is set in both places.
    """
    options = {name: getattr(args, name) for name in _TRL_FIELDS}
    options |= {"use_vllm": args.reports_logps or has_rollout_func, "vllm_importance_sampling_correction": False}
    base = presets.from_trl(**options)
    spec = args.offpolicy if args.offpolicy is not None else _default_method(args)
    chosen, said = parse_preset(spec, where="offpolicy")
    objective = _with_preset(args, base.objective, chosen, whole=isinstance(spec, Objective))
    overrides = said.get("objective") or {}
    _refuse_double(args, as_mapping(overrides, "offpolicy.objective"), where="offpolicy.objective.")
    objective = parse_objective(overrides, where="offpolicy.objective", base=objective)
    objective = _with_correction(objective, chosen, said)  # last: what a weight may hold depends on the loss
    return replace(chosen, objective=objective, advantages=_advantages(args, chosen, said))


def _default_method(args: OffPolicyGRPOConfig) -> str:
    """The preset of a configuration that names none."""
    if args.logit_fusion is not None:
        return "paper/logit-fusion"
    return "paper/tis" if args.reports_logps else "measure"


def _check_reference(args: OffPolicyGRPOConfig, objective: Objective) -> None:
    """Check ``kl_reference``; a dense context needs no model beside the policy, which ``beta`` would load."""
    cache, where = parse_learner_kv_cache(args.learner_kv_cache, args.engine), "offpolicy.objective.kl"
    check_kl_reference(args.kl_reference, cache=cache, has_kl=objective.kl is not None, where=where)
    if args.kl_reference != INITIAL and args.beta != 0.0:
        raise ValueError(
            f"beta must be 0 with kl_reference {args.kl_reference!r}, or TRL would load a reference model, but got "
            f"{args.beta}. Give the coefficient as {where}."
        )


def _take_fields_of_method(args: OffPolicyGRPOConfig) -> None:
    """Take what of the method is no part of the loss (``Preset.trainer``), where the configuration leaves it open."""
    if args.offpolicy is None:
        return  # no default method has such a part
    chosen, _ = parse_preset(args.offpolicy, where="offpolicy")
    own = {item.name: item.default for item in fields(args)}
    for name, value in chosen.fields_for(vars(args), own).items():
        setattr(args, name, value)


def _refuse_other_trainers(asking: Any) -> None:
    """Raise for a trainer, found in the caller's frame, that does not read ``offpolicy``."""
    if isinstance(asking, Trainer) and not getattr(asking, "reads_offpolicy", False):
        raise _wrong_trainer(type(asking).__name__)


def _wrong_trainer(name: str, hint: str = "") -> TypeError:
    """The error of a trainer of TRL that got this configuration; ``hint`` says how to use the kit's for it."""
    return TypeError(
        f"args must be that trainer's own configuration for {name}, but got an OffPolicyGRPOConfig, whose offpolicy, "
        f"engine and control it would ignore. Use trl_offpolicy.trainer.OffPolicyGRPOTrainer{hint}; to measure a stock "
        "GRPOTrainer or RLOOTrainer, trl_offpolicy.attach."
    )


def _read_mappings(args: OffPolicyGRPOConfig) -> None:
    """Read mappings that come as text from the command line, in YAML or JSON. TRL reads those of its own fields."""
    for name in set(args._VALID_DICT_FIELDS) - set(GRPOConfig._VALID_DICT_FIELDS):
        value = getattr(args, name)
        if not isinstance(value, str) or not value.startswith("{"):
            continue
        try:
            found = yaml.safe_load(value)
        except yaml.YAMLError as error:
            why = str(getattr(error, "problem", None) or error)
            raise ValueError(
                f"{name} must be a name or a mapping in YAML or JSON, but got {value!r} ({why})."
            ) from None
        setattr(args, name, found)


def _refuse_trl_correction(args: OffPolicyGRPOConfig) -> None:
    """Raise for options of TRL's own correction, which nothing would read."""
    defaults = {item.name: item.default for item in fields(GRPOConfig)}
    names = [f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min")]
    given = {name: getattr(args, name) for name in names if getattr(args, name) != defaults[name]}
    if given:
        options = ", ".join(f"{name}: {'null' if value is None else value}" for name, value in given.items())
        name, value = next(iter(given.items()))
        raise ValueError(
            f"{name} must be left out, because offpolicy takes the place of TRL's correction, but got {value!r} and "
            f"offpolicy {args.offpolicy!r}. TRL's correction is offpolicy: {{framework: trl, options: {{{options}}}}}."
        )


def _advantages(args: OffPolicyGRPOConfig, chosen: Preset, spec: Mapping[str, Any]) -> AdvantageEstimator | None:
    """The estimator of ``offpolicy.advantages``, else that of the preset; None = TRL's own (``advantages: null``)."""
    said = "advantages" in spec
    estimator = parse_advantages(spec["advantages"], where="offpolicy.advantages") if said else chosen.advantages
    if estimator is not None:
        where = "offpolicy." if said else "the preset's "
        _refuse_double(args, {"advantages": estimator}, where=where, sources=_ADVANTAGE_SOURCE)
    return estimator


def _with_preset(args: OffPolicyGRPOConfig, objective: Objective, chosen: Preset, *, whole: bool) -> Objective:
    """The objective with the fields that the preset sets; TRL's fields set the others.

    Args:
        args: the configuration.
        objective: the objective of TRL's fields.
        chosen: the preset.
        whole: True if the user made the preset's objective: then each of its fields counts, defaults included.
    """
    said = dict(chosen.objective_changes)
    if whole:
        names = [item.name for item in fields(Objective) if item.name != "correction"]
        said = {name: getattr(chosen.objective, name) for name in names}
    _refuse_double(args, said, where="the objective's " if whole else "the preset's ")
    return replace(objective, **said)


def _with_correction(objective: Objective, chosen: Preset, spec: Mapping[str, Any]) -> Objective:
    overrides = spec.get("correction") or {}
    correction = parse_correction(overrides, where="offpolicy.correction", base=chosen.correction)
    opsm = objective.correction.keep if objective.correction is not None else ()
    if opsm and any(isinstance(term, OffPolicySequenceMask) for term in correction.keep):
        raise ValueError("off_policy_mask_threshold and offpolicy both set an off-policy sequence mask; set one.")
    return replace(objective, correction=replace(correction, keep=correction.keep + opsm))


def _refuse_double(
    args: OffPolicyGRPOConfig,
    overrides: Mapping[str, Any],
    *,
    where: str,
    sources: Mapping[str, tuple[str, ...]] = _OBJECTIVE_SOURCE,
) -> None:
    defaults = {item.name: item.default for item in fields(GRPOConfig)}
    for key, names in sources.items():
        if key == "kl" and args.beta == getattr(args, "_beta_of_kl", None):
            continue  # set from the KL term itself
        if key == "aggregation" and overrides.get(key) == AGGREGATION[args.loss_type]:
            continue  # both say the same
        both = [name for name in names if key in overrides and getattr(args, name) != defaults[name]]
        if both:
            raise ValueError(f"{where}{key} and {', '.join(both)} set the same quantity; set one.")
