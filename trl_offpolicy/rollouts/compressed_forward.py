"""A simulated engine on the trainer's model, and a learner that computes as that engine does.

The engine: transformers' ``generate`` with a compressed KV cache or rounded weights, so that what it samples from is
not the trainer's policy, and its own log-probs are the sampling log-probs. The learner: its forward repeats what the
cache held for each token, so that both sides are one policy again (Zhu et al. 2026, Shadow Mask Distillation,
arXiv:2605.06850; with both roundings, Xi et al. 2026, Jet-RL, arXiv:2601.14243: one precision on both sides).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from trl_offpolicy.engines.kv_cache import KVCache, kv_cache_of, parse_kv_cache, set_kv_cache, with_kv_cache
from trl_offpolicy.engines.logit_fusion import SampledLogps
from trl_offpolicy.engines.processors import further_processors
from trl_offpolicy.engines.rounding import WeightRounding, parse_rounding
from trl_offpolicy.rollouts.model_parts import innermost
from trl_offpolicy.rollouts.rounded_forward import OF_ENGINE, rounded_while_fixed

SIMULATED = ("kv_cache", "weight_rounding")
"""Options of ``engine`` that change what transformers' ``generate`` samples from."""
INITIAL, DENSE = "initial", "dense_context"
KL_REFERENCES = (INITIAL, DENSE)
"""Of which policy the KL term is: the model at the start, or the policy itself over a whole, unrounded cache."""
NOT_SHARED = "a compressed KV cache is not proved equal with prompts that are computed once"
"""Why prompts are not computed once, for :class:`~trl_offpolicy.rollouts.shared_prefix.SharedPrefix`."""


@dataclass(frozen=True)
class SimulatedSampler:
    """What ``generate`` of the trainer's model samples from, in place of the trainer's policy.

    Args:
        kv_cache: its KV cache; None = that of the learner's forward.
        weight_rounding: rounding of its linear weights; None = that of the learner's forward.
    """

    kv_cache: KVCache | None = None
    weight_rounding: WeightRounding | None = None

    @property
    def options(self) -> str:
        """The options that ask for it, for messages."""
        return " and ".join(f"engine.{name}" for name in SIMULATED if getattr(self, name) is not None)

    @contextmanager
    def sampling(self, model: Any, rows: int) -> Iterator[SampledLogps]:
        """While open, ``generate`` samples from this policy, and notes the log-probs of what it sampled.

        Args:
            model: the model, plain or with an adapter; not sharded. What it computed with before comes back.
            rows: number of prompts that ``generate`` gets.
        """
        noted = SampledLogps(rows, option=self.options)
        with ExitStack() as stack:
            if self.weight_rounding is not None:
                stack.enter_context(rounded_while_fixed(model, self.weight_rounding))
            if self.kv_cache is not None:
                stack.enter_context(with_kv_cache(model, self.kv_cache))
            stack.enter_context(further_processors(model, last=noted))
            yield noted


def parse_simulated(engine: Any) -> SimulatedSampler | None:
    """The simulated engine that the options of ``engine`` describe, which has no kernels of its own; None = none.

    Raises:
        ValueError: a wrong value; the message names the field.

    Example:
        >>> parse_simulated({"kv_cache": "fp8"}).options
        'engine.kv_cache'
    """
    given = engine if isinstance(engine, Mapping) else {}
    rounding = given.get("weight_rounding")
    found = SimulatedSampler(
        parse_kv_cache(given.get("kv_cache")), None if rounding is None else parse_rounding(rounding)
    )
    return None if found == SimulatedSampler() else found


def parse_learner_kv_cache(spec: Any, engine: Any) -> KVCache | None:
    """The cache that the learner's forward repeats.

    Args:
        spec: None = a whole one; ``engine`` = that of ``engine.kv_cache``; else what
            :func:`~trl_offpolicy.engines.kv_cache.parse_kv_cache` takes.
        engine: options of the engine.

    Raises:
        ValueError: a wrong value, or an engine that has no ``kv_cache``; the message names the field.

    Example:
        >>> parse_learner_kv_cache("engine", {"kv_cache": {"keep_first": 4, "keep_last": 64}}).keep_last
        64
    """
    if spec != OF_ENGINE:
        return parse_kv_cache(spec, where="learner_kv_cache")
    of_engine = engine.get("kv_cache") if isinstance(engine, Mapping) else None
    if of_engine is None:
        raise ValueError(
            "engine.kv_cache must be given with learner_kv_cache 'engine', but it is absent. Name the cache itself "
            "(e.g. learner_kv_cache: fp8) for an engine that compresses its own."
        )
    return parse_kv_cache(of_engine)


def compress_learner(spec: Any, engine: Any, *models: Any) -> None:
    """:func:`~trl_offpolicy.engines.kv_cache.set_kv_cache` of the policy and its reference; None is left out."""
    cache = parse_learner_kv_cache(spec, engine)
    for model in models:
        if cache is not None and model is not None:
            set_kv_cache(innermost(model), cache)


def rounds_keys(model: Any) -> bool:
    """True if the learner's forward rounds keys, so that a row's log-probs depend on where its positions begin."""
    cache = kv_cache_of(innermost(model))
    return cache is not None and cache.rounding is not None


def check_kl_reference(value: Any, *, cache: KVCache | None, has_kl: bool, where: str) -> None:
    """Raise unless the KL term can be taken to the policy that is asked for.

    Args:
        value: the option ``kl_reference``.
        cache: what the learner's forward repeats.
        has_kl: whether the objective has a KL term.
        where: the option that gives the objective one.

    Raises:
        ValueError: an unknown name, or nothing to distil; the message names the field.
    """
    if value not in KL_REFERENCES:
        raise ValueError(f"kl_reference must be one of {list(KL_REFERENCES)}, but got {value!r}.")
    if value == DENSE and cache is None:
        raise ValueError(
            f"learner_kv_cache must be given with kl_reference {DENSE!r}, but it is absent: the policy would be "
            "compared with itself."
        )
    if value == DENSE and not has_kl:
        raise ValueError(f"{where} must be given with kl_reference {DENSE!r}, but it is absent.")


@contextmanager
def in_dense_context(model: nn.Module) -> Iterator[None]:
    """A context in which the learner's forward sees a whole, unrounded cache: the teacher of the KL term.

    The distillation of Shadow Mask Distillation is made of two parts that are here already: this policy, at the weights
    when a batch is scored, gives ``ref_per_token_logps``, and the objective's KL term is estimated on the sampled
    tokens, which are drawn in the compressed context. So it is KL(compressed || dense) per token in nats, and the
    gradient passes through the compressed forward alone. The paper's own form of the term is not known here (its
    abstract and summaries name a full-context teacher and a sparse-context student, no formula): the direction, and the
    sampled estimate in place of a sum over the vocabulary, are this kit's choice.
    """
    with with_kv_cache(innermost(model), None):
        yield
