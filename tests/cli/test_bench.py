"""``bench``: what it counts against independent counts, what it runs against eager PyTorch, what it refuses."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, LlamaConfig
from typer.testing import CliRunner

import torchax_serve.bench
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.loading import load_model
from torchax_serve.bench import Bandwidth, BenchSettings, Case, Measurement, Timing, bench, measure_bandwidth
from torchax_serve.bench.memory_traffic import CacheLayer, cache_layers, step_bytes, weight_bytes_per_step
from torchax_serve.bench.report import CompileCache, same_part
from torchax_serve.bench.timed_model import JaxMemory, TimedModel, count_programs
from torchax_serve.cli.main import app
from torchax_serve.runtime.eager import EagerReference

REPOSITORY = Path(__file__).parents[2]
SHAPE = REPOSITORY / "benchmarks" / "shapes" / "tiny.json"
TORCH = torch.__version__.partition("+")[0]
"""Release of PyTorch; the metadata of some wheels name the build too, such as ``+cu130``."""
HIDDEN, MLP, LAYERS, VOCAB, KV_DIM = 64, 128, 2, 512, 2 * 16
SETTINGS = BenchSettings(batches=(1, 3), prompt_len=10, new_tokens=5, repeats=2, against="hf")


@pytest.fixture(autouse=True)
def keep_this_process_as_it_is(monkeypatch):
    monkeypatch.setattr("torchax_serve.cli.shared.errors.quiet_libraries", lambda: None)


@pytest.fixture(scope="module", autouse=True)
def small_buffer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchax_serve.profiling.bandwidth.BUFFER_BYTES", 2**24)
        yield


@pytest.fixture(scope="module")
def report():
    threads = torch.get_num_threads()
    notes = []
    try:
        yield bench(SHAPE, SETTINGS, dtype="float32", random_weights=True, command="a command", note=notes.append)
    finally:
        torch.set_num_threads(threads)
    # In turns: A B A B, not A A B B.
    assert [line for line in notes if "round" in line] == [
        f"batch {batch}: round {index} of 2" for batch in (1, 3) for index in (1, 2)
    ]


def call(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def weights_by_hand(itemsize):
    layer = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_DIM + 3 * HIDDEN * MLP + 2 * HIDDEN
    return itemsize * (LAYERS * layer + HIDDEN + VOCAB * HIDDEN)  # the table is tied, so read as the output layer


def test_both_sides_give_the_same_tokens_and_plausible_numbers(report):
    assert [case.batch for case in report.cases] == [1, 3]
    for case in report.cases:
        assert case.same_tokens == 1.0
        for side in (case.ours, case.peer):
            assert len(side.timings) == 2
            for timing in side.timings:
                assert 0 < timing.ttft_s < timing.total_s
            assert 0 < side.mbu < 1
            assert side.peak_bytes == side.growth_bytes + report.model.weights_bytes
        assert case.ours.compile_cache.num_programs > 0
        assert case.peer.compile_cache is None
        assert case.ours.growth_bytes > 0
    assert report.model.num_parameters == weights_by_hand(1)
    assert report.machine.versions["torch"].partition("+")[0] == TORCH
    assert report.machine.is_busy == (report.machine.cores_in_use > 0.25)


def test_bytes_of_a_step_against_a_count_by_hand(report):
    """Weights once, and K and V of 11, 12, 13, 14 tokens: four steps behind the first token of 10 + 5."""
    buffers = 4 * 2 * 8  # inv_freq and original_inv_freq: head_dim / 2 float32 each
    for case in report.cases:
        cache = case.batch * LAYERS * 2 * KV_DIM * 4 * np.mean([11, 12, 13, 14])
        assert case.ours.step_bytes == pytest.approx(weights_by_hand(4) + cache, abs=buffers)


def test_numbers_follow_from_the_timings():
    timings = (Timing(0.5, 2.5), Timing(0.4, 1.4), Timing(0.9, 9.0))
    side = Measurement("x", 4, 100, 11, 7.0, timings, 0, 0, 50.0, 1000.0, None)
    assert side.ttft_s == 0.5
    assert side.prefill_tokens_per_s == 800
    assert side.tpot_s == pytest.approx(0.2)  # 2 s over 10 steps
    assert side.decode_tokens_per_s == pytest.approx(20)
    assert side.compile_s == 4.5
    assert side.mbu == pytest.approx(50 / 0.2 / 1000)
    assert dataclasses.replace(side, step_bytes=None).mbu is None
    slower = dataclasses.replace(side, timings=(Timing(1.0, 5.0),))
    assert Case(4, side, slower, 1.0).ratio("decode_tokens_per_s") == pytest.approx(2)
    assert Case(4, side, None, None).ratio("decode_tokens_per_s") is None


def test_same_tokens_end_at_the_first_difference():
    ours = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    theirs = torch.tensor([[1, 2, 3, 4], [1, 9, 3, 4]])
    assert same_part(ours, theirs) == 5 / 8


@pytest.mark.parametrize(
    ("cache", "state"),
    [
        (CompileCache(0, 0, True), "in memory"),
        (CompileCache(3, 3, True), "warm"),
        (CompileCache(3, 1, True), "partly warm"),
        (CompileCache(3, 0, True), "cold"),
        (CompileCache(3, 0, False), "off"),
    ],
)
def test_state_of_the_compilation_cache(cache, state):
    assert cache.state == state


def test_programs_are_counted():
    with count_programs() as programs:
        jnp.cos(jnp.ones((3, 7, 5))).block_until_ready()
    assert programs[0] >= 1
    before = list(programs)
    jnp.tan(jnp.ones((2, 9, 5))).block_until_ready()
    assert programs == before  # the listeners are gone


def test_a_sliding_layer_is_read_up_to_its_window():
    config = Gemma3TextConfig(
        num_hidden_layers=2, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    )
    cache = DynamicCache(config=config)
    for index in range(2):
        cache.update(torch.zeros(2, 1, 9, 8), torch.zeros(2, 1, 9, 8), index)
    sliding, full = cache_layers(cache, 9)
    assert (sliding.window, full.window) == (4, None)
    assert sliding.position_bytes == full.position_bytes == 2 * 8 * 4
    assert [sliding.read_bytes(length) for length in (3, 4, 20)] == [192, 256, 256]
    assert full.read_bytes(20) == 20 * 64
    assert CacheLayer(0, None, 100).read_bytes(7) == 200
    assert step_bytes(1000.0, (full,), batch=2, prompt_len=9, new_tokens=3) == 1000 + 2 * 64 * 10.5


def test_expert_bytes_follow_expected_use(tmp_path):
    shape = json.loads(SHAPE.read_text()) | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    loaded = load_model(tmp_path, random_weights=True, dtype="float32")
    experts = sum(array.nbytes for name, array in loaded.weights.items() if ".experts." in name)
    table = loaded.weights["model.embed_tokens.weight"].nbytes
    others = loaded.report.weights_bytes - experts - table
    assert experts == LAYERS * 8 * 3 * 32 * HIDDEN * 4
    rng = np.random.default_rng(0)
    for batch in (1, 5):
        used = np.mean(
            [len({e for _ in range(batch) for e in rng.choice(8, 2, replace=False)}) / 8 for _ in range(4000)]
        )
        expected = others + used * experts + batch * HIDDEN * 4
        assert weight_bytes_per_step(loaded.module, loaded.weights, batch) == pytest.approx(expected, rel=0.01)


def test_bandwidth():
    found = measure_bandwidth(2**22)
    assert found.bytes_per_s == max(found.tried.values()) == found.tried[found.method] > 1e8
    one, two = (
        Bandwidth(max(t.values()), max(t, key=t.get), t, 8) for t in ({"a": 3.0, "b": 2.0}, {"a": 1.0, "b": 5.0})
    )
    assert one.better(two) == Bandwidth(5.0, "b", {"a": 3.0, "b": 5.0}, 8)


def test_eager_reference_shares_memory_and_detects_writes():
    loaded = load_model(SHAPE, random_weights=True, dtype="bfloat16")
    twin = EagerReference(loaded)
    name = "model.layers.0.mlp.up_proj.weight"
    weight = twin.module.get_parameter(name)
    assert weight.data_ptr() == loaded.weights[name].unsafe_buffer_pointer()
    assert twin.module.lm_head.weight is twin.module.model.embed_tokens.weight
    eager = AutoModelForCausalLM.from_config(LlamaConfig(**json.loads(SHAPE.read_text())), dtype=torch.bfloat16)
    state = {key: torch.tensor(np.array(loaded.weights[key], np.float32)) for key in eager.state_dict()}
    eager.load_state_dict(state)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(twin.module(ids).logits, eager.eval()(ids).logits)
        twin.check_untouched()
        weight.mul_(1.0)
    with pytest.raises(UnsupportedModelError, match=name):
        twin.check_untouched()


def test_memory_growth_of_a_call_is_measured():
    size = 2**26
    with JaxMemory().growth() as growth:
        block = np.ones(size, np.uint8)
    # Linux counts a thread's last pages late (proc(5), VmRSS: "this value is inaccurate").
    assert 0.98 * size < growth[0] < 2 * size
    del block
    with JaxMemory().growth() as growth:
        pass
    assert growth[0] < 2**23  # the peak before is forgotten


def test_time_to_first_token_is_that_of_the_first_new_token():
    class Model:
        device = "cpu"

        def generate(self, ids, streamer, max_new_tokens, **kwargs):
            import time

            streamer.put(ids)
            time.sleep(0.05)
            for _ in range(max_new_tokens):
                streamer.put(ids[:, 0])
                time.sleep(0.02)
            return torch.cat([ids, ids[:, :max_new_tokens]], 1)

    found = TimedModel("x", "y", Model(), JaxMemory()).call(torch.tensor([[4, 5, 6]]), 3)
    assert found.timing.ttft_s >= 0.05
    assert found.timing.total_s - found.timing.ttft_s >= 0.06
    assert found.tokens.tolist() == [[4, 5, 6]]


def test_the_command_end_to_end(tmp_path):
    picture = tmp_path / "rates.png"
    small = ("--batch", 2, "--prompt-len", 4, "--new-tokens", 2, "--repeats", 1)
    done = call("--random-weights", SHAPE, "--dtype", "float32", *small, "--json", "--plot", picture)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["model"]["dtype"] == "float32"
    assert found["settings"] | {"batches": [2], "prompt_len": 4, "new_tokens": 2, "repeats": 1} == found["settings"]
    assert found["cases"][0]["ours"]["decode_tokens_per_s"] > 0
    assert found["cases"][0]["peer"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_tables_name_machine_versions_and_command(report, monkeypatch):
    asked = {}

    def measured(model, settings, **kwargs):
        asked.update(kwargs, model=model, settings=settings)
        return report

    monkeypatch.setattr(torchax_serve.bench, "bench", measured)
    done = call("some/name", "--against", "hf", "--batch", 1, "--batch", 3, "--prompt-len", 10, "--new-tokens", 5)
    assert done.exit_code == 0
    assert asked["model"] == "some/name"
    assert asked["settings"] == dataclasses.replace(SETTINGS, repeats=5)
    for text in (report.machine.cpu, TORCH, "a command", "GB/s", "decode x", "100% at batch 3"):
        assert text in done.stdout
    ours = report.cases[1].ours
    row = next(line for line in done.stdout.splitlines() if line.startswith("│     3 │ torchax-serve"))
    assert f"{ours.decode_tokens_per_s:.1f}" in row
    assert f"{report.cases[1].ratio('decode_tokens_per_s'):.2f}" in row


def test_the_benchmark_script_judges_by_the_targets(report, capsys):
    spec = importlib.util.spec_from_file_location("generate", REPOSITORY / "benchmarks" / "generate.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    rows = {(row["batch"], row["number"]): row for row in script.rows_of(report, has_targets=True)}
    ratio = report.cases[0].ratio("decode_tokens_per_s")
    assert rows[1, "decode ratio"]["value"] == ratio
    assert rows[1, "decode ratio"]["target"] == ">= 1.5"
    assert rows[1, "decode ratio"]["met"] == (ratio >= 1.5)
    assert rows[3, "decode ratio"]["met"] is None
    starts = [
        {"first": dict.fromkeys(("from_process_start_s", "from_serve_s"), 10.0), "second": second}
        for second in ({"from_process_start_s": 6.0, "from_serve_s": 4.0},)
    ]
    judged = script.rows_of_starts("float32", starts, has_targets=True)
    assert [row["met"] for row in judged] == [False, True]
    script.print_rows([*rows.values(), *judged])
    lines = capsys.readouterr().out.splitlines()
    assert sum("MISSED" in line for line in lines) == 1 + (ratio < 1.5)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batches": ()}, "at least one batch size"),
        ({"batches": (0,)}, "batches: expected whole numbers >= 1, got 0"),
        ({"prompt_len": 0}, "prompt_len: expected a whole number >= 1, got 0"),
        ({"new_tokens": 1}, "new_tokens: expected a whole number >= 2, got 1"),
        ({"repeats": 0}, "repeats: expected a whole number >= 1, got 0"),
        ({"against": "someone"}, "against: expected hf, got 'someone'"),
    ],
)
def test_bad_settings(options, error):
    with pytest.raises(InvalidArgumentError, match=error):
        BenchSettings(**options)


def test_more_tokens_than_positions():
    with pytest.raises(InvalidArgumentError, match="prompt_len \\+ new_tokens is 300, expected at most 256"):
        bench(SHAPE, BenchSettings((1,), 290, 10), random_weights=True)


def test_errors_of_the_command(tmp_path):
    for arguments in (
        ["--new-tokens", "1"],
        ["name", "--random-weights", str(SHAPE)],
        ["--plot", str(tmp_path / "nowhere" / "a.png")],
        ["--plot", str(tmp_path / "a.words")],
        [str(tmp_path / "nothing")],
    ):
        assert call(*arguments).exit_code == 2


def test_several_ways_to_store_weights_take_turns():
    options = ("--prompt-len", 8, "--new-tokens", 4, "--repeats", 1, "--batch", 1)
    done = call("--random-weights", SHAPE, "--quantization", "bf16,int8", "--json", *options)
    assert done.exit_code == 0, done.output
    reports = json.loads(done.stdout)
    assert list(reports) == ["bf16", "int8"]
    dense, quantized = (report["model"]["weights_bytes"] for report in reports.values())
    steps = [report["cases"][0]["ours"]["step_bytes"] for report in reports.values()]
    assert quantized < 0.7 * dense and steps[1] < 0.7 * steps[0]
    notes = [line for line in done.stderr.splitlines() if "first call" in line]
    assert [line.split()[-1] for line in notes] == ["bf16", "int8"]
    for arguments, said in (
        (("--quantization", "int8,int8"), "--quantization: expected different names"),
        (("--quantization", "bf16,int3"), "--quantization: expected int8, int4, fp8"),
        (("--quantization", "bf16,int8", "--against", "hf"), "--against: expected one quantization with a peer"),
        (("--quantization", "bf16,int8", "--plot", "a.png"), "--plot: expected one --quantization"),
    ):
        done = call("--random-weights", SHAPE, *arguments, *options)
        assert done.exit_code == 2 and said in done.stderr, done.stderr
