"""The ``engine`` field of a configuration: this kit's own options, and arguments for vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from trl_offpolicy.engines.rounding import WeightRounding, parse_rounding
from trl_offpolicy.engines.server.client import Patience
from trl_offpolicy.engines.server.engine import Transfer as ServerTransfer

Transfer = Literal["auto", "memory", "folder", "adapter", "nccl"]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How the engine is fed.

    Args:
        transfer: how weights reach it. "memory" (colocate), "folder" or "nccl" (server), "adapter" (both: the LoRA
            adapter alone). "auto": memory in colocate; with a server TRL's NCCL on a GPU (not with ``weight_rounding``
            or ``return_routing``), else the adapter if the server loads adapters, else a folder.
        weight_rounding: round linear weights at every sync: a type such as "int8" or a mapping, see
            :func:`~trl_offpolicy.engines.rounding.parse_rounding`.
        folder: for a server's weights; both must see it. Default: ``_engine_weights`` in the run's folder.
        timeout: seconds for one request to a server.
        retries: further tries of a request.
        check_sync: prove after every sync, on a probe, that the weights arrived.
        return_routing: (mixtures of experts) keep which experts each token was sent to; under ``routing_replay: none``
            it is only compared with the trainer's. A server must be started with ``--enable-return-routed-experts``.
        arguments: everything else, for vLLM's ``LLM`` in colocate mode.

    Raises:
        ValueError: naming the field.
    """

    transfer: Transfer = "auto"
    weight_rounding: WeightRounding | None = None
    folder: Path | None = None
    timeout: float = Patience.timeout
    retries: int = Patience.retries
    check_sync: bool = True
    return_routing: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.transfer not in get_args(Transfer):
            raise ValueError(f"engine.transfer must be one of {list(get_args(Transfer))}, but got {self.transfer!r}.")
        if self.transfer == "nccl" and self.return_routing:
            raise ValueError(
                "engine.transfer must be folder, adapter or auto with routing_replay r3 or engine.return_routing, but "
                "got 'nccl': TRL's client does not report the routing."
            )
        self.patience(start_timeout=1.0)

    @classmethod
    def parse(cls, engine: Mapping[str, Any] | None) -> EngineSettings:
        """Read the mapping of a configuration."""
        given = dict(engine or {})
        own = {item.name: given.pop(item.name) for item in fields(cls) if item.name in given}
        if own.get("weight_rounding") is not None:
            own["weight_rounding"] = parse_rounding(own["weight_rounding"])
        if own.get("folder") is not None:
            own["folder"] = Path(own["folder"])
        if "arguments" in own:
            raise ValueError("engine.arguments must be left out: write vLLM's arguments into engine itself.")
        return cls(**own, arguments=given)

    def patience(self, *, start_timeout: float) -> Patience:
        """Time limits for a server."""
        return Patience(timeout=self.timeout, retries=self.retries, start_timeout=max(start_timeout, 1.0))

    def on_server(self, device_type: str) -> bool:
        """True if a server gets its weights from this kit, False for TRL's NCCL path."""
        if self.transfer == "auto":
            return device_type != "cuda" or self.weight_rounding is not None or self.return_routing
        return self.transfer != "nccl"

    @property
    def server_transfer(self) -> ServerTransfer:
        """For :class:`~trl_offpolicy.engines.server.ServerEngine`."""
        if self.transfer == "folder" or self.transfer == "adapter":  # by name, which is how mypy sees the type
            return self.transfer
        return "auto"

    def check_colocate(self) -> None:
        """Raise for options that only a server has."""
        if self.transfer not in ("auto", "memory", "adapter"):
            raise ValueError(f"engine.transfer must be auto, memory or adapter in colocate, but got {self.transfer!r}.")
        if self.transfer == "adapter" and self.weight_rounding is not None:
            raise ValueError(
                "engine.weight_rounding must be left out with engine.transfer 'adapter': it needs merging."
            )

    def check_server(self) -> None:
        """Raise for options that only colocate has."""
        if self.transfer == "memory":
            raise ValueError("engine.transfer must be folder, adapter, nccl or auto with a server, but got 'memory'.")
        if self.arguments:
            names = ", ".join(self.arguments)
            raise ValueError(
                f"engine must not hold {names} with a server: start it with these (trl-offpolicy serve --help)."
            )
