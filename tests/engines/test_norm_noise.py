"""Noise on an engine's norms: its size by stage, on which weights, on and off. With a real vLLM: test_colocate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.engines.norm_noise import NoisyNorms, NormNoise, norms, parse_noise
from trl_offpolicy.engines.settings import EngineSettings

NORMS = {
    "model.norm.weight",
    *(f"model.layers.{i}.{name}_layernorm.weight" for i in range(2) for name in ("input", "post_attention")),
}


def made(model: Any, **options: Any) -> tuple[NoisyNorms, list[None]]:
    forgotten: list[None] = []
    return NoisyNorms(NormNoise(**options), lambda: model, lambda: forgotten.append(None)), forgotten


def test_sizes_are_those_of_the_authors_code() -> None:
    """Ten intervals of 60 steps: none in the first, then start * (end / start)^(i / 8), as their schedule has it."""
    noise = NormNoise(start=1e-2, end=5e-4, stages=10)
    trend = [1e-2 * (5e-4 / 1e-2) ** (i / 8) for i in range(9)]
    found = [noise.sigma(step, 600) for step in range(0, 661)]
    assert found == pytest.approx([0.0] * 60 + [size for size in trend for _ in range(60)] + [5e-4] * 61)
    assert NormNoise(stages=2).sigma(5, 10) == pytest.approx(1e-2)  # a single size
    with pytest.raises(ValueError, match=r"engine\.norm_noise\.steps must be given"):
        noise.sigma(3, 0)


def test_on_the_norms_alone_and_off_again_bit_by_bit() -> None:
    model = tiny_model()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    noise, forgotten = made(model)
    noise.on(4, 0.05)
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == NORMS and noise.sigma == pytest.approx(0.05, rel=0.2) and len(forgotten) == 1
    added = torch.cat([weight - before[name].detach() for name, weight in norms(model).items()])
    assert float(added.std()) == pytest.approx(0.05, rel=0.2) and abs(float(added.mean())) < 0.01
    noise.on(4, 0.05)  # it has it already
    assert len(forgotten) == 1
    noise.on(4, 0.0)  # an evaluation
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert noise.sigma == 0.0 and len(forgotten) == 2
    noise.off()
    assert len(forgotten) == 2


def test_what_16_bits_cannot_hold_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Near 1 bfloat16 has steps of 4e-3 and 8e-3: noise of 3e-4 rounds away, and the number is what is left."""
    noise, _ = made(tiny_model().bfloat16())
    noise.on(1, 0.05)
    assert noise.sigma == pytest.approx(0.05, rel=0.2) and not caplog.text
    for version in (2, 3):
        noise.on(version, 3e-4)
        assert noise.sigma < 1e-4
    assert caplog.text.count("noise of 0.0003 is below what weights near 1 hold") == 1


def test_the_draws_depend_on_the_version_and_the_seed_alone() -> None:
    def drawn(version: int, **options: Any) -> torch.Tensor:
        model = tiny_model()
        noise, _ = made(model, **options)
        noise.on(1, 0.1)  # another version before: it is taken off first
        noise.on(version, 0.2)
        return torch.cat(list(norms(model).values()))

    assert torch.equal(drawn(7), drawn(7))
    others = [drawn(8), drawn(7, seed=1), drawn(8, seed=1)]
    assert all(not torch.equal(drawn(7), other) for other in others)


def test_norms_of_queries_and_keys_are_left_out_and_none_is_an_error() -> None:
    assert set(norms(tiny_model("qwen3_moe"))) == NORMS  # it has q_norm and k_norm
    with pytest.raises(EngineError, match="needs a model with norms"):
        norms(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"start": 0}, r"^engine\.norm_noise\.start must be positive"),
        ({"stages": 1}, r"^engine\.norm_noise\.stages must"),
        ({"steps": 0}, r"^engine\.norm_noise\.steps must"),
        ({"sart": 1.0}, r"^engine\.norm_noise\.sart must be one of .* Did you mean 'start'"),
        (3, r"^engine\.norm_noise must be one of \['true', 'false'\] or a mapping, but got 3"),
    ],
)
def test_wrong_options_are_named(option: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineSettings.parse({"norm_noise": option})


def test_where_it_is_refused() -> None:
    settings = EngineSettings.parse({"norm_noise": True})
    assert settings.norm_noise == NormNoise() and parse_noise(False) is parse_noise(None) is None
    with pytest.raises(ValueError, match="must be left out with a server"):
        settings.check_server()
    with pytest.raises(ValueError, match=r"engine\.norm_noise must be left out"):
        EngineSettings.parse({"norm_noise": True, "exact": True})
