"""The corrections that are compared, each as the kit's own objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import trl_offpolicy as op
from trl_offpolicy import presets
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.presets.preset import Preset

Band = tuple[float, float]
MEASURE = ("mismatch",)


@dataclass(frozen=True)
class Row:
    """A correction.

    Args:
        title: for a table.
        preset: makes it; gets the band of the geometric mean ratio that suits the run.
    """

    title: str
    preset: Callable[[Band], Preset]


def published(name: str) -> Callable[[Band], Preset]:
    """A preset of the kit, as it is, with PPO's clip at 0.2."""
    return lambda _band: presets.get(name)


def _own(title: str, **fields: object) -> Callable[[Band], Preset]:
    made = presets.preset.own_preset(op.Objective(**fields))  # type: ignore[arg-type]
    return lambda _band: replace(made, name=title)


def _on_mu(title: str, loss: op.losses.PolicyLoss) -> Callable[[Band], Preset]:
    """A loss whose own ratio is pi / mu, so that it corrects by itself."""
    return _own(title, policy_loss=loss, mode="bypass", correction=Correction())


def _geometric(weight: op.Weight | None) -> Callable[[Band], Preset]:
    """A mask on the geometric mean ratio of each response, with the calibrated band in place of the published one."""

    def made(band: Band) -> Preset:
        mask = op.RatioBand(level="sequence_mean", low=band[0], high=band[1])
        return presets.preset.own_preset(op.Objective(correction=Correction(weight=weight, keep=(mask,))))

    return made


ROWS: dict[str, Row] = {
    "none": Row("no correction", _own("none", correction=Correction())),
    "token_tis": Row("token TIS, cap 2", published("paper/tis")),
    "sequence_tis": Row("sequence TIS, cap 5", published("paper/sequence-tis")),
    "token_mis": Row(
        "token MIS, cap 2", _own("mis", correction=Correction(weight=op.BandWeight(level="token", low=None, high=2.0)))
    ),
    "icepop": Row("IcePop, [0.5, 5]", published("paper/icepop")),
    "kpop": Row("KPop", published("paper/kpop")),
    "geometric": Row("geometric mask", _geometric(None)),
    "geometric_tis": Row("geometric mask + token TIS", _geometric(op.TruncateWeight(level="token", max_weight=2.0))),
    "opsm": Row("OPSM", published("paper/opsm")),
    "m2po": Row("M2PO", published("paper/m2po")),
    "minpro": Row("MinPRO", published("paper/minpro")),
    "ctpo": Row("CTPO", published("paper/ctpo")),
    "gspo": Row("GSPO", _own("gspo", policy_loss=op.losses.GSPO(), correction=Correction())),
    "cispo": Row("CISPO on pi / mu", _on_mu("cispo", op.losses.CISPO())),
    "vespo": Row("VESPO on pi / mu", _on_mu("vespo", op.losses.VESPO())),
    "decoupled": Row("decoupled PPO", published("areal/decoupled")),
    "auto": Row("auto", lambda _band: presets.auto_preset()),
}  # fmt: skip
"""Every one has the ratio pi / pi_old clipped at 0.2 (PPO), but for GSPO (its paper's clip) and the two on pi / mu."""
AVAILABLE = [name for name, row in ROWS.items() if name != "kpop" or "paper/kpop" in presets.names()]
