"""Draw the pictures of docs/objectives.md and write its comparison map: ``python docs/draw_objectives.py``.

The map is read off the losses themselves: level, trust region, purpose, scope, what they read, what weights do,
aggregation, paper. The pictures are autograd through the losses on a grid of ratios.
"""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from drawing import Pictures, label, ticks, write
from drawing import picture as register
from matplotlib.figure import Figure
from torch import nn

import trl_offpolicy as op
from trl_offpolicy.diagnosis.report.plots import GREY, ORANGE
from trl_offpolicy.objective.losses import LossInputs
from trl_offpolicy.presets.parsing import ADVANTAGE_TYPES, LOSS_TYPES
from trl_offpolicy.rollouts.perturbed_forward import Perturbation, PerturbedForward

PAGE = Path(__file__).resolve().parent / "objectives.md"
PICTURES: Pictures = {}
picture = partial(register, PICTURES)

FAMILIES = ("tokens", "trust_regions", "sequences", "responses")
"""Modules of the losses in the order of the map."""
LOSSES = dict(sorted(LOSS_TYPES.items(), key=lambda item: FAMILIES.index(item[1].__module__.rpartition(".")[2])))
BATCH_STATISTICS = ("m2po", "p3o", "clip_cov", "kl_cov")
GSPO = {"low": 0.2, "high": 0.2}  # the picture's scale; the paper's 3e-4 would be a step
SETTINGS: dict[str, dict[str, Any]] = dict.fromkeys(("gspo", "gspo_token", "luspo"), GSPO)
PROBABILITY = 0.3  # of the token under the old policy


def made(name: str) -> Any:
    """An example of a loss."""
    return LOSS_TYPES[name](**{**LOSS_TYPES[name].example, **SETTINGS.get(name, {})})


def loss_map() -> str:
    """The comparison map as a Markdown table, one line per loss."""
    head = "| loss | YAML | ratio at | trust region | made for | weights | reads | scope | published with | paper |"
    lines = [head, "|" + "---|" * 10]
    for name, cls in LOSSES.items():
        loss = made(name)
        region, purpose = loss.trust_region, loss.purpose
        weights = "inside" if loss.weight_use == "inside" else ("any ratio" if not loss.uses_ratio else "old/sampling")
        if "sampling_log_ratios" in loss.reads:
            weights = "none: pi / mu is in the loss"
        reads = ", ".join(f"`{field}`" for field in loss.reads) or "-"
        level = {"token": "token", "sequence_mean": "response"}[loss.level]
        cells = [f"`{cls.__name__}`", f"`{name}`", level, region, purpose, weights, reads, loss.scope]
        lines.append("| " + " | ".join([*cells, f"`{loss.aggregation}`", _paper(cls)]) + " |")
    return "\n".join(lines)


def advantage_map() -> str:
    """The estimators as a Markdown table; what they read comes from the code."""
    lines = ["| estimator | YAML | advantage | biased on-policy | reads | costs | scope |", "|" + "---|" * 7]
    for name, cls in ADVANTAGE_TYPES.items():
        estimator = cls()
        reads = ["rewards" if name != "gdpo" else "rewards per function"]
        requires = set(estimator.requires)
        aware = set(cls(is_aware=True).requires) if name == "optimal_token_baseline" else requires
        reads += ["lengths"] if requires == {"mask"} else ["log-probs, sums of squares"] * ("sum_sq_probs" in requires)
        reads += ["weights"] if "weights" in requires else ["weights if `is_aware`"] * ("weights" in aware)
        reads += ["rewards of greedy completions"] * ("greedy_rewards" in requires)
        cost = "one forward" if "per_token_logps" in requires else "-"
        cost = "one completion a prompt" if "greedy_rewards" in requires else cost
        cells = [f"`{cls.__name__}`", f"`{name}`", cls.formula, cls.bias, ", ".join(reads), cost, estimator.scope]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _paper(cls: type) -> str:
    """What follows ``Reference:`` up to the arXiv number, which becomes a link, or the first clause."""
    text = " ".join(re.split(r"Reference:", cls.__doc__ or "", maxsplit=1)[-1].split())
    found = re.match(r"(.*?\(arXiv:[\d.]+\))", text)
    if "Reference:" not in (cls.__doc__ or ""):
        return "-"
    if found is None:
        return text.split(";")[0].rstrip(".")
    return re.sub(r"arXiv:([\d.]+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", found[1])


def gradient_weight(name: str, ratio: float, advantage: float) -> float:
    """-dL / dlog pi of a response of one token, advantage +-1, as a multiple of the advantage."""
    old = torch.full((1, 1), PROBABILITY).log()
    logps = (old + torch.tensor(ratio).log()).requires_grad_()
    reward = float(advantage > 0)
    batch = op.PolicyBatch(
        per_token_logps=logps,
        old_per_token_logps=old,
        sampling_per_token_logps=old,
        completion_mask=torch.ones(1, 1).bool(),
        advantages=torch.tensor([advantage]),
        rewards=torch.tensor([reward]),
        group_ids=torch.zeros(1, dtype=torch.long),
        group_rewards=torch.tensor([[reward, 1 - reward]]),
        entropies=torch.ones(1, 1),
    )
    loss = made(name)
    op.Objective(policy_loss=loss, aggregation=loss.aggregation)(batch).loss.backward()
    assert logps.grad is not None
    return float(-logps.grad / advantage)


@picture("Gradient weight of each objective against the ratio", height=7.6)
def objectives(figure: Figure) -> None:
    """One panel a loss: the factor of A grad log pi, for both signs of the advantage."""
    names = [name for name in LOSSES if name not in (*BATCH_STATISTICS, "fipo")]  # which reads more than one token
    ratios = torch.linspace(-1.2, 1.2, 49).exp().tolist()
    panels = figure.subplots(-(-len(names) // 4), 4, sharex=True).flatten()
    for axes, name in zip(panels, names, strict=False):
        for advantage, text in ((1.0, "advantage +1"), (-1.0, "advantage -1")):
            axes.plot(ratios, [gradient_weight(name, ratio, advantage) for ratio in ratios], label=text)
        ticks(axes, [0.3, 1, 3])
        label(axes, "", "", LOSS_TYPES[name].__name__)
        low, high = axes.get_ylim()
        axes.set_ylim(max(min(low, -0.1), -2.0), min(high, 3.4))
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    figure.supxlabel("ratio pi / pi_old (pi / mu where the loss reads the sampler)", fontsize=9)
    figure.supylabel("factor of A grad log pi", fontsize=9)
    panels[len(names)].legend(*panels[0].get_legend_handles_labels(), loc="center left")


@picture("The pull of the drift term, beside a mask")
def drift(figure: Figure) -> None:
    """-dL / dlog pi of one token under prime-rl's loss, with and without the term."""
    sampler, ratios = torch.full((1, 1), PROBABILITY).log(), torch.linspace(-1.2, 1.1, 231).exp().tolist()
    panels = figure.subplots(1, 2, sharey=True)
    for axes, advantage in zip(panels, (1.0, -1.0), strict=True):
        for tau, text in ((0.0, "tau = 0"), (0.1, "tau = 0.1")):
            found = []
            for ratio in ratios:
                logps = (sampler + torch.tensor(ratio).log()).requires_grad_()
                batch = op.PolicyBatch(
                    per_token_logps=logps,
                    sampling_per_token_logps=sampler,
                    completion_mask=torch.ones(1, 1).bool(),
                    advantages=torch.tensor([advantage]),
                )
                op.presets.get("prime-rl/probability-difference", tau=tau).objective(batch).loss.backward()
                assert logps.grad is not None
                found.append(float(-logps.grad))
            axes.plot(ratios, found, label=text)
        ticks(axes, [0.3, 0.5, 1, 2, 3])
        label(axes, "ratio pi / mu of the token", "factor of grad log pi", f"advantage {advantage:+g}")
    axes.set_ylabel("")
    panels[0].legend(loc="lower left")


@picture("P3O: one number caps the weight and sets the pull")
def p3o(figure: Figure) -> None:
    """-dL / dlog pi of each token of three batches, parted into both terms by two advantages."""
    left, right = figure.subplots(1, 2)
    quantiles = torch.special.ndtri((torch.arange(201, dtype=torch.float64) + 0.5) / 201).float().unsqueeze(0)
    for spread in (0.1, 0.4, 0.8):
        logs, slopes = spread * quantiles - spread**2 / 2, []
        for advantage in (1.0, 0.0):
            logps = (logs - 3).requires_grad_()
            terms = op.losses.P3O()(
                LossInputs(logps, logps + 3, torch.full((1, 1), advantage), torch.ones_like(logs).bool())
            )
            slopes.append(-torch.autograd.grad(terms.loss.sum(), logps)[0][0])
            assert terms.gate is not None
        ess = float(terms.gate[0, 0])
        left.plot(logs[0].exp(), slopes[0] - slopes[1], label=f"sd {spread:g}, ESS {ess:.2f}")
        right.plot(logs[0].exp(), slopes[1], label=f"sd {spread:g}")
    for axes, title in ((left, "policy gradient, per A grad log pi"), (right, "pull of the KL, per grad log pi")):
        ticks(axes, [0.2, 0.5, 1, 2, 5])
        label(axes, "ratio r of the token", "factor" if axes is left else "", title)
    left.legend(loc="lower right")


@picture("FIPO: a token's factor follows what comes after it")
def fipo(figure: Figure) -> None:
    """The factor along one response, and how far a single token is seen."""
    left, right = figure.subplots(1, 2)
    place, drawn = torch.arange(1, 161), torch.randn(1, 160, generator=torch.Generator().manual_seed(2))
    logs = 0.02 * drawn + torch.where(place > 80, 0.008, -0.004)

    def influence(logs: torch.Tensor, half_life: float) -> list[float]:
        loss = op.losses.FIPO(half_life=half_life)
        terms = loss(LossInputs(logs, logs, torch.ones(1, 1), torch.ones_like(logs).bool()))
        assert terms.gate is not None
        return terms.gate[0].tolist()

    left.plot(place, logs[0].exp(), "o", color=GREY, markersize=2, label="ratio r")
    left.plot(place, influence(logs, 32.0), label="factor f, half_life=32")
    label(left, "position", "", "likelier from position 81 on")
    left.legend(loc="lower right")
    for half_life in (8.0, 32.0, 128.0):
        right.plot(
            place, influence(torch.where(place == 140, 0.15, 0.0).unsqueeze(0), half_life), label=f"{half_life:g}"
        )
    label(right, "position", "factor f", "one token moves, at position 140")
    right.legend(loc="upper left", title="half_life")


@picture("Clips that open: QuRL by the mismatch of a token, CTPO by its position")
def opening_clips(figure: Figure) -> None:
    """Where a token with A > 0 (or A < 0) stops learning, read off the gradient of the losses."""
    left, right = figure.subplots(1, 2)
    ratios = torch.linspace(0.5, 4.0, 3501)
    mismatches = torch.linspace(-1.2, 1.6, 29).exp()

    def edge(loss: Any, **fields: torch.Tensor) -> float:
        """The largest ratio at which a token with A = 1 still learns."""
        logs = ratios.log().unsqueeze(1).requires_grad_()
        inputs = LossInputs(logs, logs, torch.ones(len(ratios), 1), torch.ones(len(ratios), 1).bool(), **fields)
        (slope,) = torch.autograd.grad(loss(inputs).loss.sum(), logs)
        return float(ratios[slope[:, 0] != 0].max())

    for cap in (2.0, 4.0):
        loss, found = op.losses.QuRL(max_weight=cap), []
        for mismatch in mismatches:
            found.append(edge(loss, mismatch_log_ratios=mismatch.log().expand(len(ratios), 1)))
        left.plot(mismatches, found, label=f"weight cut at {cap:g}")
    ticks(left, [0.5, 1, 2, 4])
    label(left, "pi_old / mu of the token", "largest ratio that learns", "QuRL")
    left.legend(loc="upper left")
    place = torch.arange(1, 401)
    for advantage, text in ((1.0, "A > 0: above"), (-1.0, "A < 0: below")):
        bound = 0.05 * place.sqrt() if advantage > 0 else -0.025 * place.sqrt()
        right.plot(place, bound.exp(), label=text)
    ticks(right, [0.6, 1, 2], axis="y")
    label(right, "position of the token", "clip of the product", "CTPO, the numbers of its code")
    right.legend(loc="upper left")


@picture("Shaped advantages: a price on the mismatch, and entropy where the rewards agree")
def shaping(figure: Figure) -> None:
    """What a token's advantage becomes, by its probabilities and by its entropy; and the price over steps."""
    left, middle, right = figure.subplots(1, 3)
    ones = torch.ones(1, 101).bool()
    for coef in (0.5, 2.0):
        penalty = op.shaping.DiscrepancyPenalty(coef=coef, target=None, max_coef=2.0)
        engine, ours = torch.full((1, 101), 0.5), torch.linspace(0.01, 0.99, 101).unsqueeze(0)
        batch = op.PolicyBatch(
            per_token_logps=ours.log(), sampling_per_token_logps=engine.log(), completion_mask=ones,
            advantages=torch.ones(1),
        )  # fmt: skip
        left.plot(ours[0], penalty(batch).advantages[0], label=f"price {coef:g}")
    label(left, "trainer's probability, engine's is 0.5", "advantage (1 before)", "discrepancy")
    left.legend(loc="lower center")
    moved, prices = op.shaping.DiscrepancyPenalty(coef=0.0, target=0.02, rate=2.0), []
    for step in range(120):
        prices.append(moved.coef)
        moved = moved.updated(0.04 if 20 <= step < 60 else 0.015)
    middle.plot(range(120), prices)
    label(middle, "step; 0.04 from 20 to 60", "price", "its price, target 0.02")
    for reward, text in ((1.0, "all correct"), (0.0, "all wrong")):
        entropies = torch.linspace(0.0, 3.0, 101).unsqueeze(0)
        batch = op.PolicyBatch(
            per_token_logps=-entropies, completion_mask=ones, advantages=torch.zeros(1), entropies=entropies,
            rewards=torch.tensor([reward]), group_rewards=torch.full((1, 4), reward),
        )  # fmt: skip
        right.plot(entropies[0], op.shaping.ZeroVariance(correct_threshold=0.5)(batch).advantages[0], label=text)
    label(right, "entropy at the token, nats", "advantage (0 before)", "zero_variance, alpha 0.1")
    right.legend(loc="upper left")


class Sharp(nn.Module):
    """A policy of two tokens whose log-odds are ``slope`` times the first entry of its one layer's input."""

    _no_split_modules = ("Identity",)

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.layers, self.slope = nn.ModuleList([nn.Identity()]), slope

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        odds: torch.Tensor = self.slope * self.layers[0](hidden)[..., 0]
        return torch.nn.functional.logsigmoid(odds)


def perturbed(std: float, hidden: torch.Tensor, draws: int) -> torch.Tensor:
    """(points,) log of the mean probability of the first token, through a policy that learns under ALP's noise."""
    model = Sharp(slope=8.0)
    noise = PerturbedForward(model, None if std == 0.0 else Perturbation(std=std, learn=False))
    noise.learning()
    found = []
    for point in hidden:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # the same noise at every point, so that the curve is as smooth as the mean
            found.append(model(point.expand(draws, 2)).logsumexp(0) - math.log(draws))
    return torch.stack(found)


@picture("ALP: noise on hidden states makes a sharp policy flat", height=2.9)
def perturbation(figure: Figure) -> None:
    """Mean probability of a token along a line through hidden space; how far a small step moves its log-prob."""
    left, right = figure.subplots(1, 2)
    place = torch.linspace(-1.0, 1.0, 61)
    hidden = torch.stack([place, (2 - place**2).sqrt()], -1).requires_grad_()  # of one size, as after a norm
    for std in (0.0, 0.1, 0.3):
        logps = perturbed(std, hidden, 10_000)
        (slope,) = torch.autograd.grad(logps.sum(), hidden)
        text = "not perturbed" if std == 0.0 else f"std: {std:g}"
        left.plot(place, logps.detach().exp(), label=text)
        right.plot(place, slope[:, 0], label=text)
    label(left, "hidden state, along one direction", "probability of a token", "the policy that learns")
    label(right, "hidden state, along one direction", "nats for a unit step", "how far a difference moves its log-prob")
    left.legend(loc="upper left")
    right.legend(loc="lower left")


@picture("Advantages of a group of eight, by how many of its responses are right", height=3.2)
def group_advantages(figure: Figure) -> None:
    """What a right and a wrong response get under five estimators."""
    shown = ("grpo", "dr_grpo", "rloo", "grpo_passk", "remax")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, is_right in zip(panels, (True, False), strict=True):
        counts = range(1, 9) if is_right else range(0, 8)
        for name, style in zip(shown, ("-", "--", "-.", ":", "-"), strict=True):
            found = []
            for count in counts:
                rewards = (torch.arange(8) < count).float().unsqueeze(1)
                made = op.advantages.AdvantageInputs(
                    rewards=rewards, reward_weights=torch.ones(1), group_ids=torch.zeros(8).long(),
                    greedy_rewards=torch.ones(8) if name == "remax" else None,
                )  # fmt: skip
                found.append(float(ADVANTAGE_TYPES[name]()(made)[0 if is_right else 7]))
            marker = {"marker": "o", "markersize": 3, "color": ORANGE} if name == "remax" else {}
            text = "remax, greedy response right" if name == "remax" else name
            axes.plot(counts, found, linestyle=style, label=text, **marker)
        axes.set_xticks(range(0, 9, 2))
        label(axes, "right responses of 8", "advantage", "of a right response" if is_right else "of a wrong response")
    panels[1].set_ylabel("")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


MAPS = {"map": loss_map, "advantages": advantage_map}


def main() -> None:
    """Write the pictures, and the maps between their markers on the page."""
    write(PICTURES)
    text = PAGE.read_text()
    for name, table in MAPS.items():
        between = re.compile(rf"(<!-- {name} -->\n).*(<!-- end of {name} -->)", flags=re.DOTALL)
        text = between.sub(partial(_between, table()), text)
    PAGE.write_text(text)


def _between(table: str, marks: re.Match[str]) -> str:
    return f"{marks[1]}{table}\n{marks[2]}"


if __name__ == "__main__":
    main()
