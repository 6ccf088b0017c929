"""What a model's name or path says of it on any machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from trl_offpolicy.run_folder.base_model import BaseModel, base_model, base_model_of_run

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("name", "commit", "expected"),
    [
        ("Qwen/Qwen3-0.6B", COMMIT, BaseModel("Qwen/Qwen3-0.6B", COMMIT)),
        ("gpt2", None, BaseModel("gpt2")),
        (f"/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/{COMMIT}", None,
         BaseModel("Qwen/Qwen3-0.6B", COMMIT)),
        ("/home/me/models/mine", COMMIT, BaseModel(folder="mine")),
        (".cache/not-here", None, BaseModel(folder="not-here")),
        ("", None, BaseModel()),
    ],
)  # fmt: skip
def test_a_name_or_path_becomes_what_holds_on_any_machine(name: str, commit: str | None, expected: BaseModel) -> None:
    found = base_model(name, commit)
    assert found == expected and "/home/me" not in found.markdown()
    assert base_model_of_run({"model": name, "base_model": found.described()}) == found


def test_a_folder_says_what_it_was_made_from(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    assert base_model(str(folder)) == BaseModel(folder="mine")
    (folder / "README.md").write_text("---\nbase_model: Qwen/Qwen3-0.6B\n---\n\n# Mine\n")
    found = base_model(str(folder))
    assert found == BaseModel("Qwen/Qwen3-0.6B", folder="mine")
    assert found.markdown().startswith("the local model `mine`, which was made from [Qwen/Qwen3-0.6B](https://")
    (folder / "README.md").write_text("---\nbase_model: ../elsewhere\n---\n")
    assert base_model(str(folder)).hub_id == ""


def test_a_run_of_an_older_version_has_the_path_only() -> None:
    assert base_model_of_run({"model": "Qwen/Qwen3-0.6B"}) == BaseModel("Qwen/Qwen3-0.6B")
    assert base_model_of_run({}) == BaseModel()
