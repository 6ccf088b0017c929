"""Learned positions count from the first token of a padded prompt, as engines count; TRL alone counts the padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import VOCABULARY, score_last_word, tiny_model, tiny_prompts
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM
from trl import GRPOTrainer

from trl_offpolicy.trl.positions import counted_positions, learns_positions
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

SIZE = len(VOCABULARY)
PADDING, LENGTH = 3, 4


def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=SIZE, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.4, bos_token_id=1,
        eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def opt() -> Any:
    config = OPTConfig(vocab_size=SIZE, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2)
    return OPTForCausalLM(config)


@pytest.mark.parametrize(("make", "learned"), [(gpt2, True), (opt, True), (tiny_model, False)])
def test_a_table_of_positions_is_found(make: Callable[[], Any], learned: bool) -> None:
    model = make()
    assert learns_positions(model) is learned
    if not learned:
        assert learns_positions(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))) is False


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row alone, then the same row behind padding with its mask."""
    alone = torch.arange(5, 5 + LENGTH + 3)[None]
    padded = torch.cat([torch.zeros(1, PADDING, dtype=torch.long), alone], dim=1)
    return alone, padded, (torch.arange(padded.shape[1]) >= PADDING).long()[None]


@pytest.fixture
def build(make_args: Any, tokenizer: Any) -> Callable[..., Any]:
    def trainer(model: Any, cls: Any = OffPolicyGRPOTrainer, **options: Any) -> Any:
        return cls(
            model, score_last_word, make_args(offpolicy="measure"), train_dataset=tiny_prompts(),
            processing_class=tokenizer, **options,
        )  # fmt: skip

    return trainer


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)])
def test_padding_does_not_move_the_text(build: Callable[..., Any], adapter: Any) -> None:
    trainer = build(gpt2(), peft_config=adapter)
    trainer.model.eval()
    alone, padded, mask = rows()
    with torch.no_grad():
        plain = trainer._get_per_token_logps_and_entropies(trainer.model, alone, torch.ones_like(alone), LENGTH)[0]
        moved = trainer._get_per_token_logps_and_entropies(trainer.model, padded, mask, LENGTH)[0]
        theirs = GRPOTrainer._get_per_token_logps_and_entropies(trainer, trainer.model, padded, mask, LENGTH)[0]
    torch.testing.assert_close(moved, plain, atol=1e-4, rtol=1e-4)
    assert (theirs - plain).abs().max() > 0.1  # if TRL passes position ids one day, this module can go


def test_positions_that_are_given_stay() -> None:
    seen: list[Any] = []
    model = torch.nn.Module()
    model.forward = lambda **kwargs: seen.append(kwargs.get("position_ids"))  # type: ignore[method-assign]
    mask = torch.tensor([[0, 0, 1, 1]])
    with counted_positions(model, wanted=True):
        model(attention_mask=mask)
        model(attention_mask=mask, position_ids=mask)
        model()
    with counted_positions(model, wanted=False):
        model(attention_mask=mask)
    model(attention_mask=mask)
    assert seen[0].tolist() == [[0, 0, 0, 1]]
    assert seen[1] is mask and seen[2:] == [None, None, None]
