"""What a vLLM server must offer before a run begins, and what it must forget at every sync."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

from trl_offpolicy.engines.engine import EngineError, SyncError
from trl_offpolicy.engines.kept import ARGUMENT
from trl_offpolicy.engines.sampling_states import SettingFinding, engine_findings, judge, server_arguments
from trl_offpolicy.engines.server.client import ServerClient
from trl_offpolicy.engines.server.contact import Refused
from trl_offpolicy.engines.server.labels import ADAPTER, FRESH
from trl_offpolicy.engines.weights.broadcast import Backend, Sender, own_address
from trl_offpolicy.engines.weights.shapes import why_not, why_not_adapter
from trl_offpolicy.engines.worker import EXTENSION, WorkerExtension

logger = logging.getLogger(__name__)

COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"
"""Routes that sample; the second one reports the sampling mask."""
RESET_PATIENCE, RESET_PAUSE = 60.0, 0.25  # seconds for all tries together, and between two tries


def server_config(client: ServerClient, routes: Collection[str]) -> dict[str, Any]:
    """Configuration of a vLLM server, which must have been started so that its weights can be replaced.

    Raises:
        EngineError: it was not; the message says how to start it.
    """
    if "/weight_info" not in routes:
        raise EngineError(
            f"The vLLM server at {client.base_url} does not serve /weight_info, by which the version of its "
            "weights is known. Start it with `trl-offpolicy serve`, or with VLLM_SERVER_DEV_MODE=1 (vLLM 0.27+)."
        )
    config: dict[str, Any] = client.get("/server_info", config_format="json")["vllm_config"]
    return config


def require_ready(
    client: ServerClient, config: dict[str, Any], *, return_routing: bool = False
) -> tuple[SettingFinding, ...]:
    """Raise unless the server's log-probs can be compared with the trainer's; returns the findings of its settings.

    Raises:
        EngineError: they cannot be compared, or the routing is missing; the message says how to start the server.
    """
    if return_routing and not (config.get("aux_output_config") or {}).get("enable_return_routed_experts"):
        raise EngineError(
            f"The vLLM server at {client.base_url} does not report its routing. Start it with "
            "`trl-offpolicy serve ... -- --enable-return-routed-experts` (vLLM's Model Runner V2, which needs Triton)."
        )
    arguments = server_arguments(config)
    mode = arguments["logprobs_mode"]
    if mode not in (None, "processed_logprobs"):
        raise EngineError(
            f"The vLLM server at {client.base_url} reports {mode}: log-probs of another distribution than the "
            "one it samples from. Start it with `trl-offpolicy serve`, or with --logprobs-mode processed_logprobs."
        )
    findings = engine_findings(arguments)
    if refused := [str(one) for one in findings if one.severity == "refuse"]:
        raise EngineError(f"The vLLM server at {client.base_url} cannot be corrected for: {'; '.join(refused)}.")
    judge(findings, needs_sampling=True)
    return findings


def why_no_mask(config: dict[str, Any], routes: Collection[str]) -> str | None:
    """Why a vLLM server does not say which tokens truncated sampling kept; None if it does.

    Args:
        config: its configuration.
        routes: paths that it serves.
    """
    if not (config.get("model_config") or {}).get(ARGUMENT):
        return "the server was started without --return-sampling-mask (trl-offpolicy serve --sampling-mask)"
    return None if GENERATE in routes else f"the server was started without --enable-scale-out, which adds {GENERATE}"


def reload_method(config: dict[str, Any]) -> str:
    """The worker's method that loads weights from a folder; `trl-offpolicy serve` adds its own."""
    extension = str((config.get("parallel_config") or {}).get("worker_extension_cls") or "")
    return WorkerExtension.reload_experts.__name__ if extension == EXTENSION else "reload_weights"


def require_fit(
    client: ServerClient, shapes: Mapping[str, tuple[int, ...]], *, model: str | None, adapter: bool
) -> None:
    """Raise if names or shapes of weights are not those of the model of a server that ``trl-offpolicy serve`` started.

    Args:
        client: of the server.
        shapes: of the weights that are to be sent.
        model: with which the server was started.
        adapter: whether the weights are an adapter's.

    Raises:
        SyncError: they are of another model; the message names the first difference.
    """
    body = {"method": WorkerExtension.offpolicy_shapes.__name__}
    try:
        answers = client.post("/collective_rpc", body, final=500)["results"]
    except Refused as error:  # another version of vLLM, whose layers say less
        logger.warning("The server's shapes could not be compared before the sync: %s", error)
        return
    if reason := (why_not_adapter if adapter else why_not)(shapes, answers):
        raise SyncError(
            f"The vLLM server at {client.base_url} runs another model ({model}) than the trainer: {reason}. Nothing "
            "was sent. Start it with the model that is trained."
        )


def require_own_base(base_url: str, label: str) -> None:
    """Raise unless a server has the base weights that it was started with, on which an adapter belongs.

    Args:
        base_url: of the server.
        label: of its weights, before this run's first sync.
    """
    if label != FRESH and not label.endswith(ADAPTER):
        raise EngineError(
            f"The base weights of the vLLM server at {base_url} were changed by another run ({label}); an adapter on "
            "top would be another policy. Start the server again, or use transfer='folder'."
        )


def before_others(config: dict[str, Any]) -> dict[str, int]:
    """The field of a request that goes before those which wait; empty if the server takes them in their order.

    Args:
        config: the server's.
    """
    by_priority = (config.get("scheduler_config") or {}).get("policy") == "priority"
    return {"priority": -1} if by_priority else {}


def broadcast_ends(client: ServerClient, config: dict[str, Any], *, has_gpu: bool) -> tuple[int, Backend]:
    """(number of the server's workers, backend) for :class:`~trl_offpolicy.engines.weights.broadcast.Sender`.

    Args:
        client: the server.
        config: its configuration.
        has_gpu: whether the trainer computes on a GPU.

    Raises:
        EngineError: the server was not started by ``trl-offpolicy serve``, or runs several engines.
    """
    parallel = config.get("parallel_config") or {}
    if parallel.get("worker_extension_cls") != EXTENSION:
        raise EngineError(
            f"The workers of the vLLM server at {client.base_url} cannot receive a broadcast. Start it with "
            f"`trl-offpolicy serve`, or with --worker-extension-cls {EXTENSION}, or use transfer 'folder'."
        )
    engines = int(parallel.get("data_parallel_size") or 1)
    if engines > 1:
        raise EngineError(
            f"transfer must be 'folder' or 'adapter' with the vLLM server at {client.base_url}, which runs {engines} "
            "engines (data_parallel_size), but got 'broadcast'."
        )
    on_gpu = has_gpu and (config.get("device_config") or {}).get("device_type") == "cuda"
    return int(parallel.get("world_size") or 1), "nccl" if on_gpu else "gloo"


def reset_prefix_cache(client: ServerClient) -> None:
    """Reset the prefix cache, also that of a connector. The server refuses while requests hold keys and values.

    Raises:
        SyncError: it kept on refusing.
    """
    end = time.monotonic() + RESET_PATIENCE
    while True:
        answer = client.post("/reset_prefix_cache?reset_external=true", {})
        if not isinstance(answer, dict) or answer.get("success", True):
            return  # older servers return no body: take that as success
        if time.monotonic() >= end:
            break
        time.sleep(RESET_PAUSE)
    raise SyncError(
        f"The vLLM server at {client.base_url} did not reset its prefix cache within {RESET_PATIENCE:.0f} s: requests "
        "of another client are running, or keys and values are being moved. Its answers would come from those of the "
        "old weights. Give the trainer a server of its own."
    )


def sender_to(client: ServerClient, ends: tuple[int, Backend]) -> Sender:
    """What broadcasts weights into a server's workers.

    Args:
        client: of the server.
        ends: from :func:`broadcast_ends`.

    Raises:
        SyncError: the way to the server is not known.
    """

    def call(method: str, **kwargs: Any) -> Any:
        body = {"method": method, "kwargs": kwargs}
        return client.once("POST", "/collective_rpc", json=body, final=500, bounded=False)

    workers, backend = ends
    try:
        address = own_address(client.host, client.port)
    except OSError as error:
        raise SyncError(f"The way to {client.base_url} is not known: {error}. Nothing was sent.") from error
    return Sender(call, address=address, workers=workers, backend=backend, timeout=client.patience.timeout)
