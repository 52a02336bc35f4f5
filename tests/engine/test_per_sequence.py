"""The per-sequence executor: models that cannot be packed give each request the tokens that transformers gives it."""

import dataclasses
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from engine_requests import engine_request
from thorough import except_for
from transformers.models.mamba import modeling_mamba
from weights import draw_matrices

from model_adapters import quirks
from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.errors import InvalidArgumentError, OutOfMemoryError, UnsupportedModelError
from model_adapters.quirks import mamba
from model_adapters.quirks.quirk import Quirk
from parity_sweep.tiny.config import tiny_config
from torchax_serve import serve, to_jax
from torchax_serve.engine.factory import build_engine
from torchax_serve.engine.options import EngineOptions
from torchax_serve.executors import choice
from torchax_serve.executors.per_sequence import buckets as per_sequence_buckets
from torchax_serve.executors.per_sequence import chunked_prefill_probe
from torchax_serve.executors.per_sequence.factory import per_sequence_executor
from torchax_serve.executors.per_sequence.forward import SequenceForward
from torchax_serve.kv_cache import cache_layout, memory
from torchax_serve.kv_cache.pools import PagedLayerSpec
from torchax_serve.kv_cache.slot_states import gather, scatter
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.scheduler import PlanRow

VOCAB_SIZE = 61
NEW = 14
OPTIONS = EngineOptions(
    max_model_len=56, max_num_seqs=4, page_size=4, max_num_batched_tokens=20, kv_cache_memory_bytes=1
)

MODELS = {
    "bloom": {"n_layer": 2, "n_head": 4},
    # attends past transformers' interface, and counts its positions by itself
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    # its scan is a Python loop over tokens
    "mamba": {"state_size": 4, "num_hidden_layers": 1},
    # attention and a recurrence in each layer
    "falcon_h1": {
        "num_hidden_layers": 1,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 4,
        "mamba_chunk_size": 8,
        "head_dim": 8,
    },
    # a convolution in one layer, attention in another, and experts, whose products vmap must follow
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "recurrent_gemma": {"lru_width": 32, "num_hidden_layers": 3},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": 128,
    },
}
RECURRENT = {"mamba", "falcon_h1", "lfm2_moe"}


def tiny(model_type):
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.AutoConfig.for_model(model_type, **{**common, **MODELS.get(model_type, {})})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw_matrices(model, std=0.2)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def runtime_of(model_type):
    return to_jax(tiny(model_type))._jax_runtime


def scarce(runtime, num_pages=16):
    """Options with room for one long request and a bit: others must make room."""
    layout = SequenceForward(runtime).layout()
    state_bytes = sum(row.num_bytes for row in layout.rows) * (OPTIONS.max_num_seqs + 1)
    page_bytes = sum(shape.page_bytes(OPTIONS.page_size) for shape in layout.pages)
    return dataclasses.replace(OPTIONS, kv_cache_memory_bytes=state_bytes + num_pages * page_bytes + 1)


def prompts():
    generator = torch.Generator().manual_seed(3)
    lengths = [5, 13, 30, 1, 8, 16, 17, 40, 3, 9, 25, 31]
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def answers(engine, ids, runtime, params=None):
    params = params or SamplingParams()
    config = params.merged_into(transformers.GenerationConfig(max_new_tokens=NEW))
    handles = [engine.submit(engine_request(prompt, config, params, seed=0)) for prompt in ids]
    return [list(handle.result()) for handle in handles]


def alone(model, ids):
    with torch.no_grad():
        return [
            model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
            for prompt in ids
        ]


def prompt_logprobs(engine, prompt, runtime):
    params = SamplingParams(prompt_logprobs=0)
    config = transformers.GenerationConfig(max_new_tokens=2)
    request = engine_request(prompt, config, params, seed=0)
    found = next(new.prompt_logprobs for new in engine.submit(request) if new.prompt_logprobs is not None)
    assert found[0] is None
    return [entry.logprob for entry in found[1:]]


def refuse_packed(monkeypatch):
    """Lets no model run packed, as with drafts or on a mesh."""

    def refuse(runtime, sizes):
        raise NotPackableError("tested")

    monkeypatch.setattr(choice, "packed_executor", refuse)


# gpt_neo counts from the end of the keys, so that its cache must lean.
@pytest.mark.parametrize(
    "model_type", except_for(["mamba", "gpt_neo"], ["bloom", "gptj", "mamba", "falcon_h1", "lfm2_moe", "gpt_neo"])
)
def test_each_request_has_the_tokens_it_has_alone(model_type, monkeypatch):
    refuse_packed(monkeypatch)
    runtime = runtime_of(model_type)
    engine = build_engine(runtime, scarce(runtime))
    engine.check_integrity = True
    ids = prompts()
    try:
        first = answers(engine, ids, runtime)
        num_programs = engine.stats().num_programs
        again = answers(engine, ids[:4], runtime)
        stats = engine.stats()
        if model_type == "mamba":  # from the beginning in blocks, and in another chunk
            logprobs = prompt_logprobs(engine, ids[2][:20], runtime)
    finally:
        engine.close()
    expected = alone(tiny(model_type), ids)
    assert first == expected
    assert again == expected[:4]
    assert len({tuple(answer) for answer in expected}) > 6  # the test can tell requests apart
    assert stats.num_programs <= num_programs + 2  # chance decides which buckets the first round has met
    if model_type != "mamba":
        assert stats.scheduler.num_preemptions > 0
        assert [group.num_used for group in stats.scheduler.pages] == [0]
    assert (stats.scheduler.num_hit_tokens == 0) is (model_type in RECURRENT)
    if model_type == "mamba":
        with torch.no_grad():
            scores = tiny("mamba")(torch.tensor([ids[2][:20]])).logits[0].log_softmax(-1)
        wanted = [float(scores[i, token]) for i, token in enumerate(ids[2][1:20])]
        np.testing.assert_allclose(logprobs, wanted, rtol=1e-4, atol=1e-4)


def test_rows_one_after_the_other_give_the_same(monkeypatch):
    monkeypatch.setattr(SequenceForward, "_can_vectorise", lambda self, layout: False)
    monkeypatch.setattr(per_sequence_buckets, "MAX_GATHERED_LEN", 600)  # two programs of rows in a step
    runtime = runtime_of("bloom")
    engine = build_engine(runtime, dataclasses.replace(OPTIONS, kv_cache_memory_bytes=None))
    engine.check_integrity = True
    ids = prompts()[:6]
    try:
        assert answers(engine, ids, runtime) == alone(tiny("bloom"), ids)
    finally:
        engine.close()


def test_token_by_token_gives_the_same(monkeypatch):
    refuse_packed(monkeypatch)
    found = SequenceForward.layout
    monkeypatch.setattr(SequenceForward, "layout", lambda self: dataclasses.replace(found(self), block_len=1))
    runtime = runtime_of("lfm2_moe")
    engine = build_engine(runtime, scarce(runtime))
    ids = prompts()[1:2]
    try:
        assert answers(engine, ids, runtime) == alone(tiny("lfm2_moe"), ids)
    finally:
        engine.close()


def test_loops_over_tokens_are_cut_into_blocks(monkeypatch):
    for model_type in ("mamba", "lfm2_moe"):  # a recurrence that is one loop on the device; none
        assert SequenceForward(runtime_of(model_type)).layout().block_len == cache_layout.UNBOUNDED
    for name in mamba.QUIRK.functions:  # Python's own loop, as in code without a quirk
        monkeypatch.setattr(modeling_mamba, name, inspect.unwrap(getattr(modeling_mamba, name)))
    assert SequenceForward(runtime_of("mamba")).layout().block_len < 16


def test_many_rows_are_split_by_length(monkeypatch):
    """Logits of rows in several programs, and those of a chunk behind them, are at their rows' places."""
    monkeypatch.setattr(per_sequence_buckets, "MAX_GATHERED_LEN", 64)
    monkeypatch.setattr(per_sequence_buckets, "SMALLEST_GATHER_LEN", 8)
    runtime = runtime_of("bloom")
    sizes = memory.MemoryBudget(
        max_model_len=56, max_num_seqs=6, page_size=8, max_num_batched_tokens=32, kv_cache_memory_bytes=1 << 20
    )
    model = per_sequence_executor(runtime, sizes, "tested").executor
    table = np.arange(1, 43, dtype=np.int32).reshape(6, 7)
    lengths = [3, 20, 9, 33, 4, 12]
    generator = np.random.default_rng(1)
    ids = [tuple(generator.integers(1, VOCAB_SIZE, length + 1).tolist()) for length in lengths]
    last = jnp.asarray([prompt[-1] for prompt in ids], jnp.int32)
    for slot, prompt in enumerate(ids[:5]):
        for start in range(0, lengths[slot], 16):
            chunk = prompt[:-1][start : start + 16]
            model.run([PlanRow(slot, slot, start, len(chunk), chunk, True)], (table,), last)
    rows = [PlanRow(slot, slot, lengths[slot], 1, None, True) for slot in range(5)]
    rows.append(PlanRow(5, 5, 0, 13, ids[5], True))
    assert len(model._splitter.of(rows[:5], 0, False)) > 1
    logits = np.asarray(model.run(rows, (table,), last))
    everything = np.asarray(
        model._run_rows(rows, (table,), last, 0, all_logits=True)
    )  # decodes the same tokens once more
    with torch.no_grad():
        expected = [tiny("bloom")(torch.tensor([prompt])).logits[0].numpy() for prompt in ids]
    for row in range(6):
        np.testing.assert_allclose(logits[row], expected[row][-1], rtol=1e-4, atol=1e-4)
    for row in range(5):
        np.testing.assert_allclose(everything[row], expected[row][-1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(everything[5:18], expected[5], rtol=1e-4, atol=1e-4)


def test_pages_are_gathered_and_scattered():
    generator = np.random.default_rng(0)
    pool = generator.normal(size=(7, 2, 4, 3)).astype(np.float32)
    spec = PagedLayerSpec(2, 3, np.dtype(np.float32), None)
    pool[6] = np.nan  # what another request has left
    table = np.array([[3, 5, 6], [2, 0, 0]], np.int32)
    starts, lens = np.array([6, 1], np.int32), np.array([3, 1], np.int32)
    dense = np.asarray(gather(jnp.asarray(pool), jnp.asarray(table), jnp.asarray(starts), spec))
    assert dense.shape == (2, 1, 2, 12, 3)
    for row in range(2):
        for position in range(12):
            page = pool[table[row, position // 4], :, position % 4]
            expected = page if position < starts[row] else np.zeros_like(page)
            np.testing.assert_array_equal(dense[row, 0, :, position], expected)
    new = generator.normal(size=(2, 3, 2, 3)).astype(np.float32)
    expected = pool.copy()
    expected[5, :, 2], expected[5, :, 3], expected[6, :, 0] = new[0]
    expected[2, :, 1] = new[1, 0]
    step = jax.jit(partial(scatter, spec=spec), donate_argnums=0)
    given = jnp.asarray(pool.copy())
    scattered = step(given, jnp.asarray(table), jnp.asarray(starts), jnp.asarray(lens), jnp.asarray(new))
    np.testing.assert_array_equal(np.asarray(scattered), expected)
    assert given.is_deleted()


def test_a_model_that_keeps_its_state_in_itself_is_refused(monkeypatch):
    """RecurrentGemma's own code does."""
    monkeypatch.setattr(quirks, "_of_folder", lambda folder: Quirk())
    model = to_jax(tiny("recurrent_gemma"))
    why = r"keeps it in itself \(model\.layers\.0\.temporal_block\.\w+ and \d+ more\)"
    with pytest.raises(UnsupportedModelError, match=f"cannot be batched. Packed: .*Each by itself: .*{why}"):
        build_engine(model._jax_runtime, dataclasses.replace(OPTIONS, kv_cache_memory_bytes=1 << 20))
    for name, child in model.named_modules():
        left = [key for key, value in vars(child).items() if isinstance(value, torch.Tensor) and hasattr(value, "jax")]
        assert left == [], name


def test_a_model_whose_prompts_see_what_its_steps_have_dropped_is_refused():
    """Moshi masks nothing: its sliding cache does. Pages drop nothing, so that no other check sees it."""
    model = to_jax(transformers.AutoModelForCausalLM.from_config(tiny_config("moshi")).eval())
    why = "a prompt sees tokens that steps have dropped from its sliding cache"
    with pytest.raises(UnsupportedModelError, match=f"cannot be batched. Packed: .*Each by itself: {why}"):
        build_engine(model._jax_runtime, dataclasses.replace(OPTIONS, kv_cache_memory_bytes=1 << 20))


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "per-sequence"])
def test_states_that_do_not_fit_are_refused(is_packed, monkeypatch):
    if not is_packed:
        refuse_packed(monkeypatch)
    with pytest.raises(
        OutOfMemoryError, match=r"states of 4 requests, \d+ bytes, got 1 bytes; raise kv_cache_memory_bytes"
    ):
        build_engine(runtime_of("mamba"), OPTIONS)


class Pretender:
    """Logits that are a sum over tokens, or not quite: with `forgets`, chunks behind the first lose it."""

    sources = None

    def __init__(self, forgets):
        self.forgets, self.total = forgets, 0.0

    def first_pages(self):
        return ()

    def run(self, rows, tables, last_tokens):
        row = rows[0]
        ids = [int(last_tokens[0])] if row.is_decode else list(row.token_ids)
        kind = "token" if row.is_decode else "chunk" if row.num_tokens > 1 else "one"
        if row.context_len == 0 or kind in self.forgets:
            self.total = 0.0
        self.total += float(sum(ids))
        return jnp.sin(jnp.arange(8.0) * self.total)[None]


def test_trial_finds_how_a_model_continues():
    known = {"num_slots": 1, "vocab_size": 50, "is_float32": True}

    def make(forgets, block_len):
        return Pretender(forgets if block_len > 1 else forgets - {"chunk"})

    def find(*forgets):
        return chunked_prefill_probe.find_chunk_len(lambda block_len: make(set(forgets), block_len), 16, **known)

    assert find() == 16
    assert find("chunk") == 1
    with pytest.raises(UnsupportedModelError, match="one forward and steps on a cache"):
        find("token")


TABLES_OF_72 = {
    "mpt": transformers.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=VOCAB_SIZE, max_seq_len=72),
    "gpt_neo": transformers.GPTNeoConfig(
        **{**MODELS["gpt_neo"], "max_position_embeddings": 72},
        hidden_size=32,
        vocab_size=VOCAB_SIZE,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", TABLES_OF_72)
def test_a_table_of_distances_ends_where_pages_do_not(tmp_path, model_type):
    """MPT has no more biases than its ``max_seq_len``, GPT-Neo no more masks than its positions; a cache is made of
    whole pages, and may be wider.
    """
    torch.manual_seed(0)
    eager = transformers.AutoModelForCausalLM.from_config(TABLES_OF_72[model_type], attn_implementation="eager").eval()
    draw_matrices(eager, std=0.2)
    eager.generation_config.pad_token_id, eager.generation_config.eos_token_id = 0, None
    eager.save_pretrained(tmp_path)
    ids = [*prompts()[:3], [7] * (72 - NEW)]
    expected = alone(eager, ids)
    with serve(tmp_path, dtype="float32") as served:
        found = served.generate_batch(ids, SamplingParams(max_new_tokens=NEW, do_sample=False))
        assert [list(each.token_ids) for each in found] == expected
        last = torch.tensor(ids[-1:])
        found_alone = served.generate(input_ids=last, max_new_tokens=NEW, do_sample=False)
        assert found_alone[0, last.shape[1] :].tolist() == expected[-1]
        too_long = torch.full((1, 73), 7)
        with pytest.raises(InvalidArgumentError, match=r"at most 72 tokens|from 0 to 71"):
            served(input_ids=too_long)
        with pytest.raises(InvalidArgumentError, match="at most 72 tokens"):
            served.generate(input_ids=too_long[:, 1:], max_new_tokens=8, do_sample=False)
