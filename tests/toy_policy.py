"""A policy of a table: the next token's logits depend on the one before and on the prompt. Faults have known truth."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from trl_offpolicy.diagnosis.attribution.evidence import Declared, TokenEvidence

ROWS, GROUP, LENGTH, VOCABULARY = 32, 4, 24, 40
ROUNDING = 1e-6
SAME = Declared(
    dtype="float32", quantization="none", temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, adapter="a", weight_version=3,
    prompt_hash="p", dropout=0.0, experts=0, tools=False,
)  # fmt: skip
"""What both sides declare where nothing differs."""


class Toy:
    """One batch sampled from ``logits + engine_change``, scored with ``logits + trainer_change``."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.table = self.rng.normal(0, 1.7, (VOCABULARY, VOCABULARY))
        self.prompts = self.rng.normal(0, 0.7, (ROWS // GROUP, VOCABULARY))

    def logits(self, row: int, last: int) -> Any:
        return self.table[last] + self.prompts[row // GROUP]

    def batch(self, engine: Any = None, trainer: Any = None) -> TokenEvidence:
        """``engine`` and ``trainer`` map (logits, row, position) to log-probs; None = plain log-softmax."""
        plain = lambda logits, row, place: log_softmax(logits)  # noqa: E731
        engine, trainer = engine or plain, trainer or plain
        out = {name: np.zeros((ROWS, LENGTH)) for name in ("mu", "old", "again", "entropy")}
        ids = np.zeros((ROWS, LENGTH), np.int64)
        for row in range(ROWS):
            last = row // GROUP
            for place in range(LENGTH):
                logits = self.logits(row, last)
                mu = engine(logits, row, place)
                last = int(self.rng.choice(VOCABULARY, p=np.exp(mu) / np.exp(mu).sum()))
                ids[row, place] = last
                out["mu"][row, place] = mu[last]
                for name in ("old", "again"):
                    out[name][row, place] = trainer(logits, row, place)[last]
                p = np.exp(log_softmax(logits))
                out["entropy"][row, place] = -(p * np.log(p)).sum()
        noise = lambda: self.rng.normal(0, ROUNDING, (ROWS, LENGTH))  # noqa: E731
        return TokenEvidence(
            sampling_per_token_logps=out["mu"] + noise(),
            old_per_token_logps=out["old"] + noise(),
            rescored_per_token_logps=out["again"] + noise(),
            completion_mask=np.ones((ROWS, LENGTH), bool),
            entropies=out["entropy"],
            token_ids=ids,
            group_ids=np.repeat(np.arange(ROWS // GROUP), GROUP),
        )


def log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max()
    with np.errstate(divide="ignore"):
        return shifted - np.log(np.exp(shifted).sum())


@cache
def make(cause: str, *, seed: int = 0, size: float = 1.0) -> TokenEvidence:
    """A batch in which ``cause`` alone is wrong."""
    toy = Toy(seed)
    rng = np.random.default_rng(1000 + seed)
    shape = (ROWS, LENGTH, VOCABULARY)
    if cause == "none":
        return toy.batch()
    if cause == "temperature":
        return toy.batch(lambda z, row, place: log_softmax(z / (1 - 0.1 * size)))
    if cause == "truncated_sampling":
        return toy.batch(lambda z, row, place: log_softmax(np.where(z >= np.sort(z)[-8], z, -np.inf)))
    if cause == "precision":
        noise = rng.normal(0, 0.03 * size, shape)
        return toy.batch(lambda z, row, place: log_softmax(z + noise[row, place]))
    if cause == "other_weights":
        bias = rng.normal(0, 0.1 * size, VOCABULARY)
        return toy.batch(lambda z, row, place: log_softmax(z + bias))
    if cause == "dropout":
        return toy.batch(trainer=lambda z, row, place: log_softmax(z + rng.normal(0, 0.1 * size, VOCABULARY)))
    if cause == "routing":
        jumps = rng.normal(0, size, shape) * (rng.random((ROWS, LENGTH, 1)) < 0.01)
        return toy.batch(lambda z, row, place: log_softmax(z + jumps[row, place]))
    if cause == "prompt_difference":
        change = rng.normal(0, 0.8 * size, (ROWS // GROUP, VOCABULARY))
        return toy.batch(lambda z, row, place: log_softmax(z + change[row // GROUP] * 0.85**place))
    return _bookkeeping(cause, toy.batch(), toy)


def _bookkeeping(cause: str, batch: TokenEvidence, toy: Toy) -> TokenEvidence:
    mu, old = batch.sampling_per_token_logps.copy(), batch.old_per_token_logps.copy()
    noise = batch.rescored_per_token_logps - batch.old_per_token_logps
    if cause == "misalignment":
        mu[:, 1:] = mu[:, :-1]
        mu[:, 0] = np.nan
    elif cause == "retokenised":
        cause = "misalignment"
        for row in range(0, ROWS, 3):
            start = 3 + row % 9
            old[row, start + 1 :] = old[row, start:-1]
            old[row, start] -= 4.0
    elif cause == "tool_tokens":
        mu[::3, 8:13] = 0.0
    else:
        raise ValueError(cause)
    return replace(batch, sampling_per_token_logps=mu, old_per_token_logps=old, rescored_per_token_logps=old + noise)
