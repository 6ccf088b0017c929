"""The trainer's scoring under the engine's top-p, top-k and min-p: TRL's numbers without, the formula with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import two_ranks
from peft import LoraConfig
from tiny_models import FIRST_WORD, PAD, VOCABULARY, tiny_model
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from trainer_runs import Engine, records
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import GRPOTrainer
from trl.trainer import utils

from trl_offpolicy.functional.truncated_head import truncated_log_probs
from trl_offpolicy.functional.truncated_sampling import KeptIds, Truncation, truncated_support
from trl_offpolicy.trl import scoring as scoring_module
from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.rebinding import rebound
from trl_offpolicy.trl.scoring import FilteredScoring, filtered_scoring, scores_reference, sum_sq_probs

PROMPT, LENGTH, TEMPERATURE = 3, 6, 0.8
NOTHING_CUT = Truncation(top_k=100_000)  # takes this kit's head, cuts nothing
CUT = Truncation(top_p=0.8, top_k=20, min_p=0.02)


class Scorer:
    """TRL's own scoring method with just what it reads of its trainer."""

    def __init__(self) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return GRPOTrainer._get_per_token_logps_and_entropies(self, *args, **kwargs)


def text(rows: int = 5) -> tuple[Tensor, Tensor]:
    """Ragged prompts (left padding) and completions (right padding; one is empty)."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(FIRST_WORD, len(VOCABULARY), (rows, PROMPT + LENGTH), generator=random)
    columns = torch.arange(PROMPT + LENGTH)
    begins, ends = torch.tensor([0, 1, 2, 0, 1])[:rows, None], PROMPT + torch.tensor([6, 3, 0, 5, 1])[:rows, None]
    mask = ((columns >= begins) & (columns < ends)).long()
    return ids.where(mask.bool(), PAD), mask


def tied_model() -> Any:
    """Qwen2: tied head, biased attention."""
    torch.manual_seed(0)
    shape = {"vocab_size": len(VOCABULARY), "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "initializer_range": 0.25}
    return Qwen2ForCausalLM(Qwen2Config(**shape, **heads, tie_word_embeddings=True, max_position_embeddings=64))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny_model,
    "qwen2, tied": tied_model,
    "qwen3_moe": lambda: tiny_model("qwen3_moe"),
}


SMALL = {
    "vocab_size": len(VOCABULARY), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3,
}  # fmt: skip
CHANGED: dict[str, Callable[[], Any]] = {
    "softcapped": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=2.0)),
    "scaled": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
    "divided": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
}


def patched(make: Callable[[], Any] = tiny_model, *, outputs: tuple[str, ...] = ("log_probs", "entropy")) -> Any:
    model = make()
    utils.add_fused_lm_head(model, temperature=TEMPERATURE, outputs=outputs)
    return model


def gradient(loss: Tensor, model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def assert_same(one: Any, two: Any, model: Any, mask: Tensor) -> None:
    """Log-probs, entropies, auxiliary loss and the gradient of all three."""
    for value, other in zip(one, two, strict=True):
        assert (value is None) == (other is None)
        if value is not None:
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5)
    up = torch.randn(2, *mask.shape, generator=torch.Generator().manual_seed(1))
    mine, theirs = (
        gradient((up[0] * out[0]).sum() + (up[1] * out[1]).sum() + (0 if out[2] is None else out[2]), model)
        for out in (one, two)
    )
    assert mine.keys() == theirs.keys() and mine
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()) + 1e-7)


TRLS = utils._ChunkedLogProbFunction
UNCUT = {"nothing cut": FilteredScoring(NOTHING_CUT), "tiled": FilteredScoring(Truncation(), tiled=True)}


@pytest.mark.parametrize("kind", UNCUT)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_without_a_cut_it_is_trls_scoring(kind: str, name: str, batch_size: int | None) -> None:
    model, (ids, mask) = patched(MODELS[name]), text()
    wanted = {"compute_entropy": True, "compute_aux_loss": name == "qwen3_moe"}
    theirs = Scorer()(model, ids, mask, LENGTH, batch_size, **wanted)
    with tokens_projected() as seen:
        ours = UNCUT[kind](Scorer(), None, model, ids, mask, LENGTH, batch_size, **wanted)
    assert sum(seen) == mask[:, PROMPT:].sum()  # neither prompts nor padding
    assert_same(ours, theirs, model, mask[:, PROMPT:])


@contextmanager
def tokens_projected() -> Iterator[list[int]]:
    """How many tokens each call of this kit's head gets."""
    seen: list[int] = []

    def counted(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(hidden))
        return truncated_log_probs(hidden, *args, **kwargs)

    with rebound(scoring_module, truncated_log_probs=counted):
        yield seen


@pytest.mark.parametrize("name", ["softcapped", "scaled", "divided"])
def test_models_that_change_their_logits(name: str) -> None:
    """As TRL, and as the logits of the model's own forward."""
    model, (ids, mask) = patched(CHANGED[name]), text()
    theirs = Scorer()(model, ids, mask, LENGTH, compute_entropy=True)
    ours = UNCUT["tiled"](Scorer(), None, model, ids, mask, LENGTH, compute_entropy=True)
    assert_same(ours, theirs, model, mask[:, PROMPT:])
    logps, entropies, _ = by_full_logits(model, ids, mask, Truncation())
    ours = UNCUT["tiled"](Scorer(), None, model, ids, mask, LENGTH, compute_entropy=True)
    assert_same(ours, (logps, entropies, None), model, mask[:, PROMPT:])


def test_the_reference_is_tiled_as_well_but_not_prompt_learning() -> None:
    from peft import PromptTuningConfig, get_peft_model

    model, (ids, mask) = patched(), text()
    theirs = Scorer()(model, ids, mask, LENGTH)[0]
    with tokens_projected() as seen:
        ours = UNCUT["tiled"](Scorer(), model, model, ids, mask, LENGTH)[0]
    assert len(seen) == 1 and not UNCUT["tiled"].stats(mask[:, PROMPT:].bool())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    adapted = get_peft_model(patched(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    heads: list[Any] = []
    for which in (adapted, model):
        UNCUT["tiled"](lambda *_, **__: heads.append(utils._ChunkedLogProbFunction), None, which, ids, mask, LENGTH)
    assert [head is TRLS for head in heads] == [True, False]


def test_tiled_head_is_an_option(make_args: Callable[..., OffPolicyGRPOConfig]) -> None:
    """On "auto" this kit's head scores where TRL has no Triton kernels, except where bits are compared."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    exact = {"use_vllm": True, "engine": {"exact": True}}
    for options, on_cpu in [({}, True), (exact, False)]:
        assert filtered_scoring(make_args(tiled_head="auto", **options))._takes(cpu) is on_cpu
    assert not filtered_scoring(make_args())._takes(cpu)
    assert filtered_scoring(make_args(tiled_head="true"))._takes(gpu)
    with rebound(utils, _use_triton=lambda device: device.type == "cuda"):
        assert not filtered_scoring(make_args(tiled_head="auto"))._takes(gpu)
        assert filtered_scoring(make_args(tiled_head="auto", top_p=0.9))._takes(cpu)
    with pytest.raises(ValueError, match=r"^tiled_head must be true, false or one of \['auto'\], but got 'yes'"):
        make_args(tiled_head="yes")


def test_squared_probabilities_are_trls() -> None:
    model, (ids, mask) = patched(), text()
    found = []
    for score in (Scorer(), partial(UNCUT["tiled"], Scorer(), None)):
        with sum_sq_probs(model, wanted=True, temperature=TEMPERATURE, cast_lm_head_to_fp32=False) as sums:
            score(model, ids, mask, LENGTH, 2)
        found.append(sums.completions(LENGTH))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert ((found[0] > 0) & (found[0] < 1)).any()


def test_lora_and_gradient_checkpointing_change_nothing() -> None:
    from peft import get_peft_model

    base, (ids, mask) = patched(), text()
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"]))
    torch.manual_seed(1)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    theirs = Scorer()(model, ids, mask, LENGTH, compute_entropy=True)
    ours = FilteredScoring(NOTHING_CUT)(Scorer(), None, model, ids, mask, LENGTH, compute_entropy=True)
    assert_same(ours, theirs, model, mask[:, PROMPT:])


def by_full_logits(model: Any, ids: Tensor, mask: Tensor, cut: Truncation) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies, and whether the target had to be added; zeros on padding."""
    logits = type(model).forward(model, input_ids=ids, attention_mask=mask).logits[:, PROMPT - 1 : -1] / TEMPERATURE
    targets, valid = ids[:, PROMPT:, None], mask[:, PROMPT:].bool()
    kept = truncated_support(logits.flatten(0, 1), cut).weights(logits.flatten(0, 1)).view(logits.shape) > 0
    outside = ~kept.gather(-1, targets)[..., 0] & valid
    kept = kept.scatter(-1, targets, True)
    logps = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    entropy = -(logps.exp() * logps.masked_fill(~kept, 0.0)).sum(-1)
    return logps.gather(-1, targets)[..., 0].where(valid, 0.0), entropy.where(valid, 0.0), outside


@pytest.mark.parametrize("name", ["llama", "qwen2, tied"])
def test_with_a_cut_it_is_the_formula(name: str) -> None:
    model, (ids, mask) = patched(MODELS[name]), text()
    scoring = FilteredScoring(CUT)
    logps, entropies, aux = scoring(Scorer(), None, model, ids, mask, LENGTH, compute_entropy=True)
    expected, entropy, outside = by_full_logits(model, ids, mask, CUT)
    assert_same((logps, entropies, aux), (expected, entropy, None), model, mask[:, PROMPT:])
    valid = mask[:, PROMPT:].bool()
    share = float(scoring.stats(valid)["rollout/outside_fraction"])
    assert 0 < share == pytest.approx(float(outside.sum() / valid.sum()))
    assert float(scoring.stats(valid & ~outside)["rollout/outside_fraction"]) == 0
    raw = Scorer()(model, ids, mask, LENGTH)[0]
    assert (logps >= raw - 1e-6).all() and (logps - raw)[valid].mean() > 0.05


def kept_rows(ids: Tensor, mask: Tensor, *, seed: int = 4) -> list[KeptIds]:
    """Of each row the sampled token and up to five others, as many positions as the row has tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for tokens, here in zip(ids[:, PROMPT:], mask[:, PROMPT:].bool(), strict=True):
        others = [torch.randperm(128, generator=generator)[: place % 6].tolist() for place in range(int(here.sum()))]
        rows.append(KeptIds.of([sorted({token, *more}) for token, more in zip(tokens.tolist(), others, strict=False)]))
    return rows


def by_kept_ids(model: Any, ids: Tensor, mask: Tensor, kept: list[KeptIds]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by the log-softmax over the listed ids alone, token by token; zeros on padding."""
    logits = type(model).forward(model, input_ids=ids, attention_mask=mask).logits[:, PROMPT - 1 : -1] / TEMPERATURE
    logps, entropies = [], []
    for row, of_row in enumerate(kept):
        columns = []
        for place, listed in enumerate(of_row.tolist()):
            among = logits[row, place][listed].log_softmax(-1)
            columns.append((among[listed.index(int(ids[row, PROMPT + place]))], -(among.exp() * among).sum()))
        missing = logits.shape[1] - len(columns)
        zeros = [torch.zeros(())] * missing
        logps.append(torch.stack([value for value, _ in columns] + zeros))
        entropies.append(torch.stack([value for _, value in columns] + zeros))
    return torch.stack(logps), torch.stack(entropies)


@pytest.mark.parametrize("name", ["llama", "qwen2, tied"])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_kept_ids_of_the_engine_take_the_place_of_the_filter(name: str, batch_size: int | None) -> None:
    model, (ids, mask) = patched(MODELS[name]), text()
    kept = kept_rows(ids, mask)
    replay = FilteredScoring(CUT)
    replayed = replay(Scorer(), None, model, ids, mask, LENGTH, batch_size, compute_entropy=True, kept_ids=kept)
    assert_same(replayed, (*by_kept_ids(model, ids, mask, kept), None), model, mask[:, PROMPT:])
    assert float(replay.stats(mask[:, PROMPT:].bool())["rollout/outside_fraction"]) == 0
    others = replay(Scorer(), None, model, ids, mask, LENGTH, batch_size, kept_ids=kept_rows(ids, mask, seed=5))[0]
    assert float((others - replayed[0]).abs().mean()) > 0.1


def test_a_row_without_kept_ids_is_cut_by_the_rule() -> None:
    model, (ids, mask) = patched(), text()
    kept = kept_rows(ids, mask)
    kept[2] = KeptIds.of([[]] * len(kept[2]))
    found = FilteredScoring(CUT)(Scorer(), None, model, ids, mask, LENGTH, kept_ids=kept)[0]
    ruled = FilteredScoring(CUT)(Scorer(), None, model, ids, mask, LENGTH)[0]
    torch.testing.assert_close(found[2], ruled[2])
    assert not torch.allclose(found[1], ruled[1], atol=0.01)


def test_sum_of_squared_probabilities_is_of_the_kept_tokens() -> None:
    model, (ids, mask) = patched(outputs=("log_probs", "entropy", "log_sum_sq_probs")), text()
    seen: list[Tensor] = []
    forward = model.forward
    model.forward = lambda **kwargs: [seen.append((out := forward(**kwargs)).log_sum_sq_probs), out][1]  # type: ignore
    FilteredScoring(Truncation(top_k=1))(Scorer(), None, model, ids, mask, LENGTH)
    assert seen[0].shape == (5, PROMPT + LENGTH - 1)
    most_likely = by_full_logits(model, ids, mask, Truncation(top_k=1))[2]
    valid = mask[:, PROMPT:].bool()
    exact = seen[0][:, -LENGTH:].exp()[valid & ~most_likely]
    torch.testing.assert_close(exact, torch.ones_like(exact))  # one token is left: its probability is one


# ----------------------------------------------------------------------------------------------------------- reference


def test_the_reference_model_is_scored_whole(build: Callable[..., Any]) -> None:
    trainer = build(beta=0.1)
    ids, mask = text()
    whole = trainer._get_per_token_logps_and_entropies(trainer.ref_model, ids, mask, LENGTH)[0]
    trainer._filtered = FilteredScoring(CUT)
    again = trainer._get_per_token_logps_and_entropies(trainer.ref_model, ids, mask, LENGTH)[0]
    cut = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, LENGTH)[0]
    assert torch.equal(whole, again)
    assert (cut - whole)[mask[:, PROMPT:].bool()].mean() > 0.05  # the same weights


def test_an_adapter_that_is_off_stands_for_the_reference() -> None:
    from peft import get_peft_model

    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    assert not scores_reference(model, None)
    with utils.use_adapter(model, None):
        assert scores_reference(model, None)
    assert not scores_reference(model, None)
    model.add_adapter("ref", LoraConfig(r=2, target_modules=["q_proj"]))
    with utils.use_adapter(model, "ref"):
        assert scores_reference(torch.nn.DataParallel(model), None)
    assert not scores_reference(model, object())


def test_kl_to_a_whole_reference_has_the_gradient_of_the_kl_on_the_kept_set() -> None:
    """Expectations as sums over the vocabulary: k1 and k2 exactly, k3 up to the factor ref(S)."""
    torch.manual_seed(0)
    logits = torch.randn(1, 12, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(12, dtype=torch.float64).log_softmax(0)
    kept = (truncated_support(logits, Truncation(top_p=0.7)).weights(logits) > 0)[0]
    assert 2 < kept.sum() < 10
    logp = logits[0].masked_fill(~kept, -torch.inf).log_softmax(0)[kept]
    p, mass = logp.exp(), ref[kept].exp().sum()
    on_kept = ref[kept] - mass.log()

    def slope(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    kl = (p * (logp - on_kept)).sum()
    k1 = (p * (logp - ref[kept])).sum()
    torch.testing.assert_close(k1, kl - mass.log())
    torch.testing.assert_close(slope(k1), slope(kl))
    k2 = (p.detach() * (logp - ref[kept]) ** 2 / 2).sum()  # as a loss on sampled tokens
    torch.testing.assert_close(slope(k2), slope(kl))
    log_ratio = ref[kept] - logp
    k3 = (p.detach() * (log_ratio.exp() - log_ratio - 1)).sum()
    forward_kl = (on_kept.exp() * (on_kept - logp)).sum()
    torch.testing.assert_close(slope(k3), mass * slope(forward_kl))


# ------------------------------------------------------------------------------------------------------------- trainer


class TruncatingEngine(Engine):
    """Samples words from the trainer's own truncated distribution and reports its log-probs, as vLLM does."""

    def __init__(self, cut: Truncation) -> None:
        super().__init__()
        self.cut = cut

    @torch.no_grad()
    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        pairs = [self._sample(trainer.model, prompt) for prompt in prompt_ids]
        return {"prompt_ids": prompt_ids, "completion_ids": [p[0] for p in pairs], "logprobs": [p[1] for p in pairs]}

    def _sample(self, model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
        words, logprobs = [], []
        for _ in range(LENGTH):
            logits = model(input_ids=torch.tensor([prompt + words])).logits[:, -1]
            kept = truncated_support(logits, self.cut).weights(logits) > 0
            logps = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)[0]
            word = int(torch.multinomial(logps.exp(), 1, generator=self.random))
            words.append(word)
            logprobs.append(float(logps[word]))
        return words, logprobs


def mean_ratio(row: dict[str, Any]) -> float:
    """E rho from two diagnostics: k3 - k1 = E[rho - 1]."""
    return 1.0 + row["offpolicy/mismatch/kl_k3"] - row["offpolicy/mismatch/kl_k1"]


@pytest.mark.integration
@pytest.mark.parametrize("steps_per_generation", [2, 4], ids=["aligned", "old_log_probs"])
def test_ratios_are_one_with_the_filter_and_not_without(build: Callable[..., Any], steps_per_generation: int) -> None:
    cut = Truncation(top_p=0.8)
    for filtered in (True, False):
        options = {"offpolicy": "paper/tis", "steps_per_generation": steps_per_generation, "max_steps": 2}
        trainer = build(TruncatingEngine(cut), beta=0.01, **options)
        trainer._filtered = FilteredScoring(cut if filtered else Truncation())
        trainer.train()
        rows = records(trainer)
        assert len(rows) == 2
        for row in rows:
            assert math.isfinite(row["kl"])
            if filtered:
                assert row["offpolicy/mismatch/logp_diff_max"] < 1e-4
                assert mean_ratio(row) == pytest.approx(1.0, abs=1e-5)
                assert row["offpolicy/rollout/outside_fraction"] == 0 or row["step"] > 1
            else:
                assert 0.75 < mean_ratio(row) < 0.95
                assert "offpolicy/rollout/outside_fraction" not in row


# -------------------------------------------------------------------------------------------------------------- options


def test_the_trainer_cuts_where_the_engine_cuts(make_args: Callable[..., OffPolicyGRPOConfig]) -> None:
    args = make_args(use_vllm=True, top_p=0.9, generation_kwargs={"min_p": 0.05})
    assert filtered_scoring(args).truncation == Truncation(top_p=0.9, min_p=0.05)
    assert not filtered_scoring(make_args(use_vllm=True)).truncation
    assert not filtered_scoring(make_args(top_p=0.9), sampled_elsewhere=True).truncation  # a rollout_func may do else
    assert filtered_scoring(make_args(top_p=0.9)).truncation == Truncation(top_p=0.9)  # transformers' generate


@pytest.mark.integration
def test_what_generate_sampled_under_a_cut_is_scored_under_it(build: Callable[..., Any]) -> None:
    """Every sampled token is one that the trainer keeps, and the entropy is that of the kept ones, as in Lightning."""
    logged = []
    for top_k in (3, 0):
        trainer = build(None, offpolicy="measure", top_k=top_k, temperature=1.0)
        trainer.train()
        logged.append(records(trainer))
    for row, other in zip(*logged, strict=True):
        assert row["offpolicy/rollout/outside_fraction"] == 0.0
        assert row["entropy"] < math.log(3) + 1e-5 < other["entropy"] - 1.0


def test_raw_log_probs_of_the_engine_are_refused(make_args: Callable[..., OffPolicyGRPOConfig]) -> None:
    with pytest.raises(ValueError, match=r"^engine\.logprobs_mode must be 'processed_logprobs' .*'raw_logprobs'\.$"):
        filtered_scoring(make_args(use_vllm=True, engine={"logprobs_mode": "raw_logprobs"}))


def test_prompt_learning_is_refused() -> None:
    from peft import PromptTuningConfig, get_peft_model

    ids, mask = text()
    model = get_peft_model(patched(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(NotImplementedError, match=r"prompt-learning"):
        FilteredScoring(CUT)(Scorer(), None, model, ids, mask, LENGTH)


def test_a_forward_that_goes_past_the_head_is_noticed() -> None:
    ids, mask = text()
    result = (torch.zeros(5, LENGTH), None, None)
    with pytest.raises(RuntimeError, match=r"must be called 1 times .* but was called 0 times"):
        FilteredScoring(CUT)(lambda *_, **__: result, None, patched(), ids, mask, LENGTH)


def test_trls_head_is_back_after_scoring_and_after_an_error() -> None:
    original, (ids, mask) = utils._ChunkedLogProbFunction, text()
    FilteredScoring(CUT)(Scorer(), None, patched(), ids, mask, LENGTH)
    assert utils._ChunkedLogProbFunction is original
    with pytest.raises(NotImplementedError, match="is_top1"):
        FilteredScoring(CUT)(Scorer(), None, patched(outputs=("log_probs", "is_top1")), ids, mask, LENGTH)
    assert utils._ChunkedLogProbFunction is original


# ----------------------------------------------------------------------------------------------------------- two ranks


def run(rank: int) -> dict[str, Tensor]:
    """Gradient under DDP, each rank with two of four rows."""
    ids, mask = text(4)
    half = slice(2 * rank, 2 * rank + 2)
    model = DistributedDataParallel(patched())
    logps = FilteredScoring(CUT)(Scorer(), None, model, ids[half], mask[half], LENGTH)[0]
    return gradient(logps.sum(), model.module)


@pytest.mark.integration
def test_ddp_averages_the_gradient_of_the_filtered_log_probs(tmp_path: Any) -> None:
    first, second = two_ranks.launch(__file__, run, tmp_path)
    ids, mask = text(4)
    model = patched()
    whole = gradient(FilteredScoring(CUT)(Scorer(), None, model, ids, mask, LENGTH)[0].sum() / 2, model)
    for name, value in whole.items():
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(second[name], value, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    two_ranks.join(run)
