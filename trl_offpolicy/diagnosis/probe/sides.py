"""The two sides of a probe: an engine that samples, and the trainer's model that scores."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trl_offpolicy.diagnosis.attribution.bench import pad_ids_of, stop_ids_of
from trl_offpolicy.diagnosis.attribution.contexts.precision import rounded_weights
from trl_offpolicy.diagnosis.attribution.evidence import Compared, Declared
from trl_offpolicy.diagnosis.attribution.trials.endings import other_ends
from trl_offpolicy.diagnosis.probe.against import Answer, scored_rows
from trl_offpolicy.diagnosis.probe.asked import Asked, Proof, row
from trl_offpolicy.diagnosis.probe.proof import Asking, compare_facts
from trl_offpolicy.diagnosis.probe.weights import weight_rows
from trl_offpolicy.engines.effective import EngineFacts, facts_of_model, tokenizer_facts
from trl_offpolicy.engines.engine import Rollouts, Sampling
from trl_offpolicy.engines.exact import Exact, exact_engine, exact_trainer
from trl_offpolicy.engines.hf import Head, sample_completions
from trl_offpolicy.engines.interview import Interview

if TYPE_CHECKING:
    from trl_offpolicy.diagnosis.probe.options import ProbeOptions

PROMPTS = (
    "What is 17 + 26? Explain each step.",
    "List the first five prime numbers and say why 1 is not one.",
    "Write two sentences about the sea.",
    "A train leaves at 9:40 and arrives at 11:15. How long is the ride?",
    "Translate to French: the cat sleeps on the chair.",
    "Write a Python function that reverses a string.",
    "Why is the sky blue? Answer briefly.",
    "Sort these words: pear, apple, fig, cherry.",
    "How many letters are there in the word strawberry?",
    "Give three uses of a paper clip.",
    "What day comes three days after Friday?",
    "Solve for x: 3x + 4 = 19.",
)
"""Built-in prompts, so that a probe needs no network: arithmetic, prose, code and lists."""
ROWS = 16
"""Rows of one forward of the probe's trainer."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Rendered:
    """Token ids of the prompts, and of the same prompts rendered in other ways, by name."""

    ids: list[list[int]]
    others: dict[str, list[list[int]]]


def render_prompts(tokenizer: Any, prompts: Sequence[str]) -> Rendered:
    """Render the prompts with the chat template if the tokenizer has one, as plain text otherwise."""
    texts = list(prompts) or list(PROMPTS)
    plain = [_encode(tokenizer, text, special=True) for text in texts]
    if not getattr(tokenizer, "chat_template", None):
        return Rendered(plain, {})
    chat = [_chat(tokenizer, text) for text in texts]
    others: dict[str, Any] = {
        "no chat template": plain,
        "no generation prompt": [_chat(tokenizer, text, add_generation_prompt=False) for text in texts],
        "empty system prompt": [_chat(tokenizer, text, system="") for text in texts],
        **other_ends(tokenizer, chat),
    }
    return Rendered(chat, {name: ids for name, ids in others.items() if ids != chat})


def _chat(tokenizer: Any, text: str, *, system: str | None = None, add_generation_prompt: bool = True) -> list[int]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text})
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
    return _encode(tokenizer, rendered, special=False)


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    if not ids:
        raise ValueError(f"prompts must have at least one token each, but got {text!r}.")
    return ids


def read_prompts(path: Path) -> tuple[str, ...]:
    """Prompts of a file: one per line, or JSON lines with ``prompt`` (text, or chat messages; the user's count).

    Raises:
        ValueError: there is no prompt, or a line has no ``prompt``.
    """
    import json

    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix in (".jsonl", ".json"):
        try:
            rows = [json.loads(line) for line in lines]
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} must hold a JSON object a line, but one is none: {error}.") from None
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict) or "prompt" not in row:
                raise ValueError(f"{path}: line {number} must be an object with the key prompt, but got {row!r}.")
        lines = [_prompt_text(row["prompt"]) for row in rows]
    if not lines:
        raise ValueError(f"{path} must hold at least one prompt, but is empty.")
    return tuple(lines)


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt if message.get("role") == "user")


class Sides:
    """Engine and trainer of a probe.

    Args:
        options: options of the probe.
        model: the trainer's model, in eval mode.
        tokenizer: the model's tokenizer.
    """

    def __init__(self, options: ProbeOptions, model: Any, tokenizer: Any) -> None:
        self.options, self.model, self.tokenizer = options, model, tokenizer
        self.proof = Proof()
        """What was asked on both sides; filled by :meth:`sample`."""
        self.engine_settings: Mapping[str, Any] = {}
        """What the engine runs with, if it was asked."""
        self.exact: Exact | None = None
        """What ``exact`` has set in an engine that was started here."""
        self.first: Answer | None = None
        """What the engine says of its own tokens by ``prompt_logprobs``, with ``against``; filled by :meth:`sample`."""
        self._experts = int(
            getattr(model.config, "num_experts", 0) or getattr(model.config, "num_local_experts", 0) or 0
        )

    # -------------------------------------------------------------------------------------------------- sampling

    def sample(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """``samples`` completions of each prompt, prompt-major, with the engine's log-probs.

        The engine is asked what it is while it runs.
        """
        if self.options.engine == "hf":
            if self.options.ask:
                self.proof = self._of_itself(prompts)
            return self._sample_here(prompts)
        with self._vllm() as engine:
            rollouts = self._asked(engine, prompts) if self.options.ask else self._generated(engine, prompts)
            if self.options.against is not None:
                self.first = self._answer(engine, rollouts.prompt_ids, rollouts.completion_ids)
        assert rollouts.sampling_per_token_logps is not None
        return rollouts.completion_ids, rollouts.sampling_per_token_logps

    def _generated(self, engine: Any, prompts: list[list[int]]) -> Rollouts:
        rollouts: Rollouts = engine.generate(prompts, self._sampling(), n=self.options.samples)
        return rollouts

    def _asked(self, engine: Any, prompts: list[list[int]]) -> Rollouts:
        """The rollouts; the requests are watched, then weights and settings of both sides compared."""
        interview: Interview = engine.interview(prompts[0]) if self._remote else engine.interview()
        with interview.watch() as requests:
            rollouts = self._generated(engine, prompts)
        asking = Asking(prompts=prompts, head=self.options.trainer_head, requests=requests)
        self.proof = ask_both(interview, self.model, self.tokenizer, asking)
        self.engine_settings = interview.facts().settings
        return rollouts

    def answer(self, prompts: list[list[int]], completions: list[list[int]]) -> Answer:
        """Start the engine and have it score given tokens by ``prompt_logprobs``.

        Args:
            prompts: token ids of the prompt of each completion.
            completions: token ids.
        """
        with self._vllm() as engine:
            return self._answer(engine, prompts, completions)

    def _answer(self, engine: Any, prompts: list[list[int]], completions: list[list[int]]) -> Answer:
        interview: Interview = engine.interview(prompts[0]) if self._remote else engine.interview()
        facts = interview.facts()
        rows = scored_rows(prompts, completions, facts.settings.get("max_model_len"))
        weights = interview.weights() if self.options.ask else None
        compared = weight_rows(interview, self.model, answers=weights) if weights is not None else []
        return Answer(
            source=facts.source,
            logps=_scored(engine, rows, completions),
            again=_scored(engine, rows[::-1], completions[::-1])[::-1],
            settings=dict(facts.settings),
            model_config=None if facts.model_config is None else dict(facts.model_config),
            tokenizer=None if facts.tokenizer is None else dict(facts.tokenizer),
            weights=weights,
            to_trainer=_outcome(compared),
        )

    @property
    def _remote(self) -> bool:
        return self.options.engine.startswith("http")

    def _of_itself(self, prompts: list[list[int]]) -> Proof:
        """The engine is the trainer's model, in another dtype, rounding and with other sampling options."""
        o = self.options
        trainer = self.trainer_facts()
        settings = {**trainer.settings, "dtype": o.engine_dtype, "logprobs_mode": "processed_logprobs"}
        sampling = {name: getattr(o, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        requests = [{"prompt_token_ids": ids, "sampling": sampling} for ids in prompts]
        engine = replace(trainer, source="transformers generate", settings=settings)
        facts = compare_facts(engine, trainer, Asking(prompts=prompts, head=o.trainer_head, requests=requests))
        same = [row(topic, str(topic), "the trainer's", "the trainer's", "", equal=True)
                for topic in _OF_ONE_MODEL]  # fmt: skip
        if o.weight_rounding is not None:
            label = "rounding of the linear weights"
            same.append(row("precision", label, o.weight_rounding, "none", "precision", equal=False))
        return Proof((*same, *facts.rows))

    def trainer_facts(self) -> EngineFacts:
        """What the trainer's side says of itself."""
        return replace(facts_of_model(self.model), tokenizer=tokenizer_facts(self.tokenizer))

    def _sampling(self) -> Sampling:
        o = self.options
        return Sampling(max_tokens=o.max_tokens, temperature=o.temperature, top_p=o.top_p, top_k=o.top_k, min_p=o.min_p)

    @contextmanager
    def _vllm(self) -> Iterator[Any]:
        from trl_offpolicy.engines.weights.source import ModelWeights

        o = self.options
        if self._remote:
            from trl_offpolicy.engines.server.reader import ServerReader

            yield ServerReader(o.engine)
            return
        from trl_offpolicy.engines.colocate import ColocateEngine

        longest = 32 * ((o.max_tokens + 1024) // 32 + 1)
        arguments: dict[str, Any] = {"quantization": o.quantization, "max_model_len": min(longest, self._context())}
        arguments = {name: value for name, value in arguments.items() if value is not None}
        arguments |= {"dtype": o.engine_dtype, **o.engine_arguments}
        if o.exact:
            self.exact = exact_engine(arguments, dtype=o.trainer_dtype, rows=ROWS, where="")
            arguments = self.exact.arguments
        engine = ColocateEngine(o.model, weight_rounding=o.weight_rounding, seed=o.seed, **arguments)
        try:
            if o.weight_rounding is not None or o.adapter is not None:
                engine.bind(ModelWeights(self.model))
                engine.sync_weights(0)
            yield engine
        finally:
            engine.close()
            free_memory()

    def _context(self) -> int:
        return int(getattr(self.model.config, "max_position_embeddings", None) or 4096)

    def _sample_here(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        o = self.options
        model = self.model if o.engine_dtype == o.trainer_dtype else deepcopy(self.model).to(DTYPES[o.engine_dtype])
        inside: AbstractContextManager[Any] = (
            nullcontext() if o.weight_rounding is None else rounded_weights(model, o.weight_rounding)
        )
        repeated = [ids for ids in prompts for _ in range(o.samples)]
        head: Head = o.engine_head
        generator = torch.Generator().manual_seed(o.seed)
        with inside:
            return sample_completions(
                model, repeated, max_tokens=o.max_tokens, stop_ids=self.stop_ids, head=head, generator=generator
            )

    @property
    def stop_ids(self) -> list[int]:
        """Ids that end a completion."""
        return stop_ids_of(self.model, self.tokenizer)

    @property
    def pad_ids(self) -> list[int]:
        """Ids that a trainer may pad with."""
        return pad_ids_of(self.tokenizer, self.stop_ids)

    # ------------------------------------------------------------------------------------------- what is declared

    def engine_declares(self) -> Declared:
        """The engine's settings, as the options give them."""
        o = self.options
        remote = o.engine.startswith("http")
        return Declared(
            dtype=None if remote else o.engine_dtype,
            quantization=None if remote else o.quantization or o.weight_rounding or "none",
            temperature=o.temperature, top_p=o.top_p, top_k=o.top_k, min_p=o.min_p,
            adapter=None if remote else _short_hash(o.adapter),
            prompt_hash="same", weight_version=None if remote else 0, tools=False, experts=self._experts,
        )  # fmt: skip

    def trainer_declares(self) -> Declared:
        """The trainer's settings, as the options give them."""
        o, head = self.options, self.options.trainer_head
        cut = head.truncation
        return Declared(
            dtype=o.trainer_dtype, quantization="none", temperature=head.temperature, top_p=cut.top_p,
            top_k=cut.top_k, min_p=cut.min_p, adapter=_short_hash(o.adapter), prompt_hash="same", weight_version=0,
            dropout=0.0, tools=False, experts=self._experts,
        )  # fmt: skip

    def other_weights(self) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
        """Contexts with other weights that the engine may hold; here the model without its adapter."""
        if self.options.adapter is None:
            return {}
        return {"wrong_adapter:no adapter": self.model.disable_adapter}


def ask_both(interview: Interview, model: Any, tokenizer: Any, asking: Asking) -> Proof:
    """Ask engine and trainer for settings, prompts, sampling and weights, and compare the answers.

    Args:
        interview: the engine.
        model: the trainer's model.
        tokenizer: the trainer's tokenizer.
        asking: the requests, and what the trainer assumes of them.
    """
    trainer = replace(facts_of_model(model), tokenizer=tokenizer_facts(tokenizer))
    facts = compare_facts(interview.facts(), trainer, asking)
    named = (request.get("adapter_id") for request in asking.requests)
    weights = weight_rows(interview, model, adapter_id=next((one for one in named if one is not None), None))
    return Proof((*weights, *facts.rows))


def _scored(engine: Any, rows: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
    """``prompt_logprobs`` of the tokens of each completion; empty for an empty row."""
    asked = [row for row in rows if row]
    found: Iterator[list[float]] = iter(engine.score(asked) if asked else [])
    return [next(found)[-len(ids) :] if row else [] for row, ids in zip(rows, completions, strict=True)]


def _outcome(rows: Sequence[Asked]) -> tuple[str, str]:
    """Whether weights and adapter are the trainer's, and what is not."""
    said: Mapping[str, Asked] = {one.outcome: one for one in rows if one.topic in ("weights", "adapter")}
    for outcome in ("different", "not compared", "equal"):
        if outcome in said:
            one = said[outcome]
            return outcome, one.engine if outcome == "not compared" else one.what
    return "not compared", "the weights were not asked for"


def free_memory() -> None:
    """Return what an engine held, before another one starts on the same device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


_OF_ONE_MODEL: tuple[Compared, ...] = ("weights", "adapter", "parallelism")


def _short_hash(text: str | None) -> str:
    return "none" if text is None else hashlib.sha256(text.encode()).hexdigest()[:8]


def open_sides(options: ProbeOptions) -> Sides:
    """Load the trainer's model, onto its device, and tokenizer. The engine starts when it samples.

    Raises:
        OSError: there is no such model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=DTYPES[options.trainer_dtype])
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if options.adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, options.adapter)
    if options.exact:
        exact_trainer(model)
    return Sides(options, model.to(options.device).eval(), tokenizer)
