"""The trainer for TRL. Everything that imports trl is in this folder."""

from trl_offpolicy.engines.screen import quiet_vllm

quiet_vllm()  # trl imports vLLM
