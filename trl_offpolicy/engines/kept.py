"""Which tokens truncated sampling kept, as the engine itself reports it: the sampling mask.

vLLM reports it from 0.28 on with its Model Runner V2, which needs Triton (``return_sampling_mask``). transformers'
``generate`` hands its processed logits to the last of its processors, which notes what is left.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.checks import near
from trl_offpolicy.engines.environment import engine_has_triton
from trl_offpolicy.engines.processors import further_processors
from trl_offpolicy.functional.truncated_sampling import KeptIds

ARGUMENT = "return_sampling_mask"
"""vLLM's engine argument."""
EVERY = 2**31 - 1
"""As ``top_k``: all tokens. vLLM refuses requests without a ``top_k`` while it reports the mask."""
_REFUSAL = "sampling distribution replay"
"""Begins vLLM's words where it cannot report the mask."""
_UNKNOWN_ARGUMENT = re.compile(r"unexpected keyword argument '(\w+)'")
"""Python's words for an argument that vLLM does not have."""


class KeptStore:
    """Kept ids by the tokens of a turn, so that the names of an engine's requests do not matter."""

    def __init__(self) -> None:
        self._turns: dict[tuple[int, ...], deque[tuple[list[int], KeptIds]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._turns.values()))

    def add(self, context: Sequence[int], completion: Sequence[int], kept: KeptIds | None) -> None:
        """Keep one turn: what was sampled after ``context``, and the kept ids of each of its tokens; None = not known.

        Raises:
            ValueError: another number of positions than of tokens.
        """
        if kept is None:
            return
        if len(kept) != len(completion):
            raise ValueError(f"kept must have {len(completion)} positions, one a token, but got {len(kept)}.")
        self._turns.setdefault(tuple(context), deque()).append((list(completion), kept))

    def of_row(self, prompt: Sequence[int], completion: Sequence[int], sampled: Sequence[bool]) -> KeptIds:
        """The kept ids of a completion of one or more turns.

        Args:
            prompt: ids of the prompt.
            completion: ids of all turns, and of what came between them.
            sampled: for each of these whether the engine sampled it; the others keep themselves alone.

        Returns:
            One position for each token; none listed where no turn is known.
        """
        parts, place = [], 0
        while place < len(completion):
            end = place + 1
            while end < len(completion) and bool(sampled[end]) == bool(sampled[place]):
                end += 1
            run = list(completion[place:end])
            if sampled[place]:
                kept = self._next((*prompt, *completion[:place]), run)
                kept = KeptIds.unreported(len(run)) if kept is None else kept[: len(run)]
            else:
                kept = KeptIds.alone(run)
            parts.append(kept)
            place += len(kept)
        return KeptIds.joined(parts)

    def _next(self, context: tuple[int, ...], run: list[int]) -> KeptIds | None:
        """Of a turn that begins as the run does. Equal ones are handed out in the order in which they came."""
        turns = self._turns.get(context, deque())
        for turn in turns:
            length = min(len(run), len(turn[0]))
            if length and turn[0][:length] == run[:length]:
                turns.remove(turn)
                turns.append(turn)
                return turn[1]
        return None

    def clear(self) -> None:
        """Forget all turns."""
        self._turns.clear()


# --------------------------------------------------------------------------------------------------------------- vLLM


def why_no_mask(arguments: Mapping[str, Any]) -> str | None:
    """Why vLLM in this process cannot report its sampling mask; None if it can, as far as is known before it starts.

    Args:
        arguments: those of ``vllm.LLM``.
    """
    if not engine_has_triton():
        return "vLLM reports it with its Model Runner V2 alone, which needs Triton"
    if not _vllm_knows_it():
        return "this version of vLLM does not report it (0.28 does)"
    for name in ("speculative_config", "logits_processors"):
        if arguments.get(name):
            return f"vLLM does not report it with {name}"
    mode = arguments.get("logprobs_mode", "processed_logprobs")
    return None if mode == "processed_logprobs" else f"vLLM does not report it with logprobs_mode {mode!r}"


def _vllm_knows_it() -> bool:
    from vllm.engine.arg_utils import EngineArgs

    return hasattr(EngineArgs, ARGUMENT)


def built_with_mask(
    build: Callable[..., Any], arguments: Mapping[str, Any], *, truncated: bool
) -> tuple[Any, str | None]:
    """The ``LLM`` of vLLM, which reports its sampling mask where that is of use and possible.

    Args:
        build: makes it from keyword arguments.
        arguments: these; with ``return_sampling_mask`` the user has decided.
        truncated: whether it will sample from a part of the distribution.

    Returns:
        The engine, a :class:`MaskedLLM` if it reports; and why it does not, None if it does.

    Raises:
        ValueError: an argument that vLLM does not have.
    """
    if ARGUMENT in arguments:
        llm = _built(build, arguments)
        return (MaskedLLM(llm), None) if arguments[ARGUMENT] else (llm, f"engine.{ARGUMENT} is false")
    reason = why_no_mask(arguments) if truncated else "nothing is cut"
    if reason is not None:
        return _built(build, arguments), reason
    try:
        return MaskedLLM(_built(build, {**arguments, ARGUMENT: True})), None
    except ValueError as error:  # its configuration is checked before anything is loaded
        if _REFUSAL not in str(error):
            raise
        return _built(build, arguments), f"vLLM refused: {str(error).strip().splitlines()[-1].strip()}"


def _built(build: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The engine; an argument that vLLM does not have or not take is named as the option that it was."""
    try:
        return build(**arguments)
    except ValueError as error:
        findings = getattr(error, "errors", None)  # pydantic's, by which vLLM checks its options
        if findings is None:
            raise
        refused = "; ".join(map(_refused, findings()))
        raise ValueError(f"engine must have options that vLLM takes, but got {refused}") from error
    except TypeError as error:
        unknown = _UNKNOWN_ARGUMENT.search(str(error))
        if unknown is None or unknown[1] not in arguments:
            raise
        from vllm.engine.arg_utils import EngineArgs

        known = [field.name for field in fields(EngineArgs)]
        raise ValueError(
            f"engine must have options of this kit or of vLLM's LLM, but got {unknown[1]!r}.{near(unknown[1], known)}"
        ) from error


def _refused(found: Mapping[str, Any]) -> str:
    """One of vLLM's findings: the option with its value, where pydantic knows them, and vLLM's words."""
    option = ".".join(map(str, found["loc"][:1]))  # what follows are pydantic's own names of types
    value = f"{option}={found['input']!r}: " if option else ""
    return value + str(found["msg"]).removeprefix("Value error, ")


class MaskedLLM:
    """vLLM's ``LLM`` with ``return_sampling_mask``: gives every request the ``top_k`` that it then needs.

    Args:
        llm: vLLM's ``LLM``, built with that argument.
    """

    kept: KeptStore | None = None
    """Gets the kept ids of everything that is generated, once somebody has put a store here."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        if name == "_llm":  # not set yet, while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self._llm, name)

    def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
        """Generate with vLLM, and add the kept ids to :attr:`kept` (not those of a probe, whose prompt is scored)."""
        several = isinstance(sampling_params, Sequence)
        given = [_with_top_k(one) for one in (sampling_params if several else [sampling_params])]
        outputs = self._llm.generate(prompts, given if several else given[0], **kwargs)
        if self.kept is None:
            return outputs
        for request in outputs:
            for output in request.outputs if request.prompt_logprobs is None else ():
                self.kept.add(request.prompt_token_ids, output.token_ids, kept_of(output))
        return outputs


def _with_top_k(parameters: Any) -> Any:
    """Sampling parameters of vLLM with a ``top_k``, which cuts nothing where they have none."""
    if parameters is None or parameters.top_k > 0:
        return parameters
    changed = parameters.clone()
    changed.top_k = EVERY
    return changed


def kept_of(output: Any) -> KeptIds | None:
    """The kept ids of one completion of vLLM; None if it reports none, or not of every token."""
    mask = getattr(output, "sampling_mask", None)
    return None if mask is None else read_mask(mask.token_ids, len(output.token_ids))


def read_mask(positions: Sequence[Sequence[int]] | None, length: int) -> KeptIds | None:
    """The ids of each position as vLLM's JSON and its outputs have them; None unless they are those of ``length``."""
    return KeptIds.of(positions) if positions is not None and len(positions) == length else None


# ------------------------------------------------------------------------------------------------------- transformers


class KeptRecorder:
    """A processor of logits for ``generate`` that changes nothing and notes which tokens are left."""

    def __init__(self) -> None:
        self._steps: list[tuple[Tensor, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note the tokens of (B, V) scores that are above minus infinity."""
        left = scores > -torch.inf
        ids = left.nonzero()[:, 1].to("cpu", torch.int32)
        self._steps.append(torch.split(ids, left.sum(1).tolist()))
        return scores

    def row(self, index: int, length: int) -> KeptIds | None:
        """The kept ids of the first tokens of a row; None if ``generate`` did not come by."""
        if len(self._steps) < length:
            return None
        of_row = [step[index] for step in self._steps[:length]]
        counts = torch.tensor([len(ids) for ids in of_row], dtype=torch.int32)
        return KeptIds(torch.cat([torch.zeros(0, dtype=torch.int32), *of_row]), counts)


@contextmanager
def recorded_kept(model: Any) -> Iterator[KeptRecorder]:
    """While open, ``generate`` of a model of transformers shows what it kept to the recorder, last of its processors.

    Args:
        model: the model, plain or with an adapter of PEFT, which calls the base model's ``generate``.
    """
    recorder = KeptRecorder()
    with further_processors(model, last=recorder):
        yield recorder
