"""Requests with images beside requests whose steps verify drafts: the tokens of eager transformers."""

import copy

import pytest
import torch
from draft_head_oracle import PrefixedMtp
from thorough import thorough

from parity_sweep.tiny.images import image_model, inputs_of
from torchax_serve import EngineOptions, SamplingParams, serve

SIZES = EngineOptions(max_model_len=64, max_num_seqs=4, page_size=4, max_num_batched_tokens=32)
TEXT = [4, 5, 6, 7] * 3
NUM_TEXT = 50
"""New tokens behind it, among which each model repeats itself, so that there are drafts to look up."""


def eager_tokens(model, inputs, num_new):
    with torch.no_grad():
        options = {"max_new_tokens": num_new, "min_new_tokens": num_new, "do_sample": False}
        return model.generate(**copy.deepcopy(inputs), **options)[0, -num_new:].tolist()


@pytest.mark.parametrize(
    ("model_type", "method"),
    [("qwen2_5_vl", "ngram"), thorough("qwen3_5", "ngram"), thorough("qwen3_5", "mtp")],
)
def test_images_beside_drafts(model_type, method, tmp_path):
    model = image_model(model_type).eval()
    images = [inputs_of(model, model_type, index) for index in range(2)]
    wanted = [eager_tokens(model, one, 6) for one in images]
    ids = torch.tensor([TEXT])
    wanted.append(eager_tokens(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, NUM_TEXT))
    config = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    source = PrefixedMtp(model).save(tmp_path / "model") if method == "mtp" else model
    with serve(source, engine=SIZES, speculative_config=config) as served:
        served.engine.check_integrity = True
        params = [SamplingParams(max_new_tokens=num, min_new_tokens=num, temperature=0.0) for num in (6, 6, NUM_TEXT)]
        streams = [served.iter_tokens((), inputs=one, params=params[0]) for one in images]
        streams.append(served.iter_tokens(TEXT, params=params[2]))
        first = [list(stream) for stream in streams]
        # Its pages are those of the first request, with the keys of a head as well.
        again = list(served.iter_tokens((), inputs=images[0], params=params[0]))
        assert [*first, again] == [*wanted, wanted[0]]
        assert served.stats().scheduler.num_draft_tokens > 0
        assert served._single_engine is None
