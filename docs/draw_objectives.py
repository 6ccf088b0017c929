"""Draw the picture of docs/objectives.md and write its comparison map: ``python docs/draw_objectives.py``.

The map is read off the losses themselves: level, trust region, purpose, scope, what they read, what weights do,
aggregation, paper. The picture is autograd through the losses on a grid of ratios.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from drawing import Pictures, label, ticks, write
from drawing import picture as register
from matplotlib.figure import Figure

import trl_offpolicy as op
from trl_offpolicy.presets.parsing import ADVANTAGE_TYPES, LOSS_TYPES

PAGE = Path(__file__).resolve().parent / "objectives.md"
PICTURES: Pictures = {}
picture = partial(register, PICTURES)

FAMILIES = ("tokens", "trust_regions", "sequences", "responses")
"""Modules of the losses in the order of the map."""
LOSSES = dict(sorted(LOSS_TYPES.items(), key=lambda item: FAMILIES.index(item[1].__module__.rpartition(".")[2])))
BATCH_STATISTICS = ("m2po", "clip_cov", "kl_cov")
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
        cost = "one forward" if "per_token_logps" in requires else "-"
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
    names = [name for name in LOSSES if name not in BATCH_STATISTICS]
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


MAPS = {"map": loss_map, "advantages": advantage_map}


def main() -> None:
    """Write the picture, and the maps between their markers on the page."""
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
