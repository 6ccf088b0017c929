"""What a vLLM server says of itself: everything on `trl-offpolicy serve`, what its public routes tell on any other."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from trl_offpolicy.engines.effective import (
    TEST_CHAT,
    TEST_TEXT,
    EngineFacts,
    folder_defaults,
    settings_of,
    settings_of_sglang,
)
from trl_offpolicy.engines.interview import Ask, Interview
from trl_offpolicy.engines.server.client import ServerClient
from trl_offpolicy.engines.server.contact import Refused
from trl_offpolicy.engines.server.trials import defaults_by_trial, logprobs_mode_by_trial
from trl_offpolicy.engines.worker import EXTENSION


def interview_server(
    client: ServerClient, routes: Collection[str], model: str, *, weight_rounding: Any = None, prompt: list[int]
) -> Interview:
    """An interview of a vLLM server.

    Args:
        client: the server.
        routes: paths that it serves.
        model: name of the model that is asked.
        weight_rounding: rounding of the weights that it was given.
        prompt: token ids for the requests by which it is found out what a server does not say.
    """
    if "/get_server_info" in routes:
        return _interview_sglang(client)
    source = f"vLLM server at {client.base_url}"
    info = client.get("/server_info", config_format="json") if "/server_info" in routes else {}
    config = info.get("vllm_config") or {}
    extension = (config.get("parallel_config") or {}).get("worker_extension_cls")
    ask = _ask(client) if "/collective_rpc" in routes and extension == EXTENSION else None
    settings = settings_of(config, info.get("vllm_env") or {}) if config else _public_settings(client, model)
    if ask is None and "logprobs_mode" not in settings and (mode := logprobs_mode_by_trial(client, model, prompt)):
        settings["logprobs_mode"] = mode
    known = EngineFacts(
        source=source,
        settings=settings,
        defaults=None if ask is not None else _defaults(client, model, config, settings, prompt),
        model_config=(config.get("model_config") or {}).get("hf_overrides") if config else None,
        tokenizer=_tokenizer(client, routes, model),
    )
    return Interview(source, ask=ask, known=known, weight_rounding=weight_rounding)


def _interview_sglang(client: ServerClient) -> Interview:
    """SGLang says its settings, deterministic mode included; its workers cannot be asked for weights."""
    source = f"SGLang server at {client.base_url}"
    settings = settings_of_sglang(dict(client.get("/get_server_info")))
    return Interview(source, known=EngineFacts(source=source, settings=settings))


def _ask(client: ServerClient) -> Ask:
    def ask(question: str, **arguments: Any) -> list[dict[str, Any]]:
        body = {"method": f"offpolicy_{question}", "kwargs": arguments}
        results: list[dict[str, Any]] = client.post("/collective_rpc", body, final=500)["results"]
        return results

    return ask


def _public_settings(client: ServerClient, model: str) -> dict[str, Any]:
    """What ``/v1/models`` and the server's Prometheus metrics tell."""
    entry = _entry(client, model)
    found = {"max_model_len": entry["max_model_len"]} if entry.get("max_model_len") else {}
    try:
        text = str(client.once("GET", "/metrics"))
    except Exception:  # the metrics can be switched off
        return found
    labels = dict(re.findall(r'(\w+)="([^"]*)"', next(iter(re.findall(r"vllm:cache_config_info\{(.*)\}", text)), "")))
    found |= {"kv_cache_dtype": labels["cache_dtype"]} if "cache_dtype" in labels else {}
    prefix = labels.get("enable_prefix_caching")
    return found | ({} if prefix is None else {"enable_prefix_caching": prefix == "True"})


def _entry(client: ServerClient, model: str) -> dict[str, Any]:
    entries = client.get("/v1/models")["data"]
    return next((dict(one) for one in entries if one["id"] == model), {})


def _defaults(
    client: ServerClient, model: str, config: dict[str, Any], settings: dict[str, Any], prompt: list[int]
) -> dict[str, Any] | None:
    """Sampling options that the server gives to requests which leave them out; None if that cannot be found out."""
    own = config.get("model_config") or {}
    folder = own.get("model") or _entry(client, model).get("root") or ""
    found = {} if own.get("generation_config") == "vllm" else folder_defaults(folder)
    tried = defaults_by_trial(client, model, prompt, mode=settings.get("logprobs_mode"))
    if tried is not None:
        # The folder knows the number, the trial whether the server uses it: it may have been told not to.
        known = {name: value for name, value in (found or {}).items() if name not in tried}
        return known | {name: (found or {}).get(name, text) for name, text in tried.items() if text is not None}
    return None if found is None else {**found, **(own.get("override_generation_config") or {})}


def _tokenizer(client: ServerClient, routes: Collection[str], model: str) -> dict[str, Any] | None:
    if "/tokenize" not in routes:
        return None
    try:
        text = client.post("/tokenize", {"model": model, "prompt": TEST_TEXT})["tokens"]
    except Refused:
        return None
    try:
        chat = client.post("/tokenize", {"model": model, "messages": list(TEST_CHAT)})["tokens"]
    except Refused:  # it has no template
        chat = None
    return {"text": text, "chat": chat}
