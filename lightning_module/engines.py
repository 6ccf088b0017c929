"""Builds the engine of a module from its settings, and checks that its log-probs can be used."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_module.models import zero3_gathered
from lightning_module.state import run_seed
from trl_offpolicy.checks import near
from trl_offpolicy.engines.colocate import ColocateEngine
from trl_offpolicy.engines.engine import Engine, Sampling, check_has_methods
from trl_offpolicy.engines.exact import check_exact, exact_engine, exact_trainer
from trl_offpolicy.engines.hf import TransformersEngine
from trl_offpolicy.engines.logit_fusion import OPTION, LogitFusion, TeacherMix, load_teacher, parse_fusion
from trl_offpolicy.engines.norm_noise import NoisyNorms, parse_noise
from trl_offpolicy.engines.sampling_states import SettingFinding, engine_findings, judge, request_findings
from trl_offpolicy.engines.seeds import seed_of_rank
from trl_offpolicy.engines.server.client import Patience
from trl_offpolicy.engines.server.contact import check_base_url
from trl_offpolicy.engines.server.engine import ServerEngine
from trl_offpolicy.engines.settings import check_spelling
from trl_offpolicy.engines.weights.lora import adapted_modules
from trl_offpolicy.parts import imported
from trl_offpolicy.rollouts.compressed_forward import SIMULATED, SimulatedSampler, parse_simulated

EXACT = "exact"
ENGINES = ("transformers", "vllm", "server")
_OPTIONS = {
    kind: tuple(name for name in inspect.signature(cls).parameters if name != "arguments")
    for kind, cls in (("vllm", ColocateEngine), ("server", ServerEngine))
}
"""Names of an engine's options, besides those that it passes on to vLLM."""


def engine_type(spec: Any) -> str:
    """``transformers``, ``vllm``, ``server`` or, for an object or the path of a class, ``own``.

    Raises:
        ValueError: the type is unknown, or the address of a server is none.
        TypeError: the class at that path is not an engine.
    """
    if not isinstance(spec, str | Mapping):
        return "transformers" if isinstance(spec, TransformersEngine) else "own"
    name = spec if isinstance(spec, str) else spec.get("type")
    if isinstance(name, str) and ":" in name:
        _own_class(name)  # a wrong path fails here, before anything is loaded
        return "own"
    if name not in ENGINES:
        raise ValueError(
            f"engine.type must be one of {list(ENGINES)} or the path of a class of your own, 'package.module:Class', "
            f"but got {name!r}.{near(str(name), ENGINES)}"
        )
    if name == "server" and isinstance(spec, Mapping) and isinstance(spec.get("base_url"), str):
        check_base_url(spec["base_url"], where="engine.base_url")
    return str(name)


def check_options(spec: Any) -> None:
    """Raise if an option of the ``engine`` setting is misspelt. Those that vLLM alone knows are its own to check.

    Raises:
        ValueError: the message names the option that is meant.
    """
    kind = engine_type(spec)
    if not isinstance(spec, Mapping) or kind == "own":
        return
    simulated_of(spec)
    own = ("type", EXACT, "logit_fusion", *SIMULATED) if kind == "transformers" else ("type", EXACT, *_OPTIONS[kind])
    parse_noise(spec.get("norm_noise"))
    for name in spec:
        if name in own:
            continue
        if kind == "vllm":
            check_spelling(name, own)
            continue
        raise ValueError(f"engine.{name} is no option of {kind!r}, which has {', '.join(own)}.{near(str(name), own)}")


def forward_of(spec: Any) -> dict[str, Any]:
    """The ``engine`` setting's ``weight_rounding`` and ``kv_cache``, of an engine that is built already as well.

    They are what ``learner_rounding: engine`` and ``learner_kv_cache: engine`` repeat; None = none.
    """
    if isinstance(spec, Mapping):
        return {name: spec.get(name) for name in SIMULATED}
    holder = simulated_of(spec) if isinstance(spec, TransformersEngine) else spec
    return {name: getattr(holder, name, None) for name in SIMULATED}


def transfer_of(spec: Any) -> str:
    """The ``engine`` setting's ``transfer``, of an engine that is built already as well; "auto" if it has none."""
    own = spec.get("transfer") if isinstance(spec, Mapping) else getattr(spec, "transfer", None)
    return str(own or "auto")


def fusion_of(spec: Any) -> LogitFusion | None:
    """The ``engine`` setting's ``logit_fusion``: a teacher that takes part in the rollouts; None = there is none.

    Raises:
        ValueError: a wrong option, or the engine is not the trainer's model.
    """
    if isinstance(spec, TransformersEngine):
        return None if spec.mix is None else spec.mix.fusion
    fusion = parse_fusion(spec.get("logit_fusion")) if isinstance(spec, Mapping) else None
    if fusion is not None and (kind := engine_type(spec)) != "transformers":
        raise ValueError(f"engine.type must be 'transformers' with {OPTION}, which runs two models, but got {kind!r}.")
    return fusion


def simulated_of(spec: Any) -> SimulatedSampler | None:
    """The engine that transformers' ``generate`` imitates, by the ``engine`` setting; None = it imitates none.

    Raises:
        ValueError: a wrong option, or an engine of its own, which cannot evict keys and values.
    """
    if isinstance(spec, TransformersEngine):
        return spec.simulated if isinstance(spec.simulated, SimulatedSampler) else None
    if not isinstance(spec, Mapping) or (kind := engine_type(spec)) == "own":
        return None
    if kind != "transformers" and spec.get("kv_cache") is not None:
        raise ValueError(
            f"engine.kv_cache must be left out with engine.type {kind!r}, as vLLM cannot evict keys and values. Its "
            "own kv_cache_dtype: fp8 rounds them."
        )
    return parse_simulated(spec) if kind == "transformers" else None


def reports_logps_of(spec: Any) -> bool:
    """True if transformers' ``generate`` reports log-probs, because it does not sample from the trainer's policy."""
    return fusion_of(spec) is not None or simulated_of(spec) is not None


def teacher_of(engine: Any) -> TeacherMix | None:
    """The teacher that takes part in an engine's rollouts; None = there is none."""
    mix: TeacherMix | None = getattr(engine, "mix", None)
    return mix


def noise_of(engine: Any) -> NoisyNorms | None:
    """The noise that an engine samples with; None = none."""
    noise: NoisyNorms | None = getattr(engine, "noise", None)
    return noise


def wants_exact(spec: Any) -> bool:
    """True if the ``engine`` setting says ``exact: true``.

    Raises:
        ValueError: it says neither true nor false, or another option contradicts it.
    """
    if not isinstance(spec, Mapping) or EXACT not in spec:
        return False
    if not isinstance(spec[EXACT], bool):
        raise ValueError(f"engine.exact must be true or false, but got {spec[EXACT]!r}.")
    kind = engine_type(spec)
    if spec[EXACT] and kind not in ("vllm", "server"):
        raise ValueError(
            f"engine.exact must be left out with engine.type {kind!r}: only vLLM and its server have the settings."
        )
    if spec[EXACT] and kind == "vllm":
        check_exact(spec)
    return bool(spec[EXACT])


def check_one_each(spec: Any, ranks: int) -> None:
    """Raise if vLLM in each of several processes is to use more than one of their devices.

    Raises:
        ValueError: ``tensor_parallel_size`` is above 1 with several ranks.
    """
    size = spec.get("tensor_parallel_size", 1) if isinstance(spec, Mapping) and engine_type(spec) == "vllm" else 1
    if ranks > 1 and size > 1:
        raise ValueError(
            f"engine.tensor_parallel_size must be 1 with {ranks} ranks, each of which has an engine of its own, but "
            f"got {size}. A server may use several devices: trl-offpolicy serve ... -- --tensor-parallel-size {size}."
        )


def build_engine(
    spec: Any,
    *,
    model_name: str | None,
    policy: Callable[[], nn.Module],
    pad_token_id: int,
    eos_token_ids: Sequence[int],
    run: str,
    folder: Path,
    rank: int = 0,
    rows: int | None = None,
    truncated: bool = False,
    tokenizer: Any = None,
    autocast: torch.dtype | None = None,
    wrapped: Callable[[], nn.Module | None] = lambda: None,
) -> Engine:
    """The engine that ``spec`` names. Its further keys are the engine's arguments.

    Args:
        spec: an engine's name, ``{type: ..., **arguments}``, or an engine. ``type`` may be the path of a class,
            ``package.module:Class``. It is called with those arguments, and with those of the following ones that its
            constructor names.
        model_name: folder or Hub name of the model that vLLM loads.
        policy: returns the model to sample from.
        pad_token_id: id of the token that pads prompts on the left.
        eos_token_ids: ids of the tokens that end a completion.
        run: name of the run, the same on all ranks.
        folder: where a server finds the weights, unless ``spec`` names another folder.
        rank: number of this process, which a seed of vLLM in this process is moved by.
        rows: rows of one forward of the trainer, for ``exact``; None = any.
        truncated: whether it will sample from a part of the distribution; vLLM in this process then says from which,
            where it can.
        tokenizer: the model's, with which that of a teacher is compared.
        autocast: type of vLLM in this process, in place of the weights' (:func:`computing_dtype`).
        wrapped: returns the model as the strategy wraps it, or None.
    """
    kind = engine_type(spec)
    if not isinstance(spec, str | Mapping):
        check_has_methods(spec, where="engine")
        engine: Engine = spec
        return engine
    options = {} if isinstance(spec, str) else {key: value for key, value in spec.items() if key not in ("type", EXACT)}
    if kind == "own":
        path = spec if isinstance(spec, str) else str(spec["type"])
        offered: dict[str, Any] = {"model_name": model_name, "policy": policy, "pad_token_id": pad_token_id}
        offered |= {"eos_token_ids": eos_token_ids, "run": run, "folder": folder}
        return _own_engine(path, options, offered)
    if kind == "transformers":
        fusion = fusion_of(spec)
        for name in ("logit_fusion", *SIMULATED):
            options.pop(name, None)
        return TransformersEngine(
            policy,
            pad_token_id=pad_token_id,
            eos_token_ids=eos_token_ids,
            unsharded=lambda: zero3_gathered(policy(), wrapped()),
            mix=None if fusion is None else TeacherMix(fusion, load_teacher(fusion, policy(), tokenizer)),
            simulated=simulated_of(spec),
            **options,
        )
    if kind == "server":
        if isinstance(options.get("patience"), Mapping):
            options["patience"] = Patience(**options["patience"])
        return ServerEngine(**{"run": run, "folder": folder, **options})
    if model_name is None and "model" not in options:
        raise ValueError("engine.model must be given when the module's model is an object, but it is missing.")
    seed = seed_of_rank(options.get("seed", run_seed()), rank)
    cut = {"truncated": True} if truncated else {}
    given = {"model": model_name, **cut, **options, "seed": seed}
    return _colocated(given, policy(), rows=rows, exact=wants_exact(spec), autocast=autocast)


AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""What a forward computes in under autocast, by Lightning's precision."""


def computing_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The type that a trainer on a GPU computes in under autocast; None = its weights' own, or it is on a CPU.

    An engine in float32 beside such a trainer would have a mismatch that nobody needs, no FlashAttention, and twice the
    memory. A CPU computes slowly in 16 bits, so there the engine stays in the weights' type.

    Args:
        precision: Lightning's.
        device: the trainer's.
    """
    return AUTOCAST.get(precision) if device.type == "cuda" else None


def _colocated(
    options: Mapping[str, Any], policy: nn.Module, *, rows: int | None, exact: bool, autocast: torch.dtype | None = None
) -> ColocateEngine:
    """A vLLM engine in this process, in the policy's dtype or ``autocast`` unless ``options`` say another."""
    dtype = str(autocast or next(policy.parameters()).dtype).removeprefix("torch.")
    arguments = {"dtype": dtype, **options}
    if arguments.get("adapter_rank"):
        arguments.setdefault("adapter_modules", adapted_modules(policy))
    if not exact:
        return ColocateEngine(**arguments)
    merged = hasattr(policy, "peft_config") and not options.get("adapter_rank")
    settings = exact_engine(arguments, dtype=dtype, rows=rows, merged=merged)
    exact_trainer()
    engine = ColocateEngine(**settings.arguments)
    engine.exact = settings
    return engine


def _own_class(path: str) -> type[Any]:
    cls = imported(path, where="engine.type")
    if not isinstance(cls, type):
        raise TypeError(f"engine.type must name a class, but got {path!r}.")
    check_has_methods(cls, where="engine.type")
    return cls


def _own_engine(path: str, options: Mapping[str, Any], offered: Mapping[str, Any]) -> Engine:
    """An engine of a class that the user wrote.

    Args:
        path: import path of the class.
        options: arguments that the user gave.
        offered: arguments that are passed if the constructor names them.

    Raises:
        ValueError: the constructor does not take an option.
    """
    cls = _own_class(path)
    known = inspect.signature(cls).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
    for name in options:
        if name not in known and not takes_all:
            raise ValueError(f"engine.{name} is not an option of {cls.__name__}.{near(name, known)}")
    given = {name: value for name, value in offered.items() if name in known}
    engine: Engine = cls(**{**given, **options})
    return engine


def in_this_process(engine: Engine) -> bool:
    """True if vLLM runs in the trainer's process. A process can build only one such engine."""
    return isinstance(engine, ColocateEngine)


@contextmanager
def engine_numerics(device: torch.device) -> Iterator[None]:
    """Leave the trainer's precision: an engine in this process must not inherit autocast or a default dtype."""
    precise = torch.autocast(device.type, enabled=False)
    with float32_tensors(), torch.inference_mode(False), torch.no_grad(), precise:
        yield


@contextmanager
def float32_tensors() -> Iterator[None]:
    """New tensors are float32 unless they say otherwise.

    Lightning's ``bf16-true`` and ``16-true`` change that around a step. Log-probs of the engine, rewards and versions
    would be rounded, which looks like a mismatch.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def check_sampling(
    kind: str,
    sampling: Sampling,
    *,
    needs_sampling: bool,
    arguments: Mapping[str, Any] | None = None,
    reports: bool = False,
) -> None:
    """Check that the engine's log-probs can be compared with the trainer's.

    Args:
        kind: the engine's type, as :func:`engine_type` returns it.
        sampling: the sampling options.
        needs_sampling: whether a correction reads the engine's log-probs.
        arguments: the engine's arguments, as the user gave them.
        reports: whether transformers' ``generate`` reports log-probs, of a mixture or a simulated engine.

    Raises:
        ValueError: the correction needs an engine other than the trainer, or the trainer does not mirror an option.
    """
    if kind == "transformers" and needs_sampling and not reports:
        raise ValueError(
            "correction must not read the sampling policy when engine is 'transformers', which samples from the "
            "trainer itself, so that old/sampling is 1. Use correction: measure, or another engine."
        )
    judge(sampling_findings(kind, sampling, arguments, reports=reports), needs_sampling=needs_sampling)


def sampling_findings(
    kind: str, sampling: Sampling, arguments: Mapping[str, Any] | None = None, *, reports: bool = False
) -> tuple[SettingFinding, ...]:
    """Settings under which vLLM's policy differs from the trainer's. A server says more once it is asked.

    Args:
        kind: the engine's type, as :func:`engine_type` returns it.
        sampling: the sampling options.
        arguments: the engine's arguments, as the user gave them.
        reports: whether transformers' ``generate`` reports log-probs, of a mixture or a simulated engine.
    """
    if kind == "transformers" and not reports:
        return ()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = request_findings({"generation_kwargs": dict(sampling.extra)}, device_type=device)
    return options if reports else options + engine_findings(arguments or {})
