"""What Triton asks of a backend's compiler; the interpreter never compiles."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend


class InterpreterBackend(BaseBackend):  # type: ignore[misc]
    """Is only there."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreter"

    def parse_options(self, options: Any) -> object:
        raise NotImplementedError("Set TRITON_INTERPRET=1: this backend compiles nothing.")

    def add_stages(self, stages: Any, options: Any, language: Any = None) -> None:
        raise NotImplementedError("Set TRITON_INTERPRET=1: this backend compiles nothing.")

    def load_dialects(self, context: Any) -> None:
        """There are none."""

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
