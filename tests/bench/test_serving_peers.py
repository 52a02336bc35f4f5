"""`benchmarks/serving.py`: how the best way to run a system is chosen, what bounds it, and what its rows say."""

import ctypes
import dataclasses
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS.parent / "tests" / "loading" / "formats"))
from gguf_files import tiny_model, write_gguf  # noqa: E402

import serving  # noqa: E402  # a script
from serving_peers import environments, llama_engine, variants  # noqa: E402
from serving_peers.bench import OURS, UNQUANTIZED, Bench  # noqa: E402
from serving_peers.conversion import with_end_of_text, with_published_kinds, write_tokenizer  # noqa: E402
from serving_peers.jobs import Arrival, Job, JobResult, Trace  # noqa: E402
from serving_peers.processes import System  # noqa: E402
from serving_peers.roofline import Roofline, is_dense, kv_token_bytes  # noqa: E402
from serving_peers.settings import SystemSettings  # noqa: E402
from serving_peers.starts import NEXT_TOKENS, StartTimes, measure_start, median_start  # noqa: E402
from serving_peers.variants import EIGHT_BITS, FOUR_BITS, KINDS, Choice, Variant, choose, thread_counts, variants_of  # noqa: E402

HF = variants_of("hf", UNQUANTIZED)


def measured(rates):
    """Rates by dtype and threads; a dtype that is missing does not run."""
    asked = []

    def measure(variant):
        asked.append((variant.dtype, variant.num_threads))
        if asked[-1] not in rates:
            raise RuntimeError(f"{variant.dtype} is not supported")
        return rates[asked[-1]]

    return measure, asked


def test_the_fastest_dtype_is_chosen_and_then_the_fastest_number_of_threads():
    rates = {("bfloat16", 4): [28, 46], ("float16", 4): [20, 30], ("float32", 4): [19, 181], ("float32", 2): [25, 170]}
    measure, asked = measured(rates)
    choice = choose(HF, [4, 2], measure)
    assert (choice.best.dtype, choice.best.num_threads) == ("float32", 2), "25 * 170 > 19 * 181 > 28 * 46"
    assert asked == list(rates), "threads are tried with the best dtype alone, none twice"
    assert len(choice.tried) == 4
    assert not choice.failed


def test_what_does_not_run_is_told_and_the_rest_is_chosen_from():
    choice = choose(HF, [1], measured({("float32", 1): [5.0]})[0])
    assert choice.best.dtype == "float32"
    assert choice.failed == {
        "hf bfloat16, 1 threads": "bfloat16 is not supported",
        "hf float16, 1 threads": "float16 is not supported",
    }
    assert choose(HF, [1], measured({})[0]).best is None


def test_a_system_without_a_number_of_threads_is_asked_once():
    measure, asked = measured({("bfloat16", None): [1.0], ("float16", None): [2.0], ("float32", None): [1.5]})
    assert choose(variants_of("vllm", UNQUANTIZED), [8, 4], measure).best.dtype == "float16"
    assert len(asked) == 3


def test_choices_are_stored_for_this_processor(tmp_path, monkeypatch):
    path = tmp_path / "choices.json"
    found = {kind: {"hf": choose(variants_of("openvino", kind)[:1], [2], lambda _: [3.0])} for kind in KINDS}
    found[UNQUANTIZED]["vllm"] = Choice(None, {}, {"vllm float32": "not installed"})
    variants.write_choices(path, found)
    del found[UNQUANTIZED]["vllm"]
    assert variants.read_choices(path) == found, "what did not run is tried again"
    monkeypatch.setattr(variants, "cpu_flags", lambda: "another")
    assert variants.read_choices(path) == {}
    assert variants.read_choices(tmp_path / "none.json") == {}


def test_quantized_weights_are_multiplied_as_was_best_for_others():
    like = next(each for each in variants_of("openvino", UNQUANTIZED) if each.options["inference_precision"] == "f32")
    assert [each.dtype for each in variants.similar(variants_of("openvino", FOUR_BITS), like)] == ["int4, products f32"]
    assert len(variants.similar(variants_of("llama.cpp", FOUR_BITS), variants_of("llama.cpp", UNQUANTIZED)[0])) == 1


def test_half_of_the_cores_are_tried_where_there_are_several():
    assert [thread_counts(n) for n in (1, 2, 8)] == [[1], [2, 1], [8, 4]]


def test_every_peer_has_a_variant_of_its_like_in_ours():
    for kind in KINDS:
        assert variants_of(OURS, kind)
        assert all(variants_of(name, kind) for name in ("llama.cpp", "openvino", "onnxruntime"))
    assert {each.dtype for each in variants_of("vllm", UNQUANTIZED)} == {"bfloat16", "float16", "float32"}


def test_the_roofline_multiplies_in_the_fastest_dtype():
    """2 GB/s; 1,000,000 weights; 8 requests of 2 tokens: one step of 2 MB, or of 16 million operations."""
    rates = {"bfloat16": 1e9, "float32": 8e9}
    roofline = Roofline(2e9, rates, 900_000, 100_000, 0)
    assert roofline.decode_rate(1, 4, 2) == pytest.approx(1 / 1e-3), "reading takes 1 ms, products 0.25 ms"
    assert roofline.decode_rate(8, 4, 2) == pytest.approx(8 / 2e-3), "float32 products take 2 ms, bfloat16's 16 ms"
    assert roofline.decode_rate(8, 4, 2, bits=4) == pytest.approx(8 / 0.25e-3), "read alone"
    other = Roofline(3e9, {"bfloat16": 9e9, "float32": 1e9}, 900_000, 100_000, 0)
    better = roofline.better(other)
    assert (better.bytes_per_s, better.flops_of, better.flops_per_s) == (3e9, {"bfloat16": 9e9, "float32": 8e9}, 9e9)
    assert roofline.total_s([Arrival([1] * 4, 2)]) == pytest.approx(2 * (900_000 * 5 + 100_000 * 2) / 8e9)


def test_tokens_are_kept_by_layers_with_attention_alone():
    def shape(name):
        return json.loads((BENCHMARKS / "shapes" / f"{name}.json").read_text())

    hybrid, dense = shape("qwen3.5-104m"), shape("qwen3-184m")
    assert kv_token_bytes(hybrid) == 3 * 2 * 2 * 128 * 2, "three of twelve layers, two heads of 128"
    assert Roofline.measured(hybrid, 1) is None
    assert [is_dense(shape(name)) for name in ("granite-4-h-110m", "qwen3-moe-123m", "deepseek-v3-110m")] == [False] * 3
    assert is_dense(dense)
    with pytest.raises(SystemExit, match="sliding windows"):
        kv_token_bytes(dense | {"layer_types": ["full_attention", "sliding_attention"]})


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(serving.parse(["decode", "--smoke", "--peers", "hf", "vllm"]), tmp_path_factory.mktemp("bench"))


def turns_of(seconds):
    return [[JobResult([Trace(0.0, [1], [seconds])]), JobResult([Trace(0.0, [1, 2], [seconds, 2 * seconds])])]]


def test_every_row_has_both_dtypes(bench):
    bench.choices = {
        UNQUANTIZED: {
            OURS: Choice(Variant(OURS, "bfloat16", UNQUANTIZED), {}, {}),
            "hf": Choice(Variant("hf", "float32", UNQUANTIZED), {}, {}),
        }
    }
    bench.rows.clear()
    numbers = {OURS: {"decode tokens/s": 20.0}, "hf": {"decode tokens/s": 10.0}}
    bench.add_numbers("1 requests", numbers, {OURS: turns_of(1.0), "hf": turns_of(2.0)}, UNQUANTIZED)
    assert [row["number"] for row in bench.rows] == ["decode tokens/s", "first tokens equal"]
    assert {(row["dtype"], row["other_dtype"]) for row in bench.rows} == {("bfloat16", "float32")}
    assert bench.rows[0]["value"] == 2.0


def test_starts_are_compared_with_their_like(bench, monkeypatch):
    seconds = {"ours": 4.0, "hf": 8.0}
    monkeypatch.setattr(
        serving, "measure_start", lambda system, *_: StartTimes(1.0, seconds[system.name], 0.5, 2_000_000_000)
    )
    bench.choices = {
        UNQUANTIZED: {
            OURS: Choice(Variant(OURS, "bfloat16", UNQUANTIZED), {}, {}),
            "hf": Choice(Variant("hf", "float32", UNQUANTIZED), {}, {}),
            "vllm": Choice(None, {}, {}),
        },
        EIGHT_BITS: {OURS: Choice(Variant(OURS, "int8", EIGHT_BITS), {}, {})},
        FOUR_BITS: {OURS: Choice(None, {}, {})},
    }
    bench.rows.clear()
    serving.run_start(bench)
    found = {(row["case"], row["number"], row["beside"]): (row["ours"], row["other"]) for row in bench.rows}
    assert found["first start, 16 or 32 bits", "first token s", "hf"] == (4.0, 8.0)
    assert found["second start, 16 or 32 bits", "peak GB", "hf"] == (2.0, 2.0)
    assert found["second start, 8 bits", "first token s", ""] == (4.0, None)
    assert len(found) == 2 * 2 * len(serving.START_NUMBERS)


def test_a_peer_that_is_not_installed_is_reported(bench):
    bench.choices = {}
    assert bench.best(["vllm"], UNQUANTIZED) == {}
    assert bench.best(["vllm"], FOUR_BITS) == {}, "it has none of these: nothing to report"
    assert set(bench.unavailable()) == {"vllm bfloat16", "vllm float16", "vllm float32"}
    assert all("peers.py install FOLDER vllm" in why for why in bench.unavailable().values())


def test_options_are_checked(capsys):
    for wrong, named in ((["decode", "--peers", "gpt"], "gpt"), (["prefix", "--peers", "hf"], "hf")):
        with pytest.raises(SystemExit):
            serving.parse(wrong)
        assert named in capsys.readouterr().err
    assert serving.parse(["decode"]).kinds == list(KINDS)


def test_a_gguf_file_is_what_both_sides_read(tmp_path, capsys):
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), "llama", "Q4_1", general__name="Tiny")
    options = serving.parse(["decode", "--gguf", str(file)])
    assert (options.kinds, options.peers) == ([variants.A_FILE], {"llama.cpp"})
    found = Bench(options, tmp_path)
    assert (found.checkpoint, found.file.title, found.workload.vocab_size) == (file, "Tiny", 280)
    assert found.bits_of(variants.A_FILE) == pytest.approx(5, abs=0.1), "norms are float32"
    for system in (OURS, "llama.cpp"):
        assert [(each.dtype, each.form) for each in found.variants(system, variants.A_FILE)] == [("Q4_1", "")]
    for wrong in (["mix", "--gguf", str(file)], ["decode", "--gguf", str(tmp_path / "none.gguf")]):
        with pytest.raises(SystemExit):
            serving.parse(wrong)
        assert "expected a file, with decode or start alone" in capsys.readouterr().err


def test_commands_of_a_record_have_no_paths_of_the_machine():
    typed = environments.as_typed(
        ["/opt/bin/python", "--target", "/x/y z"], {"/opt/bin/python": "python", "/x/y z": "F"}
    )
    assert typed == "python --target F"


def test_a_native_build_is_refused_on_another_processor(tmp_path, monkeypatch):
    for name in ("llama-cpp", "onnx"):
        (tmp_path / name).mkdir()
        record = {"error": None, "cpu_flags": "avx2", "versions": {}}
        (tmp_path / name / environments.RECORD).write_text(json.dumps(record))
    monkeypatch.setattr(environments, "cpu_flags", lambda: "avx2 avx512f")
    assert "another processor" in environments.record_of("llama-cpp", tmp_path)["error"]
    assert environments.record_of("onnx", tmp_path)["error"] is None
    assert "not installed" in environments.record_of("vllm", tmp_path)["error"]


def test_an_environment_that_cannot_be_installed_says_why(tmp_path, monkeypatch):
    monkeypatch.setitem(environments.RECIPES, "none", environments.Recipe(("./no-such-folder",)))
    record = environments.install("none", tmp_path)
    assert "no-such-folder" in record["error"]
    assert "--target" in record["commands"][0]
    assert environments.record_of("none", tmp_path)["error"] == record["error"]


def test_an_installation_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setitem(environments.RECIPES, "none", environments.Recipe(("./no-such-folder",)))
    assert "timed out after 0.01 seconds" in environments.install("none", tmp_path, timeout_s=0.01)["error"]


class FakeLlama:
    """The shim's functions; the next token is the sum of a sequence's tokens so far, by its own record of them."""

    def __init__(self):
        self.sequences, self.steps = {}, []
        for name in ("engine_open", "engine_context_len", "engine_system_info", "engine_forget", "engine_step"):
            setattr(self, name, type(name, (), {"__call__": getattr(self, f"_{name}")})())

    def _engine_open(self, *arguments):
        return 1

    def _engine_context_len(self, engine):
        return 512

    def _engine_system_info(self):
        return b"a processor"

    def _engine_forget(self, engine, slot):
        del self.sequences[slot]

    def _engine_step(self, engine, num_tokens, tokens, positions, slots, is_read, found):
        assert num_tokens <= llama_engine.BATCH_LEN
        self.steps.append(num_tokens)
        for i in range(num_tokens):
            sequence = self.sequences.setdefault(slots[i], [])
            assert positions[i] == len(sequence)
            sequence.append(tokens[i])
            if is_read[i]:
                found[i] = sum(sequence) % 1000
        return 0


def test_llama_cpp_is_driven_as_its_server_does(tmp_path, monkeypatch):
    fake = FakeLlama()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: fake)
    (tmp_path / "model.gguf").touch()
    options = {"library": "a library", "max_num_seqs": 2, "num_threads": 1}
    engine = llama_engine.LlamaEngine(SystemSettings(str(tmp_path), 0, 0, 64, options))
    prompts = [[5] * 1500, list(range(1500)), [7, 8]]
    traces = engine.run(Job([Arrival(prompt, 4) for prompt in prompts])).traces
    for prompt, trace in zip(prompts, traces, strict=True):
        expected = list(prompt)
        for _ in range(4):
            expected.append(sum(expected) % 1000)
        assert trace.token_ids == expected[-4:]
    assert fake.steps[:2] == [2048, 953], "a full batch, then the rest and the first sequence's next token"
    assert not fake.sequences


class Echo(System):
    """A system whose process answers each request with the numbers from 0."""

    CODE = (
        "from serving_peers.jobs import *; out = own_output(); "
        "run = lambda job: JobResult([Trace(0.0, list(range(a.max_new_tokens)), "
        "[0.5 + i for i in range(a.max_new_tokens)]) for a in job.arrivals]); answer_jobs(out, run, dict)"
    )

    def command(self):
        return [sys.executable, "-c", self.CODE]


def test_a_start_is_measured_from_its_process_on(tmp_path):
    settings = SystemSettings("", 0, 0, 0)
    start = measure_start(Echo("echo", "", "", settings), [1, 2], tmp_path / "log", timeout_s=60)
    assert start.first_token_s > start.ready_s + 0.5
    assert start.next_tokens_s == NEXT_TOKENS
    assert start.peak_bytes > 2**20
    broken = type("Broken", (Echo,), {"CODE": "raise SystemExit('no such model')"})
    with pytest.raises(RuntimeError, match="no such model"):
        measure_start(broken("broken", "", "", settings), [1], tmp_path / "log", timeout_s=60)


def test_starts_are_summed_up_by_medians_and_the_highest_memory():
    starts = [StartTimes(1.0, 2.0, 3.0, 10), StartTimes(2.0, 9.0, 1.0, 30), StartTimes(9.0, 4.0, 2.0, 20)]
    assert dataclasses.astuple(median_start(starts)) == (2.0, 4.0, 2.0, 30)


def test_the_checkpoint_gets_what_converters_ask_for(tmp_path):
    from transformers import AutoTokenizer

    model, named = tmp_path / "model", tmp_path / "named"
    model.mkdir()
    write_tokenizer(model, 512)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(tokenizer) == 512
    assert tokenizer.decode(tokenizer("the path").input_ids) == "the path"
    (model / "config.json").write_text(json.dumps({"eos_token_id": None, "vocab_size": 512}))
    with_end_of_text(model, named)
    assert json.loads((named / "config.json").read_text()) == {"eos_token_id": 2, "pad_token_id": 2, "vocab_size": 512}
    assert (named / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert json.loads((model / "config.json").read_text())["eos_token_id"] is None


def test_layers_have_the_names_that_a_converter_knows(tmp_path):
    model, named = tmp_path / "model", tmp_path / "named"
    model.mkdir()
    shape = {"model_type": "granitemoehybrid", "layer_types": ["linear_attention", "full_attention", "mamba"]}
    (model / "config.json").write_text(json.dumps(shape))
    (model / "model.safetensors").write_bytes(b"weights")
    assert with_published_kinds(model, named) == named
    assert json.loads((named / "config.json").read_text())["layer_types"] == ["mamba", "attention", "mamba"]
    assert (named / "model.safetensors").read_bytes() == b"weights"
    (model / "config.json").write_text(json.dumps(shape | {"model_type": "qwen3_5_text"}))
    assert with_published_kinds(model, named) == model
