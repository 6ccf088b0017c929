"""Logit fusion: a teacher takes part in the rollouts, which are then off-policy on purpose.

Each token is drawn from softmax(alpha l_teacher + (1 - alpha) l_student), which is proportional to
pi_teacher^alpha pi_student^(1 - alpha). The share alpha falls to 0 over the training. Log-probs of this mixture are the
sampling log-probs, so that every correction of this kit acts on the difference. Both models run at every token; no
engine but transformers' ``generate`` can do that.

Reference: Zhang et al. 2026, "Learning from mixed rollouts: logit fusion as a bridge between imitation and
exploration".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.checks import check_number, check_whole, near, schedule_steps
from trl_offpolicy.engines.processors import further_processors
from trl_offpolicy.parts import read_numbers

OPTION = "engine.logit_fusion"


@dataclass(frozen=True, kw_only=True)
class LogitFusion:
    """How much a teacher takes part in the rollouts.

    Args:
        teacher: folder or Hub name of the teacher, a causal LM with the model's tokenizer.
        alpha: the teacher's share of the logits at the first step, in (0, 1].
        steps: optimizer steps in which the share falls to 0, linearly. None = those of the run.
        difficulty: column of the dataset with a number in [0, 1] for each prompt, which multiplies the share: 1 for a
            hard prompt, 0 for one that needs no teacher. None = 1 for all.
        dtype: precision of the teacher, e.g. "bfloat16". None = that of the model.

    Raises:
        ValueError: a wrong value; the message names the field.
    """

    teacher: str
    alpha: float = 0.5
    steps: int | None = None
    difficulty: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.teacher, str) or not self.teacher:
            raise ValueError(f"{OPTION}.teacher must be a folder or a Hub name, but got {self.teacher!r}.")
        check_number(f"{OPTION}.alpha", self.alpha)
        if not 0 < self.alpha <= 1:
            raise ValueError(f"{OPTION}.alpha must be in (0, 1], but got {self.alpha!r}.")
        if self.steps is not None:
            check_whole(f"{OPTION}.steps", self.steps, least=1)
        if self.difficulty is not None and not isinstance(self.difficulty, str):
            raise ValueError(f"{OPTION}.difficulty must name a column, but got {self.difficulty!r}.")
        if self.dtype is not None and not isinstance(getattr(torch, str(self.dtype), None), torch.dtype):
            raise ValueError(f"{OPTION}.dtype must be a precision such as 'bfloat16', but got {self.dtype!r}.")

    def share(self, step: int, run_steps: int) -> float:
        """The teacher's share at an optimizer step, alpha max(0, 1 - step / K).

        Args:
            step: optimizer steps made so far.
            run_steps: those of the whole run, for ``steps: None``.

        Raises:
            ValueError: the length of the run is not known, and ``steps`` does not say another.
        """
        steps = schedule_steps(f"{OPTION}.steps", self.steps, run_steps)
        return self.alpha * max(0.0, 1.0 - step / steps)


def parse_fusion(option: Any) -> LogitFusion | None:
    """The option ``logit_fusion`` of an engine: a teacher's name, or a mapping of :class:`LogitFusion`; None = none.

    Raises:
        ValueError: it is something else, or a key or a value is wrong.
    """
    option = read_numbers(option)
    if option is None or isinstance(option, LogitFusion):
        return option
    if isinstance(option, str):
        return LogitFusion(teacher=option)
    if not isinstance(option, Mapping):
        raise ValueError(f"{OPTION} must name a teacher or be a mapping, but got {option!r}.")
    known = [item.name for item in fields(LogitFusion)]
    for name in option:
        if name not in known:
            raise ValueError(f"{OPTION}.{name} is no option; there are {', '.join(known)}.{near(name, known)}")
    if "teacher" not in option:
        raise ValueError(f"{OPTION}.teacher must be given, but it is missing.")
    return LogitFusion(**option)


def load_teacher(fusion: LogitFusion, model: Any, tokenizer: Any) -> Any:
    """The teacher, ready to be asked, on the device of the model.

    Args:
        fusion: the settings.
        model: the model that learns.
        tokenizer: its tokenizer; None = the teacher's is not compared with it.

    Raises:
        ValueError: the teacher's tokenizer is another one.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if tokenizer is not None:
        theirs = AutoTokenizer.from_pretrained(fusion.teacher).get_vocab()
        _check_same_tokens(tokenizer.get_vocab(), theirs, special=tokenizer.all_special_tokens)
    own = next(model.parameters())
    dtype = own.dtype if fusion.dtype is None else getattr(torch, fusion.dtype)
    teacher: Any = AutoModelForCausalLM.from_pretrained(fusion.teacher, dtype=dtype)
    return teacher.to(own.device).eval().requires_grad_(False)


def _check_same_tokens(student: Mapping[str, int], teacher: Mapping[str, int], *, special: Sequence[str]) -> None:
    """Raise unless every common token has the same id, the special ones are common, and so are most of the others.

    A teacher that does not know the end of a reply gives it probability 0, and so does the mixture.
    """
    if missing := [token for token in special if token not in teacher]:
        raise ValueError(
            f"{OPTION}.teacher must know the special tokens of the model, but it lacks {missing[0]!r}, which the "
            "mixture could never sample."
        )
    other = [token for token, place in student.items() if teacher.get(token, place) != place]
    both = len(student.keys() & teacher.keys())
    if other or both < 0.9 * max(len(student), len(teacher)):
        example = f"{both} tokens in common"
        if other:
            example = f"{other[0]!r} is {student[other[0]]} here and {teacher[other[0]]} there"
        raise ValueError(
            f"{OPTION}.teacher must have the tokenizer of the model, because logits are mixed by token id, but "
            f"got another one ({example})."
        )


class TeacherMix:
    """A teacher at work: knows the share of each prompt, and mixes its logits into ``generate``.

    Args:
        fusion: the settings.
        teacher: the loaded teacher.
    """

    def __init__(self, fusion: LogitFusion, teacher: Any) -> None:
        self.fusion, self._teacher = fusion, teacher
        self._share = 0.0
        self._difficulties: list[float] | None = None  # of the prompts that come next
        self._by_prompt: dict[tuple[int, ...], float] = {}
        self.used: list[float] = []
        """The teacher's share in each row that was sampled since :meth:`plan`."""

    def plan(self, rows: Sequence[Mapping[str, Any]], *, share: float) -> None:
        """Set the shares of the prompts that are sampled next, in this order.

        Args:
            rows: the dataset's rows, one for each prompt that will be given.
            share: the teacher's share before it is multiplied by the difficulty; 0 = the student alone.
        """
        self._share, self._by_prompt, self.used = share, {}, []
        column = self.fusion.difficulty
        unread = column is None or share == 0.0  # rows of an evaluation need not have the column
        self._difficulties = None if unread else [_difficulty(row, str(column)) for row in rows]

    @contextmanager
    def sampling(self, model: Any, prompt_ids: Sequence[Sequence[int]]) -> Iterator[SampledLogps]:
        """While open, ``generate`` on these prompts samples from the mixture, and the log-probs are noted.

        Args:
            model: the student, plain or with an adapter.
            prompt_ids: the prompts, one for each row that ``generate`` gets, padded on the left.
        """
        shares = torch.tensor(self._shares(prompt_ids))
        self._teacher.to(next(model.parameters()).device)
        self.used += shares.tolist()
        noted = SampledLogps(len(prompt_ids))
        mixed = FusedLogits(self._teacher, [len(ids) for ids in prompt_ids], shares) if shares.any() else None
        with further_processors(model, first=mixed, last=noted):
            yield noted

    def _shares(self, prompt_ids: Sequence[Sequence[int]]) -> list[float]:
        """The teacher's share for each row."""
        if self._difficulties is None:
            return [self._share] * len(prompt_ids)
        keys = [tuple(ids) for ids in prompt_ids]
        if self._by_prompt:  # rows that are asked for again; of equal prompts the last one's number
            return [self._share * self._by_prompt[key] for key in keys]
        copies = len(keys) // len(self._difficulties)  # the first call is for all prompts
        repeated = [one for one in self._difficulties for _ in range(copies)]
        self._by_prompt = dict(zip(keys, repeated, strict=True))
        return [self._share * one for one in repeated]


def _difficulty(row: Mapping[str, Any], column: str) -> float:
    if column not in row:
        raise ValueError(f"{OPTION}.difficulty must be a column of the dataset, but got {column!r}.{near(column, row)}")
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{column} ({OPTION}.difficulty) must be a number in [0, 1] in every row, but got {value!r}.")
    return float(value)


class FusedLogits:
    """A processor that replaces the student's logits by the mixture with the teacher's.

    Args:
        teacher: a causal LM.
        lengths: tokens of each row's prompt; the prompts are padded on the left.
        shares: (B,) the teacher's share in each row.
    """

    def __init__(self, teacher: Any, lengths: Sequence[int], shares: Tensor) -> None:
        self._teacher, self._lengths, self._shares = teacher, torch.tensor(lengths), shares
        self._cache: Any = None
        self._mask = torch.zeros(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The mixture alpha l_teacher + (1 - alpha) l_student, (B, V) float32; rows of share 0 keep their logits."""
        own, shares = scores.float(), self._shares.to(scores.device, torch.float32).unsqueeze(1)
        teacher = _as_wide(self._logits(input_ids), own.shape[1])
        # log-softmax first: raw logits have an offset of their own, and float32 has few digits
        mixed = (1 - shares) * own.log_softmax(-1) + shares * teacher.log_softmax(-1)
        return torch.where(shares == 0, own, mixed)

    @torch.no_grad()
    def _logits(self, input_ids: Tensor) -> Tensor:
        """The teacher's logits (B, V) of the next token; only what is new goes through it."""
        if self._cache is None:
            width = input_ids.shape[1]
            self._mask = (torch.arange(width) >= width - self._lengths.unsqueeze(1)).long().to(input_ids.device)
            new, positions = input_ids, (self._mask.cumsum(1) - 1).clamp(min=0)
        else:
            new = input_ids[:, -1:]
            self._mask = torch.cat([self._mask, torch.ones_like(new)], 1)
            positions = self._mask.sum(1, keepdim=True) - 1
        out = self._teacher(
            input_ids=new,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = out.past_key_values
        logits: Tensor = out.logits[:, -1].float()
        return logits


def _as_wide(logits: Tensor, width: int) -> Tensor:
    """Logits over as many ids as the student has: models of one family pad their vocabulary to different widths."""
    missing = width - logits.shape[1]
    return logits[:, :width] if missing <= 0 else torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)


class SampledLogps:
    """A last processor that changes nothing and notes the log-prob of every token that was sampled.

    Args:
        rows: number of prompts, each of which gets one completion.
        option: what needs the log-probs, for messages.
    """

    def __init__(self, rows: int, *, option: str = OPTION) -> None:
        self._rows, self._option = rows, option
        self._steps: list[Tensor] = []
        self._last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note what the token sampled from the scores before had; keep the log-probs of (B, V) scores for the next.

        Raises:
            ValueError: several rows for a prompt: beams, whose order changes from token to token.
        """
        if len(input_ids) != self._rows:
            raise ValueError(
                f"generation must sample one completion for each row with {self._option}, but got {len(input_ids)} "
                f"rows for {self._rows} prompts (num_beams or num_return_sequences?)."
            )
        if self._last is not None:
            self._steps.append(self._last.gather(1, input_ids[:, -1:]).squeeze(1))
        self._last = scores.float().log_softmax(-1)
        return scores

    def rows(self, completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs, nats, of the sampled tokens of each completion, under the distribution they were drawn from.

        Raises:
            RuntimeError: ``generate`` did not come by.
        """
        if self._last is None:
            raise RuntimeError("generate did not call its processors, so the sampling log-probs are not known.")
        noted = torch.stack(self._steps, 1).tolist() if self._steps else [[] for _ in completions]
        found = []
        for row, ids in enumerate(completions):
            values = noted[row][: len(ids)]
            if len(ids) > len(values):  # the last token of all, after which no processor is called
                values = [*values, float(self._last[row, ids[-1]])]
            found.append(values)
        return found
