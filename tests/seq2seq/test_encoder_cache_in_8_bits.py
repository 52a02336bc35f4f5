"""Caches in 8 bits of models with an encoder, beside transformers over keys and values that numpy has rounded."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cache_name import CACHE
from test_engine_seq2seq import NEW, OPTIONS, START, VOCAB_SIZE, alone, request, sources, tiny
from transformers import EncoderDecoderCache
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from model_adapters.device_arrays import to_device
from torchax_serve import to_jax
from torchax_serve.engine.factory import build_engine
from torchax_serve.executors.choice import choose_executor
from torchax_serve.kv_cache.memory import MemoryBudget
from torchax_serve.kv_cache.scaled_state import ScaledState
from torchax_serve.scheduler import PlanRow

LARGEST = {"int8": 127, "float8_e4m3fn": 448}
BOUND = 2e-3
"""Of a logit, as `tests/engine/test_cache_in_8_bits.py` has it: sums in another order move a number in thousands."""

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")


def rounded(numbers, scale, dtype):
    """Keys or values [1, heads, n, dim] in `dtype` by scales that broadcast to them, by numpy."""
    steps = np.clip(numbers.numpy() / scale, -LARGEST[dtype], LARGEST[dtype])
    steps = np.rint(steps) if dtype == "int8" else steps.astype(jnp.float8_e4m3fn).astype(np.float32)
    return torch.from_numpy((steps * scale).astype(np.float32))


def round_layers(layers, scales_of, dtype):
    for number, layer in enumerate(layers):
        for part, which in ((0, "keys"), (1, "values")):
            numbers = getattr(layer, which)
            setattr(layer, which, rounded(numbers, scales_of(number, part, numbers), dtype))


class StoredCache(DynamicCache):
    """transformers' own cache, in which a decode step finds its own token as it is stored, once `round_new` is set.

    Attention on pages reads all tokens there. In the first step, keys and values of new tokens come from the model's
    code, not yet rounded.
    """

    round_new = None  # numbers of a layer, its index and 0 for keys, 1 for values -> rounded numbers

    def update(self, keys, values, layer_idx, *args, **kwargs):
        if self.round_new:
            keys, values = (self.round_new(x, layer_idx, part) for part, x in enumerate((keys, values)))
        return super().update(keys, values, layer_idx, *args, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize(("model_type", "name", "dtype"), [("t5", "int8", "int8"), ("bart", "fp8", "float8_e4m3fn")])
def test_a_decoder_reads_rounded_keys_and_values_of_its_own_and_of_the_encoder(model_type, name, dtype):
    eager, runtime = tiny(model_type), to_jax(tiny(model_type))._jax_runtime
    layout = {"max_model_len": 40, "max_num_seqs": 4, "page_size": 8, "max_num_batched_tokens": 16}
    sizes = MemoryBudget(**layout, kv_cache_memory_bytes=1 << 20, max_encoder_len=48, kv_cache_dtype=name)
    executor = choose_executor(runtime, sizes).executor
    scales, (table,) = executor.cache._scales, executor.first_pages()
    source = sources()[1]
    executor.assign(0, tuple(source))
    hidden = eager.get_encoder()(input_ids=torch.tensor([source])).last_hidden_state
    given = {"encoder_outputs": BaseModelOutput(last_hidden_state=hidden), "attention_mask": torch.ones(1, len(source))}
    cache, whole = (EncoderDecoderCache(StoredCache(), DynamicCache()) for _ in range(2))

    def as_stored(numbers, layer, part):
        return rounded(numbers, scales[layer][part][:, None, None], dtype)

    for start, token in enumerate([START, 9, 17, 33, 5]):
        row = PlanRow(0, 0, start, 1, (token,), True)
        found = np.asarray(executor.run([row], (table,), to_device(np.zeros(4), np.int32)))[0]
        ids = torch.tensor([[token]])
        expected, exact = (
            eager(decoder_input_ids=ids, **given, **{CACHE: each}).logits[0, -1].numpy() for each in (cache, whole)
        )
        np.testing.assert_allclose(found, expected, atol=BOUND)
        round_layers(cache.self_attention_cache.layers, lambda n, part, _: scales[n][part][:, None, None], dtype)
        if start == 0:  # later steps do not write these again

            def exact_scale(number, part, numbers):
                return numbers.abs().amax((2, 3), True).numpy() / LARGEST[dtype]

            round_layers(cache.cross_attention_cache.layers, exact_scale, dtype)
            cache.self_attention_cache.round_new = as_stored
    assert np.abs(expected - exact).max() > 5 * BOUND  # it is rounded
    states = executor.cache.states
    assert states and all(isinstance(state, ScaledState) for state in states)
    assert {str(state.numbers.dtype) for state in states} == {dtype}
    assert executor.cache.state_bytes == 5 * 4 * 4 * (48 * 8 + 4)  # slots, leaves, heads; a byte a number and a scale


def test_requests_side_by_side_have_the_tokens_of_single_ones():
    options = {**vars(OPTIONS), "kv_cache_dtype": "int8"}
    engine = build_engine(to_jax(tiny("t5"))._jax_runtime, type(OPTIONS)(**options))
    try:
        singly = [engine.submit(request(source)).result() for source in sources()]
        handles = [engine.submit(request(source)) for source in sources()]
        assert [handle.result() for handle in handles] == singly
        assert len({token for row in singly for token in row}) > 6
    finally:
        engine.close()
    first = [row[0] for row in singly]  # computed before anything was rounded
    assert first == [row[0] for row in alone("t5", sources())]
    assert all(len(row) == NEW and max(row) < VOCAB_SIZE for row in singly)
