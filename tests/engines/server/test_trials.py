"""Trials against a stand-in for a server that samples as vLLM does; a real one is in test_bare_server.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trl_offpolicy.engines.effective import SAMPLING_DEFAULTS
from trl_offpolicy.engines.server.trials import SHOWN, defaults_by_trial, logprobs_mode_by_trial

PROMPT = [3, 4, 3, 4]


class Server:
    """Logits of 100 tokens under vLLM's options; those that a request leaves out are the server's ``defaults``."""

    def __init__(self, mode: str = "processed_logprobs", **defaults: float) -> None:
        self.mode, self.defaults = mode, {**SAMPLING_DEFAULTS, **defaults}
        self.logits = torch.randn(100, generator=torch.Generator().manual_seed(0)) * 3 + 5

    def post(self, path: str, body: dict[str, Any]) -> Any:
        options = {**self.defaults, **body}
        logits = self.logits.clone()
        if self.mode.startswith("processed"):
            seen = logits[options["prompt"]]
            penalty = options["repetition_penalty"]
            logits[options["prompt"]] = torch.where(seen > 0, seen / penalty, seen * penalty)
            logits /= options["temperature"]
            if options["top_k"]:
                logits[logits < logits.topk(int(options["top_k"])).values[-1]] = -torch.inf
        values = logits.log_softmax(0) if self.mode.endswith("logprobs") else logits
        top = values.topk(SHOWN)
        shown = {f"token_id:{i}": float(v) for i, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)}
        return {"choices": [{"logprobs": {"top_logprobs": [shown]}}]}


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_the_mode_shows_in_two_requests(mode: str) -> None:
    assert logprobs_mode_by_trial(Server(mode), "m", PROMPT) == mode  # type: ignore[arg-type]


def test_a_default_shows_where_it_is_left_out() -> None:
    def tried(**defaults: float) -> Any:
        return defaults_by_trial(Server(**defaults), "m", PROMPT, mode="processed_logprobs")  # type: ignore[arg-type]

    def shown(**defaults: float) -> list[str]:
        return [name for name, text in tried(**defaults).items() if text is not None]

    assert shown() == [] and set(tried()) == {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    assert shown(repetition_penalty=1.5) == ["repetition_penalty"]
    assert shown(temperature=0.6) == ["temperature"]
    assert tried(top_k=5)["top_k"] == "not 0 (cuts the distribution)"
    assert defaults_by_trial(Server("raw_logprobs"), "m", PROMPT, mode="raw_logprobs") is None  # type: ignore[arg-type]
