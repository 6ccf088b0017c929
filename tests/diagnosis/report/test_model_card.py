"""The model card of a run: from the recorded faulty run, and after real training through the trainer."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from tensorboardX.proto import event_pb2
from trainer_runs import Engine, records
from trl.trainer.utils import generate_model_card

from recipes.record import RecipeCallback
from trl_offpolicy import presets
from trl_offpolicy.cli import commands as cli
from trl_offpolicy.diagnosis.report import demo
from trl_offpolicy.diagnosis.report.model_card import BEGIN, END, card_section, write_card

DEMO = Path(demo.__file__).parent / "demo_run"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "run"))


def test_the_section_says_method_numbers_verdict_and_recipe(run_dir: Path) -> None:
    (run_dir / "recipe.yaml").write_text("max_steps: 12\n")
    text = card_section(run_dir)
    assert "`paper/product-mask`" in text and "Verdict over the last logged steps: **critical**" in text
    assert "| KL k3 (nats/token) | before |" in text and "- **Seed**: 42" in text
    assert "```yaml\nmax_steps: 12\n```" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1  # a table that Markdown can read


def test_a_new_card_has_the_hubs_metadata_and_a_second_one_replaces_the_first(run_dir: Path) -> None:
    path = write_card(run_dir)
    assert ModelCard.load(path).data.tags == ["generated_from_trainer", "grpo", "trl-offpolicy"]
    once = path.read_text()
    write_card(run_dir)
    assert path.read_text() == once and once.count(BEGIN) == once.count(END) == 1


def test_the_section_stands_before_the_framework_versions_of_a_card_of_trl(run_dir: Path, tmp_path: Path) -> None:
    card = tmp_path / "CARD.md"
    card.write_text("# A model\n\nText \\1 of mine.\n\n### Framework versions\n\n- TRL\n")
    write_card(run_dir, card)
    text = card.read_text()
    assert text.index("of mine") < text.index(BEGIN) < text.index(END) < text.index("### Framework versions")


BASES = [
    (
        {"hub_id": "Qwen/Qwen3-0.6B", "revision": "c1899de"},
        "Qwen/Qwen3-0.6B",
        "Qwen3-0.6B) (revision `c1899de`) on the",
    ),
    (
        {"hub_id": "Qwen/Qwen3-0.6B", "folder": "mine"},
        "Qwen/Qwen3-0.6B",
        "of the local model `mine`, which was made from",
    ),
    ({"folder": "mine"}, None, "version of the local model `mine` on the"),
]


@pytest.mark.parametrize(("base", "hub_id", "words"), BASES)
@pytest.mark.parametrize("theirs", [None, "../models/mine"])  # TRL takes a path that it does not find for an id
def test_trls_card_names_the_model_and_what_it_began_with(
    run_dir: Path, base: dict[str, str], hub_id: str | None, words: str, theirs: str | None
) -> None:
    made = generate_model_card(
        base_model=theirs, model_name=None, hub_model_id=None, dataset_name="some/dataset", tags=["grpo"],
        wandb_url=None, trackio_url=None, trainer_name="GRPO",
    )  # fmt: skip
    card = run_dir / "README.md"
    made.save(card)
    info = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**info, "base_model": base}))
    write_card(run_dir)
    text = card.read_text()
    assert text.count("# Model Card for run\n") == 1 and "None" not in text.split(BEGIN)[0] and "../models" not in text
    assert words in text and "on the [some/dataset]" in text and text.count("- **Base model**: ") == 1
    assert ModelCard(text).data.base_model == hub_id
    write_card(run_dir)
    assert card.read_text() == text


def test_command_line(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["card", str(run_dir)]) == 0
    assert capsys.readouterr().out.strip() == str(run_dir / "README.md")
    assert cli.main(["card", str(run_dir / "nowhere")]) == cli.BAD_INPUT


@pytest.mark.integration
def test_push_to_hub_writes_the_card_and_leaves_out_what_is_ours_alone(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but the upload is real; the upload is recorded."""
    trainer = build(Engine(noise=0.1), offpolicy="paper/geometric-mask")
    trainer.add_callback(RecipeCallback({"max_steps": 2}))
    trainer.train()
    uploads: list[dict[str, Any]] = []

    class Hub:
        def upload_folder(self, **what: Any) -> str:
            uploads.append(what)
            return "done"

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    trainer.hub_model_id = "someone/some-model"
    trainer.push_to_hub(dataset_name="some/dataset")
    (upload,) = uploads
    assert upload["repo_id"] == "someone/some-model" and "_*" in upload["ignore_patterns"]
    text = (Path(trainer.args.output_dir) / "README.md").read_text()
    assert "# Model Card for run\n" in text and "of the local model `" in text
    trainer.hub_model_id = None
    trainer.create_model_card()  # as recipes/grpo.py calls it
    assert "# Model Card for run\n" in (Path(trainer.args.output_dir) / "README.md").read_text()
    assert presets.get("paper/geometric-mask").citation in text and "trl-offpolicy" in ModelCard(text).data.tags
    assert "### Engine against trainer" in text and "max_steps: 2" in text and "some/dataset" in text


@pytest.mark.integration
def test_tensorboard_gets_the_keys_of_the_run_folder(build: Callable[..., Any], tmp_path: Path) -> None:
    trainer = build(Engine(noise=0.1), report_to="tensorboard")
    trainer.train()
    (events,) = Path(trainer.args.output_dir, "runs").rglob("events.*")
    tags = {value.tag for event in read_events(events) for value in event.summary.value}
    (row, *_) = records(trainer)
    keys = {key for key in row if key.startswith("offpolicy/") and row[key] is not None}
    assert len(keys) > 50 and {f"train/{key}" for key in keys} <= tags


def read_events(path: Path) -> Iterator[event_pb2.Event]:
    """The records of an event file: length, checksum, body, checksum."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        yield event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
        at += 12 + size + 4
