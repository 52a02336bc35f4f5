"""Parts of a profile by hand: instructions of a program, nested events, scopes."""

from types import SimpleNamespace

import pytest

from model_adapters.program.module_scopes import module_of
from torchax_serve.profiling import trace
from torchax_serve.profiling.instructions import instructions_of

PROGRAM = """HloModule jit_run_1, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%body (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg = (s32[], /*index=1*/f32[4]{0}) parameter(0)
  %fusion.12 = f32[4]{0} fusion(%arg), kind=kLoop, metadata={op_name="jit(run)/model/layers/1/mlp/mul"}
  ROOT %custom-call.3 = (f32[4]{0}, s32[]) custom-call(%fusion.12), custom_call_target="tas_linear", \
metadata={op_name="jit(run)/model/layers/1/mlp/up/ffi_call" source_file="a (b).py"}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %while.7 = (s32[], f32[4]{0}) while(%x), condition=%condition, body=%body
  ROOT %add.1.clone = f32[4]{0} add(%x, %x)
}
"""


def test_instructions_of_a_program():
    name, found = instructions_of(PROGRAM)
    assert name == "jit_run_1"
    assert found["fusion.12"].kernel == "fusion" and found["fusion.12"].primitive == "mul"
    assert found["custom-call.3"].kernel == "tas_linear"
    assert found["custom-call.3"].scopes.endswith("up/ffi_call")
    assert found["while.7"].is_control_flow and not found["fusion.12"].is_control_flow
    assert found["add.1.clone"].scopes == ""


NAMES = {"", "model", "model.layers.1", "model.layers.1.mlp", "model.layers.1.mlp.up", "lm_head", "norm"}


@pytest.mark.parametrize(
    ("scopes", "name"),
    [
        ("jit(run)/model/layers/1/mlp/up/ffi_call", "model.layers.1.mlp.up"),
        ("jit(run)/while/body/closed_call/model/layers/1/mlp/mul", "model.layers.1.mlp"),
        ("jit(run)/vmap(model)/layers/1/mul", "model.layers.1"),
        ("jit(run)/vmap(jvp(model))/layers/1/mlp/jit(silu)/mul", "model.layers.1.mlp"),
        ("jit(run)/model/layers/1/lm_head/dot_general", "lm_head"),
        ("jit(run)/jit(norm)/mul", ""),
        ("jit(run)/argmax", ""),
        ("jit(run)/norm", ""),  # the primitive, not the module
        ("", ""),
    ],
)
def test_the_innermost_module_is_found(scopes, name):
    assert module_of(scopes, NAMES) == name


def event(name, begin, duration, program="jit_run_1"):
    stats = [("hlo_op", name), ("hlo_module", program)]
    return SimpleNamespace(name=name, start_ns=begin, duration_ns=duration, stats=stats)


def test_nested_events_are_counted_once(monkeypatch, tmp_path):
    (tmp_path / "a.xplane.pb").write_bytes(b"")
    line = [
        event("while.7", 0, 100),
        event("fusion.12", 10, 20),
        event("call.1", 40, 30),
        event("custom-call.3", 45, 10),
        event("fusion.12", 80, 10),
        SimpleNamespace(name="host", start_ns=0, duration_ns=1000, stats=[]),
    ]
    other = [event("fusion.12", 85, 10)]
    lines = [SimpleNamespace(events=events) for events in (line, other)]
    data = SimpleNamespace(planes=[SimpleNamespace(name="/host:CPU", lines=lines)])
    monkeypatch.setattr(trace.jax.profiler.ProfileData, "from_file", lambda file: data, raising=False)
    found = trace.read_trace(tmp_path, dict([instructions_of(PROGRAM)]))
    times = {time.instruction.kernel if time.instruction else time.kernel: time for time in found.times}
    assert {kernel: (time.num_calls, round(time.seconds * 1e9)) for kernel, time in times.items()} == {
        "fusion": (3, 40),
        "call": (1, 20),
        "tas_linear": (1, 10),
    }
    assert found.span_s == pytest.approx((20 + 30 + 15) * 1e-9)


def test_kernels_of_devices_are_named_by_their_events(monkeypatch, tmp_path):
    (tmp_path / "a.xplane.pb").write_bytes(b"")
    launched = event("fusion.12", 0, 5)
    launched.name = "loop_multiply_fusion_kernel"
    plane = SimpleNamespace(name="/device:GPU:0", lines=[SimpleNamespace(events=[launched])])
    monkeypatch.setattr(
        trace.jax.profiler.ProfileData, "from_file", lambda file: SimpleNamespace(planes=[plane]), raising=False
    )
    (time,) = trace.read_trace(tmp_path, dict([instructions_of(PROGRAM)])).times
    assert time.kernel == "loop_multiply_fusion_kernel" and time.instruction.primitive == "mul"
