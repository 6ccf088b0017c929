"""Logit fusion: what is sampled from, and its log-probs, against both models' whole forwards in float64."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import EOS, PAD, save_tiny_model, tiny_model, tiny_tokenizer
from torch import Tensor

from trl_offpolicy.engines.engine import Rollouts, Sampling
from trl_offpolicy.engines.hf import TransformersEngine
from trl_offpolicy.engines.logit_fusion import LogitFusion, TeacherMix, load_teacher, parse_fusion
from trl_offpolicy.rollouts.sampler_stats import sampler_stats

PROMPTS = [[5, 6, 7, 8], [9], [10, 11]]
TEACHER = tiny_model(seed=1)


def mix(shares: Sequence[float], *, alpha: float = 1.0, teacher: Any = TEACHER) -> TeacherMix:
    """A teacher whose share differs from prompt to prompt."""
    made = TeacherMix(LogitFusion(teacher="a/teacher", alpha=alpha, difficulty="hard"), teacher)
    made.plan([{"hard": share} for share in shares], share=alpha)
    return made


def engine(model: Any, made: TeacherMix | None) -> TransformersEngine:
    return TransformersEngine(lambda: model, pad_token_id=PAD, eos_token_ids=[EOS], mix=made)


def mixture(model: Any, share: float, prompt: list[int], completion: list[int], temperature: float) -> Tensor:
    """Log-probs (T, V) of softmax((share l_T + (1 - share) l_S) / temperature): float64, no cache, no padding."""
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        student, teacher = (
            copy.deepcopy(one).double()(input_ids=ids).logits[0, len(prompt) - 1 : -1] for one in (model, TEACHER)
        )
    return ((share * teacher + (1 - share) * student) / temperature).log_softmax(-1)


def check(out: Rollouts, model: Any, shares: Sequence[float], temperature: float = 1.0) -> int:
    """Compare every reported log-prob; how many there are."""
    assert out.sampling_per_token_logps is not None
    for prompt, completion, logps, share in zip(
        out.prompt_ids, out.completion_ids, out.sampling_per_token_logps, shares, strict=True
    ):
        expected = mixture(model, share, prompt, completion, temperature)
        own = expected.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(logps, dtype=torch.float64), own, rtol=0, atol=1e-3)
    return sum(map(len, out.sampling_per_token_logps))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_mixture(temperature: float) -> None:
    """Prompts of three lengths, three shares, several completions of each; some end early."""
    model, shares = tiny_model(), [0.3, 0.0, 1.0]
    torch.manual_seed(0)
    out = engine(model, mix(shares)).generate(PROMPTS, Sampling(max_tokens=20, temperature=temperature), n=8)
    assert check(out, model, [share for share in shares for _ in range(8)], temperature) > 200
    assert {"stop", "length"} == set(out.finish_reasons)  # the last token of a row has a log-prob either way


def test_tokens_are_drawn_from_the_mixture() -> None:
    """The first token of many completions, against the probabilities of the mixture and of the student."""
    model, share, count = tiny_model(), 0.5, 4000
    torch.manual_seed(0)
    out = engine(model, mix([share])).generate([PROMPTS[0]], Sampling(max_tokens=1), n=count)
    drawn = Counter(ids[0] for ids in out.completion_ids)
    counts = torch.tensor([drawn[token] for token in range(model.config.vocab_size)], dtype=torch.float64)

    def distance(share: float) -> float:
        return float((counts / count - mixture(model, share, PROMPTS[0], [PAD], 1.0)[0].exp()).abs().sum() / 2)

    assert distance(share) < 0.1 < 0.3 < min(distance(0.0), distance(1.0))


def test_a_truncated_mixture() -> None:
    """Top-k cuts the mixture, not the student; what was kept is reported with it, and log-probs are over that."""
    model = tiny_model()
    torch.manual_seed(0)
    out = engine(model, mix([0.5])).generate([PROMPTS[0]], Sampling(max_tokens=6, top_k=4), n=4)
    assert out.sampling_mask is not None and out.sampling_per_token_logps is not None
    for completion, kept, logps in zip(
        out.completion_ids, out.sampling_mask, out.sampling_per_token_logps, strict=True
    ):
        whole = mixture(model, 0.5, PROMPTS[0], completion, 1.0)
        for place, listed in enumerate(kept.tolist()):
            assert sorted(listed) == sorted(whole[place].topk(4).indices.tolist())
            among = whole[place][listed].log_softmax(-1)[listed.index(completion[place])]
            assert logps[place] == pytest.approx(float(among), abs=1e-3)


def test_without_a_share_the_student_samples_alone() -> None:
    """Same draws as without a teacher, which is not asked; the log-probs are the student's."""

    def absent(*_: object, **__: object) -> None:
        raise AssertionError("the teacher was asked")

    model, teacher = tiny_model(), copy.deepcopy(TEACHER)
    teacher.forward = absent
    sampling, drawn = Sampling(max_tokens=10), []
    for made in (None, mix([0.0, 0.0, 0.0], teacher=teacher)):
        torch.manual_seed(3)
        drawn.append(engine(model, made).generate(PROMPTS, sampling, n=2))
    plain, alone = drawn
    assert plain.completion_ids == alone.completion_ids and plain.sampling_per_token_logps is None
    check(alone, model, [0.0] * 6)


def test_an_adapter_and_a_teacher_with_another_width() -> None:
    """LoRA's wrapper calls the base model; a teacher that lacks the last ids cannot sample them."""
    model = get_peft_model(tiny_model(), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    torch.manual_seed(0)
    check(engine(model, mix([0.4])).generate([PROMPTS[0]], Sampling(max_tokens=8), n=3), model, [0.4] * 3)
    narrow = mix([0.5], teacher=tiny_model(seed=1, vocab_size=64))
    out = engine(tiny_model(), narrow).generate([PROMPTS[0]], Sampling(max_tokens=8), n=16)
    assert max(map(max, out.completion_ids)) < 64
    wide = mix([0.5], teacher=tiny_model(seed=1, vocab_size=160))
    out = engine(tiny_model(), wide).generate([PROMPTS[0]], Sampling(max_tokens=8), n=16)
    assert 64 < max(map(max, out.completion_ids)) < 128


def test_rows_that_are_asked_again_keep_their_share() -> None:
    """A reply that could not be used is asked for again alone."""
    model, made = tiny_model(), mix([0.9, 0.0, 0.3])
    used = engine(model, made)
    used.generate(PROMPTS, Sampling(max_tokens=4), n=2)
    check(used.generate([PROMPTS[2]], Sampling(max_tokens=4), n=1), model, [0.3])
    found = sampler_stats(None, torch.device("cpu"), mix=made).compute()["offpolicy/rollout/teacher_share"]
    assert found == pytest.approx((2 * 0.9 + 3 * 0.3) / 7)


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_beams_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match="one completion for each row"):
        engine(tiny_model(), mix([share])).generate([PROMPTS[0]], Sampling(max_tokens=4, extra={"num_beams": 2}))


def test_equal_prompts_may_differ_in_difficulty() -> None:
    made = mix([1.0, 0.0, 0.5])
    engine(tiny_model(), made).generate([[5, 6], [5, 6], [7]], Sampling(max_tokens=1), n=2)
    assert made.used == [1.0, 1.0, 0.0, 0.0, 0.5, 0.5]


def test_rows_of_an_evaluation_need_no_difficulty() -> None:
    made = mix([1.0])
    made.plan([{"prompt": "w1"}], share=0.0)
    check(engine(tiny_model(), made).generate([[5, 6]], Sampling(max_tokens=4)), tiny_model(), [0.0])


def test_a_penalty_of_the_models_own_is_not_applied() -> None:
    """Some models' generation_config sets one; it would be in the log-probs of no mixture."""
    model = tiny_model()
    model.generation_config.repetition_penalty = 1.5
    torch.manual_seed(0)
    check(engine(model, mix([0.3])).generate([PROMPTS[0]], Sampling(max_tokens=12), n=4), model, [0.3] * 4)


def test_the_share_falls_to_zero() -> None:
    fusion = LogitFusion(teacher="t", alpha=0.8, steps=10)
    assert [round(fusion.share(step, 5), 3) for step in (0, 5, 10, 15)] == [0.8, 0.4, 0.0, 0.0]
    assert LogitFusion(teacher="t", alpha=0.8).share(1, 4) == pytest.approx(0.6)
    with pytest.raises(ValueError, match=r"engine\.logit_fusion\.steps must be given"):
        LogitFusion(teacher="t").share(0, -1)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (3, "must name a teacher or be a mapping"),
        ({}, r"teacher must be given"),
        ({"teacher": ""}, r"teacher must be a folder"),
        ({"teacher": "t", "alpha": 0.0}, r"alpha must be in \(0, 1\]"),
        ({"teacher": "t", "alpha": 1.5}, r"alpha must be in \(0, 1\]"),
        ({"teacher": "t", "steps": 0}, r"steps must be"),
        ({"teacher": "t", "dtype": "nn"}, r"dtype must be a precision"),
        ({"teacher": "t", "alpha": "2e0"}, r"alpha must be in \(0, 1\], but got 2"),
        ({"teacher": "t", "alhpa": 0.1}, r"Did you mean 'alpha'"),
    ],
)
def test_wrong_options_are_named(option: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_fusion(option)


@pytest.mark.parametrize("value", [-0.1, 1.1, "hard", None, True])
def test_a_difficulty_is_a_number_of_the_dataset(value: Any) -> None:
    with pytest.raises(ValueError, match=r"hard .* must be a number in \[0, 1\]"):
        mix([value])
    with pytest.raises(ValueError, match=r"must be a column of the dataset, but got 'hard'\. Did you mean"):
        TeacherMix(LogitFusion(teacher="t", difficulty="hard"), TEACHER).plan([{"hardness": 1.0}], share=0.5)


def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    found = load_teacher(parse_fusion(str(tmp_path)) or pytest.fail(), tiny_model().bfloat16(), tiny_tokenizer())
    assert found.dtype == torch.bfloat16 and not found.training
    assert not any(parameter.requires_grad for parameter in found.parameters())
    other = tiny_tokenizer()
    other.get_vocab = lambda: {token: 127 - place for token, place in tiny_tokenizer().get_vocab().items()}
    with pytest.raises(ValueError, match="must have the tokenizer of the model"):
        load_teacher(LogitFusion(teacher=str(tmp_path)), tiny_model(), other)
    ends = tiny_tokenizer()
    ends.add_special_tokens({"eos_token": "<end>"})
    with pytest.raises(ValueError, match="must know the special tokens of the model, but it lacks '<end>'"):
        load_teacher(LogitFusion(teacher=str(tmp_path)), tiny_model(), ends)
    more = tiny_tokenizer()
    more.add_tokens([f"other{i}" for i in range(64)])
    with pytest.raises(ValueError, match="must have the tokenizer of the model"):
        load_teacher(LogitFusion(teacher=str(tmp_path)), tiny_model(), more)
