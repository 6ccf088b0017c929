"""Reads one completion from the OpenAI-style JSON of a vLLM server."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from torch import Tensor

from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.engines.routing.reported import routes_of


def sampled_logps(choice: dict[str, Any]) -> list[float]:
    """Log-prob of each sampled token, nats; NaN where the server has None.

    Raises:
        EngineError: it returned another number of them.
    """
    if not choice["token_ids"]:  # the request was ended before its first token
        return []
    values = (choice.get("logprobs") or {}).get("token_logprobs")
    if values is None or len(values) != len(choice["token_ids"]):
        raise EngineError(
            "The vLLM server must return one log-prob for each token, but got "
            f"{None if values is None else len(values)} for {len(choice['token_ids'])} tokens."
        )
    return [float("nan") if value is None else float(value) for value in values]


def sampled_routes(prompt: list[int], choice: dict[str, Any]) -> Tensor:
    """Routes (tokens, all layers, k) of the prompt and of all sampled tokens but the last.

    They travel as the base64 of a ``.npy`` file.

    Raises:
        EngineError: they are missing, or have another form.
    """
    packed = choice.get("routed_experts")
    if packed is None:
        raise EngineError("The vLLM server must report the routing of every completion, but one came without.")
    try:
        reported = np.load(io.BytesIO(base64.b64decode(packed)), allow_pickle=False)
        return routes_of(prompt, choice["token_ids"], reported).routes
    except ValueError as error:
        raise EngineError(f"The vLLM server's report of its routing cannot be read: {error}") from error
