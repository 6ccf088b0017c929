"""The ``engine`` field of a configuration: this kit's own options, and arguments for vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from trl_offpolicy.engines.exact import check_exact
from trl_offpolicy.engines.kv_cache import KVCache, parse_kv_cache
from trl_offpolicy.engines.logit_fusion import LogitFusion, parse_fusion
from trl_offpolicy.engines.norm_noise import NormNoise, parse_noise
from trl_offpolicy.engines.rounding import WeightRounding, parse_rounding
from trl_offpolicy.engines.server.client import Patience
from trl_offpolicy.engines.server.engine import Transfer as ServerTransfer
from trl_offpolicy.engines.weights.files import weights_folder
from trl_offpolicy.parts import read_numbers

Transfer = Literal["auto", "memory", "folder", "adapter", "broadcast", "nccl"]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How the engine gets its weights, and its further options.

    Args:
        transfer: how weights reach it: "memory" (colocate); "folder", "broadcast" (this kit's, over NCCL or Gloo) or
            "nccl" (TRL's client) with a server; "adapter" (both: the LoRA adapter alone). "auto" is memory in colocate.
            With a server it is TRL's NCCL on a GPU (not with ``weight_rounding``, ``return_routing``,
            ``async_rollouts`` or truncated sampling of a text model), else the adapter if the server loads adapters,
            else a folder.
        weight_rounding: round linear weights at every sync: a type such as "int8" or a mapping, see
            :func:`~trl_offpolicy.engines.rounding.parse_rounding`. Without vLLM ``generate`` samples with them.
        folder: folder for a server's weights, which both must see. Default: ``_engine_weights`` in the run's folder.
            ``memory`` = in this machine's shared memory, which needs room for three versions.
        timeout: seconds for one request to a server.
        retries: further tries of a request.
        check_sync: prove on a probe after every sync that the weights arrived.
        return_routing: (mixtures of experts) record to which experts each token was sent; under
            ``routing_replay: none`` the record is only compared with the trainer's. A server must be started with
            ``--enable-return-routed-experts``.
        exact: bring engine and trainer together: equal dtype and batch shape, eager, no prefix cache, batch-invariant
            kernels where there are any (:mod:`trl_offpolicy.engines.exact`); the first generation is checked.
        logit_fusion: (without vLLM) a teacher that takes part in the rollouts, see
            :class:`~trl_offpolicy.engines.logit_fusion.LogitFusion`.
        kv_cache: (without vLLM) sample with a compressed KV cache: ``{keep_first: 4, keep_last: 64}``, ``fp8``, or a
            mapping of :class:`~trl_offpolicy.engines.kv_cache.KVCache`.
        norm_noise: (colocate) noise on the norms of the engine's weights, which falls over the training: true, or a
            mapping of :class:`~trl_offpolicy.engines.norm_noise.NormNoise`.
        arguments: all other options, for vLLM's ``LLM`` in colocate mode.

    Raises:
        ValueError: a wrong value; the message names the field.
    """

    transfer: Transfer = "auto"
    weight_rounding: WeightRounding | None = None
    folder: Path | None = None
    timeout: float = Patience.timeout
    retries: int = Patience.retries
    check_sync: bool = True
    return_routing: bool = False
    exact: bool = False
    logit_fusion: LogitFusion | None = None
    kv_cache: KVCache | None = None
    norm_noise: NormNoise | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.transfer not in get_args(Transfer):
            raise ValueError(f"engine.transfer must be one of {list(get_args(Transfer))}, but got {self.transfer!r}.")
        if self.transfer == "nccl" and self.return_routing:
            raise ValueError(
                "engine.transfer must be folder, adapter, broadcast or auto with routing_replay r3 or "
                "engine.return_routing, but got 'nccl': TRL's client does not report the routing."
            )
        self.patience(start_timeout=1.0)
        if not isinstance(self.exact, bool):
            raise ValueError(f"engine.exact must be true or false, but got {self.exact!r}.")
        if self.exact:
            check_exact({**self.arguments, "weight_rounding": self.weight_rounding, "norm_noise": self.norm_noise})

    @classmethod
    def parse(cls, engine: Mapping[str, Any] | None) -> EngineSettings:
        """The settings from the mapping of a configuration."""
        given = dict(read_numbers(engine or {}))
        own = {item.name: given.pop(item.name) for item in fields(cls) if item.name in given}
        for name in given:
            check_spelling(name, [item.name for item in fields(cls) if item.name != "arguments"])
        if own.get("weight_rounding") is not None:
            own["weight_rounding"] = parse_rounding(own["weight_rounding"])
        own["logit_fusion"] = parse_fusion(own.get("logit_fusion"))
        own["kv_cache"] = parse_kv_cache(own.get("kv_cache"))
        own["norm_noise"] = parse_noise(own.get("norm_noise"))
        if own.get("folder") is not None:
            own["folder"] = weights_folder(own["folder"])
        if "arguments" in own:
            raise ValueError("engine.arguments must be left out: write vLLM's arguments into engine itself.")
        return cls(**own, arguments=given)

    def patience(self, *, start_timeout: float) -> Patience:
        """Time limit and retries of requests to a server."""
        return Patience(timeout=self.timeout, retries=self.retries, start_timeout=max(start_timeout, 1.0))

    def on_server(self, device_type: str, *, ahead: bool = False, truncated: bool = False) -> bool:
        """True if a server gets its weights from this kit, False for TRL's NCCL path.

        Args:
            device_type: the trainer's.
            ahead: whether requests are sent ahead, which TRL's client cannot do.
            truncated: whether the engine is to say which tokens truncated sampling kept, which TRL's client drops.
        """
        if self.transfer == "auto":
            ours = ahead or truncated or self.return_routing or self.weight_rounding is not None
            return ours or device_type != "cuda"
        return self.transfer != "nccl"

    @property
    def server_transfer(self) -> ServerTransfer:
        """The ``transfer`` of :class:`~trl_offpolicy.engines.server.ServerEngine`."""
        return "auto" if self.transfer == "memory" or self.transfer == "nccl" else self.transfer

    def check_colocate(self) -> None:
        """Raise for options that need a server."""
        if self.transfer not in ("auto", "memory", "adapter"):
            raise ValueError(f"engine.transfer must be auto, memory or adapter in colocate, but got {self.transfer!r}.")
        if self.transfer == "adapter" and self.weight_rounding is not None:
            raise ValueError(
                "engine.weight_rounding must be left out with engine.transfer 'adapter': it needs merging."
            )

    def check_server(self) -> None:
        """Raise for options that need an engine in the trainer's process."""
        if self.transfer == "memory":
            raise ValueError(
                "engine.transfer must be folder, adapter, broadcast, nccl or auto with a server, but got 'memory'."
            )
        if self.norm_noise is not None:
            raise ValueError("engine.norm_noise must be left out with a server: it changes weights in this process.")
        if self.arguments:
            names = ", ".join(self.arguments)
            raise ValueError(
                f"engine must not hold {names} with a server: start it with these (trl-offpolicy serve --help)."
            )


def check_spelling(name: str, own: Sequence[str]) -> None:
    """Raise if vLLM has no argument of a name that is nearly one of its own, or of this kit's options.

    Args:
        name: what the user wrote.
        own: names of this kit's options.

    Raises:
        ValueError: names the option that was meant.
    """
    of_vllm = _vllm_arguments()
    if name in of_vllm:
        return
    if close := get_close_matches(name, {*own, *of_vllm}, n=1, cutoff=0.8):
        raise ValueError(f"engine.{name} is no option here and no argument of vLLM. Did you mean {close[0]!r}?")


@cache
def _vllm_arguments() -> frozenset[str]:
    """What the installed vLLM's engine and ``LLM`` take. Their source is read, because an import takes seconds."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    sources = (Path(spec.origin).parent / place for place in ("engine/arg_utils.py", "entrypoints/llm.py"))
    texts = [source.read_text(encoding="utf-8") for source in sources if source.is_file()]
    return frozenset(name for text in texts for name in re.findall(r"^ {4,8}(\w+)\s*:", text, re.MULTILINE))
