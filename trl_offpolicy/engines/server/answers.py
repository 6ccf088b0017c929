"""Reads one completion from the OpenAI-style JSON of a vLLM server."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.engines.kept import read_mask
from trl_offpolicy.engines.routing.reported import routes_of
from trl_offpolicy.engines.server.contact import excerpt
from trl_offpolicy.functional.truncated_sampling import KeptIds


class Answer(NamedTuple):
    """One completion: ids, log-probs (nats), vLLM's finish reason, what was kept at each token (None = not known).

    ``routes`` (tokens, all layers, k) are the experts of prompt and completion without its last token; None = not asked
    for, or the request was ended before its first token.
    """

    token_ids: list[int]
    logps: list[float]
    finish_reason: str
    kept: KeptIds | None = None
    routes: Tensor | None = None


def choices_of(
    answer: Any, base_url: str, *, needs: str = "token_ids", route: str = "/v1/completions"
) -> list[dict[str, Any]]:
    """The choices of an answer of a route that samples.

    Args:
        answer: the server's JSON.
        base_url: its address, for the message.
        needs: a field that each of them must have.
        route: the route.

    Raises:
        EngineError: it is no such answer.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) and needs in choice for choice in choices):
        raise EngineError(
            f"The server at {base_url} must answer {route} with choices that have {needs}, but got "
            f"{excerpt(answer)}. A proxy, or a server other than vLLM, stands in between."
        )
    return choices


def scored(rows: Sequence[Sequence[int]], answer: Any, base_url: str) -> list[list[float]]:
    """Log-probs (nats) of tokens 1, 2, ... of each row, from the ``prompt_logprobs`` of an answer.

    Raises:
        EngineError: they are not there, or are those of other rows.
    """
    choices = choices_of(answer, base_url, needs="prompt_logprobs")
    try:
        return [
            [float(place[str(i)]["logprob"]) for i, place in zip(row[1:], choice["prompt_logprobs"][1:], strict=True)]
            for row, choice in zip(rows, choices, strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"The server at {base_url} must return the log-prob of every token of the prompts that were sent, but some "
            f"are missing ({type(error).__name__}: {error})."
        ) from error


def require_room(rows: Sequence[Sequence[int]], context_length: int | None, engine: str) -> None:
    """Raise unless the sync's probe fits into the engine's context.

    Args:
        rows: token ids of the probe.
        context_length: tokens of prompt and completion that the engine takes; None = not known.
        engine: who is asked, for the message.

    Raises:
        EngineError: it does not fit.
    """
    needed = max(map(len, rows), default=0) + 1
    if context_length is not None and needed > context_length:
        raise EngineError(
            f"max_model_len must be at least {needed}, because the probe that proves every sync has {needed - 1} "
            f"tokens and samples one, but {engine} was started with {context_length}. Start it with a larger "
            "--max-model-len (engine.max_model_len), or set engine.check_sync: false."
        )


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


def as_completion(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of the route that reports the sampling mask, with log-probs in the form of /v1/completions."""
    content = (choice.get("logprobs") or {}).get("content")
    values = None if content is None else [place.get("logprob") for place in content]
    return {**choice, "logprobs": {"token_logprobs": values}}


def sampled_mask(choice: dict[str, Any]) -> KeptIds | None:
    """The kept ids at each token; None if the server does not report them, or not of every token."""
    return read_mask(choice.get("sampling_mask"), len(choice["token_ids"]))


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
