"""Run as a program, with eight CPU devices: tiny models on meshes, against the same model on one device.

Each line of stdin is a call as JSON, ``["tokens", FAMILY, "MESH,MESH"]`` or another function below; what it finds is
printed, and a last line says whether it ended well. The environment sets JAX_NUM_CPU_DEVICES.
"""

import copy
import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import jax
import numpy as np
import test_recurrent_layers as recurrent
import test_sparse_indexers as sparse
import torch
import transformers
from engine_requests import engine_request
from head_checks import check_heads
from safetensors.numpy import save_file
from start_checks import check_bundles, check_starts
from task_head_checks import check_module, check_task_heads
from transformers.pytorch_utils import Conv1D
from weights import draw_matrices

from model_adapters.errors import TorchaxServeError
from model_adapters.loading import load_model
from model_adapters.loading.model_class import module_of
from model_adapters.ops.quantized_weight import QuantizedWeight
from model_adapters.program.packed_forward import forward_packed
from parity_sweep.tiny.images import image_model, inputs_of
from torchax_serve import EngineOptions, SamplingParams, serve
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.distributed.mesh import mesh_for
from torchax_serve.engine.weight_update import engines_in
from torchax_serve.executors.packed.probes import page_shapes
from torchax_serve.executors.step_inputs import PackedStepSpec
from torchax_serve.kv_cache.pools import CacheAllocation, PagedCache, PoolAllocator
from torchax_serve.planning.plan import PlanRequest, make_plan
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.scheduler import CacheGroup

SIZES = {"hidden_size": 32, "intermediate_size": 66, "num_hidden_layers": 2, "vocab_size": 61}
SIZES |= {"max_position_embeddings": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
# Sizes that divide by no mesh: 66 hidden units, 61 words, two heads of keys; one of seven query heads.
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, **HEADS, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: transformers.Qwen2Config(
        **{**SIZES, "hidden_size": 28}, num_attention_heads=7, num_key_value_heads=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, **HEADS),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, **HEADS, **ENDS, sliding_window=8, query_pre_attn_scalar=8
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, **HEADS, sliding_window=8),
    "gemma4_text": lambda: transformers.Gemma4TextConfig(  # whose last two layers have the keys of the first two
        **{**SIZES, "num_hidden_layers": 4},
        **HEADS,
        **ENDS,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        global_head_dim=16,
        sliding_window=8,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=61,
    ),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, **HEADS, **ENDS),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **HEADS, **ENDS, sliding_window=8, query_pre_attn_scalar=8),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SIZES, **HEADS, **QWEN_EXPERTS),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **HEADS, **QWEN_EXPERTS),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=128, **ENDS),
    "phi3": lambda: transformers.Phi3Config(
        **SIZES, **ENDS, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES, **ENDS, num_attention_heads=4),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=32,
        ffn_dim=66,
        num_hidden_layers=2,
        vocab_size=61,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=128,
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **HEADS, **EXPERTS),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, **HEADS, **EXPERTS, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SIZES, **MLA, **DEEPSEEK),
    "deepseek_v32": lambda: transformers.DeepseekV32Config(
        **SIZES, **MLA, **DEEPSEEK, index_topk=4, index_head_dim=16, index_n_heads=16
    ),
    "mamba": lambda: transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=61, state_size=4),
    "minimax": lambda: transformers.MiniMaxConfig(
        **SIZES, **HEADS, **EXPERTS, block_size=8, layer_types=["linear_attention", "full_attention"]
    ),
    "recurrent_gemma": lambda: transformers.RecurrentGemmaConfig(
        **SIZES | {"num_hidden_layers": 3}, **ENDS, num_attention_heads=4
    ),
    "zamba": lambda: transformers.ZambaConfig(
        **SIZES | {"num_hidden_layers": 3},
        **ENDS,
        num_attention_heads=4,
        num_key_value_heads=4,
        layers_block_type=["linear_attention", "hybrid", "hybrid"],
    ),
    "zaya": lambda: transformers.ZayaConfig(
        **SIZES, **HEADS, **ENDS, num_experts=4, moe_intermediate_size=16, router_hidden_size=16
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2),  # its own plan
    "bloom": lambda: transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=61),  # shapes alone
}
SIZES_OF_STATES = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4}
_INDEXED = ("deepseek_v4", "qwen4_exp_text", "glm_moe_dsa")
_RECURRENT = ("inkling2_text", "inkling2_loop_text", "qwen3_5_text", "kimi_linear", "olmo_hybrid")
_SPACES = ("mamba2", "nemotron_h", "granitemoehybrid", "lfm2", "zamba2", "jamba")
for _name in (*_INDEXED, *_RECURRENT, *_SPACES):
    _kinds = sparse if _name in sparse.TYPES else recurrent
    CONFIGS[_name] = functools.partial(
        transformers.AutoConfig.for_model, _name, **_kinds.SIZES | _kinds.TYPES[_name] | {"vocab_size": 61}
    )
for _name in ("inkling2_text", "inkling2_loop_text"):
    CONFIGS[_name].keywords["unpadded_vocab_size"] = 61
# What four devices divide: heads of a delta rule; heads of Mamba-2, whose two groups every device has.
DIVIDED = {"gated_delta": ("qwen3_5_text", {"linear_num_key_heads": 4}), "state_space": ("mamba2", {})}
DIVIDED |= {"key_heads": ("qwen3_next", {"linear_num_key_heads": 4}), "groups": ("bamba", {"mamba_n_groups": 4})}
_BLOCKS = {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "hybrid_layer_ids": [1, 2]}
_BLOCKS |= {"num_key_value_heads": 4, "use_shared_attention_adapter": True, "adapter_rank": 8}
DIVIDED |= {"shared_block": ("zamba2", _BLOCKS)}
for _name, (_type, _more) in DIVIDED.items():
    _sizes = recurrent.SIZES | recurrent.TYPES[_type] | _more | {"vocab_size": 61}
    CONFIGS[_name] = functools.partial(transformers.AutoConfig.for_model, _type, **_sizes)
CONFIGS["hybrid"] = lambda: transformers.FalconH1Config(**SIZES, **HEADS, **SIZES_OF_STATES, mamba_chunk_size=8)
PROMPTS = [np.random.default_rng(0).integers(3, 60, length).tolist() for length in (5, 9, 17)]
ALWAYS = {"max_new_tokens": 8, "min_new_tokens": 8}
DECODING = [
    transformers.GenerationConfig(**ALWAYS, do_sample=False),
    transformers.GenerationConfig(**ALWAYS, do_sample=True, temperature=1.0, top_k=0),
    transformers.GenerationConfig(**ALWAYS, do_sample=True, temperature=1.3, top_k=20),
]


def model_of(family):
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    draw_matrices(module, std=0.2)
    return module


def tokens_of(served):
    streams = [served.iter_tokens(ids, config, seed=7) for ids, config in zip(PROMPTS, DECODING, strict=True)]
    return [list(stream) for stream in streams]  # which run side by side


def tokens_together(served):
    """The same of requests that come at once, whose steps do not depend on time."""
    rows = [engine_request(*row, seed=7) for row in zip(PROMPTS, DECODING, strict=True)]
    return [handle.result() for handle in served.engine.submit_all(rows)]


def shape_of(mesh):
    """``2x4`` is data x model, ``1x2x4`` data x model x expert."""
    return dict(zip(("data", "model", "expert"), map(int, mesh.split("x")), strict=False))


def tokens(family, meshes, kv_cache_dtype=None):
    options = EngineOptions(max_model_len=64, max_num_seqs=4, kv_cache_dtype=kv_cache_dtype)
    with serve(model_of(family), engine=options) as single:
        wanted = tokens_of(single)
    assert len({token for row in wanted for token in row}) > 6, wanted
    for mesh in meshes.split(","):
        with serve(model_of(family), engine=options, mesh=shape_of(mesh)) as served:
            got = tokens_of(served)
            assert got == wanted, f"{family} {mesh}: {got} is not {wanted}"
            assert tokens_together(served) == wanted
            print("same tokens", family, mesh, served.engine.description)


def speculative(family, meshes, method):
    """Tokens of verify steps on meshes, those of plain steps on one device; and how many drafts were accepted."""
    options = EngineOptions(max_model_len=64, max_num_seqs=4, page_size=8, max_num_steps=4)
    config = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if method == "draft_model":
        config["model"] = model_of(family)
    prompts = [(prompt * 4)[:24] for prompt in PROMPTS]
    params = [
        SamplingParams(max_new_tokens=20, temperature=0.0, logprobs=1),
        SamplingParams(max_new_tokens=20, temperature=0.7, seed=1),
        SamplingParams(max_new_tokens=20, temperature=0.0, repetition_penalty=1.2),
    ]
    with serve(model_of(family), engine=options) as single:
        wanted = [answer.token_ids for answer in single.generate_batch(prompts, params)]
    for mesh in meshes.split(","):
        with serve(model_of(family), engine=options, mesh=shape_of(mesh), speculative_config=config) as served:
            got = [answer.token_ids for answer in served.generate_batch(prompts, params)]
            assert got == wanted, f"{family} {mesh}: {got} is not {wanted}"
            print("same tokens", family, mesh, "accepted", served.stats().scheduler.num_accepted_tokens)


def headed(kind, meshes):
    """Tokens and accepted drafts of draft heads on meshes, those of one device."""
    for mesh, drafted, accepted in check_heads(kind, [(mesh, shape_of(mesh)) for mesh in meshes.split(",")]):
        print("same tokens", kind, mesh, "drafted", drafted, "accepted", accepted)


def bundled(family, meshes):
    """Tokens of bundles on meshes, those of one device."""
    shapes = [(mesh, shape_of(mesh)) for mesh in meshes.split(",")]
    for mesh, num_hits in check_bundles(functools.partial(model_of, family), PROMPTS, shapes):
        print("same tokens", family, mesh, "hits", num_hits)


def started_again(family, meshes):
    """Tokens of second starts on meshes, those of one device; and programs that were not compiled again."""
    shapes = [(mesh, shape_of(mesh)) for mesh in meshes.split(",")]
    for mesh, num_read in check_starts(functools.partial(model_of, family), PROMPTS, shapes):
        print("same tokens", family, mesh, "read", num_read)


def offloaded(family, meshes):
    """Prompts of five pages on a device with nine, twice: prefixes of the first time come from host memory."""
    rng = np.random.default_rng(0)
    prompts = [[int(token) for token in rng.integers(3, 61, 40)] for _ in range(4)]
    greedy = [SamplingParams(max_new_tokens=4, temperature=0.0)]
    options = {"max_model_len": 64, "max_num_seqs": 1, "page_size": 8}

    def answers(served):
        return [served.generate_batch([prompt], greedy)[0].token_ids for prompt in prompts]

    with serve(model_of(family), engine=EngineOptions(**options)) as single:
        wanted, plan = answers(single), single.engine._runner._cache.plan
    num_bytes = 10 * sum(shape.page_bytes(plan.page_size) for shape in plan.shapes)
    for mesh in meshes.split(","):
        copies = max(1, shape_of(mesh)["model"] // HEADS["num_key_value_heads"])  # of each head of keys
        sizes = {"kv_cache_memory_bytes": copies * num_bytes, "kv_offloading_bytes": 4 * copies * num_bytes}
        engine = EngineOptions(**options, **sizes)
        with serve(model_of(family), engine=engine, mesh=shape_of(mesh)) as served:
            assert answers(served) == wanted
            assert answers(served) == wanted
            print("loaded", served.stats().scheduler.pages[0].num_loaded)


def new_weights(family, meshes):
    """Tokens after `set_weights`, on meshes that divide, pad or repeat parts of the weights."""
    options = EngineOptions(max_model_len=64, max_num_seqs=4)
    with serve(model_of(family), engine=options) as single:
        before = tokens_of(single)
        weights = {name: array.numpy() * 1.5 for name, array in single.state_dict().items()}
        single.set_weights(weights)
        wanted = tokens_of(single)
    assert wanted != before
    for mesh in meshes.split(","):
        with serve(model_of(family), engine=options, mesh=shape_of(mesh)) as served:
            assert tokens_together(served) == before
            for engine in engines_in(served.engine):
                engine._runner._background.wait()  # for programs that are compiled ahead
            programs = served.stats().num_programs
            served.set_weights(weights)
            assert tokens_together(served) == wanted, f"{family} {mesh}"
            assert served.stats().num_programs == programs
            print("same tokens", family, mesh)


def adapter_of(family, folder, seed):
    """Writes an adapter of all linear layers of the decoder, as peft does."""
    rng, tensors, model = np.random.default_rng(seed), {}, model_of(family)
    for name, part in model.get_decoder().named_modules(prefix=model.base_model_prefix):
        if isinstance(part, torch.nn.Linear | Conv1D):
            num_out, num_in = part.weight.shape if isinstance(part, torch.nn.Linear) else part.weight.shape[::-1]
            for kind, shape in (("A", (3, num_in)), ("B", (num_out, 3))):
                values = rng.standard_normal(shape).astype(np.float32) / 4
                tensors[f"base_model.model.{name}.lora_{kind}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6}))
    return folder


def adapters(family, meshes, drafts=None):
    """Tokens of requests with two adapters and with none, beside each other, on one device and on meshes.

    With a configuration of `drafts`, steps on meshes verify some.
    """
    options = EngineOptions(max_model_len=96, max_num_seqs=4)
    with tempfile.TemporaryDirectory() as root:
        folders = {name: adapter_of(family, Path(root, name), seed) for seed, name in enumerate(("x", "y"))}

        def rows(served):
            asked = [SamplingParams(adapter=name, max_new_tokens=8, temperature=0.0) for name in ("x", "y", None)]
            # With drafts, a prompt that has all tokens: whatever follows has been there.
            prompts = [list(range(3, 60)) if drafts else PROMPTS[1]] * 3
            return [answer.token_ids for answer in served.generate_batch(prompts, asked)]

        with serve(model_of(family), engine=options, adapters=folders) as single:
            wanted = rows(single)
        assert len(set(map(tuple, wanted))) == 3, wanted
        for mesh in meshes.split(","):
            on_mesh = {"mesh": shape_of(mesh), "adapters": folders, "speculative_config": drafts}
            with serve(model_of(family), engine=options, **on_mesh) as served:
                assert rows(served) == wanted, f"{family} {mesh}: {rows(served)} is not {wanted}"
                for engine in engines_in(served.engine):
                    engine._runner._background.wait()  # for programs that are compiled ahead
                programs = served.stats().num_programs
                served.unload_adapter("x")
                served.load_adapter("x", folders["x"])
                assert rows(served) == wanted
                assert drafts or served.stats().num_programs == programs
                # Whether one is accepted depends on the random weights, which differ from processor to processor.
                assert drafts is None or served.stats().scheduler.num_draft_tokens > 0
                print("same tokens", family, mesh)


def quantized(family, meshes, rules):
    """Tokens with quantized weights on meshes, and how much of its weights a device has."""
    options = EngineOptions(max_model_len=64, max_num_seqs=4)
    with serve(model_of(family), engine=options, quantization=rules) as single:
        wanted = tokens_of(single)
    assert len({token for row in wanted for token in row}) > 6, wanted
    for mesh in meshes.split(","):
        with serve(model_of(family), engine=options, mesh=shape_of(mesh), quantization=rules) as served:
            got = tokens_of(served)
            assert got == wanted, f"{family} {mesh}: {got} is not {wanted}"
            weights = served._runtimes[0].weights.values()
            stored = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
            for weight in stored:
                rows = weight.values.sharding.spec[-2]
                assert weight.scale.sharding.spec[-2] == rows, (weight.values.sharding, weight.scale.sharding)
                assert 8 * weight.values.nbytes == weight.scheme.bits * weight.size, weight.scheme  # 4 bits take 4
            divided = [weight for weight in stored if not weight.values.is_fully_replicated]
            print("same tokens", family, mesh, len(stored), len(divided))


def images(model_type, meshes):
    """Tokens of two prompts with an image each and of text, in one batch, on one device and on meshes."""
    model, options = image_model(model_type).eval(), EngineOptions(max_model_len=64, max_num_seqs=4)
    inputs = [inputs_of(model, model_type, index) for index in range(2)]

    def rows(served):
        config = copy.deepcopy(served.generation_config)
        config.update(**ALWAYS, do_sample=False)
        streams = [served.iter_tokens((), config, inputs=one) for one in inputs]
        streams.append(served.iter_tokens([4, 5, 6, 7], config))
        answers = [list(stream) for stream in streams]
        assert served._single_engine is None
        return answers

    with torch.no_grad():
        wanted = [model.generate(**copy.deepcopy(one), **ALWAYS, do_sample=False)[0, -8:].tolist() for one in inputs]
    for mesh in meshes.split(","):
        with serve(copy.deepcopy(model), engine=options, mesh=shape_of(mesh)) as served:
            got = rows(served)
            assert got[:2] == wanted, f"{model_type} {mesh}: {got} is not {wanted}"
            print("same tokens", model_type, mesh)


def states(family, degree):
    """How the states of recurrent layers lie, and the steps compiled while an engine that is warm answers."""
    compiled = []

    def listen(event, duration_secs, **about):
        if event.endswith("backend_compile_duration") and about.get("fun_name") in ("jit(packed)", "jit(decode_steps)"):
            compiled.append(event)

    options = EngineOptions(max_model_len=64, max_num_seqs=4)
    with serve(model_of(family), engine=options, mesh={"model": int(degree)}) as served:
        served.engine.warm_up()
        jax.monitoring.register_event_duration_secs_listener(listen)
        tokens_of(served)
        states = served.engine._runner._cache.pools  # a model without pages
        print(*sorted({str(state.sharding.spec) for state in states}), len(compiled))


def pools(family, degree):
    """Number of devices that pools lie on after requests."""
    options = EngineOptions(max_model_len=64, max_num_seqs=4)
    with serve(model_of(family), engine=options, mesh={"model": int(degree)}) as served:
        tokens_of(served)
        leaves = jax.tree.leaves(served.engine._runner._cache.pools)
        print(*{len(leaf.sharding.device_set) for leaf in leaves})


def donated(degree):
    """Number of devices of two results of one shape and dtype, of which the latter is a pool's new value."""
    mesh = jax.make_mesh((int(degree),), ("model",))
    function = CachedFunction(
        ExecutableCache(mesh=mesh),
        "a step",
        lambda weights, pool, other, *, spec: (other + 1, pool + other),
        donate={"pool": 1},
        is_pure=True,
    )
    pool = jax.device_put(np.arange(4, dtype=np.float32), jax.NamedSharding(mesh, jax.P()))
    logits, new_pool = function({}, pool, np.full(4, 2, np.float32), spec=None)
    assert pool.is_deleted()
    assert (logits.tolist(), new_pool.tolist()) == ([3] * 4, [2, 3, 4, 5])
    print(len(logits.sharding.device_set), len(new_pool.sharding.device_set))


def encoder_cache(meshes, kv_cache_dtype):
    """Tokens of requests side by side with an encoder; and how its keys, values and their scales are divided."""
    sizes = {"d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "d_ff": 48, "vocab_size": 61}
    torch.manual_seed(0)
    module = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=1)).eval()
    draw_matrices(module, std=0.4)
    options = EngineOptions(max_model_len=16, max_num_seqs=4, max_encoder_len=32, kv_cache_dtype=kv_cache_dtype)
    decoding = {**ALWAYS, "do_sample": False}

    def answers(mesh):
        with serve(copy.deepcopy(module), engine=options, mesh=mesh) as served:
            config = transformers.GenerationConfig(**decoding)
            rows = [engine_request([1], config, None, seed=0, source_ids=ids) for ids in PROMPTS]
            found = [handle.result() for handle in served.engine.submit_all(rows)]
            return found, served.engine._runner._cache

    wanted, _ = answers(None)
    assert len({token for row in wanted for token in row}) > 6, wanted
    for mesh in meshes.split(","):
        got, cache = answers(shape_of(mesh))
        assert got == wanted, f"{mesh}: {got} is not {wanted}"
        arrays = jax.tree.leaves(cache.states)
        where = {f"{array.dtype} {getattr(array.sharding, 'spec', 'replicated')}" for array in arrays}
        print(mesh, *sorted(where), sep="; ")


def exchange(family, degree):
    """What a compiled decode step exchanges, from the plan."""
    report = make_plan(module_on_meta(family), family, PlanRequest(topology=f"cpu:{degree}", **PLAN))
    decode = report.programs[0]
    assert decode.name == "decode"
    print({kind: number for kind, (number, _) in decode.collectives.items()})


def work(family, degree):
    """Operations and bytes of weights of a device where experts are divided and where one device has them all."""
    config = CONFIGS[family]()
    config.intermediate_size = 1024  # of an expert
    module = module_of(transformers.AutoModelForCausalLM._model_mapping[type(config)], config, torch.float32)
    found = []
    for number in (int(degree), 1):  # the larger first: a process keeps the devices that it begins with
        request = PlanRequest(topology=f"cpu:{number}", mesh=f"expert={number}", **PLAN)
        report = make_plan(module, family, request)
        found.append({program.name: (program.flops, report.weights_bytes) for program in report.programs})
    print(found)


def long_prompt(family, degree):
    """A prompt in one step that is divided by tokens: its answer beside one device's, and what the steps exchange."""
    CONFIGS["long"] = lambda: CONFIGS[family]().__class__(**{**SIZES, **HEADS, "max_position_embeddings": 512})
    request = PlanRequest(
        topology=f"cpu:{degree}", max_model_len=512, max_num_seqs=4, page_size=16, prefill_lens=(64, 256)
    )
    report = make_plan(module_on_meta("long"), "long", request)
    print({f"{p.name} {p.num_tokens}": {kind: n for kind, (n, _) in p.collectives.items()} for p in report.programs})
    options = EngineOptions(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=256)
    ids = np.random.default_rng(1).integers(3, 60, 250).tolist()
    answers = []
    for mesh in ({"model": int(degree)}, None):
        with serve(model_of("long"), engine=options, mesh=mesh) as served:
            answers.append(list(served.iter_tokens(ids, DECODING[0])))
            if mesh is not None:
                print(served._runtimes[0].program.sharding.min_tokens_to_shard)
    assert answers[0] == answers[1], answers
    assert len(set(answers[0])) > 2, answers


PLAN = {"max_model_len": 64, "max_num_seqs": 4, "page_size": 16, "prefill_lens": (32,)}


def module_on_meta(family):
    config = CONFIGS[family]()
    return module_of(transformers.AutoModelForCausalLM._model_mapping[type(config)], config, torch.float32)


def bounds(family, degree):
    """Bytes of the bounds of a decode step and of a prompt, with four slots and with eight."""
    for num_slots in (4, 8):
        request = PlanRequest(topology=f"cpu:{degree}", **PLAN | {"max_num_seqs": num_slots})
        print(*(bound.bytes_read for bound in make_plan(module_on_meta(family), family, request).bounds))


def memory(family, degree):
    """The plan's bytes beside those of the same steps with real arguments."""
    report = make_plan(module_on_meta(family), family, PlanRequest(topology=f"cpu:{degree}", **PLAN))
    loaded = load_model(model_of(family), mesh=mesh_for(None, int(degree)))
    runtime = ModelRuntime(loaded.module, loaded.weights, sharding=loaded.sharding)
    num_pages = 4 * 4 + 1
    groups = tuple(CacheGroup(str(w), w, num_pages) for w in dict.fromkeys(s.window for s in page_shapes(runtime)))
    assert [group.window for group in groups] == [None]
    cache = PagedCache(
        CacheAllocation(page_shapes(runtime), groups, 16, 64), PoolAllocator(loaded.sharding.pool_sharding)
    )
    everywhere = loaded.sharding.replicated()
    for program, num_tokens, is_decode in zip(report.programs, (4, 32), (True, False), strict=True):

        def integers(*shape):
            return jax.device_put(np.zeros(shape, np.int32), everywhere)

        layout = dataclasses.replace(cache.layout, is_decode=is_decode)
        spec = PackedStepSpec(num_tokens, 4, 4, layout, batch_invariant=False)  # one array of integers, as the engine

        def step(weights, pools, last_tokens, numbers, spec=spec):
            batch = spec.unpack(numbers, last_tokens)
            logits, pools = forward_packed(runtime.program, weights, pools, batch, spec.layout)
            return logits.argmax(-1), pools

        unique = {id(array): name for name, array in reversed(list(loaded.weights.items()))}
        owners = {name: unique[id(array)] for name, array in loaded.weights.items()}

        def owned(weights, *args, owners=owners, step=step):
            return step({name: weights[owner] for name, owner in owners.items()}, *args)

        weights = {name: array for name, array in loaded.weights.items() if owners[name] == name}
        real = (
            jax.jit(owned, donate_argnums=1)
            .lower(weights, cache.pools, integers(4), integers(spec.size))
            .compile()
            .memory_analysis()
        )
        took = real.temp_size_in_bytes + real.output_size_in_bytes - real.alias_size_in_bytes
        print(program.argument_bytes, real.argument_size_in_bytes, program.temporary_bytes, took)
    held = sum(array.addressable_shards[0].data.nbytes for array in weights.values())
    print(report.weights_bytes, held)


def load(folder):
    """Loads a checkpoint of 0.2 GB; prints the host's peak, the checkpoint, its largest tensor and a device's share."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=512,
        num_hidden_layers=6,
        vocab_size=8000,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        dtype="float32",
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    code = f"""
from model_adapters.errors import TorchaxServeError
from model_adapters.loading import load_model
from torchax_serve.distributed.mesh import mesh_for
import jax
jax.devices()
loaded = load_model({folder!r}, mesh=mesh_for(None, 8))
arrays = {{id(array): array for array in loaded.weights.values()}}.values()
share = sum(array.addressable_shards[3].data.nbytes for array in arrays)
largest = max(array.nbytes for array in arrays)
print(loaded.report.peak_host_bytes, loaded.report.checkpoint_bytes, largest, share)
"""
    print(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout, end="")


def generate(family, degree):
    """transformers' own interface, which runs on the dense cache."""
    ids = torch.tensor([PROMPTS[1], PROMPTS[1][::-1]])
    config = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
    wanted = model_of(family).generate(ids, generation_config=config)
    beams = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    wanted_of_beams = model_of(family).generate(ids, **beams)
    with serve(model_of(family), tensor_parallel=int(degree)) as served:
        assert torch.equal(served.generate(ids, generation_config=config), wanted)
        assert torch.equal(served.generate(ids, **beams), wanted_of_beams)
    print("same ids")


def task_head(kind, degrees):
    """Prints the numbers of devices on which a head's outputs are those of eager PyTorch."""
    print(*check_task_heads(kind, degrees))


def own_module(meshes):
    """Prints the meshes on which a module of no library has the result of eager PyTorch."""
    print(*(len(mesh) for mesh in check_module(meshes)))


def refused(arguments):
    """The one line of the error that `serve` answers with."""
    try:
        serve(model_of("llama"), **eval(f"dict({arguments})"))
    except TorchaxServeError as error:
        print(" ".join(str(error).split()))


def answer_calls():
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            globals()[name](*arguments)
            end = "== done"
        except Exception:
            traceback.print_exc()
            end = "== failed"
        print(end, flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    answer_calls()
