"""Sorted, trimmed and shared micro-batches against the plain path: the same loss and gradient, for every loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from both_trainers import WatchTRL, distance
from datasets import Dataset
from tiny_models import WORDS, save_tiny_model, score_last_word, tiny_model, tiny_tokenizer
from torch import Tensor
from trainer_runs import Engine, rollouts
from trainer_specs import spec_of
from transformers import AutoModelForCausalLM, BartConfig, BartForCausalLM

from trl_offpolicy.functional.aggregation import AGGREGATIONS
from trl_offpolicy.presets.parsing import LOSS_TYPES
from trl_offpolicy.rollouts import micro_batches, prompts
from trl_offpolicy.rollouts.shared_prefix import SharedPrefix
from trl_offpolicy.trl.checks import stages_of
from trl_offpolicy.trl.config import OffPolicyGRPOConfig, resolve_preset
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

ROWS, PARTS, GROUP = 4, 3, 4
LIMIT = 1e-5
"""Largest difference, float32: absolute, plus relative to the largest entry of the gradient."""
PROMPTS = Dataset.from_dict({"prompt": [" ".join(WORDS[i : i + 4 + i % 7]) for i in range(24)]})
OPTIONS = {
    "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False,
    "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": PARTS, "num_generations": GROUP,
    "max_completion_length": 6, "max_steps": 1, "logging_steps": 1, "save_strategy": "no", "write_report": False,
    "noise_floor_steps": 0, "scale_rewards": "none", "share_prefix": True,
}  # fmt: skip


def trainer_of(folder: Path, *, model: Any = None, peft_config: Any = None, **options: Any) -> OffPolicyGRPOTrainer:
    args = OffPolicyGRPOConfig(str(folder), **{**OPTIONS, **options})
    if args.beta:  # TRL loads the reference from where the model came from
        model = AutoModelForCausalLM.from_pretrained(save_tiny_model(folder / "model"))
    trainer = OffPolicyGRPOTrainer(
        model or tiny_model(), score_last_word, args, train_dataset=PROMPTS, processing_class=tiny_tokenizer(),
        rollout_func=Engine(noise=0.3), peft_config=peft_config,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = PARTS  # transformers sets it in its training loop
    return trainer


def plainly(trainer: Any) -> None:
    """Split and score as TRL does."""
    trainer._compact._trim, trainer._compact._shared = False, SharedPrefix(False, counted=False)


def moved(trainer: Any, scale: float = 0.02) -> None:
    """Change the weights a little, so that the current policy is not the old one."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            if weight.requires_grad:
                weight += scale * torch.randn(weight.shape, generator=random)


def step(trainer: Any, micro_batches: list[dict[str, Any]]) -> tuple[float, Tensor]:
    """Loss and gradient of one optimizer step."""
    trainer.model.zero_grad()
    total = 0.0
    for part in micro_batches:
        loss = trainer._compute_loss(trainer.model, dict(part))
        loss.backward()
        total += loss.item()
    gradients = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    return total, torch.cat(gradients)


def compared(trainer: Any, rows: dict[str, Any]) -> tuple[tuple[float, Tensor], tuple[float, Tensor]]:
    """The step on the plain path and on the compact one, from the same rows in random order."""
    order = torch.randperm(len(rows["completion_ids"]), generator=torch.Generator().manual_seed(1))
    shuffled = {name: value if value.dim() == 0 else value[order] for name, value in rows.items()}
    compact = trainer._compact
    forwards = counted_forwards(trainer)
    ours = step(trainer, compact.split(shuffled, PARTS))
    assert forwards() == {"plain": 0, "shared": PARTS} or compact._why_whole() is not None
    kept = compact._trim, compact._shared
    plainly(trainer)
    theirs = step(trainer, compact.split(shuffled, PARTS))
    compact._trim, compact._shared = kept
    return ours, theirs


def counted_forwards(trainer: Any) -> Callable[[], dict[str, int]]:
    """How many forwards were plain and how many computed prompts once, up to the call."""
    seen = {"plain": 0, "shared": 0}
    shared = trainer._compact._shared
    original = shared.prompts

    def prompts(*args: Any) -> Any:
        found = original(*args)
        seen["plain" if found is None else "shared"] += 1
        return found

    shared.prompts = prompts

    def so_far() -> dict[str, int]:
        shared.prompts = original
        return seen

    return so_far


def assert_same(ours: tuple[float, Tensor], theirs: tuple[float, Tensor], limit: float = LIMIT) -> None:
    largest = float(theirs[1].abs().max())
    assert largest > 0
    assert abs(ours[0] - theirs[0]) < limit * (1 + abs(theirs[0]))
    assert float((ours[1] - theirs[1]).abs().max()) < limit * (1 + largest)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OffPolicyGRPOTrainer, list[Any]]]:
    """One trainer and its prompts, for all losses."""
    trainer = trainer_of(tmp_path_factory.mktemp("compact"))
    yield trainer, next(iter(trainer.get_train_dataloader()))


def generated(trainer: Any, prompts: list[Any], **changed: Any) -> dict[str, Any]:
    """A generation batch with all that this configuration decides on the whole of it, and with old log-probs.

    The weights then move, so that the current policy is another one.
    """
    args = deepcopy(trainer.args)
    for name, value in changed.items():
        setattr(args, name, value)
    preset = resolve_preset(args, has_rollout_func=True)
    trainer.objective, trainer._stages = preset.objective, stages_of(trainer.args, preset)
    trainer.rollout_func = Engine(noise=0.3)
    output: dict[str, Any] = trainer._generate_and_score_completions(prompts)
    output.setdefault("old_per_token_logps", trainer._score_old(output, "train", with_sums=False)[0])
    moved(trainer)
    return output


@pytest.fixture
def weights_kept(prepared: tuple[Any, list[Any]]) -> Iterator[None]:
    kept = deepcopy(prepared[0].model.state_dict())
    yield
    prepared[0].model.load_state_dict(kept)


@pytest.mark.usefixtures("weights_kept")
@pytest.mark.parametrize("name", LOSS_TYPES)
def test_every_loss(name: str, prepared: tuple[Any, list[Any]]) -> None:
    trainer, prompts = prepared
    assert_same(*compared(trainer, generated(trainer, prompts, offpolicy=spec_of(name))))


@pytest.mark.usefixtures("weights_kept")
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_reduction(aggregation: str, prepared: tuple[Any, list[Any]]) -> None:
    """``token_mean`` divides by the tokens of the whole step here, as in dapo."""
    trainer, prompts = prepared
    spec = {"preset": "paper/tis", "objective": {"aggregation": aggregation}}
    rows = generated(trainer, prompts, offpolicy=spec)
    assert trainer._compact._why_whole() is None
    assert_same(*compared(trainer, rows))


def one_loss(name: str = "ppo_clip") -> dict[str, Any]:
    return {"preset": "paper/tis", "objective": {"policy_loss": {"type": name}, "aggregation": "seq_mean_token_mean"}}


@pytest.mark.parametrize("options", [
    {"beta": 0.1}, {"top_p": 0.9}, {"loss_type": "luspo"}, {"temperature": 0.7},
], ids=str)  # fmt: skip
def test_options(options: dict[str, Any], tmp_path: Path) -> None:
    """A reference model and its scores; a truncated distribution; another reduction."""
    trainer = trainer_of(tmp_path, **options)
    prompts = next(iter(trainer.get_train_dataloader()))
    rows = generated(trainer, prompts)
    assert ("ref_per_token_logps" in rows) == ("beta" in options)
    assert_same(*compared(trainer, rows))


def test_scores_of_the_old_and_the_reference_policy(tmp_path: Path) -> None:
    """Sorted into forwards of like length they are those of TRL's own, row by row; padding holds 0."""
    trainer = trainer_of(tmp_path, beta=0.1, share_prefix=False)
    prompts = next(iter(trainer.get_train_dataloader()))
    rows = generated(trainer, prompts)
    for scored in (trainer.model, trainer.ref_model):
        forwards = counted_widths(trainer)
        ours = trainer._score(scored, rows, batch_size=3)[0]
        narrow = forwards()
        plain = trainer._score(scored, rows, batch_size=3, compact=False)[0]
        assert len(narrow) == 4 and min(narrow) < rows["prompt_ids"].shape[1] + rows["completion_ids"].shape[1]
        torch.testing.assert_close(ours, plain, rtol=LIMIT, atol=LIMIT)
        assert not ours[rows["completion_mask"] == 0].any()


def counted_widths(trainer: Any) -> Callable[[], list[int]]:
    """The widths of the forwards up to the call."""
    seen: list[int] = []
    head = trainer._filtered

    def scored(score: Any, reference: Any, model: Any, ids: Tensor, *rest: Any, **kwargs: Any) -> Any:
        seen.append(ids.shape[1])
        return head(score, reference, model, ids, *rest, **kwargs)

    trainer._filtered = scored

    def so_far() -> list[int]:
        trainer._filtered = head
        return seen

    return so_far


def test_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM")
    trainer = trainer_of(tmp_path, peft_config=config, beta=0.1)
    rows = generated(trainer, next(iter(trainer.get_train_dataloader())))
    ours, theirs = compared(trainer, rows)
    assert len(theirs[1]) < 10_000  # the adapter alone learns
    assert_same(ours, theirs)


def test_bfloat16(tmp_path: Path) -> None:
    """The compact path is as far from float32 as the plain one."""
    trainer = trainer_of(tmp_path)
    rows = generated(trainer, next(iter(trainer.get_train_dataloader())), offpolicy=one_loss())
    truth = compared(trainer, rows)[1]
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = compared(trainer, rows)
    own = float((theirs[1] - truth[1]).norm())
    assert own > 100 * LIMIT
    assert float((ours[1] - truth[1]).norm()) < 1.5 * own


def test_rows_without_learned_tokens(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    rows = generated(trainer, next(iter(trainer.get_train_dataloader())))
    rows["completion_mask"][:5] = 0
    assert_same(*compared(trainer, rows))


def test_tool_tokens_keep_their_places(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    rows = generated(trainer, next(iter(trainer.get_train_dataloader())))
    random = torch.Generator().manual_seed(3)
    rows["tool_mask"] = (torch.rand(rows["completion_mask"].shape, generator=random) < 0.6).long()
    rows["policy_versions"] = -torch.arange(rows["completion_mask"].shape[1]).expand_as(rows["tool_mask"])
    assert_same(*compared(trainer, rows))


# ------------------------------------------------------------------------------------------ where the split matters


@pytest.mark.parametrize(("options", "reason"), [
    ({"loss_type": "bnpo"}, "its own micro-batch"),
    ({"entropy_coef": 0.1}, "entropy bonus"),
    ({"top_entropy_quantile": 0.5}, "top_entropy_quantile"),
    ({"offpolicy": {"preset": "paper/tis", "objective": {"policy_loss": {"type": "m2po"}}}}, "statistics over its"),
], ids=str)  # fmt: skip
def test_rows_stay_where_the_loss_depends_on_the_split(
    options: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(tmp_path, share_prefix="auto", **options)
    assert reason in caplog.text and "does not sort rows by length" in caplog.text
    rows = generated(trainer, next(iter(trainer.get_train_dataloader())))
    parts = trainer._compact.split(rows, PARTS)
    assert torch.equal(torch.cat([part["group_ids"] for part in parts]), rows["group_ids"])
    assert any(part["completion_ids"].shape[1] < rows["completion_ids"].shape[1] for part in parts)
    assert_same(*compared(trainer, rows))
    with pytest.raises(ValueError, match="share_prefix must be auto or false here, but got true"):
        trainer_of(tmp_path, share_prefix=True, **options)


def test_rows_keep_their_width_where_padding_changes_log_probs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dynamic rotary embeddings have other angles in a wider input."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny_model(max_position_embeddings=6, rope_parameters=rope)
    trainer = trainer_of(tmp_path, model=model, share_prefix="auto")
    assert caplog.text.count("trim_padding keeps every column: rotary embeddings of type 'dynamic'") == 1
    rows = generated(trainer, next(iter(trainer.get_train_dataloader())))
    for part in trainer._compact.split(rows, PARTS):
        assert part["completion_ids"].shape[1] == rows["completion_ids"].shape[1]
        assert part["prompt_ids"].shape[1] == rows["prompt_ids"].shape[1]
    forwards = counted_widths(trainer)
    trainer._score(trainer.model, rows, batch_size=3)
    assert set(forwards()) == {rows["prompt_ids"].shape[1] + rows["completion_ids"].shape[1]}


def test_rows_keep_their_width_where_positions_count_padding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a forward of one width old and current log-probs would differ where no weight has moved."""
    size = len(tiny_tokenizer())
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=size, d_model=32, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32, use_cache=False,
        dropout=0.0, max_position_embeddings=64, init_std=0.4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    trainer = trainer_of(tmp_path, model=BartForCausalLM(config), share_prefix="auto")
    assert caplog.text.count("trim_padding keeps every column: this model's positions are absolute") == 1
    rows = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
    old = trainer._score(trainer.model, rows, batch_size=3)[0]
    assert any(not mask.all() for mask in (rows["prompt_mask"], rows["completion_mask"]))
    parts = trainer._compact.split(rows, PARTS)
    assert {part["prompt_ids"].shape[1] for part in parts} == {rows["prompt_ids"].shape[1]}
    current = torch.cat([trainer._score(trainer.model, part)[0] for part in parts])
    torch.testing.assert_close(current, old, rtol=LIMIT, atol=LIMIT)


def test_widths_stay_multiples_in_scoring_and_prompts_are_not_shared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"share_prefix must .* but got true: pad_to_multiple_of wants widths"):
        trainer_of(tmp_path, pad_to_multiple_of=4)
    trainer = trainer_of(tmp_path, pad_to_multiple_of=4, share_prefix="auto")
    rows = generated(trainer, next(iter(trainer.get_train_dataloader())))
    forwards = counted_widths(trainer)
    trainer._score(trainer.model, rows, batch_size=3)
    assert all(width % 4 == 0 for width in forwards())
    other = trainer_of(tmp_path / "reference", pad_to_multiple_of=4, share_prefix="auto", beta=0.1)
    assert other.ref_model is not None and not other._compact._shared.possible(other.ref_model)


def test_rows_stay_in_their_order_where_they_are_not_to_be_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``share_prefix: auto`` shares what meets by chance; ``true`` brings groups together."""
    monkeypatch.setattr(micro_batches, "LEAST_SAVED", 1)
    for trim in (False, "columns"):
        for share, moves in (("auto", False), (True, True)):
            trainer = trainer_of(tmp_path, trim_padding=trim, share_prefix=share)
            count = ROWS * PARTS
            groups = torch.arange(count) % PARTS
            ids = groups[:, None].expand(-1, 40) + 3
            rows = {"prompt_ids": ids, "completion_ids": ids[:, :2], "group_ids": groups}
            rows |= {"prompt_mask": torch.ones_like(ids), "completion_mask": torch.ones_like(ids[:, :2])}
            parts = trainer._compact.split(rows, PARTS)
            found = torch.cat([part["group_ids"] for part in parts])
            assert torch.equal(found, groups) is not moves


def test_no_forward_of_the_loss_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides how it passes is on the host since the split."""

    class Looked(Exception):
        pass

    def look(*_: Any) -> Any:
        raise Looked

    trainer = trainer_of(tmp_path)
    rows = generated(trainer, next(iter(trainer.get_train_dataloader())))
    parts = trainer._compact.split(rows, PARTS)
    first = step(trainer, parts)  # compares the first batch with the plain path
    monkeypatch.setattr(prompts, "on_host", look)
    forwards = counted_forwards(trainer)
    assert step(trainer, parts)[0] == pytest.approx(first[0], abs=1e-6)
    assert forwards() == {"plain": 0, "shared": PARTS}
    with pytest.raises(Looked):  # other rows are not taken for these
        step(trainer, [{**parts[0], "completion_mask": parts[0]["completion_mask"].clone()}])


def test_gradient_checkpointing_shares_as_well(tmp_path: Path) -> None:
    """TRL's default. Layers are computed again in the backward, with nothing of the forward but their arguments."""
    trainer = trainer_of(tmp_path, gradient_checkpointing=True)
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    layers: list[int] = []
    trainer.model.model.layers[0].register_forward_pre_hook(lambda _, args: layers.append(args[0].shape[0]))
    rows = generated(trainer, next(iter(trainer.get_train_dataloader())))
    assert_same(*compared(trainer, rows))
    assert trainer.model.is_gradient_checkpointing and layers.count(1) >= 4  # one sequence, forward and again


@pytest.mark.parametrize("value", ["sometimes", 3, None])
def test_other_values_are_refused(value: Any, tmp_path: Path) -> None:
    for name, others in (("trim_padding", "'columns', 'ranks'"), ("share_prefix", "'auto'")):
        with pytest.raises(ValueError, match=f"{name} must be true, false or one of \\[{others}\\], but got {value!r}"):
            OffPolicyGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **{name: value})


# ----------------------------------------------------------------------------------------------------------- whole runs


RUNS: dict[str, dict[str, Any]] = {
    "accumulation": {},
    "several steps on a generation": {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "several iterations": {"num_iterations": 2},
    "windows that do not divide": {"steps_per_generation": 2, "gradient_accumulation_steps": 3},
    "wide scope": {"offpolicy": {"preset": "paper/tis", "correction": {"keep": [{"type": "second_moment_budget"}]}}},
    "reference": {"beta": 0.1},
}


MOVES_ROWS = ("several steps on a generation", "windows that do not divide")
"""With several steps on one generation ``share_prefix: true`` gathers whole groups, which changes what a step sees."""


@pytest.mark.integration
@pytest.mark.parametrize("name", RUNS)
def test_a_run_takes_the_same_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of three optimizer steps, and what is recorded of each row."""
    monkeypatch.setattr(micro_batches, "LEAST_SAVED", 1)  # so that auto shares these short prompts
    options = {"max_steps": 3, "learning_rate": 0.02, "optim": "sgd", "max_grad_norm": 1e9, **RUNS[name]}
    seen = {}
    for how, compact in {"plain": (False, False), "ours": (True, "auto" if name in MOVES_ROWS else True)}.items():
        trainer = trainer_of(tmp_path / how, trim_padding=compact[0], share_prefix=compact[1], **options)
        watch = WatchTRL(trainer.model)
        trainer.add_callback(watch)
        trainer.train()
        seen[how] = watch.gradients, by_row(trainer)
    (ours, rows), (theirs, plain_rows) = seen["ours"], seen["plain"]
    assert len(ours) == 3 and all(distance(*pair) < 1e-4 for pair in zip(ours, theirs, strict=True))
    assert rows.keys() == plain_rows.keys() and len(rows) >= ROWS * PARTS
    for key, row in rows.items():
        assert row == pytest.approx(plain_rows[key], abs=1e-4), key


@pytest.mark.integration
def test_the_noise_floor_takes_its_turn_with_the_micro_batches(tmp_path: Path) -> None:
    """Sorted ones differ in length. The second score has the rows in their order and full width."""
    trainer = trainer_of(tmp_path, noise_floor_steps=1, max_steps=4)
    original, seen = trainer._score, []

    def score(model: Any, inputs: dict[str, Any], **how: Any) -> Any:
        if how.get("compact", True):
            return original(model, inputs, **how)
        seen.append([part is inputs for part in trainer._buffered_inputs].index(True))
        forwards = counted_widths(trainer)
        result = original(model, inputs, **how)
        assert set(forwards()) == {inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]}
        return result

    trainer._score = score  # type: ignore[method-assign]
    trainer.train()
    assert seen == [0, 1, 2, 0]
    assert sum("offpolicy/noise_floor/kl_k3" in row for row in trainer.state.log_history) == 4


def by_row(trainer: Any) -> dict[Any, list[float]]:
    """Step, weights, log-probs and reward of each recorded row, by its group and tokens."""
    return {
        (row.group_id, tuple(row.completion_ids), row.step): [
            *row.sampling_per_token_logps, *row.old_per_token_logps, *row.weights, *row.keep_mask,
            row.reward, row.advantage,
        ]
        for row in rollouts(trainer).itertuples()
    }  # fmt: skip


@pytest.mark.integration
def test_groups_stay_whole_where_a_generation_serves_several_steps(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, steps_per_generation=4, gradient_accumulation_steps=2, max_steps=2)
    seen: list[dict[str, Any]] = []
    original = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: seen.append(inputs) or original(model, inputs)
    trainer.train()
    assert len(seen) == 4 and all(len(part["group_ids"].unique()) == 1 for part in seen)
    assert len({int(part["group_ids"][0]) for part in seen}) == 4


@pytest.mark.integration
def test_replayed_groups(tmp_path: Path) -> None:
    """Rows of older versions among fresh ones, whose micro-batches are larger."""
    from trl_offpolicy.rollouts.replay import ReplayBuffer
    from trl_offpolicy.trl.replay import ReplayGRPOTrainer

    seen = {}
    for how, compact in {"plain": False, "ours": True}.items():
        options = {"max_steps": 3, "learning_rate": 0.02, "optim": "sgd", "max_grad_norm": 1e9}
        args = OffPolicyGRPOConfig(
            str(tmp_path / how), **{**OPTIONS, **options, "trim_padding": compact, "share_prefix": compact}
        )
        trainer = ReplayGRPOTrainer(
            tiny_model(), score_last_word, args, train_dataset=PROMPTS, processing_class=tiny_tokenizer(),
            rollout_func=Engine(noise=0.1), replay=ReplayBuffer(tmp_path / f"{how}_rows", max_rows=1000),
            replay_groups=3,
        )  # fmt: skip
        watch = WatchTRL(trainer.model)
        trainer.add_callback(watch)
        trainer.train()
        seen[how] = watch.gradients, by_row(trainer)
    assert all(distance(*pair) < 1e-4 for pair in zip(seen["ours"][0], seen["plain"][0], strict=True))
    assert seen["ours"][1].keys() == seen["plain"][1].keys() and len(seen["ours"][1]) > 3 * ROWS * PARTS
