"""Tokens of an image that see each other in some layers (Gemma 4), packed, beside eager PyTorch."""

import copy

import pytest
import torch
from transformers.models.gemma4 import modeling_gemma4

from model_adapters import quirks
from model_adapters.quirks.quirk import Quirk
from parity_sweep.check_images import options_of
from parity_sweep.tiny import image_overrides
from parity_sweep.tiny.images import image_model, inputs_of
from torchax_serve import serve
from torchax_serve.generation.media_requests import media_request

KIND = "gemma4"


@pytest.fixture(scope="module")
def asked():
    """A model, a prompt with an image, and two tokens.

    The first one is likelier, and the second one if tokens of an image saw each other in all layers.
    """
    patched = pytest.MonkeyPatch()
    text = {"use_bidirectional_attention": "vision", "num_kv_shared_layers": 0}
    own = image_overrides.CONFIGS[KIND]
    patched.setitem(image_overrides.CONFIGS, KIND, own | {"text_config": text})
    model, generator = image_model(KIND, 0), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.6, generator=generator)
    inputs, in_windows = inputs_of(model, KIND, 0), modeling_gemma4.create_masks_for_vision_model

    def in_all_layers(**given):
        config = copy.deepcopy(given["config"])
        config.sliding_window = 1000
        return in_windows(**given) | {"full_attention": in_windows(**given | {"config": config})["sliding_attention"]}

    with torch.no_grad():
        right = model(**copy.deepcopy(inputs)).logits[0, -1]
        patched.setattr(modeling_gemma4, "create_masks_for_vision_model", in_all_layers)
        wrong = model(**copy.deepcopy(inputs)).logits[0, -1]
    patched.undo()
    gaps = torch.minimum(right[:, None] - right, wrong - wrong[:, None])
    assert gaps.max() > 0.01
    return model, inputs, divmod(int(gaps.argmax()), len(right))


def next_token(model, inputs, tokens):
    with serve(copy.deepcopy(model), engine=options_of([inputs])) as served:
        config = copy.deepcopy(served.generation_config)
        others = [token for token in range(model.config.text_config.vocab_size) if token not in tokens]
        config.update(max_new_tokens=1, min_new_tokens=1, do_sample=False, suppress_tokens=others)
        (found,) = served.iter_tokens(generation_config=config, prompt_ids=(), inputs=inputs)
        of_engine = media_request(served.torch_model, lambda: served.engine, inputs, config, None, 0)
        return found, of_engine if isinstance(of_engine, str) else None


def test_layers_without_a_window_stay_causal(asked):
    model, inputs, tokens = asked
    assert next_token(model, inputs, tokens) == (tokens[0], None)


def test_a_model_whose_layers_differ_unknown_to_us_is_not_packed(asked, monkeypatch):
    model, inputs, tokens = asked
    monkeypatch.setattr(quirks, "of", lambda module: Quirk())
    assert next_token(model, inputs, tokens) == (tokens[0], "its layers differ in what the tokens of an image see")
