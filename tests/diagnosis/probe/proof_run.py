"""Ask a real vLLM engine in this process and a trainer's model with a known fault; prints one JSON line.

    python tests/diagnosis/probe/proof_run.py MODEL_FOLDER [ENGINE_ARGUMENTS_AS_JSON] SCENARIO ...

One engine serves all scenarios: the fault is put into the trainer's model or into the requests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_offpolicy.diagnosis.probe.proof import Asking
from trl_offpolicy.diagnosis.probe.sides import ask_both
from trl_offpolicy.engines.colocate import ColocateEngine
from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.engines.hf import Head
from trl_offpolicy.engines.weights.source import ModelWeights

PROMPTS = [[3, 4, 5, 6], [7, 8, 9]]


def moved(model: Any, wanted: Callable[[str], bool], size: float = 1e-3) -> Any:
    """Add noise of ``size`` times each weight's own root mean square."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if wanted(name):
                weight += size * weight.square().mean().sqrt() * torch.randn(weight.shape, generator=generator)
    return model


def adapted(model: Any, seed: int = 0) -> Any:
    """The model with a LoRA adapter that is not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05)
    return model


class Scenarios:
    """Faults by name; each gives the trainer's model, and may change what the engine holds or is asked."""

    def __init__(self, folder: str, engine: ColocateEngine) -> None:
        self.folder, self.engine = folder, engine

    def fresh(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def clean(self) -> Any:
        return self.fresh()

    def stale(self) -> Any:
        return moved(self.fresh(), lambda name: True)

    def partial(self) -> Any:
        return moved(self.fresh(), lambda name: ".layers.1." in name)

    def one_norm(self) -> Any:
        return moved(self.fresh(), lambda name: name == "model.norm.weight", 0.1)

    def head(self) -> Any:
        """The trainer's head is no longer the embedding; the engine's still is."""
        model = self.fresh()
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return moved(model, lambda name: name == "lm_head.weight", 1e-2)

    def adapter_missing(self) -> Any:
        return adapted(self.fresh())

    def adapter_halved(self) -> Any:
        """The engine gets half of the adapter, the trainer has all of it."""
        model = adapted(self.fresh())
        layers = [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "scaling")]
        for module in layers:
            module.scaling["default"] /= 2
        self.sync(model)
        for module in layers:
            module.scaling["default"] *= 2
        return model

    def adapter_merged(self) -> Any:
        model = adapted(self.fresh())
        self.sync(model)
        return model

    def rounded(self) -> Any:
        """The engine gets weights that somebody rounded to int8 without saying so."""
        from trl_offpolicy.engines.rounding import round_weights

        model = self.fresh()

        class Source:
            is_main = True
            merged = staticmethod(lambda: round_weights(ModelWeights(model).merged(), "int8"))
            adapter = staticmethod(lambda: None)

        self.engine.bind(Source())
        self.engine.sync_weights(0)
        return model

    def theta(self) -> Any:
        config = AutoModelForCausalLM.from_pretrained(self.folder).config
        config.rope_parameters = {**config.rope_parameters, "rope_theta": 3000.0}
        return AutoModelForCausalLM.from_pretrained(self.folder, config=config, dtype=torch.float32).eval()

    def epsilon(self) -> Any:
        """One norm of the trainer's live model, not its configuration."""
        model = self.fresh()
        model.model.layers[1].input_layernorm.variance_epsilon = 1e-3
        return model

    def sync(self, model: Any) -> None:
        self.engine.bind(ModelWeights(model))
        self.engine.sync_weights(0)

    # ---------------------------------------------------------------------------------------------- the requests

    @contextmanager
    def requests(self, name: str) -> Iterator[None]:
        """Somebody between the trainer and vLLM changes the requests."""
        changes: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
            "penalty": lambda ids, given: (ids, _changed(given, repetition_penalty=1.3)),
            "bias": lambda ids, given: (ids, _changed(given, logit_bias={5: 2.0})),
            "cooler": lambda ids, given: (ids, _changed(given, temperature=0.7)),
            "bos": lambda ids, given: ([[1, *row] for row in ids], given),
            "cut": lambda ids, given: ([row[1:] for row in ids], given),
        }
        run = self.engine._run
        if name in changes:
            self.engine._run = lambda ids, given: run(*changes[name](ids, given))  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.engine._run = run  # type: ignore[method-assign]


def _changed(parameters: Any, **options: Any) -> Any:
    for name, value in options.items():
        setattr(parameters, name, value)
    return parameters


def main() -> None:
    folder, *rest = sys.argv[1:]
    arguments = json.loads(rest.pop(0)) if rest and rest[0].startswith("{") else {}
    temperature = arguments.pop("temperature", 1.0)
    engine = ColocateEngine(folder, **{"dtype": "float32", "max_model_len": 64, **arguments})
    scenarios = Scenarios(folder, engine)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {}
    for name in rest:
        model = getattr(scenarios, name, scenarios.clean)()
        interview = engine.interview()
        with interview.watch() as requests, scenarios.requests(name):
            engine.generate(PROMPTS, Sampling(max_tokens=4, temperature=temperature), n=2)
        asking = Asking(prompts=PROMPTS, head=Head(temperature), requests=requests)
        proof = ask_both(interview, model, tokenizer, asking)
        found[name] = {
            "seen": [asdict(one) for one in proof.seen],
            "compared": sorted(proof.compared),
            "rows": [asdict(one) for one in proof.rows],
        }
        if name in ("adapter_halved", "adapter_merged", "rounded"):
            scenarios.sync(scenarios.fresh())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
