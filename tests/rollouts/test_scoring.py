"""Log-probs of the completions: against the plain log-softmax of the model's logits, with gradient, padded or not."""

from __future__ import annotations

import pytest
import torch
from tiny_models import PAD, tiny_model
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
)

from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.engines.hf import TransformersEngine
from trl_offpolicy.rollouts.scoring import Scorer, _head_options, sequence_logps

PROMPTS = [[5, 6, 7], [8]]
COMPLETIONS = [[9, 10], [11, 12, 13, 14]]


def rows(pad_prompt=0):
    width, length = 3 + pad_prompt, 4
    return {
        "prompt_ids": torch.tensor([[PAD] * (width - len(p)) + p for p in PROMPTS]),
        "prompt_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS]),
        "completion_ids": torch.tensor([c + [PAD] * (length - len(c)) for c in COMPLETIONS]),
        "completion_mask": torch.tensor([[1] * len(c) + [0] * (length - len(c)) for c in COMPLETIONS]),
    }


def one_by_one(model, temperature=1.0):
    """What the model says without any padding."""
    found = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
        logps = (logits / temperature).log_softmax(-1)
        found.append(logps.gather(-1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(found)


def of(scores, batch):
    return scores[batch["completion_mask"].bool()]


GPT2 = {"vocab_size": 128, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.0,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "initializer_range": 0.3}  # fmt: skip
GEMMA = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "final_logit_softcapping": 2.0,
         "initializer_range": 0.3}  # fmt: skip
LLAMA = {key: value for key, value in GEMMA.items() if key not in ("head_dim", "final_logit_softcapping")}
MODELS = {
    "llama": tiny_model,
    "tied_head": lambda: tiny_model(tie_word_embeddings=True),
    "scaled_logits": lambda: CohereForCausalLM(CohereConfig(**LLAMA, logit_scale=0.25)),
    "divided_logits": lambda: GraniteForCausalLM(GraniteConfig(**LLAMA, logits_scaling=4.0)),
    "absolute_positions": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "softcapped_logits": lambda: Gemma2ForCausalLM(Gemma2Config(**GEMMA)),
}


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("kind", MODELS)
def test_scores_are_those_without_padding(kind, padding):
    torch.manual_seed(0)
    model, batch = MODELS[kind]().eval(), rows(padding)
    scorer = Scorer(Sampling(max_tokens=4, temperature=0.7))
    expected = one_by_one(model, 0.7)
    for size in (None, 1):
        scores = scorer(model, batch, batch_size=size)
        assert torch.allclose(of(scores.logps, batch), expected, atol=2e-5)
    assert "forward" not in vars(model.get_output_embeddings())  # the head is the model's own again


@pytest.mark.parametrize("kind", MODELS)
def test_gradient_is_that_of_the_plain_computation(kind):
    torch.manual_seed(0)
    model, batch = MODELS[kind]().eval(), rows()
    of(Scorer(Sampling(max_tokens=4))(model, batch).logps, batch).sum().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    one_by_one(model).sum().backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name], parameter.grad, rtol=1e-4, atol=1e-5 * float(norm)), name
        assert parameter.grad.abs().max() > 0 or "norm" in name


class LlamaWithItsOwnScale(LlamaForCausalLM):
    """Halves its logits, of which its configuration says nothing."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 2
        return output


def test_a_change_of_the_logits_that_the_configuration_does_not_name_is_refused():
    model = LlamaWithItsOwnScale(tiny_model().config)
    with pytest.raises(NotImplementedError, match=r"^LlamaWithItsOwnScale must change its logits by nothing but"):
        Scorer(Sampling(max_tokens=4))(model, rows())


def test_truncated_sampling_is_mirrored():
    """Under top-k 1 the engine's log-prob of the most likely token is 0, and all others are outside."""
    model, batch = tiny_model().eval(), rows()
    scorer = Scorer(Sampling(max_tokens=4, top_k=1))
    scores, mask = scorer(model, batch), batch["completion_mask"].bool()
    assert torch.all(of(scores.logps, batch)[~of(scores.outside, batch)] == 0)
    share = float(scorer.support_stats(scores, mask)["rollout/outside_fraction"])
    assert share == of(scores.outside, batch).float().mean() > 0
    assert not Scorer(Sampling(max_tokens=4)).support_stats(scores, mask)


def test_an_adapted_head_is_refused():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(NotImplementedError, match="LM head must be a plain linear layer"):
        Scorer(Sampling(max_tokens=4))(model, rows())


def test_an_engine_that_is_the_trainer_gives_its_log_probs():
    """Both sides of a sync's proof, for sequences of several lengths and without a trace on the model's mode."""
    model, ids = tiny_model().train(), [[5, 6, 7], [8, 9], [5, 10, 11, 12, 13]]
    engine = TransformersEngine(lambda: model, pad_token_id=PAD, eos_token_ids=()).score(ids)
    trainer = sequence_logps(model, ids, pad=PAD)
    for row, one, other in zip(ids, engine, trainer, strict=True):
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
        assert len(one) == len(other) == len(row) - 1
        assert torch.allclose(torch.tensor(one), expected, atol=2e-5)
        assert torch.allclose(torch.tensor(other), expected, atol=2e-5)
    assert model.training


@pytest.mark.parametrize(
    ("field", "scale"),
    [
        ({}, 1.0),
        ({"logit_scale": 0.25}, 0.25),
        ({"logit_scale": None}, 1.0),
        ({"output_multiplier": 2}, 2.0),
        ({"lm_head_multiplier": 0.5}, 0.5),
        ({"logits_scaling": 4.0}, 0.25),
        ({"logits_scaling": 4.0, "model_type": "hyperclovax"}, 4.0),
    ],
)
def test_the_factor_on_the_logits_has_several_names(field, scale):
    config = tiny_model().config
    for name, value in field.items():
        setattr(config, name, value)
    assert _head_options(config) == {"softcap": None, "logit_scale": scale}
