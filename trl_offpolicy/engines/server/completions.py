"""Asks a vLLM server for completions: again for missing ones, and with the sampling mask where it is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.engines.kept import EVERY
from trl_offpolicy.engines.server.answers import as_completion, choices_of
from trl_offpolicy.engines.server.checks import COMPLETIONS, GENERATE
from trl_offpolicy.engines.truncation import truncation_of

logger = logging.getLogger(__name__)


class Completions:
    """Asks a server for the completions of a prompt.

    Args:
        post: sends the body of a request to a route, with the model of now unless the body names one.
        base_url: the server's, for messages.
        masks: whether it can say which tokens truncated sampling kept.
        needs_top_k: whether it wants a ``top_k`` in each request.
        most: completions that the route with masks takes at a time.
        tries: requests for those that the server keeps on leaving out.
    """

    def __init__(
        self,
        post: Callable[[dict[str, Any], str], Any],
        *,
        base_url: str,
        masks: bool,
        needs_top_k: bool,
        most: int,
        tries: int,
    ) -> None:
        self._post, self._base_url = post, base_url
        self._masks, self._needs_top_k, self._most, self._tries = masks, needs_top_k, most, tries

    def __call__(
        self, prompt: list[int], options: dict[str, Any], n: int, *, model: str | None = None
    ) -> list[dict[str, Any]]:
        """The ``n`` completions of a prompt, as choices of the server.

        Args:
            prompt: token ids.
            options: fields of the request.
            n: number of completions.
            model: name of the adapter that samples; None = the weights of now.

        Raises:
            EngineError: the server kept on returning too few.
        """
        named = {} if model is None else {"model": model}
        if self.reports(options):
            return self._with_masks(prompt, options, n, named)
        found: list[dict[str, Any]] = []
        for _ in range(self._tries):
            body = {**self.with_top_k(options), **named, "prompt": prompt, "n": n - len(found)}
            found += choices_of(self._post(body, COMPLETIONS), self._base_url)
            if len(found) >= n:
                return found[:n]
            logger.warning("The server returned %d of %d completions; asking for the rest.", len(found), n)
        raise _too_few(found, n)

    def _with_masks(
        self, prompt: list[int], options: dict[str, Any], n: int, named: dict[str, str]
    ) -> list[dict[str, Any]]:
        """The same from the route that reports the sampling mask, which takes few completions at a time."""
        sampling = {name: value for name, value in self.with_top_k(options).items() if name != "return_token_ids"}
        found: list[dict[str, Any]] = []
        while len(found) < n:
            params = {**sampling, "n": min(n - len(found), self._most)}
            answer = self._post({**named, "token_ids": prompt, "sampling_params": params}, GENERATE)
            choices = choices_of(answer, self._base_url, route=GENERATE)
            if not choices:
                raise _too_few(found, n)
            found += map(as_completion, choices)
        return found[:n]

    def reports(self, options: Mapping[str, Any]) -> bool:
        """True if the answers to requests with these options say which tokens were kept."""
        return self._masks and bool(truncation_of(options))

    def with_top_k(self, body: dict[str, Any]) -> dict[str, Any]:
        """A request with a ``top_k``, which cuts nothing where it has none: a server that reports masks wants one."""
        return {**body, "top_k": EVERY} if self._needs_top_k and body.get("top_k", 0) <= 0 else body


def _too_few(found: list[dict[str, Any]], n: int) -> EngineError:
    return EngineError(f"The vLLM server returned {len(found)} completions, but {n} were asked for.")
