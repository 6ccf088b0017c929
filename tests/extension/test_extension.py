"""Parts of a method from a package of the user's own: in YAML, as objects, in both trainers, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from my_package import wrong
from my_package.engines import DiceEngine
from my_package.objectives import HalfwayProximal, HuberKL, QuadraticLoss, RisingKL, SignAdvantage
from my_package.terms import OpeningVeto, SoftCapWeight

import trl_offpolicy as op
from lightning_module.engines import build_engine, engine_type
from lightning_module.spec import hyperparameters, resolve
from trl_offpolicy.parts import parse_tagged, plain, types_of
from trl_offpolicy.presets.parsing import parse_advantages, parse_correction, parse_objective, plain_method
from trl_offpolicy.trl.config import OffPolicyGRPOConfig

ROOT = Path(__file__).resolve().parents[2]
IN_YAML = """
offpolicy:
  correction:
    weight: {type: "my_package.terms:SoftCapWeight", power: 0.25}
    keep:
      - {type: "my_package.terms:OpeningVeto", tokens: 3, high: 2.0}
      - {type: outlier_veto, low: 1.0e-4, high: 100.0}
  objective:
    policy_loss: {type: "my_package.objectives:QuadraticLoss", coef: 0.1}
    kl: {type: "my_package.objectives:HuberKL", width: 0.5,
         coef: {type: "my_package.objectives:RisingKL", coef: 0.01, step: 0.001, highest: 0.02}}
    proximal: "my_package.objectives:HalfwayProximal"
  advantages: "my_package.objectives:SignAdvantage"
"""
CORRECTION = op.Correction(
    weight=SoftCapWeight(power=0.25), keep=(OpeningVeto(tokens=3, high=2.0), op.OutlierVeto(low=1e-4, high=100.0))
)
OBJECTIVE = op.Objective(
    policy_loss=QuadraticLoss(coef=0.1),
    correction=CORRECTION,
    kl=HuberKL(width=0.5, coef=RisingKL(coef=0.01, step=0.001, highest=0.02)),
    proximal=HalfwayProximal(),
)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def make(**options: Any) -> OffPolicyGRPOConfig:
        usual = {"use_cpu": True, "bf16": False, "report_to": "none", "use_vllm": True}
        return OffPolicyGRPOConfig(output_dir=str(tmp_path), **{**usual, **options})

    return make


# ------------------------------------------------------------------------------------------------- configurations


def test_yaml_gives_what_python_gives_with_trl(config: Any) -> None:
    args = config(**yaml.safe_load(IN_YAML))

    assert args.preset.objective == OBJECTIVE
    assert args.preset.advantages == SignAdvantage()
    assert args.beta == 0.01  # so that TRL loads the reference model
    assert config(offpolicy=OBJECTIVE).preset.objective == OBJECTIVE


def test_yaml_gives_what_python_gives_with_lightning() -> None:
    preset = resolve(yaml.safe_load(IN_YAML)["offpolicy"])

    assert (preset.objective, preset.advantages) == (OBJECTIVE, SignAdvantage())
    assert resolve(OBJECTIVE, advantages=SignAdvantage()).objective == OBJECTIVE
    assert resolve(CORRECTION).correction == CORRECTION


VALUES = {
    "correction": CORRECTION,
    "objective": OBJECTIVE,
    "preset": replace(op.presets.get("paper/tis", max_weight=3.0), advantages=SignAdvantage()),
    "mapping with objects": {"correction": {"weight": SoftCapWeight()}, "advantages": SignAdvantage()},
    "name": "paper/tis",
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_offpolicy_is_written_down_and_read_again(config: Any, name: str) -> None:
    """What the loggers and JSON get makes the same method."""
    args = config(offpolicy=VALUES[name])

    written = json.loads(args.to_json_string())["offpolicy"]

    assert yaml.safe_load(yaml.safe_dump(written)) == written
    assert args.to_sanitized_dict()["offpolicy"] == str(written)
    again = config(offpolicy=written).preset
    assert again.objective == args.preset.objective
    assert again.advantages == args.preset.advantages
    assert repr(args) and json.dumps(args.preset.described())


@pytest.mark.parametrize("name", VALUES)
def test_a_module_of_lightning_writes_it_into_its_checkpoint(name: str) -> None:
    given = {"model": "folder", "reward_funcs": [], "correction": VALUES[name], "objective": None}

    kept = hyperparameters(given)

    assert json.dumps(kept)
    assert resolve(kept["correction"]).objective == resolve(VALUES[name]).objective


def test_an_objective_with_a_correction_survives_a_checkpoint_as_one_argument() -> None:
    kept = hyperparameters({"model": "folder", "reward_funcs": [], "correction": None, "objective": OBJECTIVE})

    assert "objective" not in kept
    assert resolve(kept["correction"]).objective == OBJECTIVE


def test_what_was_used_is_said(config: Any) -> None:
    said = config(offpolicy=OBJECTIVE).preset.described()

    assert said["preset"] == "own"
    assert "SoftCapWeight(power=0.25)" in said["correction"] and "QuadraticLoss(coef=0.1)" in said["objective"]
    assert said["formula"].startswith("w = min(rho_t, rho_t^0.25); OpeningVeto: tokens=3, high=2; drop the response")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offpolicy": OBJECTIVE, "beta": 0.1}, "the objective's kl and beta set the same quantity"),
        ({"offpolicy": op.Objective(), "loss_type": "grpo"}, "the objective's policy_loss and loss_type set the same"),
        ({"offpolicy": 3}, "offpolicy must be a preset's name .*, a mapping, a Correction, an Objective or"),
    ],
)
def test_a_quantity_set_twice_or_another_value_is_an_error(config: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_two_objectives_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"correction and objective both are an Objective"):
        resolve(OBJECTIVE, op.Objective())


# ------------------------------------------------------------------------------------------------- runs


def test_they_compute_what_they_say() -> None:
    rho = torch.tensor([[0.5, 4.0, 1.0], [1.0, 9.0, 1.0]])
    old = torch.full((2, 3), -3.0)
    batch = op.PolicyBatch(
        per_token_logps=old.clone().requires_grad_(),
        old_per_token_logps=old,
        sampling_per_token_logps=old - rho.log(),
        completion_mask=torch.ones(2, 3).bool(),
        advantages=torch.tensor([1.0, -1.0]),
        ref_per_token_logps=old - 0.2,
    )

    out = OBJECTIVE(batch)
    out.loss.backward()

    expected = torch.tensor([[0.5, 4.0**0.25, 1.0], [1.0, 9.0**0.25, 1.0]])
    torch.testing.assert_close(out.weights, expected, rtol=1e-5, atol=1e-6)
    assert out.keep_mask.tolist() == [[True] * 3, [False] * 3]  # log 9 = 2.2 nats
    assert float(out.stats["keep/OpeningVeto/dropped_fraction"]) == 0.5
    assert float(out.stats["loss/kl"]) == pytest.approx(0.02, rel=1e-4)
    wanted = torch.where(out.keep_mask, -expected, 0.0) / 6 + 0.01 * 0.2 / 6
    torch.testing.assert_close(batch.per_token_logps.grad, wanted, rtol=1e-4, atol=1e-6)


def test_a_controller_of_ones_own_moves_and_goes_into_a_checkpoint() -> None:
    kl = OBJECTIVE.kl
    assert kl is not None and kl.adapts

    moved = kl.updated(kl=0.1, samples=8)

    assert moved.beta == pytest.approx(0.011)
    assert type(moved) is HuberKL
    assert kl.restored(moved.state_dict()) == moved


def test_an_engine_by_its_path() -> None:
    context = {"model_name": None, "policy": None, "pad_token_id": 0, "eos_token_ids": [1], "run": "r"}
    spec = {"type": "my_package.engines:DiceEngine", "ids": [5, 6, 7]}

    engine = build_engine(spec, **context, folder=Path())  # type: ignore[arg-type]

    assert engine_type(spec) == "own"
    assert isinstance(engine, DiceEngine) and engine.ids == [5, 6, 7]
    engine.close()
    with pytest.raises(ValueError, match=r"^engine\.idz is not an option of DiceEngine\. Did you mean 'ids'\?"):
        build_engine({**spec, "idz": 1}, **context, folder=Path())  # type: ignore[arg-type]


@pytest.mark.integration
def test_a_run_with_trl(build: Any) -> None:
    from trainer_runs import Engine, records

    trainer = build(Engine(noise=0.5), offpolicy=yaml.safe_load(IN_YAML)["offpolicy"])
    trainer.train()

    rows = records(trainer)
    assert len(rows) == 2
    for row in rows:
        assert row["grad_norm"] > 0.0
        assert 0.0 <= row["offpolicy/keep/OpeningVeto/dropped_fraction"] <= 1.0
        assert row["offpolicy/weight/max"] > row["offpolicy/weight_applied/max"] > 1.0
    assert rows[1]["offpolicy/loss/kl_coef"] == pytest.approx(0.011)
    info = json.loads((Path(trainer.args.output_dir) / "run.json").read_text())
    assert "SoftCapWeight(power=0.25)" in info["correction"] and info["advantages"] == "SignAdvantage()"
    trainer.save_model()  # writes the arguments too


@pytest.mark.integration
def test_a_run_with_lightning(tmp_path: Path) -> None:
    from lightning_runs import Watch, data, module, trainer
    from tiny_models import FIRST_WORD

    watch = Watch()
    engine = {"type": "my_package.engines:DiceEngine", "ids": [FIRST_WORD, FIRST_WORD + 1, FIRST_WORD + 2]}
    run = trainer(tmp_path, max_steps=2, callbacks=[watch])
    correction = op.Correction(weight=SoftCapWeight())  # dice are so far off that a keep term would leave nothing
    run.fit(module(engine, correction=correction, advantages="my_package.objectives:SignAdvantage"), data())

    assert len(watch.losses) == 2
    assert any(float(gradient.abs().max()) > 0 for step in watch.gradients for gradient in step.values())


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("no_such_package.weights:W", ValueError,
         r"must name a module that can be imported, but got 'no_such_package\.weights:W' \(ModuleNotFoundError: "),
        ("my_package.terms:SoftCapWieght", ValueError,
         r"must name something that exists in my_package\.terms, but got .*\. Did you mean 'SoftCapWeight'"),
        ("my_package.terms:", ValueError, r"must be 'package\.module:name', but got 'my_package\.terms:'"),
        ("my_package.wrong:a_function", TypeError, r"must name a subclass of .*Weight, but .*, which is no class"),
        ("my_package.wrong:NotAPart", TypeError, r"must name a subclass of .*Weight, .* lacks the method weigh"),
        ("my_package.wrong:Unfinished", TypeError, r"must name a subclass of .*Weight, .* lacks the method weigh"),
        ("my_package.wrong:Stranger", TypeError, r"must name a subclass of .*Weight, .*, which does not derive from"),
        ("my_package.terms:OpeningVeto", TypeError, r"must name a subclass of .*Weight, .* lacks the method weigh"),
        ("my_package.wrong:NotADataclass", TypeError, r"must name a class with @dataclass\(frozen=True, kw_only="),
    ],
)  # fmt: skip
def test_a_wrong_path_names_the_field_and_the_reason(path: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"^offpolicy\.correction\.weight\.type {message}"):
        parse_correction({"weight": {"type": path}}, where="offpolicy.correction")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"powr": 0.5}, r"^offpolicy\.weight\.powr is not an option of SoftCapWeight\. Did you mean 'power'\?"),
        ({"power": 2.0}, r"^offpolicy\.weight: power must be in \[0, 1\], but got 2.0\."),
    ],
)
def test_options_are_checked_as_those_of_the_kit(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_correction({"weight": {"type": "my_package.terms:SoftCapWeight", **options}}, where="offpolicy")


def test_a_missing_field_and_the_wrong_kind_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"^o\.policy_loss\.coef must be given for QuadraticLoss"):
        parse_objective(
            {"policy_loss": {"type": "my_package.objectives:QuadraticLoss"}}, where="o", base=op.Objective()
        )
    with pytest.raises(TypeError, match=r"^advantages\.type must name a subclass of .*AdvantageEstimator, but got"):
        parse_advantages("my_package.terms:SoftCapWeight", where="advantages")
    with pytest.raises(ValueError, match=r"type must be one of \[.*\] or the path of a class of your own"):
        parse_advantages("rlo", where="advantages")


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("my_package.wrong:HalfAnEngine", TypeError, r"^engine\.type must have the methods of .*Engine, but .*, which "
                                                     r"lacks bind, score, sync_weights, close\."),
        ("my_package.wrong:a_function", TypeError, r"^engine\.type must name a class"),
        ({"type": "my_package.engines:Dice"}, ValueError, r"^engine\.type must name something that exists in my_p"),
        ("vlm", ValueError, r"^engine\.type must be one of \[.*\] or the path .* Did you mean 'vllm'\?"),
    ],
)  # fmt: skip
def test_a_wrong_engine_is_named(spec: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        engine_type(spec)


def test_an_object_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^weight must be a weight"):
        op.Correction(weight=wrong.Stranger())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="abstract"):
        wrong.Unfinished()  # type: ignore[abstract]


# ------------------------------------------------------------------------------------------------- the contract


def test_what_is_outside_does_not_enter_the_tables() -> None:
    assert "SoftCapWeight" not in {cls.__name__ for cls in types_of(op.Weight).values()}
    assert all(name and name == name.lower() for kind in (op.Weight, op.KeepTerm) for name in types_of(kind))


def test_defaults_of_the_contract() -> None:
    weight, term, loss = SoftCapWeight(), OpeningVeto(tokens=1, high=1.0), QuadraticLoss(coef=1.0)

    assert (weight.ratio, weight.level, weight.scope) == ("old/sampling", "token", "row")
    assert (term.name, term.ratio, term.scope, term.reads_ratio) == ("OpeningVeto", "old/sampling", "row", True)
    assert not term.reads_advantages and term.requires == ()
    assert (loss.level, loss.reads, loss.scope, loss.aggregation) == ("token", (), "row", "token_mean")
    assert loss.weight_use == "multiply" and loss.uses_ratio and not loss.fixed_aggregation
    assert (SignAdvantage().requires, SignAdvantage().scope, SignAdvantage().by_token) == ((), "group", False)
    assert HalfwayProximal().reads_old


def test_a_field_without_a_default_does_not_take_the_property_of_the_base_for_one() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True, kw_only=True)
    class Levelled(SoftCapWeight):
        level: Any

    with pytest.raises(TypeError, match="level"):
        Levelled()
    assert Levelled(level="sequence").level == "sequence"


def test_a_part_of_this_package_is_written_by_its_name_and_another_by_its_path() -> None:
    assert plain(op.TruncateWeight(max_weight=3.0)) == {"type": "truncate", "max_weight": 3.0}
    assert plain(SoftCapWeight()) == {"type": "my_package.terms:SoftCapWeight"}
    assert plain(op.KLPenalty(coef=0.1)) == {"coef": 0.1}
    assert parse_tagged(plain(SoftCapWeight(power=0.1)), op.Weight, where="weight") == SoftCapWeight(power=0.1)
    assert plain_method(CORRECTION)["correction"]["keep"][0]["type"] == "my_package.terms:OpeningVeto"


@pytest.mark.parametrize("name", ["terms", "objectives", "engines"])
def test_the_page_shows_these_files(name: str) -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    assert (Path(__file__).parent / "my_package" / f"{name}.py").read_text() in page
