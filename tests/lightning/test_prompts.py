"""The tokenizer of a module: which one is loaded, and of which revision."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import tiny_tokenizer
from transformers import AutoTokenizer

from lightning_module.prompts import Prompts

REVISION = {"revision": "0123abc", "dtype": "float32"}


@pytest.mark.parametrize(
    ("tokenizer", "loaded", "options"),
    [
        (None, "some/model", {"revision": "0123abc"}),
        ("some/model", "some/model", {"revision": "0123abc"}),
        ("another/tokenizer", "another/tokenizer", {}),  # whose revisions are others
    ],
)
def test_the_tokenizer_is_of_the_models_revision(
    monkeypatch: pytest.MonkeyPatch, tokenizer: str | None, loaded: str, options: dict[str, Any]
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def load(name: str, **given: Any) -> Any:
        calls.append((name, given))
        return tiny_tokenizer()

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    policy = SimpleNamespace(config=SimpleNamespace(), generation_config=SimpleNamespace(eos_token_id=[3, 4]))
    settings = {
        "model": "some/model", "tokenizer": tokenizer, "model_options": REVISION,
        "chat_template": None, "response_template": None,
    }  # fmt: skip
    assert Prompts.of(settings, policy).ends == (3, 4, tiny_tokenizer().eos_token_id)
    assert calls == [(loaded, options)]
