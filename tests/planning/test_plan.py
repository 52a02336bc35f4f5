"""Plans on CPU devices, what is said of what cannot be planned, and figures against ones computed by hand."""

import dataclasses
import importlib.util
import json
import os
import pickle

import jax
import numpy as np
import pytest
import torch
import transformers
from jax.experimental import serialize_executable
from thorough import thorough
from typer.testing import CliRunner

import torchax_serve
from model_adapters.errors import (
    InvalidArgumentError,
    TorchaxServeError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from model_adapters.loading import memory
from model_adapters.loading.model_class import module_of
from parity_sweep.tiny.config import tiny_config
from parity_sweep.tiny.rope_types import with_rope
from torchax_serve import EngineOptions
from torchax_serve.cli.main import app
from torchax_serve.distributed.mesh import mesh_of
from torchax_serve.distributed.mesh_shape import parse_mesh
from torchax_serve.kv_cache.pools import PagedLayerSpec
from torchax_serve.planning import plan_cache, search, topology
from torchax_serve.planning.abstract_model import abstract_model
from torchax_serve.planning.chips import Chip, chip_of
from torchax_serve.planning.compiled_steps import count_collectives, estimate
from torchax_serve.planning.plan import PlanReport, PlanRequest, make_plan
from torchax_serve.planning.plan_cache import cached_plan
from torchax_serve.planning.report import lines_of
from torchax_serve.planning.roofline import decode_bound, prefill_bound
from torchax_serve.planning.sharding_table import sharding_rows

CONFIG = transformers.LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    vocab_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)
REQUEST = PlanRequest(topology="cpu:1", max_model_len=64, max_num_seqs=4, page_size=16, prefill_lens=(32,))
# float32: two layers of q, k, v, o, gate, up, down; words and head; norms; two tables of rotation frequencies
WEIGHTS_BYTES = 4 * (2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 64) + 2 * 64 * 32 + 5 * 32 + 2 * 4)
PAGES_BYTES = 2 * (4 * 4 + 1) * 2 * 16 * 16 * 4  # layers, pages and the null page, heads, tokens, key and value


@pytest.fixture
def module():
    return module_of(transformers.LlamaForCausalLM, CONFIG, torch.float32)


@pytest.fixture
def small_host(monkeypatch):
    def set_to(num_bytes):
        monkeypatch.setattr(memory, "free_host_bytes", lambda: num_bytes)

    return set_to


def test_reported_bytes_match_shapes(module):
    report = make_plan(module, "toy", REQUEST)
    assert report.fits
    assert report.weights_bytes == report.weights_bytes_of_one_device == WEIGHTS_BYTES
    assert report.pages_bytes == report.pages_bytes_wanted == PAGES_BYTES
    assert report.num_tokens == 4 * 64
    assert report.token_bytes == 2 * 2 * 16 * 4
    assert [(p.name, p.num_tokens, p.num_rows) for p in report.programs] == [("decode", 4, 4), ("prefill", 32, 4)]
    for program in report.programs:
        assert program.alias_bytes == PAGES_BYTES  # written in place
        assert program.collectives == {}
        assert WEIGHTS_BYTES + PAGES_BYTES <= program.argument_bytes <= WEIGHTS_BYTES + PAGES_BYTES + 2000
    assert PlanReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    page = "\n".join(lines_of(report, from_cache=False))
    assert "fits: 4 requests of 64 tokens at once" in page
    assert "no faster than" not in page  # nobody says what this processor can do


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
EXECUTORS = {
    "bloom": (transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64), "per-sequence"),
    "mamba": (transformers.MambaConfig(**TINY, state_size=4), "packed"),
    "openai-gpt": (transformers.OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=64), "static"),
    "reformer": (  # whose code reads the last of the positions that it counts
        transformers.ReformerConfig(
            hidden_size=32,
            attn_layers=["local"],
            is_decoder=True,
            vocab_size=64,
            num_attention_heads=2,
            axial_pos_embds_dim=[16, 16],
            axial_pos_shape=[8, 8],
            max_position_embeddings=64,
        ),
        "static",
    ),
}


def test_plan_with_length_dependent_rope():
    module = module_of(transformers.LlamaForCausalLM, with_rope(CONFIG, "dynamic"), torch.float32)
    report = make_plan(module, "toy", REQUEST)
    assert (report.executor, report.fits) == ("packed", True)
    assert [program.name for program in report.programs] == ["decode", "prefill"]


@pytest.mark.parametrize("model_type", EXECUTORS)
def test_models_beyond_pages_alone_are_planned_on_their_executor(model_type):
    config, executor = EXECUTORS[model_type]
    model_class = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    report = make_plan(module_of(model_class, config, torch.float32), model_type, REQUEST)
    assert (report.executor, report.fits) == (executor, True)
    assert [program.name for program in report.programs] == ["decode", "prefill"]
    decode = report.programs[0]
    # Layers, pages, tokens, heads times key and value; a state of a convolution and one of the recurrence; nothing.
    pages = 2 * (4 * 4 + 1) * 16 * 4 * 16 * 4 if model_type == "bloom" else 0
    states = 2 * (4 + 1) * 64 * (3 + 4) * 4 if model_type == "mamba" else 0
    assert (report.pages_bytes, report.states_bytes) == (pages, states)
    assert decode.alias_bytes == pages + states  # written in place
    assert (decode.num_tokens, decode.num_rows) == ((4 * 64, 4) if executor == "static" else (4, 4))
    page = "\n".join(lines_of(report, from_cache=False))
    assert (report.fallback_reason is None) == (executor == "packed")
    assert report.fallback_reason is None or report.fallback_reason in page
    assert PlanReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_plan_chooses_the_executor_of_the_engine():
    config, _ = EXECUTORS["bloom"]
    report = make_plan(module_of(transformers.BloomForCausalLM, config, torch.float32), "toy", REQUEST)
    module = transformers.BloomForCausalLM(config).eval()
    with torchax_serve.serve(module, engine=EngineOptions(max_model_len=64, max_num_seqs=4, page_size=16)) as served:
        assert report.fallback_reason in served.engine.description


@pytest.mark.parametrize(("name", "dtype"), [("bloom", "bfloat16"), ("openai-gpt", "int8")])
def test_kv_cache_dtype_is_refused_where_there_is_no_such_cache(name, dtype):
    classes = {"bloom": transformers.BloomForCausalLM, "openai-gpt": transformers.OpenAIGPTLMHeadModel}
    module = module_of(classes[name], EXECUTORS[name][0], torch.float32)
    with pytest.raises(UnsupportedArgumentError, match=f"expected 'auto'.* not packed but .*, got '{dtype}'"):
        make_plan(module, "toy", dataclasses.replace(REQUEST, kv_cache_dtype=dtype))


def test_untraceable_model_is_refused_with_every_reason():
    module = module_of(transformers.BltForCausalLM, tiny_config("blt"), torch.float32)  # patches as long as they happen
    with pytest.raises(UnsupportedModelError, match=r"can be traced, got .*; not packed: .*; not per-sequence: "):
        make_plan(module, "toy", REQUEST)


def test_model_that_does_not_fit_gets_remedies(module, small_host):
    small_host(WEIGHTS_BYTES + PAGES_BYTES // 2 + 200_000)
    fitting = make_plan(module, "toy", dataclasses.replace(REQUEST, prefill_lens=()))
    taken = fitting.temporary_bytes
    small_host(int((WEIGHTS_BYTES + PAGES_BYTES * 0.6 + taken) / 0.98))
    report = make_plan(module, "toy", dataclasses.replace(REQUEST, prefill_lens=()))
    assert not report.fits
    assert "more than it has" in report.remedies[0]
    assert report.remedies[1] == "2 slots of 64 tokens"
    assert report.remedies[2] == "4 slots of about 32 tokens"
    assert "devices of this kind" in report.remedies[-1]
    assert 0 < report.pages_bytes < PAGES_BYTES  # compiled with what there is room for
    assert "DOES NOT FIT" in "\n".join(lines_of(report, from_cache=False))
    small_host(WEIGHTS_BYTES // 2)
    report = make_plan(module, "toy", REQUEST)
    assert (report.fits, report.programs, report.num_pages) == (False, (), 0)


def test_second_plan_is_read_from_cache(module, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = cached_plan(module, "toy", REQUEST)
    assert not first[1]
    monkeypatch.setattr(plan_cache, "make_plan", lambda *args, **kwargs: pytest.fail("planned again"))
    assert cached_plan(module, "toy", REQUEST) == (first[0], True)
    with pytest.raises(pytest.fail.Exception):
        cached_plan(module, "toy", dataclasses.replace(REQUEST, max_num_seqs=5))
    with pytest.raises(pytest.fail.Exception):
        cached_plan(module, "toy", REQUEST, use_cache=False)


def test_saved_programs_run(module, tmp_path):
    make_plan(module, "toy", dataclasses.replace(REQUEST, prefill_lens=()), save=tmp_path)
    code, in_tree, out_tree = pickle.loads((tmp_path / "decode-4.pickle").read_bytes())
    program = serialize_executable.deserialize_and_load(code, in_tree, out_tree, execution_devices=jax.devices()[:1])
    (avals, _) = program.in_avals
    tokens, pools = program(*jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), avals))
    assert tokens.shape == (4,)
    assert len(pools) == 2


def test_roofline_bounds_match_hand_computation(module):
    chip = Chip("toy", "cpu", 10**12, 1e9, 1e12)
    model = abstract_model(module, mesh_of(jax.devices()[:1], {}))
    report = make_plan(module, "toy", REQUEST)
    shapes = [PagedLayerSpec(2, 16, np.dtype("f4"), None)] * 2
    bound = decode_bound(model, chip, shapes, 4, 64)
    words = 64 * 32 * 4  # looked up by row
    assert bound.bytes_read == WEIGHTS_BYTES - words + 2 * 4 * 64 * 2 * 16 * 4
    products = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 64) + 64 * 32
    assert bound.flops == 4 * 2 * products + 2 * (2 * 4 * 64 * 4 * 16)
    assert bound.seconds == pytest.approx(bound.bytes_read / 1e9)
    assert bound.bound_by == "memory"
    prefill = prefill_bound(model, dataclasses.replace(chip, flops_per_s=1e6), shapes, 10)
    pairs = 10 * 11 / 2  # each token sees those before it and itself
    layers = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 64)
    assert prefill.flops == 2 * (10 * layers + 64 * 32) + 2 * (2 * pairs * 4 * 16)
    assert prefill.bound_by == "compute"
    assert report.bounds[0].bytes_read == bound.bytes_read
    last = prefill_bound(model, chip, [PagedLayerSpec(2, 16, np.dtype("f4"), 6)], 5, context_len=8, num_prompts=1)
    pairs = sum(min(seen, 6) for seen in range(4, 9))  # the last five tokens of eight
    assert last.flops == 2 * (5 * layers + 64 * 32) + 2 * pairs * 4 * 16


PROGRAM = """
  %all-reduce.1 = f32[8,128]{1,0} all-reduce(%x), replica_groups={}
  ROOT %all-reduce.2 = (bf16[4]{0}, f32[2,2]{1,0}) all-reduce(%a, %b), replica_groups={}
  %all-gather-start.1 = (bf16[2,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%y), dimensions={0}
  %all-gather-done.1 = bf16[8,4]{1,0} all-gather-done(%all-gather-start.1)
  %not-all-reduce = f32[1000]{0} fusion(%all-reduce.1), calls=%all-reduce.9
"""


def test_collectives_are_counted_once_with_the_bytes_of_their_results():
    assert count_collectives(PROGRAM) == {
        "all-reduce": (2, 8 * 128 * 4 + 4 * 2 + 2 * 2 * 4),
        "all-gather": (1, 8 * 4 * 2),
    }


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.25, (0.25, 0)), (-79.75, (0.25, 80)), (None, (None, 0)), (0.0, (None, 0))]
)
def test_opaque_calls_are_not_in_the_estimate(seconds, said):
    assert estimate(seconds) == said


def test_rows_of_the_sharding_table(module):
    rows = {row["parameter"]: row for row in sharding_rows(module, mesh="model=4")}
    assert rows["model.layers.*.self_attn.k_proj.weight"] == {
        "parameter": "model.layers.*.self_attn.k_proj.weight",
        "number": 2,
        "shape": [16, 32],
        "laid_out_shape": [32, 32],  # two heads, each on two devices
        "spec": ["model", None],
        "source": "table",
        "bytes_per_device": 8 * 32 * 4,
    }
    assert len(sharding_rows(module, topology="v6e:2x2")) == len(rows)  # no compiler is asked


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v9:2x2", r"topology: expected one of v4:.*v6e:.*h200:.*cpu:<number>; got 'v9:2x2'"),
        ("v6e", r"topology: expected v6e:<shape> such as v6e:2x2 or v6e:8x8, got 'v6e'"),
        ("v6e:2y2", r"expected v6e:<shape>"),
        ("h200:0", r"expected h200:<shape>"),
        ("cpu:0", r"topology: expected one of"),
        ("cpu:64", r"topology: expected at most cpu:\d+, the devices that this process has begun with"),
    ],
)
def test_unknown_topologies(name, said):
    with pytest.raises(InvalidArgumentError, match=said):
        topology.describe(name)


@pytest.mark.parametrize(("name", "extra"), [("v6e:2x4", r"\[plan\]"), ("h200:8", r"\[cuda\]")])
def test_missing_compiler_error_names_the_extra(monkeypatch, name, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TorchaxServeError, match=f"not installed; pip install 'torchax-serve{extra}'"):
        topology.describe(name)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "--xla_gpu_autotune_level=0"),
        ("--xla_dump_to=here", "--xla_dump_to=here --xla_gpu_autotune_level=0"),
        ("--xla_gpu_autotune_level=4", "--xla_gpu_autotune_level=4"),
    ],
)
def test_autotuning_is_off_without_a_device(given, expected, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", given)
    for _ in range(2):
        topology._tune_nothing()
        assert os.environ["XLA_FLAGS"] == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model=3", r"multiply out to the 8 devices, got data 1 x model 3 x expert 1 = 3, fewer than there are"),
        ("model=8,data=2", r"data 2 x model 8 x expert 1 = 16, more than there are"),
        ("pipe=8", r"expected axes out of data, model, expert, got 'pipe'"),
        ("model=x", r"expected model=<a positive number>, got 'model=x'"),
    ],
)
def test_invalid_meshes(text, said):
    with pytest.raises(InvalidArgumentError, match=said):
        parse_mesh(text, 8)


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"kv_cache_dtype": "int4"}, InvalidArgumentError, "kv_cache_dtype: expected one of auto.*got 'int4'"),
        ({"kv_cache_dtype": "int9"}, InvalidArgumentError, "kv_cache_dtype: expected one of auto.*got 'int9'"),
        (
            {"kv_cache_dtype": "fp8", "topology": "v6e:2x2"},
            InvalidArgumentError,
            "int8 or auto for v6e, which has no float8",
        ),
        ({"max_num_seqs": 0}, InvalidArgumentError, "max_num_seqs"),
        ({"max_model_len": 1}, InvalidArgumentError, "max_model_len"),
        ({"prefill_lens": (0,)}, InvalidArgumentError, "prefill"),
    ],
)
def test_invalid_plan_requests(changes, kind, said):
    with pytest.raises(kind, match=said):
        dataclasses.replace(REQUEST, **changes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--topology", "cpu:1", "--quantization", "int3"],
            "--quantization: expected int8, int4, fp8, w8a8, fp8-w8a8, nf4, none or a .toml, .yaml or .json",
        ),
        ([], "expected --topology, such as v6e:2x4 or h200:8, or --for SLOTSxLEN; got neither"),
        (["--for", "64by8"], "--for: expected SLOTSxLEN such as 64x8192, got '64by8'"),
        (["--for", "2x64", "--mesh", "model=2"], "--mesh: expected without --for"),
        (["--topology", "cpu:1", "--prefill", "a"], "--prefill: expected numbers such as 256,1024, got 'a'"),
        thorough(["--topology", "cpu:1", "--max-model-len", "100000000"], ""),
        (["no/such/folder/at/all", "--topology", "cpu:1"], "no/such/folder/at/all"),
    ],
)
def test_plan_command_errors_are_one_line(arguments, said, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = CliRunner().invoke(app, ["plan", *arguments, "--offline"])
    if said:
        assert done.exit_code == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
    else:  # rotary positions have no end: it is planned, and does not fit
        assert done.exit_code == 0
        assert "DOES NOT FIT" in done.stdout


def test_plan_reports_progress(module, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    request = dataclasses.replace(REQUEST, topology="cpu:1", prefill_lens=(16,))
    told = []
    cached_plan(module, "toy", request, note=told.append)
    assert told == [
        "tracing toy for cpu:1",
        f"compiling decode of {request.max_num_seqs} tokens for cpu:1",
        "compiling prefill of 16 tokens for cpu:1",
    ]
    cached_plan(module, "toy", request, note=told.append)
    assert len(told) == 3  # there is nothing to wait for


def test_search_finds_the_smallest_topology(module, monkeypatch):
    asked = []

    def fake(module, name, request, note):
        asked.append(request.topology)
        report = make_plan(module, name, dataclasses.replace(request, topology="cpu:1", prefill_lens=()))
        return dataclasses.replace(report, topology=request.topology, fits=request.topology.endswith("2x4")), False

    monkeypatch.setattr(search, "cached_plan", fake)
    monkeypatch.setattr(search, "CHIPS", {"v6e": chip_of("v6e:2x2")})
    (row,) = search.search(module, "toy", 4, 64, {"page_size": 16, "prefill_lens": ()})
    assert asked == ["v6e:2x2", "v6e:2x4"]
    assert (row["topology"], row["fits"]) == ("v6e:2x4", True)
