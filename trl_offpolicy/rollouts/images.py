"""Images in the rows of a data set, read as ``trl.GRPOTrainer`` reads them: columns ``image`` or ``images``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from trl_offpolicy.engines.images import PromptImages, image_token

Message = Mapping[str, Any]
_ROLES = ("system", "user", "assistant", "tool")


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """The images of a row: its column ``images`` (a list) or ``image`` (one); empty if there are none.

    Example:
        >>> images_of({"image": "a"}), images_of({"images": ["a", "b"]}), images_of({"image": None})
        (['a'], ['a', 'b'], [])
    """
    if "images" in row:
        return list(row["images"] or [])
    return [] if row.get("image") is None else [row["image"]]


def has_images(row: Mapping[str, Any]) -> bool:
    """True if a row has images in a column or in its messages."""
    prompt = row.get("prompt")
    return bool(images_of(row)) or (isinstance(prompt, Sequence) and not isinstance(prompt, str) and _any(prompt))


def _any(messages: Sequence[Any]) -> bool:
    return any(_is_image(part) for message in messages for part in _parts(message))


def _parts(message: Any) -> Sequence[Any]:
    """The parts of a message; none if it is a text, or what only a user's function understands."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else []


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def placed(messages: Sequence[Message], images: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Messages whose contents are lists of parts, with the images in their places. The given ones are not changed.

    If the messages are texts, the images come before the first text of the user, as in TRL. A part
    ``{"type": "image"}`` is filled with the next image. One that has an image keeps it.

    Args:
        messages: the prompt.
        images: images in the order of their places.

    Raises:
        ValueError: a role is unknown, or there is another number of places than of images.

    Example:
        >>> placed([{"role": "user", "content": "what?"}], ["picture"])[0]["content"]
        [{'type': 'image', 'image': 'picture'}, {'type': 'text', 'text': 'what?'}]
    """
    found, inserted = [], False
    for message in messages:
        if message.get("role") not in _ROLES:
            raise ValueError(f"role must be one of {list(_ROLES)}, but got {message.get('role')!r}.")
        content = message.get("content")
        if isinstance(content, str):
            first = message["role"] == "user" and not inserted
            inserted = inserted or first
            places = [{"type": "image"} for _ in images] if first else []
            content = [*places, {"type": "text", "text": content}]
        found.append({**message, "content": content} if "content" in message else dict(message))
    return _filled(found, images)


def _filled(messages: list[dict[str, Any]], images: Sequence[Any]) -> list[dict[str, Any]]:
    left = list(images)
    places = 0
    for message in messages:
        if message["role"] == "tool" or not message.get("content"):
            continue
        parts = []
        for part in message["content"]:
            is_place = _is_image(part) and "image" not in part
            places += is_place
            parts.append({**part, "image": left.pop(0)} if is_place and left else part)
        message["content"] = parts
    if places != len(images):
        raise ValueError(
            f"prompt must have one place for each image, but has {places} for {len(images)}. A message of text gets "
            "them by itself; a list of parts must hold {'type': 'image'} for each."
        )
    return messages


def encode(
    processor: Any, prompts: Sequence[Sequence[Message]], options: Mapping[str, Any]
) -> tuple[list[list[int]], list[PromptImages]]:
    """Token ids and images of prompts, one at a time, so that what the processor returns belongs to one prompt.

    Args:
        processor: a ``transformers`` processor.
        prompts: messages as :func:`placed` returns them.
        options: further variables of the chat template.

    Returns:
        The ids, with as many image tokens as the model expects, and the images.
    """
    ids, images = [], []
    for prompt in prompts:
        write = partial(processor.apply_chat_template, [list(prompt)], add_generation_prompt=True, **options)
        made = write(tokenize=True, return_dict=True, return_tensors="pt")
        text = write(tokenize=False)[0]
        ids.append(made["input_ids"][0].tolist())
        inputs = {name: value for name, value in made.items() if name not in ("input_ids", "attention_mask")}
        pictures = [part["image"] for message in prompt for part in _parts(message) if _is_image(part)]
        short = _tokenised(processor.tokenizer, text)
        images.append(PromptImages(pictures=pictures, short_ids=short, inputs=inputs))
    return ids, images


def _tokenised(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that a template wrote, which may begin with a BOS token."""
    begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids: list[int] = tokenizer(text, add_special_tokens=not begun)["input_ids"]
    return ids


def check_completions(completion_ids: Sequence[Sequence[int]], config: Any) -> None:
    """Raise if a completion holds the token that stands for a part of an image.

    Args:
        completion_ids: B completions.
        config: the model's configuration.

    Raises:
        ValueError: the message names the token.
    """
    token = image_token(config)
    if any(token in ids for ids in completion_ids):
        raise ValueError(
            f"completion_ids must not hold the image token {token}, which stands for a part of a picture that a "
            "completion does not have. Have the engine never sample it (vLLM: sampling.extra.logit_bias)."
        )
