"""Finds out by a few requests of one token what a server does not say: which log-probs it reports, and its defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trl_offpolicy.engines.effective import SAMPLING_DEFAULTS
from trl_offpolicy.engines.server.client import ServerClient
from trl_offpolicy.engines.server.contact import Refused

SHOWN = 20
"""Log-probs a request asks for: vLLM's own limit (``--max-logprobs``)."""
LEAST = 0.05
"""Nats below which two answers count as the same: a 16-bit engine repeats itself to about 0.01."""

_FIRST_TOKEN = ("temperature", "top_k", "top_p", "min_p")

Answer = Mapping[str, float]


def logprobs_mode_by_trial(client: ServerClient, model: str, prompt: list[int]) -> str | None:
    """The server's ``logprobs_mode``; None if it does not report log-probs.

    Halving the temperature sharpens processed log-probs and leaves raw ones as they are. Logits do not add up to a
    probability of at most 1.
    """
    whole, sharp = _ask(client, model, prompt), _ask(client, model, prompt, temperature=0.5)
    if not whole or not sharp:
        return None
    kind = "logits" if sum(map(math.exp, whole.values())) > 1.01 else "logprobs"
    return f"{'raw' if distance(whole, sharp) < LEAST else 'processed'}_{kind}"


def defaults_by_trial(
    client: ServerClient, model: str, prompt: list[int], *, mode: str | None
) -> dict[str, Any] | None:
    """Options with which a request that leaves them out is answered otherwise than one that switches them off.

    Args:
        client: the server.
        model: name of the model.
        prompt: token ids.
        mode: the server's ``logprobs_mode``; raw ones show nothing of the options.

    Returns:
        By the name of each option that could be tried, what its omission does, in words; None = nothing. The penalties
        on what was generated do not show at a first token. None alone = nothing shows.
    """
    if mode is None or not mode.startswith("processed"):
        return None
    # With its likely tokens in front of it, a penalty on tokens of the prompt shows among those that are reported.
    front = [int(token.rpartition(":")[2]) for token in _ask(client, model, prompt)]
    prompt = [*front, *prompt]
    neutral = _ask(client, model, prompt)
    if not neutral:
        return None
    repeated = any(int(token.rpartition(":")[2]) in prompt for token in neutral)
    tried = [*_FIRST_TOKEN, *(["repetition_penalty"] if repeated else [])]
    found: dict[str, Any] = dict.fromkeys(tried)
    for name in tried:
        answer = _ask(client, model, prompt, leave_out=name)
        if answer and (moved := distance(neutral, answer)) >= LEAST:
            effect = f"moves log-probs by up to {moved:.2g} nats" if math.isfinite(moved) else "cuts the distribution"
            found[name] = f"not {SAMPLING_DEFAULTS[name]:g} ({effect})"
    return found


def distance(one: Answer, other: Answer) -> float:
    """Largest difference over the tokens that both answers show; infinite if a tenth of them shows in one alone."""
    shared = one.keys() & other.keys()
    if len(shared) < 0.9 * min(len(one), SHOWN) or len(shared) < 0.9 * min(len(other), SHOWN):
        return math.inf
    return max((abs(one[token] - other[token]) for token in shared), default=math.inf)


def _ask(client: ServerClient, model: str, prompt: list[int], *, leave_out: str = "", **options: Any) -> Answer:
    """The largest log-probs at the first sampled token, by token; empty if the server has none."""
    body = {**SAMPLING_DEFAULTS, **options, "model": model, "prompt": prompt, "max_tokens": 1, "logprobs": SHOWN}
    body.pop(leave_out, None)
    try:
        (choice,) = client.post("/v1/completions", {**body, "return_tokens_as_token_ids": True})["choices"]
    except Refused:
        return {}
    tops: list[dict[str, float | None]] = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
    return {token: value for token, value in tops[0].items() if value is not None and value > -1e4}
