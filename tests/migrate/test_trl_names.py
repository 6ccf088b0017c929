"""The names in TRL's table are those of TRL's classes."""

from __future__ import annotations

from dataclasses import fields

from trl import GRPOConfig, ModelConfig

from trl_offpolicy.migrate.frameworks.trl import FIELDS
from trl_offpolicy.migrate.page import GROUPS


def test_fields_are_those_of_trl() -> None:
    names = {one.name for cls in (GRPOConfig, ModelConfig) for one in fields(cls) if one.init}
    assert set(FIELDS) == {name for name in names if not name.startswith("vllm_importance_sampling")}
    ours = {"offpolicy", "engine", "dataset_name", "train_files", "val_files", "reward", "reward_options"}
    assert {name for group in GROUPS for name in group} - names == ours
