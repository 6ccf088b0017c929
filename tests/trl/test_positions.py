"""Absolute positions count from the first token of a padded prompt, as engines count; TRL alone counts the padding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import VOCABULARY, score_last_word, tiny_model, tiny_prompts
from trainer_runs import tiny_options
from transformers import (
    BartConfig,
    BartForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    CTRLConfig,
    CTRLLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    XGLMConfig,
    XGLMForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

import trl_offpolicy as op
from trl_offpolicy.trl.positions import (
    GIVEN,
    THEIRS,
    Positions,
    counted_positions,
    has_position_vectors,
    positions_under_padding,
)
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


_OLD = {"vocab_size": SIZE, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
_NEW = {"vocab_size": SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_BART = {"vocab_size": SIZE, "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
_XGLM = {"vocab_size": SIZE, "d_model": 32, "ffn_dim": 32, "num_layers": 2, "attention_heads": 2}
MODELS: dict[str, tuple[Callable[[], Any], Positions]] = {
    "gpt2": (gpt2, "wanted"),
    "openai-gpt": (lambda: OpenAIGPTLMHeadModel(OpenAIGPTConfig(**_OLD)), "wanted"),
    "ctrl": (lambda: CTRLLMHeadModel(CTRLConfig(**_OLD, dff=32)), "wanted"),
    "xglm": (lambda: XGLMForCausalLM(XGLMConfig(**_XGLM, max_position_embeddings=64)), "wanted"),
    "opt": (lambda: OPTForCausalLM(OPTConfig(**_NEW, ffn_dim=32, word_embed_proj_dim=32)), "fine"),  # reads the mask
    "bart": (lambda: BartForCausalLM(BartConfig(**_BART, use_cache=False)), "wrong"),  # takes no position_ids
    "bloom": (lambda: BloomForCausalLM(BloomConfig(vocab_size=SIZE, hidden_size=32, n_layer=2, n_head=2)), "fine"),
    "gpt-neox": (lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_NEW, intermediate_size=32)), "fine"),
    "mamba": (lambda: MambaForCausalLM(MambaConfig(vocab_size=SIZE, hidden_size=32, num_hidden_layers=2)), "fine"),
    "llama": (tiny_model, "fine"),
    "qwen3_moe": (partial(tiny_model, "qwen3_moe"), "fine"),
}
"""Kinds of models, and what padding does to them. The log-probs below prove it."""


def drawn(name: str) -> Any:
    """A model whose vectors are large enough to be seen."""
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
    return model


@torch.no_grad()
def logps_of_text(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(1, LENGTH + 2, V) log-probs after the tokens of the text."""
    return model(input_ids=ids, attention_mask=mask).logits[:, -LENGTH - 2 :].log_softmax(-1)


@pytest.mark.parametrize("name", MODELS)
def test_what_padding_does_is_seen_and_is_what_it_does(name: str) -> None:
    model, found = drawn(name), MODELS[name][1]
    assert positions_under_padding(model) == found and not model.training
    assert positions_under_padding(drawn(name).to(torch.bfloat16)) == found
    alone, padded, mask = rows()
    expected = logps_of_text(model, alone, torch.ones_like(alone))
    off = (logps_of_text(model, padded, mask) - expected).abs().max()
    assert off < 1e-4 if found == "fine" else off > 0.1
    with counted_positions(model, wanted=found == "wanted"):
        mended = (logps_of_text(model, padded, mask) - expected).abs().max()
    assert mended > 0.1 if found == "wrong" else mended < 1e-4


def test_an_adapter_hides_nothing() -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    assert positions_under_padding(get_peft_model(drawn("xglm"), lora)) == "wanted"
    assert positions_under_padding(get_peft_model(drawn("llama"), lora)) == "fine"


@pytest.mark.parametrize(
    "name", ["gpt2", "openai-gpt", "ctrl", "xglm", "bart", "bloom", "gpt-neox", "mamba", "llama", "qwen3_moe"]
)
def test_names_decide_where_no_weights_are(name: str) -> None:
    """As under ZeRO-3, whose parameters have a mark and no values."""
    model = drawn(name)
    next(model.parameters()).ds_id = 0  # type: ignore[attr-defined]
    assert positions_under_padding(model) == MODELS[name][1]


def test_a_tensor_that_is_no_buffer_is_found_by_its_name() -> None:
    """CTRL's vectors were one in earlier versions of transformers."""
    model = drawn("ctrl")
    vectors = model.transformer.pos_encoding.data
    del model.transformer.pos_encoding
    assert not has_position_vectors(model)
    model.transformer.pos_encoding = vectors.clone()
    assert "pos_encoding" not in dict(model.transformer.named_buffers()) and has_position_vectors(model)


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


@pytest.mark.parametrize("name", ["openai-gpt", "ctrl", "xglm", "llama"])
def test_the_trainer_says_it_once_and_counts(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    trainer = build(drawn(name))
    said = [record.getMessage() for record in caplog.records if GIVEN in record.getMessage()]
    assert len(said) == (0 if name == "llama" else 1)
    trainer.model.eval()
    alone, padded, mask = rows()
    with torch.no_grad():
        plain = trainer._get_per_token_logps_and_entropies(trainer.model, alone, torch.ones_like(alone), LENGTH)[0]
        moved = trainer._get_per_token_logps_and_entropies(trainer.model, padded, mask, LENGTH)[0]
    torch.testing.assert_close(moved, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["xglm", "llama"])
def test_attach_warns_that_trl_is_off(
    make_args: Any, tokenizer: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    args = GRPOConfig(**tiny_options(tmp_path))
    stock = GRPOTrainer(drawn(name), score_last_word, args, tiny_prompts(), processing_class=tokenizer)
    op.attach(stock, write_report=False)
    assert (THEIRS in caplog.text) is (name != "llama")


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
