"""Profiles of the small model of the package: names of modules, numbers of calls, times, bytes."""

import json
import warnings

import jax
import pytest
import torch
import transformers

from model_adapters.errors import InvalidArgumentError, TorchaxServeError
from torchax_serve import EngineOptions, SamplingParams, serve
from torchax_serve.bench.memory_traffic import weight_bytes_per_step
from torchax_serve.profiling import roofline, trace
from torchax_serve.profiling.bandwidth import Bandwidth
from torchax_serve.profiling.session import ProfileRunningError

NUM_TOKENS = 33  # the first is the prompt's
PROMPT = list(range(5, 29))
ENGINE = EngineOptions(max_num_seqs=4, max_model_len=128, enable_prefix_caching=False)
BANDWIDTH = Bandwidth(1e10, "given", {"given": 1e10}, 0)


def generate(model):
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=0)
    return list(model.iter_tokens(PROMPT, params=params))


@pytest.fixture(scope="module")
def model():
    with serve(engine=ENGINE) as served:
        yield served


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    """Tokens without names, the profile, and the tokens in it."""
    before = generate(model)
    with model.profile(tmp_path_factory.mktemp("trace")) as profile:
        named = generate(model)
    profile.bandwidth = BANDWIDTH
    return before, profile, named


@pytest.fixture(scope="module")
def profile(runs):
    return runs[1]


@pytest.fixture(scope="module")
def decode(profile):
    return profile.table(program="jit_decode_steps")


def test_names_change_no_token(runs):
    before, _, named = runs
    assert before == named and len(named) == NUM_TOKENS


def test_programs_with_names_are_made_once_and_only_for_profiles(model, runs):
    (cache,) = model.profile().caches
    traces = dict(cache.num_traces)
    assert generate(model) == runs[0]
    with model.profile():
        generate(model)
    assert generate(model) == runs[0]
    assert dict(cache.num_traces) == traces


def test_paths_are_names_of_modules(model, profile):
    names = dict(model.torch_model.named_modules())
    rows = profile.table().rows
    assert {row.name for row in rows if row.name is not None} <= set(names)
    assert {name.rpartition(".")[2] for name in names if "layers.0." in name} - {"act_fn", "rotary_emb"} <= {
        (row.name or "").rpartition(".")[2] for row in rows
    } | {"self_attn", "mlp"}


def test_every_layer_runs_in_every_step(model, decode):
    layers = [f"model.layers.{index}" for index in range(model.config.num_hidden_layers)]
    for layer in layers:
        inside = [row for row in decode.rows if (row.name or "").startswith(f"{layer}.")]
        assert max(row.num_calls for row in inside) == NUM_TOKENS - 1
        projections = [row for row in inside if row.name.endswith("_proj")]
        assert len(projections) >= 6 and {row.num_calls for row in projections} == {NUM_TOKENS - 1}


def events_of(file):
    """The events of instructions in a trace, by line: program, name, begin and end in nanoseconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = jax.profiler.ProfileData.from_file(str(file))
    for plane in data.planes:
        for line in plane.lines:
            yield [
                (stats["hlo_module"], stats["hlo_op"], event.start_ns, event.start_ns + event.duration_ns)
                for event in line.events
                if "hlo_op" in (stats := dict(event.stats))
            ]


def is_leaf(name):
    return not name.startswith(("while", "cond"))


def test_times_are_those_of_the_trace(profile):
    """The sum of the table is the time in which instructions ran: none is counted twice, none is left out."""
    programs = [name for name in profile.programs if name.startswith(("jit_decode_steps", "jit_packed"))]
    busy_ns = sum(
        trace.covered((begin, stop) for program, name, begin, stop in events if program in programs and is_leaf(name))
        for events in events_of(profile.file)
    )
    assert len(programs) >= 2
    assert sum(profile.table(program=name).seconds for name in programs) == pytest.approx(busy_ns * 1e-9, rel=1e-3)
    assert profile.trace.span_s <= profile.table().seconds * 1.001
    assert profile.table("op").seconds == pytest.approx(profile.table("kernel").seconds)


def test_most_of_a_loops_time_is_in_the_table(profile):
    """Against the trace's own span of the loop over steps; that of the dispatch which others disturbed least."""
    events = [event for line in events_of(profile.file) for event in line if event[0].startswith("jit_decode_steps")]
    shares = []
    for _, name, begin, stop in events:
        if name.startswith("while") and stop - begin > 0.01 * sum(e[3] - e[2] for e in events if is_leaf(e[1])):
            inside = [(e[2], e[3]) for e in events if is_leaf(e[1]) and begin <= e[2] and e[3] <= stop]
            shares.append(trace.covered(inside) / (stop - begin))
    assert len(shares) >= 2 and 0.85 <= max(shares) <= 1


def test_bytes_are_those_of_the_weights_a_step_reads(model, decode):
    runtime = model.torch_model._jax_runtime
    known = sum(row.weight_bytes or 0 for row in decode.rows)
    expected = weight_bytes_per_step(runtime.program.module, runtime.weights, 1) * (NUM_TOKENS - 1)
    assert known == pytest.approx(expected, rel=0.02)
    (head,) = [row for row in decode.rows if row.name == "lm_head"]
    rate = runtime.weights["lm_head.weight"].nbytes * head.num_calls / head.seconds
    assert head.bandwidth_share == pytest.approx(rate / BANDWIDTH.bytes_per_s)


def test_layers_are_one_row_for_people(model, decode):
    merged = decode.merged()
    (row,) = [row for row in merged.rows if row.name == "model.layers.*.mlp.down_proj"]
    assert row.num_calls == model.config.num_hidden_layers * (NUM_TOKENS - 1)
    assert sum(each.share for each in merged.rows) == pytest.approx(1)
    text = str(decode)
    assert "model.layers.*.mlp.down_proj" in text and "of bandwidth" in text.splitlines()[0]


def test_tables_by_operation_and_by_kernel(profile):
    operations = {row.name for row in profile.table("op").rows}
    assert {"ffi_call"} <= operations
    kernels = {row.name for row in profile.table("kernel").rows}
    assert any(kernel.startswith("tas_") for kernel in kernels)
    assert json.loads(json.dumps(profile.as_dict(), allow_nan=False))["span_s"] > 0


def test_the_roofline_of_a_cpu_is_bytes_over_bandwidth(profile):
    found = profile.roofline()
    assert found.source == "weights"
    rows = {row["module"]: row for row in found.rows}
    assert rows["lm_head"]["of_bound"] == pytest.approx(rows["lm_head"]["bound_s"] / rows["lm_head"]["seconds"])
    assert "lm_head" in str(found)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture(profile, tmp_path, suffix):
    file = tmp_path / f"profile.{suffix}"
    profile.plot(file)
    content = file.read_bytes()
    assert (b"<svg" if suffix == "svg" else b"\x89PNG") in content[:600]


def test_one_profile_at_a_time(model, tmp_path):
    other = model.profile()
    with model.profile(tmp_path), pytest.raises(ProfileRunningError, match="expected no other profile of this process"):
        other.start()
    with model.profile(tmp_path):
        pass
    jax.profiler.start_trace(tmp_path / "own")
    try:
        with pytest.raises(ProfileRunningError), model.profile():
            pass
    finally:
        jax.profiler.stop_trace()


def test_a_folder_that_cannot_be_written(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match="folder: expected a folder for new files"):
        model.profile(tmp_path / "file").start()
    with model.profile(tmp_path / "folder" / "inner"):  # and nothing is left behind
        pass


def test_an_error_in_the_block_ends_the_profile(model, tmp_path):
    with pytest.raises(ZeroDivisionError), model.profile(tmp_path) as broken:
        1 / 0  # noqa: B018
    with pytest.raises(TorchaxServeError, match="expected a profile that has ended"):
        broken.table()
    with model.profile(tmp_path):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "layer"}, "by: expected one of module, op, kernel"),
        ({"program": "jit_none"}, "program: expected one of"),
    ],
)
def test_wrong_arguments(profile, arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        profile.table(**arguments)


def test_an_encoder_is_profiled():
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    with serve(transformers.BertModel(config).eval()) as encoder:
        ids = torch.arange(12)[None]
        encoder(input_ids=ids)
        with encoder.profile() as profile:
            encoder(input_ids=ids)
        profile.bandwidth = BANDWIDTH
        counts = {row.name: row.num_calls for row in profile.table().rows}
    for layer in range(2):
        assert counts[f"encoder.layer.{layer}.attention.self.query"] == 1


def test_a_model_that_is_not_packed_is_profiled():
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4)
    with serve(transformers.MambaForCausalLM(config).eval(), engine=ENGINE) as recurrent:
        tokens = generate(recurrent)
        with recurrent.profile() as profile:
            assert generate(recurrent) == tokens
        profile.bandwidth = BANDWIDTH
        counts = {row.name: row.num_calls for row in profile.table().rows}
    for layer in range(2):
        assert counts[f"backbone.layers.{layer}.mixer.out_proj"] >= NUM_TOKENS - 1


def test_xprofs_tables_are_read_by_their_labels():
    table = {
        "cols": [{"id": "op", "label": "Operation"}, {"id": "time", "label": ""}],
        "rows": [{"c": [{"v": "dot.1"}, {"v": 2.5}]}, {"c": [{"v": "add.1"}, None]}],
    }
    rows = roofline.rows_of(table)
    assert rows == [{"Operation": "dot.1", "time": 2.5}, {"Operation": "add.1", "time": None}]
    assert str(roofline.Roofline("xprof", tuple(rows))).splitlines()[2].split() == ["add.1", "-"]
    assert "no operations" in str(roofline.Roofline("xprof", ()))
