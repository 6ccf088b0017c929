"""Faults of the engine that are injected into the model that plays it: prompts, sampling, architecture, precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import contexts
import torch
from moe import rough_router
from sampler import Drawing, Said, plain, processed
from torch import Tensor, nn
from worlds import Batch, Inside, Made, Rows, World

from trl_offpolicy.diagnosis.attribution.evidence import padded
from trl_offpolicy.engines.hf import Head
from trl_offpolicy.functional.truncated_sampling import Truncation

Inject = Callable[[World], Made]
Context = Callable[[World], AbstractContextManager[Any]]


def computes(fault: str, inside: Context, **declared: Any) -> Inject:
    """The engine computes in a context."""
    return lambda world: Made(fault, world.sample(inside=partial(inside, world)), engine=declared)


def draws(fault: str, drawing: Callable[[World], Drawing], **declared: Any) -> Inject:
    """The engine draws, or reports, in another way."""
    return lambda world: Made(fault, world.sample(drawing(world)), engine=declared)


def gets(fault: str, render: Callable[[World], Rows]) -> Inject:
    """The engine gets other prompts than were meant."""
    return lambda world: Made(fault, world.sample(seen=render(world)))


def both(fault: str, inside: Context | None = None, drawing: Callable[[World], Drawing] | None = None,
         seen: Callable[[World], Rows] | None = None, **declared: Any) -> Inject:  # fmt: skip
    """Two of the three at once."""

    def inject(world: World) -> Made:
        options: dict[str, Any] = {} if inside is None else {"inside": partial(inside, world)}
        drawn = None if drawing is None else drawing(world)
        rendered = None if seen is None else seen(world)
        return Made(fault, world.sample(drawn, seen=rendered, **options), engine=declared)

    return inject


# ------------------------------------------------------------------------------------------------------------ prompts


def with_bos(world: World) -> Rows:
    return world.repeated([[world.bos, *ids] for ids in world.prompts])


def cut_left(world: World) -> Rows:
    """A limit on the prompt's length that drops its beginning."""
    return world.repeated([ids[len(ids) // 3 :] for ids in world.prompts])


def cut_right(world: World) -> Rows:
    """The question's last tokens are missing."""
    return world.repeated([[*ids[: -len(ids) // 2], *ids[-len(ids) // 3 :]] for ids in world.prompts])


def without_last(world: World) -> Rows:
    """Without the newline behind "assistant"."""
    return world.repeated([ids[:-1] for ids in world.prompts])


def other_template(world: World) -> Rows:
    """Plain roles instead of the chat template."""
    assert world.task is not None
    encode = world.task.tokenizer
    return world.repeated([list(encode(f"User: {q}\nAssistant: ")["input_ids"]) for q in world.questions])


def next_group(world: World) -> Rows:
    """Every group gets the prompt of the next one."""
    return world.repeated([*world.prompts[1:], world.prompts[0]])


def first_two_swapped(world: World) -> Rows:
    """Two of the groups have changed places."""
    first, second, *rest = world.prompts
    return world.repeated([second, first, *rest])


# ----------------------------------------------------------------------------------------------------------- sampling


def head(temperature: float = 1.0, **cut: Any) -> Head:
    return Head(temperature, Truncation(**cut))


def truncated(**cut: Any) -> Inject:
    name, value = next(iter(cut.items()))
    return draws(f"{name} {value}", lambda _world: plain(head(**cut)), **cut)


def counts(logits: Tensor, said: Said) -> Tensor:
    """(N, V) how often each token was said."""
    found = torch.zeros_like(logits)
    for row, tokens in enumerate(said):
        for token in tokens:
            found[row, token] += 1
    return found


def repetition(penalty: float) -> Drawing:
    """Logits of what the prompt or the completion holds are divided by it, or multiplied where negative."""

    def change(logits: Tensor, prompts: Said, said: Said) -> Tensor:
        seen = counts(logits, [[*p, *c] for p, c in zip(prompts, said, strict=True)]) > 0
        return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    return processed(change)


def presence(penalty: float) -> Drawing:
    return processed(lambda logits, _prompts, said: logits - penalty * (counts(logits, said) > 0))


def frequency(penalty: float) -> Drawing:
    return processed(lambda logits, _prompts, said: logits - penalty * counts(logits, said))


def frequent(world: World, count: int) -> list[int]:
    """The tokens that the clean batch holds most often, without those that end a completion."""
    said = torch.tensor([token for row in world.clean[0].ids for token in row if token not in world.stop])
    return torch.bincount(said).argsort(descending=True)[:count].tolist()


def biased(world: World, amount: float, count: int = 5) -> Drawing:
    chosen = frequent(world, count)

    def change(logits: Tensor, _prompts: Said, _said: Said) -> Tensor:
        logits[:, chosen] += amount
        return logits

    return processed(change)


def banned(tokens: Sequence[int]) -> Drawing:
    chosen = list(tokens)

    def change(logits: Tensor, _prompts: Said, _said: Said) -> Tensor:
        logits[:, chosen] = -torch.inf
        return logits

    return processed(change)


def no_digits(world: World) -> Drawing:
    """A grammar that allows no digit."""
    if world.task is None:
        return banned(range(48, 58))
    vocabulary = world.task.tokenizer.get_vocab()
    return banned([number for text, number in vocabulary.items() if any(letter.isdigit() for letter in text)])


def renormalised(count: int) -> Drawing:
    """Draws from all, but the report is normalised over the ``count`` most likely tokens."""

    def drawing(logits: Tensor, _prompts: Said, _said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        logps = logits.log_softmax(-1)
        drawn = torch.multinomial(logps.exp(), 1, generator=generator)[:, 0]
        return drawn, logps - logps.topk(count).values.logsumexp(-1, keepdim=True)

    return drawing


def padded_vocabulary(world: World, share: float = 0.02) -> Drawing:
    """Rows that pad the head to a round size have logit 0 and count in the softmax; they are never drawn."""
    extra = int(share * world.model.config.vocab_size)

    def drawing(logits: Tensor, _prompts: Said, _said: Said, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        whole = torch.cat([logits, torch.zeros(len(logits), extra)], -1).log_softmax(-1)
        logps = whole[:, : logits.shape[1]]
        return torch.multinomial(logps.exp(), 1, generator=generator)[:, 0], logps

    return drawing


def best_of_two(world: World) -> Made:
    """The engine samples twice and returns the more likely completion."""
    batches = [world.sample()]
    world.salt += 1
    batches.append(world.sample())
    likely = [[sum(batch.logps[row][: len(ids)]) / len(ids) for row, ids in enumerate(batch.ids)] for batch in batches]
    chosen = [int(second > first) for first, second in zip(*likely, strict=True)]
    rows = [batches[which].logps[row][: len(batches[which].ids[row])].tolist() for row, which in enumerate(chosen)]
    ids = [batches[which].ids[row] for row, which in enumerate(chosen)]
    return Made("the likelier of two samples", Batch(batches[0].prompt_ids, ids, padded(rows)))


# ------------------------------------------------------------------------------------- architecture and precision


def of_model(change: Callable[..., Any], *values: Any, **options: Any) -> Context:
    """A context of ``contexts.py`` that takes the model first."""
    return lambda world: change(world.model, *values, **options)


def embedding_scaled(world: World, factor: float) -> Any:
    return contexts.hooked([world.model.get_input_embeddings()], lambda values: values * factor)


def without_q_k_norms(world: World) -> Any:
    """The engine's implementation lacks the norms of queries and keys."""
    norms = [m for name, m in world.model.named_modules() if name.endswith(("q_norm", "k_norm"))]
    stack = ExitStack()
    for norm in norms:
        handle = norm.register_forward_hook(lambda _module, inputs, _output: inputs[0])
        stack.callback(handle.remove)
    return stack


def head_changed(world: World, change: Callable[[Tensor], Tensor]) -> Any:
    """Another head; a tied embedding stays."""
    head = world.model.lm_head
    return contexts.swapped([(head, change(head.weight.data))])


def fewer_experts(world: World) -> Any:
    """One expert a token instead of two."""
    gates = [m for name, m in world.model.named_modules() if name.endswith("mlp.gate")]
    return contexts.attribute_set(gates, "top_k", lambda old: old - 1)


def rough(bits: int, *, select_only: bool) -> Context:
    return lambda world: rough_router(world.model, bits, select_only=select_only)


def cast(name: str) -> Context:
    return lambda world: contexts.cast(world.model, getattr(torch, name))


def edge_layers_int8(world: World) -> Any:
    """Only the MLPs of the first and of the last layer are quantised."""
    layers = world.model.model.layers
    chosen = [m for layer in (layers[0], layers[-1]) for m in layer.modules() if isinstance(m, nn.Linear)]
    return contexts.swapped([(m, contexts.int8(m.weight.data)) for m in chosen])


# ------------------------------------------------------------------------------------------------------------ weights


def holds(fault: str, choice: Callable[[World, str], tuple[Any, float]], **declared: Any) -> Inject:
    """The engine's parameters have chosen versions."""
    return computes(fault, lambda world: world.weights.holding(partial(choice, world)), **declared)


def version_of(world: World, back: float) -> float:
    return len(world.weights.updates.versions) - back


def layer_of(name: str) -> int:
    """Number of the layer of a parameter; -1 = none."""
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1


def stale_where(fault: str, where: Callable[[World, str], bool], back: float = 4) -> Inject:
    """Some parameters are ``back`` versions behind."""
    return holds(fault, lambda world, name: (version_of(world, back if where(world, name) else 0), 1.0))


def middle_layer(world: World) -> int:
    return len(world.model.model.layers) // 2


def tied_head_stale(world: World) -> Any:
    """The embedding arrived; the head, which is tied to it, kept its first value."""
    return contexts.swapped([(world.model.lm_head, world.weights.base["model.embed_tokens.weight"])])


def stack(*makers: Context) -> Context:
    """Several contexts at once."""

    def inside(world: World) -> Any:
        found = ExitStack()
        for make in makers:
            found.enter_context(make(world))
        return found

    return inside


def always(inside: Inside) -> Context:
    return lambda _world: inside()
