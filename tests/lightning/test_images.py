"""Rows with images: the Lightning module against TRL on the same draws, with HF generate, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from both_trainers import GRADIENT_LIMIT, RATE, STEPS, assert_same_numbers, distance, run_lightning, run_trl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import Played, Watch, data, module, trainer
from tiny_images import (
    encoded,
    image_rows,
    kept_by_generate,
    last_word,
    save_tiny_llava,
    seen_logits,
    seen_logps,
    tiny_processor,
    tiny_vlm,
)
from tiny_models import tiny_tokenizer
from trainer_runs import TIMES, Engine
from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

from lightning_module.agents import check_images
from lightning_module.export import save_model
from trl_offpolicy.engines.engine import Rollouts, Sampling
from trl_offpolicy.engines.server.engine import ServerEngine
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

pytestmark = pytest.mark.integration

ROWS = 32


class SeeingWords(Engine):
    """A ``rollout_func``: random words, with the log-probs of a model that sees the images, a shift and noise."""

    def __call__(self, prompts: list[Any], owner: Any) -> dict[str, Any]:
        ids, images = encoded(owner.processing_class, prompts)
        completions = [self._words() for _ in prompts]
        logprobs = []
        for prompt, completion, seen in zip(ids, completions, images, strict=True):
            true = seen_logps(owner.model, prompt, completion, seen.inputs)
            noise = self.noise * torch.randn(len(completion), generator=self.random)
            logprobs.append((true + self.shift + noise).tolist())
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs}


class PlayedImages(Played):
    """Plays rollouts back, and takes images."""

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1, images: Any = None
    ) -> Rollouts:
        assert len(images) == len(prompt_ids) and all(len(one.pictures) == 1 for one in images)
        return super().generate(prompt_ids, sampling, n=n)


def settings(**options: Any) -> dict[str, Any]:
    return {"model": tiny_vlm(), "tokenizer": tiny_processor(), "reward_funcs": last_word, **options}


def without_ids(logs: dict[str, float]) -> dict[str, float]:
    """Without the check of token ids, which TRL's side leaves out with images."""
    return {name: value for name, value in logs.items() if name != "offpolicy/rollout/noncanonical_fraction"}


@pytest.fixture
def build(make_args: Any, tmp_path: Path) -> Any:
    """TRL's side, as ``both_trainers.trl_side`` makes it, with images."""
    same = {
        "optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "max_steps": STEPS,
        "max_grad_norm": 1e9, "shuffle_dataset": False,
    }  # fmt: skip

    def made(rollout_func: Any, *, column: str = "image", **options: Any) -> OffPolicyGRPOTrainer:
        tiny_vlm().save_pretrained(tmp_path / "vlm")  # TRL loads its reference model by name
        return OffPolicyGRPOTrainer(
            Qwen2VLForConditionalGeneration.from_pretrained(tmp_path / "vlm"),
            last_word,
            make_args(**{**same, **options}),
            train_dataset=image_rows(ROWS, column=column),
            processing_class=tiny_processor(),
            rollout_func=rollout_func,
        )

    return made


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # TRL's options, the module's, the data's
    "accumulated": ({"gradient_accumulation_steps": 2}, {}, {"steps_per_generation": 2}),
    "several_iterations_and_images": (
        {"gradient_accumulation_steps": 1, "num_iterations": 2, "column": "images"}, {}, {"num_iterations": 2},
    ),
    "kl_and_noise_floor": (
        {"gradient_accumulation_steps": 1, "beta": 0.1, "noise_floor_steps": 1},
        {"objective": {"kl": {"coef": 0.1, "ratio_weighted": True}}, "noise_floor_steps": 1},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_metrics_and_weights_are_those_of_trl(case: str, build: Any, tmp_path: Path) -> None:
    options, ours, sizes = CASES[case]
    theirs, rows, calls = run_trl(build, engine=SeeingWords(shift=0.2, noise=0.3), **options)
    watch, engine = run_lightning(
        tmp_path, calls, options["gradient_accumulation_steps"], settings(**ours), sizes,
        engine=PlayedImages(calls), prompts=image_rows(ROWS, column=options.get("column", "image")),
    )  # fmt: skip

    assert engine.prompts == [call["prompt_ids"] for call in calls]
    assert len({len(ids) for call in calls for ids in call["prompt_ids"]}) > 1  # padded, with images of several sizes
    seeing = {name for name in theirs.gradients[0] if "visual.patch_embed" in name}
    assert max(float(theirs.gradients[0][name].abs().max()) for name in seeing) > 1e-4  # the images are learned from
    for step in range(STEPS):
        assert distance(watch.gradients[step], theirs.gradients[step]) < GRADIENT_LIMIT
        assert distance(watch.weights[step], theirs.weights[step]) < GRADIENT_LIMIT
        assert_same_numbers(without_ids(watch.logs[step]), rows[step])


def test_images_of_other_rows_are_seen(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails if rows are scored with each other's images, of one size."""
    theirs, _, calls = run_trl(build, engine=SeeingWords(shift=0.2, noise=0.3), gradient_accumulation_steps=1)
    swapped = image_rows(ROWS)
    pictures = [row["image"] for row in swapped]
    order = [i + 2 if i % 4 == 0 else i - 2 if i % 4 == 2 else i for i in range(ROWS)]  # (8, 8) with (8, 8)
    rows = [{**row, "image": pictures[place]} for row, place in zip(swapped, order, strict=True)]
    watch, engine = run_lightning(tmp_path, calls, 1, settings(), {}, engine=PlayedImages(calls), prompts=rows)
    assert engine.prompts == [call["prompt_ids"] for call in calls]  # only the pixels differ
    assert distance(watch.gradients[0], theirs.gradients[0]) > 1e-3


# ---------------------------------------------------------------------------------------------------- HF generate


def fit(folder: Path, rows: Any, *, steps: int, resume: Path | None = None) -> Watch:
    pl.seed_everything(1, verbose=False)
    if resume is not None:
        torch.manual_seed(99)  # other random numbers, until those of the checkpoint are back
    watch = Watch()
    saver = ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{step}", every_n_train_steps=3)
    ours = module(**settings(learning_rate=0.01, check_token_ids="raise"))
    owner = trainer(folder, callbacks=[watch, saver], enable_checkpointing=True, max_steps=steps)
    sizes = {"steps_per_generation": 2, "num_iterations": 2}
    owner.fit(ours, data(rows, **sizes), ckpt_path=resume, weights_only=True if resume else None)
    return watch


def mixed() -> list[dict[str, Any]]:
    """Prompts with an image, with two, and without; the generation batch of the last two prompts has none."""
    rows = [dict(row) for row in image_rows(8, column="images")]
    rows[1]["images"] = [*rows[1]["images"], *rows[2]["images"]]
    for i in (2, 6, 7):
        rows[i]["images"] = None
    return rows


def test_a_run_with_hf_generate_resumes_exactly_inside_a_generation(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", mixed(), steps=6)
    rest = fit(tmp_path / "rest", mixed(), steps=6, resume=tmp_path / "whole" / "step=3.ckpt")
    assert len({log["reward"] for log in whole.logs if "reward" in log}) > 1 and len(rest.logs) == 3
    for step in range(3, 6):
        expected, logs = whole.logs[step], rest.logs[step - 3]
        same = {name: value for name, value in expected.items() if name not in TIMES}
        assert {name: logs[name] for name in same} == pytest.approx(same, rel=1e-5, abs=1e-6, nan_ok=True)
        assert distance(rest.weights[step - 3], whole.weights[step]) < 1e-5


def test_images_under_a_truncated_distribution(tmp_path: Path) -> None:
    """Ratios to the distribution that sampled are 1; to the whole one they are the kept mass."""
    cut: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "top_k": 30, "min_p": 0.03}
    watch, ours = Watch(), module(**settings(learning_rate=1e-9, sampling={"max_tokens": 6, **cut}))
    owner = trainer(tmp_path, callbacks=[watch], max_steps=2)
    owner.fit(ours, data(image_rows(8), steps_per_generation=2))
    ratios, of_whole = [], []
    for part in ours.generation._buffer.micro_batches:
        with torch.no_grad():
            scored = ours.score(part).logps
        for row, mask in enumerate(part["completion_mask"].bool()):
            completion = part["completion_ids"][row][mask].tolist()
            prompt = part["prompt_ids"][row][part["prompt_mask"][row].bool()].tolist()
            logits = seen_logits(ours.policy, prompt, completion, part["images"][row])
            for logp, at, token in zip(scored[row], logits, completion, strict=False):
                kept = kept_by_generate(at.tolist(), **cut, never=ours.policy.config.image_token_id)
                ratios.append(float(logp) - kept[token])
                of_whole.append(float((at / cut["temperature"]).log_softmax(-1)[token]) - kept[token])
    assert len(ratios) > 20 and max(map(abs, ratios)) < 2e-4
    assert 0.5 < float(torch.tensor(of_whole).exp().mean()) < 0.95
    for row in watch.logs:
        assert row["offpolicy/rollout/outside_fraction"] == row["offpolicy/rollout/recomputed_cut_fraction"] == 0.0


def test_the_checkpoint_holds_the_images_of_rollouts_in_use(tmp_path: Path) -> None:
    fit(tmp_path, image_rows(8), steps=3)
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["offpolicy"]["ranks"][0]["rollouts"]
    images = [one for part in saved["micro_batches"] for one in part["images"]]
    assert len(images) == 8 and {"pixel_values", "image_grid_thw", "mm_token_type_ids"} <= set(images[0])


def test_model_and_processor_are_loaded_by_name_and_saved(tmp_path: Path) -> None:
    """Another family: pixels by image, no types of tokens, the image token under another name."""
    folder = str(save_tiny_llava(tmp_path / "model"))
    ours = module(**settings(model=folder, tokenizer=None, learning_rate=0.01))
    watch = Watch()
    trainer(tmp_path, callbacks=[watch], max_steps=2).fit(ours, data(image_rows(8), steps_per_generation=1))
    assert type(ours.policy).__name__ == "LlavaForConditionalGeneration"
    assert max(float(g.abs().max()) for name, g in watch.gradients[1].items() if "patch_embedding" in name) > 0
    save_model(ours, tmp_path / "saved")
    assert type(AutoProcessor.from_pretrained(tmp_path / "saved")).__name__ == "LlavaProcessor"


def test_predict_returns_the_messages_with_their_images(tmp_path: Path) -> None:
    rows = data(image_rows(2), val_batch_size=2, val_generations=2, test_dataset=image_rows(2))
    (found,) = trainer(tmp_path).predict(module(**settings()), rows)
    assert [part["type"] for part in found[0]["prompt"][0]["content"]] == ["image", "text"]
    assert found[0]["completion"][0]["role"] == "assistant" and len(found) == 4


# ------------------------------------------------------------------------------------------------------- refusals


def double(number: int) -> int:
    """Double a number.

    Args:
        number: any.
    """
    return 2 * number


class Blind(Played):
    """An engine that is sent ids alone, as vLLM's server."""


REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rollout": ({"rollout": lambda prompts, engine, sampling: {}}, NotImplementedError, "rollout must be left out"),
    "tokenizer": ({"tokenizer": tiny_tokenizer()}, ValueError, "tokenizer must be a processor"),
    "engine": ({"engine": Blind([])}, NotImplementedError, "engine must take images .* but got a Blind"),
    "replay": (
        {"engine": PlayedImages([]), "replay": {"groups": 1, "max_rows": 64}},
        NotImplementedError, "replay must be left out with images",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_go_with_images_is_refused(case: str, tmp_path: Path) -> None:
    options, error, message = REFUSALS[case]
    ours = module(**{"engine": "transformers", "sync_check": False, **settings(**options)})
    with pytest.raises(error, match=message):
        trainer(tmp_path, max_steps=1).fit(ours, data(image_rows(4)))


def test_the_refusal_of_a_server_says_by_which_route_it_would_take_images() -> None:
    ours = module(**settings())
    ours.generation.engine = object.__new__(ServerEngine)  # as it is before the first request
    with pytest.raises(NotImplementedError, match=r"a ServerEngine, whose .* /v1/chat/completions/render, which"):
        check_images(ours)


def test_a_text_prompt_with_an_image_is_refused(tmp_path: Path) -> None:
    rows = [{**row, "prompt": "w1 w2"} for row in image_rows(4)]
    with pytest.raises(ValueError, match="prompt must be a list of messages with images, but got the text 'w1 w2'"):
        trainer(tmp_path, max_steps=1).fit(module(**settings()), data(rows))


def test_a_sampled_image_token_is_refused(tmp_path: Path) -> None:
    processor = tiny_processor()
    token = processor.image_token_id
    ids, _ = encoded(processor, [[{"role": "user", "content": [{"type": "text", "text": "w1"}]}]])
    calls = [{"prompt_ids": ids * 4, "completion_ids": [[5, token]] * 4, "logprobs": [[-1.0, -1.0]] * 4}]
    ours = module(PlayedImages(calls), **settings())
    with pytest.raises(ValueError, match=f"completion_ids must not hold the image token {token}"):
        trainer(tmp_path, max_steps=1).fit(ours, data(image_rows(4), steps_per_generation=1))
