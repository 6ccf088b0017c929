"""Probe and doctor on the same tokens: the same cause, or "unknown" from the doctor; never another cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_probe import record_probe

from trl_offpolicy.diagnosis.doctor import examine
from trl_offpolicy.diagnosis.probe.options import ProbeOptions
from trl_offpolicy.diagnosis.probe.probe import run_probe
from trl_offpolicy.diagnosis.probe.sides import open_sides, render_prompts

pytestmark = pytest.mark.integration  # a probe and a run for every case

PROMPTS = ("w1 w2", "w3", "w4 w9", "w50 w51 w5")


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({}, "none"),
        ({"temperature": 0.9}, "temperature"),
        ({"top_p": 0.8}, "truncated_sampling"),
        ({"weight_rounding": "int8"}, "precision"),
        ({"engine_dtype": "bfloat16"}, "precision"),
        ({"weight_rounding": "int8", "temperature": 0.9}, "temperature"),  # both; the probe names the shares
    ],
)
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
def test_they_do_not_contradict_each_other(
    model_folder: Callable[[str], Path], tmp_path: Path, options: dict[str, Any], cause: str, declared: bool
) -> None:
    asked = ProbeOptions(
        model=str(model_folder("llama")), engine="hf", prompts=PROMPTS, samples=8, max_tokens=16, ask=False, **options
    )
    probed = run_probe(asked)
    assert probed.attribution.cause == cause
    prompts = render_prompts(open_sides(asked).tokenizer, PROMPTS).ids
    folder = record_probe(probed, prompts, tmp_path / "run", declared=declared)
    known = {cause, "unknown", *(name for name, _ in probed.attribution.parts)}
    alone, tested = examine(folder).attribution, examine(folder, model="auto").attribution
    assert (alone.cause if alone else "none") in known
    if declared:  # then the doctor scores as the trainer did, and reaches what the probe reaches
        assert (tested.cause if tested else "none") == cause
        assert (tested.detail if tested else "") == probed.attribution.detail
    assert (tested.cause if tested else "none") in known
