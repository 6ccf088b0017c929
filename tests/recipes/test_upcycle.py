"""A mixture of experts made from a dense model: the same function without noise, another one with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recipes.moe_small import upcycle

IDS = torch.arange(2, 26).view(2, 12)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize(("experts", "chosen"), [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_without_noise_it_computes_what_the_dense_model_does(experts: int, chosen: int, tied: bool) -> None:
    dense = tiny_model(seed=1, tie_word_embeddings=tied).eval()
    moe = upcycle.upcycled(dense, experts=experts, chosen=chosen, noise=0.0).eval()
    torch.testing.assert_close(logits(moe), logits(dense), atol=1e-4, rtol=1e-4)
    assert moe.model.layers[0].mlp.experts.down_proj.shape == (experts, 64, 64)


def test_with_noise_the_experts_differ_by_their_share() -> None:
    dense = tiny_model(seed=1).eval()
    moe = upcycle.upcycled(dense, noise=0.1, seed=3)
    matrix, stack = dense.model.layers[1].mlp.down_proj.weight, moe.model.layers[1].mlp.experts.down_proj
    for expert in stack:
        assert (expert - matrix).std().item() == pytest.approx(0.1 * matrix.std().item(), rel=0.1)
    assert not torch.equal(stack[0], stack[1])
    again = upcycle.upcycled(dense, noise=0.1, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(moe.parameters(), again.parameters(), strict=True))
    assert (logits(moe.eval()) - logits(dense)).abs().max() > 1e-3


def test_the_routers_use_every_expert() -> None:
    moe = upcycle.upcycled(tiny_model(seed=1).eval()).eval()
    chosen = []
    for layer in moe.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[2]))
    logits(moe)
    assert len(chosen) == 2 and all(len(ids.unique()) == 4 for ids in chosen)


def test_the_command_saves_what_loads_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, made = tmp_path / "dense", tmp_path / "moe"
    tiny_model().save_pretrained(dense)
    tiny_tokenizer().save_pretrained(dense)
    monkeypatch.setattr(sys, "argv", ["upcycle.py", "--model", str(dense), "--output", str(made), "--noise", "0"])
    assert upcycle.main() == 0 and f"model ready: {made}" in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(made).eval()
    assert isinstance(loaded, MixtralForCausalLM) and AutoTokenizer.from_pretrained(made).pad_token == "<pad>"
    torch.testing.assert_close(logits(loaded), logits(tiny_model().eval()), atol=1e-4, rtol=1e-4)
    written = (made / "model.safetensors").stat().st_mtime_ns
    assert upcycle.main() == 0 and (made / "model.safetensors").stat().st_mtime_ns == written  # made once
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "0.2"])
    with pytest.raises(SystemExit):  # not taken for one of other options
        upcycle.main()
    assert "--output must be another folder" in capsys.readouterr().err


def test_a_folder_with_something_else_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["upcycle.py", "--output", str(tmp_path)])
    with pytest.raises(SystemExit):
        upcycle.main()
    assert "--output must be a new or an empty folder" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="chosen must be from 1 to 2"):
        upcycle.upcycled(tiny_model(), experts=2, chosen=3)
    with pytest.raises(ValueError, match="without biases"):
        upcycle.upcycled(tiny_model(mlp_bias=True))
    monkeypatch.setattr(sys, "argv", ["upcycle.py", "--model", str(tmp_path), "--output", str(tmp_path / "moe")])
    with pytest.raises(SystemExit):  # no model there
        upcycle.main()
