"""Every file of recipes/accelerate is what accelerate, DeepSpeed and FSDP understand.

Not run here, for want of the machine; the engine configurations are built instead:

- single_gpu, multi_gpu: CUDA devices; cpu_ddp runs the same code over gloo.
- zero2, zero3, fsdp2: their cpu_ variants differ in device, precision and number of processes alone, see below.
- zero3_offload: on a CPU nothing can be moved to the host; DeepSpeed's compiled host optimizer was not tried.
- fsdp1: over gloo it trains but cannot save a full state dict.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "accelerate"
FILES = sorted(FOLDER.glob("*.yaml"))
NAMES = [file.stem for file in FILES]
TYPES = {"single": "NO", "multi": "MULTI_GPU", "cpu_ddp": "MULTI_GPU", "zero": "DEEPSPEED", "fsdp": "FSDP"}


def check_keys(path: Path) -> None:
    """Accelerate rejects unknown keys of the file; of the inner mappings it sets anything, so they are checked here."""
    config = load_config_from_file(str(path))
    parser = launch_command_parser()
    known = {action.dest for action in parser._actions}
    unknown = [key for part in (config.deepspeed_config, config.fsdp_config) for key in part if key not in known]
    if unknown:
        raise ValueError(f"{path.name} has keys that accelerate launch does not know: {unknown}.")


def launched(name: str, *flags: str) -> tuple[Any, dict[str, str]]:
    """Arguments and environment that ``accelerate launch --config_file`` makes of a file."""
    command = ["--config_file", str(FOLDER / f"{name}.yaml"), "--main_process_port", "0", *flags, "script.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        return args, prepare_deepspeed_cmd_env(args)[1]
    return args, prepare_multi_gpu_env(args)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``engine(name)``: the DeepSpeed or FSDP plugin that a launched process builds."""

    def build(name: str) -> Any:
        for key, value in launched(name)[1].items():
            if key not in os.environ and key.startswith(("ACCELERATE_", "FSDP_")):
                monkeypatch.setenv(key, value)
        if "zero" in name:
            return DeepSpeedPlugin()
        off = {"sync_module_states": False, "cpu_ram_efficient_loading": False}
        # FSDP1 sends weights from the first rank through a device, for which it asks at once
        return FullyShardedDataParallelPlugin(**(off if name == "fsdp1" else {}))

    return build


def test_all_strategies_are_there() -> None:
    gpu = {"single_gpu", "multi_gpu", "zero2", "zero3", "zero3_offload", "fsdp1", "fsdp2"}
    assert set(NAMES) == gpu | {"cpu_ddp", "cpu_zero2", "cpu_zero3", "cpu_fsdp2"}


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_reads_it(name: str) -> None:
    check_keys(FOLDER / f"{name}.yaml")
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    kind = next(kind for part, kind in TYPES.items() if part in name)
    assert config.distributed_type == DistributedType(kind)
    cpu = name.startswith("cpu_")
    assert config.use_cpu == cpu
    assert config.mixed_precision == ("no" if cpu else "bf16")
    assert config.num_processes == (2 if cpu else 1 if name == "single_gpu" else 8)


@pytest.mark.parametrize(("part", "key"), [(None, "zero_stage"), ("deepspeed_config", "zero_stages")])
def test_an_unknown_key_fails(part: str | None, key: str, tmp_path: Path) -> None:
    spec = yaml.safe_load((FOLDER / "zero3.yaml").read_text())
    (spec if part is None else spec[part])[key] = 3
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(spec))
    with pytest.raises(ValueError, match=key):
        check_keys(tmp_path / "wrong.yaml")


@pytest.mark.parametrize(("name", "stage"), [("zero2", 2), ("zero3", 3), ("zero3_offload", 3), ("cpu_zero3", 3)])
def test_deepspeed_is_configured_as_written(engine: Any, name: str, stage: int) -> None:
    plugin = engine(name)
    zero = plugin.deepspeed_config["zero_optimization"]
    device = "cpu" if name == "zero3_offload" else "none"
    assert zero["stage"] == stage
    assert (zero["offload_optimizer"]["device"], zero["offload_param"]["device"]) == (device, device)
    assert plugin.zero3_init_flag == zero["stage3_gather_16bit_weights_on_model_save"] == (stage == 3)
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == "auto"  # the recipe's, whatever it is


@pytest.mark.parametrize("name", ["zero2", "zero3", "zero3_offload"])
def test_deepspeed_itself_takes_the_configuration(engine: Any, name: str) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    config = {key: value for key, value in engine(name).deepspeed_config.items() if value != "auto"}
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "steps_per_print": 10}
    read = DeepSpeedConfig(config)
    assert read.zero_optimization_stage == (2 if name == "zero2" else 3)
    offload = read.zero_config.offload_optimizer
    assert offload is not None and str(getattr(offload.device, "value", offload.device)) == (
        "cpu" if name == "zero3_offload" else "none"
    )


@pytest.mark.parametrize(("name", "version"), [("fsdp1", 1), ("fsdp2", 2), ("cpu_fsdp2", 2)])
def test_fsdp_is_configured_as_written(engine: Any, name: str, version: int) -> None:
    plugin = engine(name)
    assert plugin.fsdp_version == version
    if version == 2:
        assert plugin.reshard_after_forward is True
    else:
        assert plugin.sharding_strategy.name == "FULL_SHARD" and plugin.use_orig_params
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)


def test_single_gpu_is_one_process() -> None:
    args, _ = launched("single_gpu")
    assert not (args.multi_gpu or args.use_deepspeed or args.use_fsdp) and args.num_processes == 1


@pytest.mark.parametrize("name", ["multi_gpu", "cpu_ddp"])
def test_ddp_is_started_by_torchrun(name: str) -> None:
    args, _ = launched(name)
    assert args.multi_gpu  # MULTI_CPU would go to the launcher of a single process


@pytest.mark.parametrize("name", ["zero2", "zero3", "fsdp2"])
def test_cpu_variants_differ_in_the_machine_alone(name: str) -> None:
    machine = {"num_processes", "mixed_precision", "use_cpu"}
    gpu, cpu = (yaml.safe_load((FOLDER / f"{prefix}{name}.yaml").read_text()) for prefix in ("", "cpu_"))
    cpu.get("fsdp_config", {}).pop("fsdp_cpu_ram_efficient_loading", None)
    gpu.get("fsdp_config", {}).pop("fsdp_cpu_ram_efficient_loading", None)
    assert {key for key in gpu if gpu[key] != cpu[key]} == machine and gpu.keys() == cpu.keys()
