"""Speculative decoding: how many of the draft's tokens the engine took.

Rejection sampling keeps the policy's distribution, whatever the draft proposes. But the policy learns and the draft
does not, so fewer and fewer of its tokens are taken, and generation gets slower (ReSpec, Chen et al. 2025,
arXiv:2510.26475).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trl_offpolicy.engines.cpu_bugs import mend_drafts
from trl_offpolicy.engines.engine import EngineError

logger = logging.getLogger(__name__)

OPTION = "speculative_config"
"""vLLM's argument that switches it on."""
_PROPOSED, _TAKEN = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"


class Drafted(NamedTuple):
    """Tokens that a draft proposed, and those of them that were taken."""

    proposed: float
    taken: float


class Drafts:
    """Reads an engine's counters.

    Args:
        read: returns both counts since the engine started; None = it does not answer.
    """

    def __init__(self, read: Callable[[], Drafted | None]) -> None:
        self._read = read
        self._last = read() or Drafted(0, 0)  # a server may have counted for other runs

    def since_last(self) -> Drafted:
        """Both counts since the last call, the first time since this was made. A restarted engine begins anew."""
        now = self._read()
        if now is None:
            return Drafted(0, 0)
        last, self._last = self._last, now
        if now.proposed < last.proposed:
            return now
        return Drafted(now.proposed - last.proposed, now.taken - last.taken)


def with_counters(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` under which it counts draft tokens, if it has any."""
    return {"disable_log_stats": False, **arguments} if arguments.get(OPTION) else dict(arguments)


def drafts_in_process(llm: Any, arguments: Mapping[str, Any]) -> Drafts | None:
    """The counters of an engine in this process; None if it does not speculate, or does not count.

    An engine that speculates on a CPU is mended first: :func:`~trl_offpolicy.engines.cpu_bugs.mend_drafts`.

    Args:
        llm: vLLM's ``LLM``.
        arguments: those that it was built with.
    """
    if not arguments.get(OPTION):
        return None
    mend_drafts()
    if arguments.get("disable_log_stats"):
        return None

    def read() -> Drafted | None:
        found = {one.name: getattr(one, "value", 0) for one in llm.get_metrics()}
        known = _PROPOSED in found and _TAKEN in found  # another version of vLLM may have other names
        return Drafted(found[_PROPOSED], found[_TAKEN]) if known else None

    return Drafts(read)


def drafts_of_server(client: Any, config: Mapping[str, Any]) -> Drafts | None:
    """The counters of a server, from its ``/metrics``; None if it does not speculate.

    Args:
        client: :class:`~trl_offpolicy.engines.server.client.ServerClient`.
        config: the server's configuration.
    """

    def read() -> Drafted | None:
        try:
            return read_counters(str(client.get("/metrics")))
        except EngineError as error:  # a number to look at is no reason to end a run
            logger.warning("The draft tokens of this generation are not known: %s", error)
            return None

    return Drafts(read) if config.get(OPTION) else None


def read_counters(text: str) -> Drafted:
    """Both counts from Prometheus' text, added up over a server's engines.

    Example:
        >>> read_counters('vllm:spec_decode_num_draft_tokens_total{engine="0"} 8.0')
        Drafted(proposed=8.0, taken=0)
    """

    def total(name: str) -> float:
        return sum(map(float, re.findall(rf"^{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE)))

    return Drafted(total(_PROPOSED), total(_TAKEN))
