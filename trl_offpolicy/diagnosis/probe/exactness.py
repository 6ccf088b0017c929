"""Whether an exact engine is exact: the distance to the trainer against the noise floor, and what keeps it above."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from trl_offpolicy.diagnosis.attribution.distances import kl_k3
from trl_offpolicy.diagnosis.attribution.evidence import Compared, Floats
from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.diagnosis.probe.asked import Asked
from trl_offpolicy.diagnosis.probe.proof import compare_facts
from trl_offpolicy.diagnosis.thresholds import SAME_POLICY_KL, Thresholds
from trl_offpolicy.engines.effective import facts_of_model, tokenizer_facts
from trl_offpolicy.engines.exact import Exact, server_findings, server_flags
from trl_offpolicy.run_folder.writer import add_to_run

logger = logging.getLogger(__name__)

ABOVE = Thresholds().floor_factor
"""A distance up to this multiple of the noise floor counts as none, as everywhere in the diagnosis."""
_TOPICS: tuple[Compared, ...] = ("weights", "adapter", "prompts", "sampling", "logprobs_mode", "model_config",
                                 "precision", "parallelism")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """What the first generation of an exact run shows.

    Args:
        kl_k3: KL(engine || trainer), nats per token.
        floor: that of the trainer against itself in other batches, at least
            :data:`~trl_offpolicy.diagnosis.thresholds.SAME_POLICY_KL`.
        largest: largest |log-ratio|, nats.
        tokens: number of tokens.
        applied: what ``exact`` has set, in words.
        keeps: what keeps engine and trainer apart: differences that were looked up, then what cannot be had here.
    """

    kl_k3: float
    floor: float
    largest: float
    tokens: int
    applied: str
    keeps: tuple[str, ...] = ()

    @property
    def at_floor(self) -> bool:
        """True if the distance is within twice the noise floor."""
        return self.kl_k3 <= ABOVE * self.floor

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "at_floor": self.at_floor, "text": self.text}

    @property
    def text(self) -> str:
        """The verdict in one or two sentences."""
        size = (
            f"KL k3 {format_number(self.kl_k3)} nats per token over {self.tokens} tokens (largest |d| "
            f"{format_number(self.largest)}), noise floor {format_number(self.floor)}"
        )
        if self.at_floor:
            return f"engine and trainer are the same policy: {size}."
        why = "; ".join(self.keeps) or "nothing that engine and trainer say of themselves: run trl-offpolicy probe"
        times = format_number(self.kl_k3 / self.floor)
        return f"engine and trainer differ: {size}; the KL is {times} times that. What keeps it: {why}."


@dataclass(frozen=True, kw_only=True)
class ExactAsked:
    """What an exact engine runs with.

    Args:
        applied: what was set, in words.
        rows: what engine and trainer were asked.
        missing: what cannot be had here, or what a server must be started with.
    """

    applied: str
    rows: tuple[Asked, ...] = ()
    missing: tuple[str, ...] = ()


def ask_exact(engine: Any, model: Any, tokenizer: Any, *, rows: int | None) -> ExactAsked:
    """What the engine of a training run says of itself, against its trainer.

    Args:
        engine: the engine; its ``interview()`` is asked, and ``exact`` says what was set, both if it has them.
        model: the trainer's model.
        tokenizer: the trainer's tokenizer.
        rows: rows of one forward of the trainer; None = any.
    """
    ask = getattr(engine, "interview", None)
    interview = None if ask is None else ask()
    if interview is None:
        return ExactAsked(applied="nothing", missing=("the engine cannot be asked what it runs with",))
    facts = interview.facts()
    trainer = replace(facts_of_model(model), tokenizer=tokenizer_facts(tokenizer))
    compared = tuple(one for one in compare_facts(facts, trainer).rows if one.topic != "sampling")
    settings, dtype = facts.settings, str(trainer.settings["dtype"])
    return asked_exact(getattr(engine, "exact", None), settings, compared, dtype=dtype, rows=rows)


def asked_exact(
    exact: Exact | None, settings: Mapping[str, Any], compared: tuple[Asked, ...], *, dtype: str, rows: int | None
) -> ExactAsked:
    """What was set in an engine that was started here; of a server, what it must be started with.

    Args:
        exact: what was set; None = the engine is a server.
        settings: what the engine runs with.
        compared: what both sides were asked.
        dtype: data type of the trainer's weights.
        rows: rows of one forward of the trainer; None = any.
    """
    if exact is not None:
        return ExactAsked(applied=exact.text, rows=compared, missing=exact.missing)
    found = server_findings(settings, dtype=dtype, rows=rows)
    sglang = settings.get("server") == "SGLang"
    variable = "" if sglang else ", and VLLM_BATCH_INVARIANT=1 on a GPU"
    start = f"start the server with {server_flags(dtype=dtype, rows=rows, sglang=sglang)}{variable}"
    return ExactAsked(applied="nothing: a server keeps its settings", rows=compared,
                      missing=(*found, start) if found else ())  # fmt: skip


def judge_generation(
    sampling: Tensor, old: Tensor, again: Tensor | None, mask: Tensor, *, asked: ExactAsked
) -> Exactness:
    """:func:`judge_exactness` of a trainer's generation batch.

    Args:
        sampling: (B, T) the engine's log-probs, nats.
        old: (B, T) the trainer's.
        again: (B, T) the trainer's from other batches; None = the floor is not measured.
        mask: (B, T) bool, the completions' tokens.
        asked: what the engine runs with.
    """

    def masked(values: Tensor) -> Floats:
        found: Floats = torch.where(mask, values.float(), torch.nan).double().cpu().numpy()
        return found

    return judge_exactness(masked(sampling), masked(old), None if again is None else masked(again), asked=asked)


def report_exactness(found: Exactness, folder: Path | str) -> None:
    """Say what was found, as a warning if the engine is not exact, and add it to ``run.json``, on the main rank."""
    say = tqdm.write if found.at_floor else logger.warning
    say(f"engine.exact: {found.text}")
    add_to_run(folder, "exact", found.as_dict())


def judge_exactness(sampling: Floats, old: Floats, again: Floats | None, *, asked: ExactAsked) -> Exactness:
    """Compare the log-probs of a generation.

    Args:
        sampling: (B, T) the engine's, nats; NaN outside the completions.
        old: (B, T) the trainer's.
        again: (B, T) the trainer's from other batches; NaN = not scored again. None = the floor is not measured.
        asked: what the engine runs with.
    """
    d = old - sampling
    repeated = float("nan") if again is None else kl_k3(again - np.where(np.isfinite(sampling), old, np.nan))
    different = [one for one in asked.rows if one.outcome == "different" and one.topic in _TOPICS]
    seen = [f"{one.what}: {one.engine} in the engine, {one.trainer} in the trainer" for one in different]
    finite = d[np.isfinite(d)]
    return Exactness(
        kl_k3=kl_k3(d),
        floor=max(SAME_POLICY_KL, repeated if np.isfinite(repeated) else 0.0),
        largest=float(np.abs(finite).max()) if finite.size else float("nan"),
        tokens=int(finite.size),
        applied=asked.applied,
        keeps=(*seen, *asked.missing),
    )
