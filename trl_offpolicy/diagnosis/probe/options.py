"""The options of a probe, checked before a model is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trl_offpolicy.diagnosis.probe.setting import parse_setting
from trl_offpolicy.engines.exact import check_exact
from trl_offpolicy.engines.hf import Head
from trl_offpolicy.engines.truncation import as_vllm_keeps
from trl_offpolicy.functional.truncated_sampling import Truncation


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """What to probe.

    Args:
        model: folder or Hub name, for both sides.
        adapter: LoRA adapter, for both sides.
        prompts: chat prompts; empty = the built-in ones.
        engine: "vllm" (in this process), "hf", or the URL of a vLLM server.
        engine_dtype: data type in which the engine computes.
        trainer_dtype: data type in which the trainer computes.
        trainer_device: device on which the trainer's model computes: "auto" (the GPU if there is one), "cpu", "cuda",
            "cuda:1". Another device than the engine's is a source of mismatch of its own.
        quantization: vLLM's option of that name.
        weight_rounding: type to which the engine's linear weights are rounded in simulation: "int8", "fp8", ...
        temperature: temperature of the engine.
        top_p: top-p of the engine; 1 = off.
        top_k: top-k of the engine; 0 = off.
        min_p: min-p of the engine; 0 = off.
        mirror: whether the trainer scores at the same temperature and truncation, as this kit's trainers do.
        samples: completions per prompt.
        max_tokens: longest completion, in tokens.
        seed: seed of the engine.
        explain: whether to test hypotheses with the model if there is a mismatch.
        ask: whether to compare weights, settings and requests of both sides, by asking them.
        engine_arguments: further arguments of vLLM's ``LLM``.
        against: a second setting of the engine, ``name=value,...``, or the URL of a second server: both settings and
            the trainer are compared on the same tokens (:mod:`~trl_offpolicy.diagnosis.probe.against`).
        exact: whether to set everything that brings engine and trainer together
            (:mod:`~trl_offpolicy.engines.exact`), and to say what keeps them apart.

    Raises:
        ValueError: a field is not valid; the message names it.
    """

    model: str
    adapter: str | None = None
    prompts: tuple[str, ...] = ()
    engine: str = "vllm"
    engine_dtype: str = "float32"
    trainer_dtype: str = "float32"
    trainer_device: str = "auto"
    quantization: str | None = None
    weight_rounding: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    mirror: bool = False
    samples: int = 4
    max_tokens: int = 32
    seed: int = 0
    explain: bool = True
    ask: bool = True
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    against: str | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        for name in ("samples", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1, but got {value!r}.")
        if not 0 < self.temperature < 100:
            raise ValueError(f"temperature must be in (0, 100), but got {self.temperature}.")
        for name in ("engine_dtype", "trainer_dtype"):
            if getattr(self, name) not in ("float32", "bfloat16", "float16"):
                raise ValueError(f"{name} must be float32, bfloat16 or float16, but got {getattr(self, name)!r}.")
        self._check_device()
        if self.engine not in ("vllm", "hf") and not self.engine.startswith(("http://", "https://")):
            raise ValueError(f"engine must be vllm, hf or the URL of a server, but got {self.engine!r}.")
        if self.engine != "vllm" and self.quantization is not None:
            raise ValueError(f"quantization must be left out with engine {self.engine}: start the server with it.")
        if self.engine.startswith("http") and self.weight_rounding is not None:
            raise ValueError("weight_rounding must be left out with a server: it keeps its own weights.")
        Truncation(top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)  # raises for a value out of range
        if self.engine != "vllm" and self.engine_arguments:
            names = ", ".join(self.engine_arguments)
            raise ValueError(f"engine_arguments must be left out with engine {self.engine}, but got {names}.")
        self._check_against()
        self._check_exact()

    def _check_device(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.trainer_device):
            raise ValueError(f"trainer_device must be auto, cpu, cuda or cuda:N, but got {self.trainer_device!r}.")
        index, known = int(self.trainer_device.partition(":")[2] or 0), torch.cuda.device_count()
        if self.trainer_device.startswith("cuda") and index >= known:
            raise ValueError(f"trainer_device must be a device of this machine, but got {self.trainer_device!r}: "
                             f"torch sees {known} GPUs.")  # fmt: skip

    def _check_exact(self) -> None:
        if not self.exact:
            return
        if self.engine == "hf":
            raise ValueError("exact must be left out with engine hf: the trainer samples from itself.")
        if self.engine == "vllm" and self.engine_dtype != self.trainer_dtype:
            raise ValueError(
                f"engine_dtype must be {self.trainer_dtype} (trainer_dtype) with exact: true, but got "
                f"{self.engine_dtype!r}."
            )
        if (self.temperature != 1 or self.engine_head.truncation) and not self.mirror:
            raise ValueError("mirror must be true with exact: true and another temperature or truncation than none.")
        given = {"weight_rounding": self.weight_rounding, "quantization": self.quantization}
        check_exact({**self.engine_arguments, **{name: one for name, one in given.items() if one}}, where="")

    def _check_against(self) -> None:
        if self.against is None:
            return
        setting = parse_setting(self.against)
        if self.engine == "hf":
            raise ValueError("against must be left out with engine hf: there are no settings of it to compare.")
        if self.engine != "vllm" and not setting.url:
            raise ValueError(
                f"against must be the URL of a second server with engine {self.engine}, whose settings cannot be "
                f"changed from here, but got {self.against!r}."
            )
        if setting.url and setting.url == self.engine.rstrip("/"):
            raise ValueError(f"against must be another server than engine, but both are {setting.url}.")
        if self.temperature != 1 or self.top_p < 1 or self.top_k > 0 or self.min_p > 0:
            raise ValueError(
                "temperature, top_p, top_k and min_p must be left at 1, 1, 0 and 0 with against: prompt_logprobs, by "
                "which two settings are compared on the same tokens, are those of the whole distribution at "
                "temperature 1."
            )

    @property
    def device(self) -> torch.device:
        """The device on which the trainer's model computes."""
        if self.trainer_device != "auto":
            return torch.device(self.trainer_device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def engine_head(self) -> Head:
        """Temperature and truncation of the distribution that the engine samples from."""
        cut = Truncation(top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)
        return Head(self.temperature, cut if self.engine == "hf" else as_vllm_keeps(cut))

    @property
    def trainer_head(self) -> Head:
        """Temperature and truncation under which the trainer scores."""
        return self.engine_head if self.mirror else Head()
