"""Run as a program, one of several hosts on this machine: a tiny model over the CPU devices of all of them.

``python host_checks.py ACTION HOST_ID COORDINATOR``; of the action, followers need the model alone. What the leader
finds out is printed. An action may be a type with sparse indexers. The environment sets JAX_NUM_CPU_DEVICES.
"""

import dataclasses
import os
import sys

import numpy as np
import torch
import transformers

from model_adapters.caches.packed_batch import ScaledPool
from model_adapters.errors import TorchaxServeError
from torchax_serve import EngineOptions, Hosts, follow, serve
from torchax_serve.engine.factory import build_engine
from torchax_serve.request_params import RequestParams
from torchax_serve.scheduler import Request

PROMPTS = [[5, 9, 17, 3], list(range(3, 40)), [8, 8, 2]]
ALWAYS = {"max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
DECODING = [
    transformers.GenerationConfig(**ALWAYS, do_sample=False),
    transformers.GenerationConfig(**ALWAYS, do_sample=True, temperature=1.2, top_k=20),
    transformers.GenerationConfig(**ALWAYS, do_sample=True, temperature=1.0),
]
OPTIONS = EngineOptions(max_model_len=64, max_num_seqs=4, page_size=8, max_num_batched_tokens=24)


def engine_request(prompt_ids, config, seed):
    return Request.of(prompt_ids, RequestParams.of_generation_config(config, seed=seed))


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 66,
    "num_hidden_layers": 2,
    "vocab_size": 61,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SPARSE = "deepseek_v32", "deepseek_v4", "qwen4_exp_text"


def config_of(action):
    """A model that runs packed, without recurrent states, with one, or with an indexer; or one that does not."""
    if action == "recurrent":
        return transformers.Lfm2Config(**SIZES | {"num_key_value_heads": 8}, layer_types=["conv", "full_attention"])
    if action in SPARSE:
        from test_sparse_indexers import SIZES as SPARSE_SIZES
        from test_sparse_indexers import TYPES

        heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
        return transformers.AutoConfig.for_model(action, **SPARSE_SIZES | heads | TYPES[action])
    if action == "per_sequence":
        return transformers.BloomConfig(vocab_size=61, hidden_size=64, n_layer=2, n_head=8)
    return transformers.LlamaConfig(**SIZES, head_dim=8)


def model_of(action="tokens", seed=0):
    torch.manual_seed(seed)
    config = config_of(action)
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def tokens_of(served):
    """Of requests side by side, one of which shares a page with another that has run, and of a `generate`."""
    streams = [served.iter_tokens(ids, config, seed=7) for ids, config in zip(PROMPTS, DECODING, strict=True)]
    rows = [list(stream) for stream in streams]
    rows.append(list(served.iter_tokens(PROMPTS[1][:-3], DECODING[0])))
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    return [*rows, *served.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0).tolist()]


def same_answers(served, action, answers):
    """Returns the tokens of `answers` of a model, which are those of the same on one device."""
    with serve(model_of(action), engine=OPTIONS) as alone:
        wanted = answers(alone)
    assert len({token for row in wanted for token in row}) > 6, wanted
    got = answers(served)
    assert got == wanted, f"{got} is not {wanted}"
    return got


def tokens(served):
    same_answers(served, "tokens", tokens_of)
    in_8_bits(served)
    with_drafts(served)
    refused(served)
    print("same tokens on", served.device_description)


def recurrent(served):
    """The same of a packed model with recurrent states, and of prefixes that are found in snapshots of these."""

    def answers(model):
        ids = [*range(3, 40)]
        rows = [ids[:30], [*ids[:28], 7], ids[:30], PROMPTS[0]]
        return [list(model.iter_tokens(each, DECODING[0])) for each in rows]

    same_answers(served, "recurrent", answers)
    assert served.stats().scheduler.num_hit_tokens > 0
    assert "per-sequence" not in served.engine.description
    for pool in served.engine._runner._cache.pools:
        assert pool.sharding.num_devices == 8, pool.sharding
    in_8_bits(served, "recurrent")
    with_drafts(served, "recurrent")
    print("same tokens", served.engine.description)


def sparse(served, action):
    """The same of a model whose attention goes to the tokens that an indexer takes."""

    def answers(model):
        requests = [engine_request(ids, config, seed=7) for ids, config in zip(PROMPTS, DECODING, strict=True)]
        rows = [handle.result() for handle in model.engine.submit_all(requests)]
        return [*rows, list(model.iter_tokens(PROMPTS[1][:-3], DECODING[0]))]

    same_answers(served, action, answers)
    assert served.stats().scheduler.num_hit_tokens > 0
    assert "not packed" not in served.engine.description
    print("same tokens", served.engine.description)


def per_sequence(served):
    """Requests side by side, whose pages lie on all hosts, have the tokens of one device."""

    def answers(model):
        rows = [prompt[:4] for prompt in PROMPTS[:2]]
        requests = [engine_request(ids, config, seed=7) for ids, config in zip(rows, DECODING, strict=False)]
        return [handle.result() for handle in model.engine.submit_all(requests)]

    got = same_answers(served, "per_sequence", answers)
    assert served.stats().num_steps < sum(map(len, got))  # rows side by side
    cache = served.engine._runner._cache
    assert cache.pools
    for array in cache.pools:
        assert array.sharding.num_devices == 8, array.sharding
    in_8_bits(served, "per_sequence")
    print("same tokens", served.engine.description)


def in_8_bits(served, action="tokens"):
    """A cache in int8, whose scales all hosts have computed, has the tokens of one device."""
    options = dataclasses.replace(OPTIONS, kv_cache_dtype="int8")
    rows, scales = [], []
    with serve(model_of(action)) as alone:
        for model in (alone, served):
            engine = build_engine(model._generator()._jax_runtime, options)
            requests = [engine_request(ids, DECODING[0], seed=0) for ids in (*PROMPTS, PROMPTS[1])]
            rows.append([handle.result() for handle in [engine.submit(each) for each in requests]])
            cache = engine._runner._cache
            assert {str(pool.pages.dtype) for pool in cache.pools if isinstance(pool, ScaledPool)} == {"int8"}
            scales.append(np.array(cache._scales))
            engine.close()
    # each device has a head, so that two heads are there four times
    np.testing.assert_allclose(scales[1], np.repeat(scales[0], 8 // scales[0].shape[2], axis=2), rtol=1e-5)
    assert rows[1] == rows[0], f"{rows[1]} is not {rows[0]}"


def with_drafts(served, action="tokens"):
    """Verify steps on all hosts have the tokens of one device without drafts, and accept what one device does."""
    options = dataclasses.replace(OPTIONS, speculative={"num_speculative_tokens": 3, "adaptive": False})
    rows, counts = [], []
    with serve(model_of(action)) as alone:
        for model, own in ((alone, OPTIONS), (alone, options), (served, options)):
            engine = build_engine(model._generator()._jax_runtime, own)
            asked = [[17, 4, 9, 33] * 5, [8, 8, 2] * 6, PROMPTS[0]]
            requests = [
                engine_request(ids, config, seed=3)
                for ids, config in zip(asked, (DECODING[0], DECODING[1], DECODING[0]), strict=True)
            ]
            rows.append([handle.result() for handle in engine.submit_all(requests)])
            stats = engine.stats().scheduler
            counts.append((stats.num_draft_tokens, stats.num_accepted_tokens))
            engine.close()
    assert rows[1] == rows[0] and rows[2] == rows[0], rows
    assert counts[2] == counts[1] and counts[1][action == "tokens"] > 0, counts  # some accepted, or some drafted
    try:
        head = {"method": "draft_model", "model": "any"}
        build_engine(served._generator()._jax_runtime, dataclasses.replace(OPTIONS, speculative=head))
    except TorchaxServeError as error:
        print("refused:", error)


def refused(served):
    """What several hosts cannot do is said, and ends nothing."""
    try:
        served.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=4, num_beams=2, pad_token_id=0)
    except TorchaxServeError as error:
        print("refused:", error)


def load(served):
    """Until somebody ends it."""
    while True:
        tokens_of(served)
        print("running", flush=True)


def tokens_and_load(served):
    """One after the other, by one start."""
    tokens(served)
    load(served)


def main():
    action, host_id, coordinator = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    hosts = Hosts(coordinator=coordinator, num_hosts=2, host_id=host_id, join_timeout_s=120, secret="a secret of these")
    try:
        if host_id:
            follow(model_of(action, int(os.environ.get("SEED", "0"))), hosts=hosts)
            print("the leader has closed")
            return
        with serve(model_of(action), hosts=hosts, engine=OPTIONS) as served:
            if action in SPARSE:
                sparse(served, action)
            else:
                globals()[action](served)
    except TorchaxServeError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
