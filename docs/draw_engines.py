"""Draw the pictures of docs/engines.md: ``python docs/draw_engines.py``.

Roundings, caches, noise and mixtures are those that the engines compute with, on weights, places and logits made here.
"""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from drawing import Pictures, label, legend_below, ticks, write
from drawing import picture as register
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import trl_offpolicy as op
from trl_offpolicy.diagnosis.report.plots import BLUE, GREEN, GREY, ORANGE
from trl_offpolicy.engines.kv_cache import KVCache
from trl_offpolicy.engines.logit_fusion import FusedLogits
from trl_offpolicy.engines.norm_noise import NoisyNorms, NormNoise
from trl_offpolicy.engines.rounding import WeightRounding
from trl_offpolicy.rollouts.rounded_forward import round_forward

PICTURES: Pictures = {}
picture = partial(register, PICTURES)


# --------------------------------------------------------------------------------------------------------- rounding


class Rounds(nn.Module):
    """A policy of two linear layers over 64 tokens: its hidden layer is rounded, its head is not."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.hidden, self.lm_head = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
            nn.init.normal_(self.lm_head.weight, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        logps: Tensor = self.lm_head(self.hidden(x).tanh()).log_softmax(-1)
        return logps


def ratios(rounding: str, *, learner: bool) -> Tensor:
    """Sorted ratios old/sampling of tokens that an engine of rounded weights sampled."""
    generator = torch.Generator().manual_seed(1)
    engine, trainer, context = Rounds(), Rounds(), torch.randn(4000, 64, generator=generator)
    round_forward(engine, WeightRounding(rounding))
    if learner:
        round_forward(trainer, WeightRounding(rounding))
    with torch.no_grad():
        sampling, old = engine(context), trainer(context)
        token = torch.multinomial(sampling.exp(), 1, generator=generator)
        return (old - sampling).gather(1, token).squeeze(1).exp().sort().values


@picture("Rounded weights, the ratios that they make, and a learner that rounds as well", height=2.9)
def rounding(figure: Figure) -> None:
    """Rounded against whole weights; ratios of a learner with whole weights and of one that rounds."""
    left, right = figure.subplots(1, 2)
    weights = torch.linspace(-1.0, 1.0, 1001).unsqueeze(0)
    for kind, colour in (("int3", ORANGE), ("int4", BLUE), ("fp8", GREEN)):
        left.plot(weights[0], WeightRounding(kind)(weights)[0], color=colour, linestyle="-", linewidth=1.0, label=kind)
    label(left, "weight / largest of its row", "rounded", "the gradient passes as if it were a line")
    left.legend(loc="upper left")
    shown = slice(40, 3961, 40)  # neither end, which single tokens decide
    share = ((torch.arange(4000) + 0.5) / 4000)[shown]
    for kind, colour, style in (("int3", ORANGE, "--"), ("int4", BLUE, "-"), ("int8", GREEN, "-.")):
        right.plot(share, ratios(kind, learner=False)[shown], color=colour, linestyle=style, label=f"engine {kind}")
    right.plot(share, ratios("int3", learner=True)[shown], color=GREY, linestyle=":", label="engine int3, learner too")
    ticks(right, [0.5, 1, 2], "y")
    right.set_ylim(0.4, 2.9)
    label(right, "share of tokens below", "ratio pi_old / mu", "ratios, smallest first (a toy policy)")
    right.legend(loc="upper left")


# -------------------------------------------------------------------------------------------------------------- noise


class Normed(nn.Module):
    """A norm whose weights are near 1."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        drawn = torch.randn(4096, generator=torch.Generator().manual_seed(2))
        self.input_layernorm = nn.Module()
        self.input_layernorm.weight = nn.Parameter((1 + 0.1 * drawn).to(dtype))


def noise_left(asked: float, dtype: torch.dtype) -> float:
    """Size of the noise that weights of this precision hold."""
    model = Normed(dtype)
    noisy = NoisyNorms(NormNoise(), lambda: model, lambda: None)
    logging.disable(logging.WARNING)  # what it says of lost noise is for a run's log
    try:
        noisy.on(1, asked)
    finally:
        logging.disable(logging.NOTSET)
    return noisy.sigma


@picture("QeRL: noise on the norms over a run, and what a precision holds of it", height=2.9)
def norm_noise(figure: Figure) -> None:
    """Stages of three settings; size that is left in three precisions."""
    left, right = figure.subplots(1, 2)
    for options, text in (
        ({}, "the default: 1e-2 to 1e-4"),
        ({"end": 4e-3}, "end: 4e-3, for bfloat16"),
        ({"stages": 4}, "stages: 4"),
    ):
        found = [NormNoise(**options).sigma(step, 1000) for step in range(1000)]
        left.step(range(1000), [one or torch.nan for one in found], label=text)
    left.axvspan(0, 100, color=GREY, alpha=0.15, linewidth=0)
    left.set_yscale("log")
    left.set_ylim(6e-5, 0.1)
    label(left, "optimizer step of 1000", "sd of the noise", "none in the first stage")
    left.legend(loc="upper right")
    asked = [1e-4 * 10 ** (k / 12) for k in range(25)]
    for dtype, text in ((torch.float32, "float32"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
        right.plot(asked, [noise_left(one, dtype) for one in asked], label=text)
    right.set(xscale="log", yscale="log", ylim=(6e-5, 2e-2))
    label(right, "sd that is asked for", "sd that weights near 1 hold", "small noise is lost in 16 bits")
    right.legend(loc="lower right")


# -------------------------------------------------------------------------------------------------------------- cache


def seen(cache: KVCache, length: int) -> Tensor:
    """(T, T) bool: which keys each token of a sequence attends to."""
    return cache.kept(torch.ones(length, length).tril().bool())


def sees(axes: Axes, cache: KVCache, prompt: int, length: int) -> None:
    """Black where a key is held, pale where it was evicted, blank where it is in the future."""
    held, past = seen(cache, length), torch.ones(length, length).tril().bool()
    tokens = torch.arange(length)
    query, key = (tokens.view(shape).expand(length, length) for shape in ((-1, 1), (1, -1)))
    axes.plot(key[past & ~held], query[past & ~held], "x", color=ORANGE, markersize=2.6, label="evicted")
    axes.plot(key[held], query[held], "s", color=BLUE, markersize=3.2, label="held")
    axes.axhline(prompt - 0.5, color=GREY, linewidth=1.0, linestyle=":", label="completion begins")
    axes.set(xlim=(-1, length), ylim=(length, -1), aspect="equal", xticks=(0, 8, 16), yticks=(0, 8, 16))


@picture("A compressed KV cache: what each position sees, and what 8 bits hold", height=3.1)
def kv_cache(figure: Figure) -> None:
    """The rule as a matrix; keys that the whole and the compressed cache hold; error of fp8."""
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.05, 1, 1))
    rule = KVCache(keep_first=2, keep_last=5)
    sees(left, rule, 7, 20)
    label(left, "key of position", "query of position", "keep_first: 2, keep_last: 5")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24))
    places = torch.arange(1, 401)
    middle.plot(places, places, color=GREY, linestyle=":", label="whole")
    for last, style in ((64, "-"), (256, "--")):
        held = seen(KVCache(keep_first=4, keep_last=last), 400).sum(-1)
        middle.plot(places, held, linestyle=style, label=f"4 and {last}")
    label(middle, "position", "", "keys that it holds")
    middle.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24))
    values = torch.logspace(-3, 3.2, 4000).view(100, 40)  # of 40 neighbours the largest error
    for scale, colour in ((1.0, BLUE), (0.1, ORANGE)):
        error = (KVCache(rounding="fp8", scale=scale).held(values) - values).abs() / values
        right.plot(values[:, 20], error.amax(1), color=colour, label=f"scale: {scale:g}")
    right.set(xscale="log", ylim=(0, 0.52), xticks=(1e-3, 1, 1e3))
    label(right, "size of the key or value", "", "relative error of fp8")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24))


# ------------------------------------------------------------------------------------------------------------- fusion


def mixed(student: Tensor, teacher: Tensor, share: float) -> Tensor:
    """(V,) log-probs of the mixture, by the processor that samples from it."""

    def answer(**_: Any) -> Any:
        return SimpleNamespace(logits=teacher.view(1, 1, -1), past_key_values=None)

    fused = FusedLogits(answer, [1], torch.tensor([share]))
    return fused(torch.zeros(1, 1, dtype=torch.long), student.view(1, -1)).log_softmax(-1)[0]


@picture("Logit fusion: the mixture between student and teacher, and what a cap does to its ratio", height=2.9)
def logit_fusion(figure: Figure) -> None:
    """Probabilities of three tokens over the teacher's share; their weights pi / pi_mix, capped."""
    left, right = figure.subplots(1, 2)
    student = torch.tensor([0.02, 0.9, 0.03, 0.05]).log()
    teacher = torch.tensor([0.80, 0.1, 0.05, 0.05]).log()
    names = ("teacher's favourite", "student's favourite", "a rare one")
    shares = torch.linspace(0.0, 1.0, 51)
    logps = torch.stack([mixed(student, teacher, float(one)) for one in shares])
    for token, name in enumerate(names):
        left.plot(shares, logps[:, token].exp(), label=name)
        pi = student[token].expand(1, len(shares))
        batch = op.PolicyBatch(
            per_token_logps=pi, sampling_per_token_logps=logps[:, token].unsqueeze(0),
            completion_mask=torch.ones_like(pi).bool(), advantages=torch.ones(1),
        )  # fmt: skip
        out = op.presets.get("paper/logit-fusion").correction(batch)
        right.plot(shares, out.weights[0], label=name)
    label(left, "alpha, the teacher's share", "probability of being sampled", "what the mixture samples")
    right.axhline(3.0, color=GREY, linewidth=1.0, linestyle=":")
    right.set_yscale("log")
    ticks(right, [0.03, 0.1, 0.3, 1, 3], "y")
    label(right, "alpha, the teacher's share", "weight min(pi / pi_mix, 3)", "its weight in the loss")
    legend_below(figure, left)


if __name__ == "__main__":
    write(PICTURES)
