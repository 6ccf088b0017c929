"""The same ladder on a real language model (SmolLM2-135M), a few short answers a format."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.dtype_ladder.experiment import compare
from benchmarks.dtype_ladder.formats import FORMATS, engine
from benchmarks.lab.jobs import outcome_of, write_outcome

PROMPTS = (
    "The most important thing to know about the history of Rome is",
    "To solve this equation, we first have to subtract seven from",
    "Once upon a time, in a village beside the sea, there lived",
    "In Python, a list comprehension is a short way to write",
    "The water cycle begins when the sun heats the surface of",
    "My favourite recipe for a quick dinner after a long day",
    "A good letter of application should always begin with the reason",
    "If a train leaves the station at noon and travels at sixty",
)
PROMPT_TOKENS = 8
NATIVE = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LlmSettings:
    """What all pieces share.

    Args:
        model: folder of the model.
        answers: to each of the eight prompts.
        longest: tokens of an answer.
    """

    model: str
    answers: int = 4
    longest: int = 64

    @property
    def lengths(self) -> tuple[int, ...]:
        """16, 32, 64 and so on."""
        return tuple(16 * 2**k for k in range(20) if 16 * 2**k <= self.longest)


@dataclass(frozen=True)
class LlmJob:
    """A format in one part of the engine; ``native``: the whole model in that type of torch, with its own kernels."""

    form: str
    where: str
    seed: int = 0

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"llm-{self.form.replace(' ', '-')}-{self.where}"


def plan() -> list[LlmJob]:
    """Rounded weights in every format; the 16-bit floats also in all parts, simulated and native."""
    jobs = [LlmJob(form, "weights") for form in FORMATS]
    return jobs + [LlmJob(form, where) for form in NATIVE for where in ("all", "native")]


@lru_cache(maxsize=1)
def _load(path: str) -> tuple[Any, Tensor]:
    """The float32 model, and the (8, 8) ids of the prompts' beginnings."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
    return model, torch.tensor([tokenizer(text).input_ids[:PROMPT_TOKENS] for text in PROMPTS])


def run(job: LlmJob, settings: LlmSettings, folder: Path) -> dict[str, Any]:
    """Sample, score and compare, at every length; the outcome as written. A finished piece is read."""
    if (done := outcome_of(job, settings, folder)) is not None:
        return done
    began = time.process_time()
    model, questions = _load(settings.model)
    questions = questions.repeat_interleave(settings.answers, 0)
    uniforms = torch.rand(len(questions), settings.longest, generator=torch.Generator().manual_seed(job.seed))
    sampler = _sampler(model, job)
    ids, sampling, likeliest = sample(sampler, questions, uniforms)
    scores, expected = score(model, ids)
    same = likeliest == expected
    rows = [
        {"length": length, **compare(scores[:, :length], sampling[:, :length], same[:, :length])}
        for length in settings.lengths
    ]
    outcome = {**asdict(job), "settings": asdict(settings), "rows": rows, "cpu_seconds": time.process_time() - began}
    write_outcome(job, outcome, folder)
    return outcome


def _sampler(model: Any, job: LlmJob) -> Any:
    if job.where == "native":
        from copy import deepcopy

        return deepcopy(model).to(NATIVE[job.form])
    return engine(model, FORMATS[job.form], job.where)  # type: ignore[arg-type]


@torch.no_grad()
def sample(model: Any, questions: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Answers at temperature 1 with a KV cache: ids (B, 8 + T), log-probs (B, T) in nats, likeliest tokens (B, T)."""
    new, past, said, logps, likeliest = questions, None, [], [], []
    for place in range(uniforms.shape[1]):
        out = model(input_ids=new, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = out.past_key_values
        now = out.logits[:, -1].float().log_softmax(-1)
        cumulated = now.double().exp().cumsum(1)
        drawn = (cumulated <= uniforms[:, place : place + 1] * cumulated[:, -1:]).sum(1, keepdim=True)
        drawn = drawn.clamp(max=now.shape[1] - 1)
        logps.append(now.gather(1, drawn))
        likeliest.append(now.argmax(1, keepdim=True))
        said.append(drawn)
        new = drawn
    return torch.cat([questions, *said], dim=1), torch.cat(logps, dim=1), torch.cat(likeliest, dim=1)


@torch.no_grad()
def score(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T) log-probs of the float32 model on the answers, and its likeliest tokens."""
    scores, likeliest = [], []
    for part in ids.split(8):
        logits = model(input_ids=part[:, :-1]).logits[:, PROMPT_TOKENS - 1 :]
        scores.append(logits.log_softmax(-1).gather(-1, part[:, PROMPT_TOKENS:].unsqueeze(-1)).squeeze(-1))
        likeliest.append(logits.argmax(-1))
    return torch.cat(scores), torch.cat(likeliest)
