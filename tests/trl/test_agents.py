"""Completions with tool output in between: masked everywhere, weighed by turn, by TRL's tool loop and rollout_func."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from agent_runs import TOOL_WORDS, Agent, lookup, tool_tokenizer
from datasets import Dataset
from scripted_agents import byte_tokenizer
from tiny_models import EOS, WORDS
from trainer_runs import TIMES, records, rollouts
from trl.chat_template_utils import parse_response

import trl_offpolicy as op
from trl_offpolicy.engines.engine import Call
from trl_offpolicy.functional.aggregation import AGGREGATIONS
from trl_offpolicy.rollouts.batches import policy_batch
from trl_offpolicy.trl.agents import read_reply
from trl_offpolicy.trl.checks import check_tools

pytestmark = pytest.mark.integration  # trains

NAN = float("nan")

# ------------------------------------------------------------------------------------- the objective, without a trainer

MASK = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 0, 1], [1, 1, 0, 1, 1, 1, 0, 0, 0]]).bool()
TURNS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 2], [0, 0, 0, 1, 1, 1, 1, 1, 1]])
FIELDS = ("per_token_logps", "old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps", "entropies")


def with_tools(fill):
    """Two responses of three and two turns; ``fill`` stands in every field at the tokens of the tool."""
    generator = torch.Generator().manual_seed(3)
    base = -torch.rand(2, 9, generator=generator) - 0.3
    values = {name: base + 0.2 * torch.randn(2, 9, generator=generator) for name in FIELDS}
    values["entropies"] = values["entropies"].abs()
    return {name: torch.where(MASK, value, torch.tensor(fill)) for name, value in values.items()}


def compacted(value):
    """The rows without their tool tokens, padded at the end."""
    rows = [row[keep] for row, keep in zip(value, MASK, strict=True)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def answer(objective, values, mask, turn_ids):
    logps = values["per_token_logps"].clone().requires_grad_()
    batch = op.PolicyBatch(
        **{**values, "per_token_logps": logps},
        completion_mask=mask,
        advantages=torch.tensor([1.0, -0.7]),
        turn_ids=turn_ids,
    )
    out = objective(batch)
    out.loss.backward()
    return out, logps.grad


BY_TURN = op.Correction(
    weight=op.TruncateWeight(level="turn", max_weight=1.3), keep=(op.RatioBand(level="turn_mean", low=0.8, high=1.25),)
)
OBJECTIVES = {
    "turn weights and band": op.Objective(correction=BY_TURN),
    "token weights": op.Objective(correction=op.Correction(weight=op.TruncateWeight(max_weight=1.1))),
    "prefix weights": op.Objective(correction=op.Correction(weight=op.PrefixWeight(low=0.5, high=1.5))),
    "geometric mask": op.presets.get("paper/geometric-mask", low=0.9, high=1.1).objective,
    "ST-PPO": op.Objective(policy_loss=op.losses.STPPO(low=0.05, high=0.05), correction=BY_TURN),
    "Turn-PPO": op.Objective(policy_loss=op.losses.STPPO(low=0.05, high=0.05, normalize=False)),
    "GSPO": op.Objective(policy_loss=op.losses.GSPO(low=0.01, high=0.01)),
    "KL and entropy": op.Objective(correction=BY_TURN, kl=op.KLPenalty(coef=0.1), kl_on="kept", entropy_coef=0.1),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("fill", [5.0, NAN])
def test_the_loss_is_that_of_the_same_turns_without_tool_tokens(name, fill):
    objective, values = OBJECTIVES[name], with_tools(fill)
    whole, gradient = answer(objective, values, MASK, None)
    short = {key: compacted(value) for key, value in values.items()}
    alone, alone_gradient = answer(objective, short, compacted(MASK), compacted(TURNS))

    assert whole.loss.item() == pytest.approx(alone.loss.item(), rel=1e-5)
    assert gradient[~MASK].abs().max() == 0 and gradient[MASK].abs().max() > 0
    torch.testing.assert_close(compacted(gradient), alone_gradient, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(compacted(whole.weights), alone.weights)
    assert compacted(whole.keep_mask).equal(alone.keep_mask)
    found, expected = whole.stats.compute(), alone.stats.compute()
    shared = [key for key in found if "/post_tool/" not in key]  # turns are not named here, so it is left out
    for key in shared:  # widths of intervals are differences of large moments (CONTRIBUTING.md, "Tolerances")
        assert found[key] == pytest.approx(expected[key], rel=2e-3 if key.endswith("_ci95") else 1e-5), key


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_no_denominator_counts_tool_tokens(aggregation):
    objective = op.Objective(correction=BY_TURN, aggregation=aggregation)
    values = with_tools(5.0)
    short = {key: compacted(value) for key, value in values.items()}
    whole = answer(objective, values, MASK, None)[0].loss
    alone = answer(objective, short, compacted(MASK), compacted(TURNS))[0].loss
    scale = 9 / short["entropies"].shape[1] if aggregation == "seq_mean_token_sum_norm" else 1.0  # divides by T, fixed
    assert whole.item() * scale == pytest.approx(alone.item(), rel=1e-5)


# ------------------------------------------------------------------------------------------------------- rollout_func


@pytest.fixture
def train(build):
    """``train(agent, **options)``: a finished run."""

    def run(agent, **options):
        trainer = build(agent, **{"max_completion_length": 20, "control": "off", **options})
        trainer.train()
        return trainer

    return run


def numbers(trainer):
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in records(trainer)]
    return pd.DataFrame(rows).to_dict("list")


def tables(trainer):
    """Rows of the recorded rollouts as arrays over tokens."""
    columns = ("completion_ids", "completion_mask", "sampling_per_token_logps", "weights", "keep_mask")
    return [{name: np.asarray(row[name]) for name in columns} for _, row in rollouts(trainer).iterrows()]


TURN_BAND = {
    "correction": {
        "weight": {"type": "truncate", "level": "turn", "max_weight": 1.2},
        "keep": [{"type": "ratio_band", "level": "turn", "low": 0.8, "high": 1.25}],
    }
}


def test_nothing_depends_on_what_stands_at_tool_tokens(train, tmp_path):
    first, second = Agent(noise=0.2), Agent(noise=0.2)
    second.garbage = NAN
    options = {"offpolicy": TURN_BAND, "beta": 0.05, "max_steps": 1}
    runs = [train(agent, output_dir=str(tmp_path / str(i)), **options) for i, agent in enumerate((first, second))]
    assert numbers(runs[0]) == numbers(runs[1])
    for one, other in zip(*(run.model.parameters() for run in runs), strict=True):
        assert one.equal(other)
    assert records(runs[0])[0]["grad_norm"] > 0


def turn_numbers(mask):
    starts = mask & ~np.concatenate([[False], mask[:-1]])
    return np.where(mask, np.cumsum(starts) - 1, -1)


def test_weights_and_keep_terms_go_by_turn(train):
    rows = tables(train(Agent(noise=0.2), offpolicy=TURN_BAND))

    assert len(rows) == 16
    dropped = kept = differ = 0
    for row in rows:
        tool = ~row["completion_mask"]
        assert set(row["completion_ids"][tool]) == set(TOOL_WORDS)
        assert not row["weights"][tool].any() and not row["keep_mask"][tool].any()
        turns = turn_numbers(row["completion_mask"])
        assert turns.max() in (1, 2)
        weights = []
        for turn in range(turns.max() + 1):
            here = turns == turn
            (keep,) = set(row["keep_mask"][here].tolist())
            (weight,) = set(row["weights"][here].tolist())
            weights.append(weight)
            assert weight <= np.float32(1.2)
            dropped, kept = dropped + (not keep), kept + keep
        differ += len(set(weights)) > 1
    assert dropped and kept and differ > 8


def test_a_wide_correction_sees_the_same_turns(train):
    """Normalisation decides on the whole generation batch, before it is split."""
    spec = {"correction": {**TURN_BAND["correction"], "normalize": "kept"}}
    for row in tables(train(Agent(noise=0.2), offpolicy=spec, max_steps=1)):
        turns = turn_numbers(row["completion_mask"])
        for turn in range(turns.max() + 1):
            assert len(set(row["weights"][turns == turn].tolist())) == 1


@pytest.mark.parametrize("normalize", [True, False])
def test_turn_level_objectives_train(train, normalize):
    spec = {**TURN_BAND, "objective": {"policy_loss": {"type": "st_ppo", "normalize": normalize}}}
    trainer = train(Agent(noise=0.2), offpolicy=spec, num_iterations=2, max_steps=4)
    assert trainer.objective.policy_loss == op.losses.STPPO(normalize=normalize)
    rows = records(trainer)
    assert len(rows) == 4 and all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    assert rows[1]["offpolicy/staleness/kl_k3"] > 0


def test_mismatch_after_the_tool_is_reported_apart(train):
    agent = Agent(noise=0.02, post_noise=0.3)
    for row in records(train(agent)):
        after, all_of_it = (row[f"offpolicy/{group}/kl_k3"] for group in ("post_tool", "mismatch"))
        assert after > all_of_it > 0 and row["offpolicy/post_tool/kl_k3_ratio"] > 20
        assert 0.4 < row["offpolicy/post_tool/token_fraction"] < 0.8
        assert row["offpolicy/rollout/retokenised_fraction"] == 0.0


def test_ids_that_were_not_sampled_are_found(train):
    trainer = train(Agent(changed=1))
    assert records(trainer)[0]["offpolicy/rollout/retokenised_fraction"] == pytest.approx(1 / 8)
    described = json.loads((Path(trainer.args.output_dir) / "run.json").read_text())
    assert described["token_ids"] == {"check": "warn", "rows": 8, "changed": 1}
    assert described["declared"]["engine"]["tools"] is None  # a rollout function may call tools of its own
    with pytest.raises(ValueError, match=r"First: row 1, token 1 of the completion: .* had 102 \('w99'\)"):
        train(Agent(changed=1), check_token_ids="raise")


def test_the_option_is_checked(make_args):
    with pytest.raises(ValueError, match=r"check_token_ids must be one of \['warn', 'raise', 'off'\], but got 'no'"):
        make_args(check_token_ids="no")


# --------------------------------------------------------------------------------------------------- TRL's tool loop


@pytest.fixture
def build_with_tools(fresh_model, make_args):
    """A trainer on TRL's own tool loop; an engine in place of ``_generate_single_turn`` answers three tokens a turn."""
    from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

    class Scripted(OffPolicyGRPOTrainer):
        """Every first answer begins with an even word, which calls the tool; every later one with an odd word."""

        noise = 0.1

        @torch.no_grad()
        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
            random = torch.Generator().manual_seed(sum(map(len, prompt_ids)))
            self.vllm_generation = getattr(self, "vllm_generation", None) or SimpleNamespace(calls=[])
            answers, logprobs = [], []
            for i, prompt in enumerate(prompt_ids):
                first = len(prompt) < 10
                words = (2 * torch.randint(2, 40, (2,), generator=random) + (0 if first and i % 4 else 1)).tolist()
                ids = [*words, EOS]
                logits = self.model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
                true = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
                answers.append(ids)
                logprobs.append((true + self.noise * torch.randn(3, generator=random)).tolist())
            self.vllm_generation.calls += map(Call, prompt_ids, answers)
            return answers, logprobs

    def trainer(kind=Scripted, environment=None, **options):
        rows = [{"prompt": [{"role": "user", "content": " ".join(WORDS[i : i + 1 + i % 3])}]} for i in range(32)]
        reward = lambda completions, **_: [float(len(str(one)) % 7) for one in completions]  # noqa: E731
        return kind(
            fresh_model(),
            reward,
            make_args(**{"max_completion_length": 24, "control": "off", **options}),
            train_dataset=Dataset.from_list(rows),
            processing_class=tool_tokenizer(),
            tools=None if environment else [lookup],
            environment_factory=environment,
        )

    trainer.kind = Scripted
    return trainer


def assert_tools_are_masked(trainer):
    rows = tables(trainer)
    called = [row for row in rows if not row["completion_mask"].all()]
    assert len(called) == len(rows) * 3 // 4  # every fourth answer calls no tool
    for row in called:
        tool = ~row["completion_mask"]
        assert [token in row["completion_ids"][tool] for token in TOOL_WORDS] == [True] * 3
        assert not row["sampling_per_token_logps"][tool].any() and turn_numbers(~tool).max() == 1
        assert row["completion_mask"][:3].all() and row["completion_mask"][-3:].all()
    return rows


def test_trls_tool_loop(build_with_tools):
    trainer = build_with_tools()
    trainer.train()
    assert_tools_are_masked(trainer)
    for row in records(trainer):
        assert row["tools/call_frequency"] == 0.75
        assert row["offpolicy/post_tool/token_fraction"] == pytest.approx(18 / 42)
        assert row["offpolicy/rollout/retokenised_fraction"] == 0.0
        assert 0.001 < row["offpolicy/mismatch/kl_k3"] < 0.02  # of the noise; placeholders of 0 would give nats


def test_an_environment_goes_the_same_way(build_with_tools):
    class Library:
        def reset(self, **_):
            self.asked = 0

        def lookup(self, word: str) -> str:
            """Look a word up.

            Args:
                word: The word.

            Returns:
                Three words.
            """
            self.asked += 1
            return lookup(word)

    trainer = build_with_tools(environment=Library)
    trainer.train()
    assert_tools_are_masked(trainer)


def test_a_loop_that_tokenises_again_is_found(build_with_tools):
    class Again(build_with_tools.kind):
        """As TRL did before 0.29: what the model wrote goes through text, where its end of sequence gets lost."""

        def _tool_call_loop(self, *args):
            result = list(super()._tool_call_loop(*args))
            result[2] = [ids if i != 2 else [ids[0], ids[1] + 1, *ids[2:]] for i, ids in enumerate(result[2])]
            return tuple(result)

    trainer = build_with_tools(Again, check_token_ids="raise")
    with pytest.raises(ValueError, match=r"in 1 of the rows looked at\. First: row 2, token 1 of the completion"):
        trainer.train()


def test_turns_are_known_only_with_a_tool_mask():
    inputs = {"completion_mask": torch.ones(1, 4), "advantages": torch.ones(1)}
    assert policy_batch(inputs, torch.zeros(1, 4), version=0).turn_ids is None
    inputs["tool_mask"] = torch.tensor([[1, 0, 0, 1]])
    assert policy_batch(inputs, torch.zeros(1, 4), version=0).turn_ids.tolist() == [[0, 0, 0, 1]]


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("ranks", "mode", "parallel", "refused"),
    [(1, "server", 1, False), (2, "server", 1, True), (2, "colocate", 1, False), (2, "colocate", 2, True)],
)
def test_ranks_that_share_an_engine_cannot_have_tools(ranks, mode, parallel, refused):
    args = SimpleNamespace(
        use_vllm=True,
        world_size=ranks,
        vllm_mode=mode,
        vllm_tensor_parallel_size=parallel,
        vllm_enable_sleep_mode=False,
    )
    check_tools(args, has_tools=False)
    if refused:
        with pytest.raises(ValueError, match="tools must have an engine on each rank"):
            check_tools(args, has_tools=True)
    else:
        check_tools(args, has_tools=True)
        args.vllm_enable_sleep_mode = True
        if ranks > 1:
            with pytest.raises(ValueError, match="vllm_enable_sleep_mode must be false with tools and 2 ranks"):
                check_tools(args, has_tools=True)
        else:
            check_tools(args, has_tools=True)


def test_a_reply_that_no_reader_takes_is_text():
    tokenizer = byte_tokenizer()
    ids = tokenizer("<tool_call>\n" + "[" * 3000, add_special_tokens=False)["input_ids"]
    with pytest.raises(RecursionError):
        parse_response(tokenizer, ids, prefix=[1], tools=[])
    assert read_reply(tokenizer, ids, prefix=[1], tools=[])["content"].count("[") == 3000
