"""The trained policy as transformers and PEFT read it, with its card."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from lightning_runs import data, module, trainer
from peft import PeftModel
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_module import RunFolder, SaveModel

IDS = torch.tensor([[5, 9, 14, 3]])
ADAPTER = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def train(folder: Path, saver: SaveModel, **options: Any) -> Any:
    """One step; returns the policy."""
    ours = module(learning_rate=0.01, **options)
    owner = trainer(folder, max_steps=1, callbacks=[RunFolder(str(folder)), saver])
    owner.fit(ours, data())
    return ours.policy


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.integration
def test_transformers_loads_what_was_trained(tmp_path: Path) -> None:
    policy = train(tmp_path, SaveModel())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    assert torch.equal(logits(loaded), logits(policy)) and not torch.equal(logits(loaded), logits(tiny_model()))
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("w1 w2")["input_ids"] == [4, 5]
    card = (tmp_path / "model" / "README.md").read_text()
    assert "trl-offpolicy" in card and "measure" in card  # the method of this run


@pytest.mark.integration
def test_an_adapter_is_written_alone(tmp_path: Path) -> None:
    policy = train(tmp_path, SaveModel(str(tmp_path / "out")), adapter=ADAPTER)
    assert not list((tmp_path / "out").glob("model*.safetensors"))
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "out")
    assert torch.allclose(logits(loaded), logits(policy), atol=1e-6)
    assert not torch.allclose(logits(loaded), logits(tiny_model()), atol=1e-3)


@pytest.mark.integration
def test_the_folder_is_uploaded_to_the_named_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's client is replaced: there is no Hub here."""
    calls: dict[str, Any] = {}

    class Api:
        def create_repo(self, name: str, **options: Any) -> None:
            calls["made"] = (name, options)

        def upload_folder(self, **options: Any) -> Any:
            calls["files"] = sorted(path.name for path in Path(options["folder_path"]).iterdir())
            calls["repo"] = options["repo_id"]
            return SimpleNamespace(commit_url="there")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    train(tmp_path, SaveModel(push_to_hub="me/tiny", private=True))
    assert calls["made"] == ("me/tiny", {"private": True, "exist_ok": True}) and calls["repo"] == "me/tiny"
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(calls["files"])
