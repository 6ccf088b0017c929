"""Asks an engine what it is: its settings, its weights, and the requests as they reached it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from trl_offpolicy.engines import worker
from trl_offpolicy.engines.effective import EngineFacts, tokenizer_facts

Ask = Callable[..., list[dict[str, Any]]]
"""``ask(question, **arguments)``: the answer of each worker. Questions: "facts", "weights", "watch"."""
_QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "facts": worker.facts_of,
    "weights": worker.weights_of,
    "shapes": worker.shapes_of,
    "watch": worker.watch_requests,
}


class Interview:
    """What can be asked of one engine.

    Args:
        source: who answers, for people.
        ask: puts a question to the engine's workers; None = they cannot be asked.
        known: what is known of the engine without them.
        weight_rounding: rounding of the weights that the engine was given.

    Every question that fails is answered by None, and ``why`` says why: that something cannot be compared is a result.
    """

    def __init__(
        self, source: str, *, ask: Ask | None = None, known: EngineFacts | None = None, weight_rounding: Any = None
    ) -> None:
        self.source, self.weight_rounding = source, weight_rounding
        self.why = "" if ask is not None else f"{source} does not let its workers be asked"
        self.echo: list[dict[str, Any]] = []
        """Requests as the engine's answers repeat them, where its workers cannot be watched."""
        self._ask, self._known = ask, known

    def facts(self) -> EngineFacts:
        """What the engine says of itself."""
        known = self._known or EngineFacts(source=self.source)
        answers = self._answers("facts")
        if not answers:
            return known
        first = answers[0]
        return replace(known, **{**first, "settings": {**known.settings, **first["settings"]}})

    def weights(self, names: Collection[str] | None = None, *, sample: int = 0) -> list[dict[str, Any]] | None:
        """See :func:`~trl_offpolicy.engines.worker.weights_of`: one answer a worker. None = it cannot be asked."""
        return self._answers("weights", names=None if names is None else sorted(names), sample=sample)

    @contextmanager
    def watch(self) -> Iterator[list[dict[str, Any]]]:
        """Yields a list that holds, after the block, the requests as they reached the worker; empty if unknown."""
        noted: list[dict[str, Any]] = []
        before, watched = len(self.echo), self._answers("watch", on=True) is not None
        try:
            yield noted
        finally:
            if watched and (answers := self._answers("watch", on=False)):
                noted += answers[0]["requests"]
            elif not watched:
                noted += self.echo[before:]

    def _answers(self, question: str, **arguments: Any) -> list[dict[str, Any]] | None:
        if self._ask is None:
            return None
        try:
            return self._ask(question, **arguments)
        except Exception as error:  # another version of vLLM, a model without the parts that are read
            self.why = f"{self.source} could not say: {type(error).__name__}: {error}"
            return None


def interview_llm(llm: Any, *, weight_rounding: Any = None) -> Interview:
    """An interview of vLLM's ``LLM`` in this process."""

    def ask(question: str, **arguments: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = llm.collective_rpc(_QUESTIONS[question], kwargs=arguments)
        return answers

    source = "vLLM in this process"
    known = EngineFacts(source=source, tokenizer=tokenizer_facts(llm.get_tokenizer()))
    return Interview(source, ask=ask, known=known, weight_rounding=weight_rounding)
