"""A vLLM server that somebody else started and feeds: it is asked and sampled from, never changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl_offpolicy.engines.engine import EngineError, Rollouts, Sampling
from trl_offpolicy.engines.interview import Interview
from trl_offpolicy.engines.server.answers import choices_of, sampled_logps, scored
from trl_offpolicy.engines.server.client import Patience, ServerClient
from trl_offpolicy.engines.server.contact import Refused, meet
from trl_offpolicy.engines.server.interview import interview_server
from trl_offpolicy.engines.server.parallel import at_once


class ServerReader:
    """Samples from a stock ``vllm serve`` and asks it what it is.

    Args:
        base_url: ``http://127.0.0.1:8000``.
        api_key: see :class:`~trl_offpolicy.engines.server.client.ServerClient`.
        patience: time limits and retries.

    Raises:
        EngineUnreachable: no server answers.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, patience: Patience | None = None) -> None:
        self.client = ServerClient(base_url, api_key=api_key, patience=patience)
        base, self._routes = meet(self.client)
        self.model = str(base["id"])
        self._received: list[dict[str, Any]] = []

    def interview(self, prompt: Sequence[int]) -> Interview:
        """Ask the server what it runs with.

        Args:
            prompt: token ids of the requests by which it is found out what the server does not say.
        """
        found = interview_server(self.client, self._routes, self.model, prompt=list(prompt))
        found.echo = self._received
        return found

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        """``n`` completions of each prompt, prompt-major; of unknown weights (version -1).

        Raises:
            EngineError: the server refused, or returned something else than was asked for.
        """
        options = {**sampling.vllm_options(), "n": n, "return_token_ids": True}
        answers = at_once(lambda ids: self._complete(list(ids), options), prompt_ids)
        choices = [choice for answer in answers for choice in answer]
        if len(choices) != n * len(prompt_ids):
            raise EngineError(f"The vLLM server returned {len(choices)} completions of {n * len(prompt_ids)}.")
        completions = [list(choice["token_ids"]) for choice in choices]
        return Rollouts(
            prompt_ids=[list(ids) for ids in prompt_ids for _ in range(n)],
            completion_ids=completions,
            sampling_per_token_logps=[sampled_logps(choice) for choice in choices],
            policy_versions=[[-1] * len(ids) for ids in completions],
            finish_reasons=[str(choice["finish_reason"]) for choice in choices],
        )

    def score(self, ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of tokens 1, 2, ... of each sequence, in requests of their own.

        Raises:
            EngineError: the server refused.
        """
        return at_once(self._score, map(list, ids))

    def _score(self, row: list[int]) -> list[float]:
        body = {"prompt": row, "model": self.model, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        return scored([row], self._post(body), self.client.base_url)[0]

    def _complete(self, prompt: list[int], options: dict[str, Any]) -> list[dict[str, Any]]:
        body = {**options, "prompt": prompt, "model": self.model}
        choices = choices_of(self._post(body), self.client.base_url)
        used = choices[0].get("prompt_token_ids") if choices else None
        if used is not None:  # the ids that it really used, and the options that it was sent
            sent = {name: value for name, value in options.items() if name not in ("n", "return_token_ids")}
            self._received.append({"prompt_token_ids": used, "sampling": sent, "adapter": None})
        return choices

    def _post(self, body: dict[str, Any]) -> Any:
        try:
            return self.client.post("/v1/completions", body)
        except Refused as error:
            raise EngineError(f"The vLLM server at {self.client.base_url} refused a request: {error}") from error

    def close(self) -> None:
        """Nothing: the server is left as it is."""
