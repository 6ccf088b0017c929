"""Image inputs of padded batches, and HF generate with them."""

from __future__ import annotations

import pytest
import torch
from tiny_images import SIZES, encoded, image_rows, picture, tiny_processor, tiny_vlm
from tiny_models import EOS, PAD

from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.engines.hf import TransformersEngine
from trl_offpolicy.engines.images import model_inputs
from trl_offpolicy.rollouts.images import images_of, placed

pytestmark = pytest.mark.integration


def test_images_of_two_shapes_are_refused() -> None:
    rows = [{"pixel_values": torch.zeros(1, 2, 3)}, {}, {"pixel_values": torch.zeros(1, 2, 4)}]
    with pytest.raises(ValueError, match=r"pixel_values must have one shape .* but got \[\(2, 3\), \(2, 4\)\]"):
        model_inputs(rows, width=1)


def test_token_inputs_stand_where_the_prompt_does() -> None:
    rows = [{"token_type_ids": torch.tensor([[1, 1, 1]])}, {"token_type_ids": torch.tensor([[1]])}, {}]
    found = model_inputs(rows, width=4, length=2)["token_type_ids"]
    assert found.tolist() == [[0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0], [0] * 6]


def test_a_batch_with_images_of_several_sizes_is_continued_as_each_prompt_alone() -> None:
    model, processor = tiny_vlm().eval(), tiny_processor()
    prompts = [placed(row["prompt"], images_of(row)) for row in image_rows(4)]
    ids, images = encoded(processor, prompts)
    assert len({len(row) for row in ids}) > 1
    engine = TransformersEngine(lambda: model, pad_token_id=PAD, eos_token_ids=[EOS])
    greedy = Sampling(max_tokens=6, top_k=1)
    found = engine.generate(ids, greedy, n=2, images=images).completion_ids
    for i, (row, seen) in enumerate(zip(ids, images, strict=True)):
        alone = model.generate(
            input_ids=torch.tensor([row]), attention_mask=torch.ones(1, len(row), dtype=torch.long), **seen.inputs,
            do_sample=False, max_new_tokens=6, pad_token_id=PAD, eos_token_id=[EOS],
            suppress_tokens=[model.config.image_token_id],
        )  # fmt: skip
        expected = engine._cut(alone[0, len(row) :].tolist())
        assert found[2 * i] == found[2 * i + 1] == expected
    other = placed(image_rows(4)[0]["prompt"], [picture(99, SIZES[0])])
    _, (seen,) = encoded(processor, [other])
    assert engine.generate(ids[:1], greedy, images=[seen]).completion_ids[0] != found[0]
