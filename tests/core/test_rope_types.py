"""Every type of rotary embeddings against eager transformers, on both sides of the length where frequencies change."""

import pytest
import torch
import transformers
from cache_name import CACHE
from rope_models import COMPUTED_ANEW, LENS, NUM_NEW, answers, left_padded, prompt, rope_model
from thorough import thorough
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model_adapters.errors import InvalidArgumentError
from model_adapters.program.position_limits import has_end, max_positions
from parity_sweep.tiny.rope_types import BORDER, KINDS, LEGACY, LENGTH_DEPENDENT, MAX_POSITIONS, with_rope
from torchax_serve import to_jax

BY_LENGTH = [
    ("llama", "longrope"),
    thorough("llama", "dynamic"),
    ("gemma3_text", "dynamic"),  # by kind of layer
    thorough("phi3", "longrope"),
    thorough("phimoe", "longrope"),
]


def test_every_type_of_transformers_is_known():
    assert {kind.partition("_")[0] for kind in KINDS} == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LENGTH_DEPENDENT])
def test_frequencies_of_every_type_are_those_of_pytorch(kind):
    model, ids = to_jax(rope_model("llama", kind)), prompt(LENS[-1])
    got = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False)
    assert got[:, ids.shape[1] :].tolist() == answers("llama", kind, ids).tolist()


@pytest.mark.parametrize(("family", "kind"), BY_LENGTH)
def test_frequencies_are_those_of_the_length(family, kind):
    model = to_jax(rope_model(family, kind))
    given = [(prompt(length), None) for length in (*LENS[::-1], LENS[0])]  # a short one behind a long one, too
    given += [left_padded([prompt(LENS[0]), prompt(length)]) for length in LENS[1:]]
    for ids, mask in given:
        mask = torch.ones_like(ids) if mask is None else mask
        got = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False)
        assert got[:, ids.shape[1] :].tolist() == answers(family, kind, ids, mask).tolist()


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_padding_of_a_program_is_no_length(kind):
    ids = prompt(BORDER - 1)  # which a program pads to more than the border
    with torch.no_grad():
        expected = rope_model("llama", kind)(ids).logits
    torch.testing.assert_close(to_jax(rope_model("llama", kind))(ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_what_a_model_has_kept_of_calls_in_pytorch_is_not_used(kind):
    ids, used = prompt(LENS[0]), rope_model("llama", kind)
    with torch.no_grad():
        used(prompt(LENS[-1]))
        expected = rope_model("llama", kind)(ids).logits
    torch.testing.assert_close(to_jax(used)(ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_a_forward_behind_a_cache_leaves_what_is_in_it(kind):
    ids = prompt(BORDER + 6)

    def logits(model):
        first = model(ids[:, :10], use_cache=True)
        return model(ids[:, 10:], **{CACHE: first[CACHE]}).logits

    with torch.no_grad():
        expected = logits(rope_model("llama", kind))
    torch.testing.assert_close(logits(to_jax(rope_model("llama", kind))), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "kind"), [("phi3", "longrope"), ("llama", "dynamic")])
def test_beams_cross_the_border(family, kind):
    ids = prompt(LENS[1])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    given = {"use_cache": False} if (family, kind) in COMPUTED_ANEW else {}
    expected = rope_model(family, kind).generate(ids, **options, **given)
    assert to_jax(rope_model(family, kind)).generate(ids, **options, **given).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_an_end_where_a_type_does_not_go_beyond(kind):
    config = with_rope(transformers.LlamaConfig(hidden_size=32, num_attention_heads=4), kind)
    assert max_positions(config) == MAX_POSITIONS
    assert has_end(config) == (kind == "proportional")


@pytest.mark.parametrize("kind", LEGACY)
def test_older_keys_say_the_same(kind):
    config = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4)
    old, new = with_rope(config, kind, legacy=True), with_rope(config, kind)
    assert (max_positions(old), has_end(old)) == (max_positions(new), has_end(new)) == (MAX_POSITIONS, False)
    model = transformers.LlamaForCausalLM(old.__class__(**{**old.to_dict(), "num_hidden_layers": 1, "vocab_size": 97}))
    assert (to_jax(model)._jax_runtime.program.rope is not None) == (kind in LENGTH_DEPENDENT)


def test_plain_rotary_embeddings_and_tables_have_an_end():
    for config in (transformers.LlamaConfig(max_position_embeddings=64), transformers.GPT2Config(n_positions=64)):
        assert (max_positions(config), has_end(config)) == (64, True)
    hunyuan = {"rope_type": "dynamic", "factor": 1.0, "alpha": 8.0, "rope_theta": 100.0}
    assert max_positions(transformers.LlamaConfig(max_position_embeddings=64, rope_parameters=hunyuan)) == 512
    model = to_jax(rope_model("llama", "proportional"))
    with pytest.raises(InvalidArgumentError, match="at most 96 tokens, the positions this model has, got 97"):
        model.generate(torch.ones(1, 97, dtype=torch.long), max_new_tokens=1)
