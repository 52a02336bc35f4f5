"""Every option of the engine and of `serve(...)` is one of `torchax-serve serve` and `run`."""

import dataclasses
import inspect

import pytest
import typer
from typer.testing import CliRunner

from torchax_serve import EngineOptions
from torchax_serve import serve as serve_model
from torchax_serve.cli.run import run
from torchax_serve.cli.serve import serve
from torchax_serve.cli.shared.engine_options import EngineFlags, ServeOptions
from torchax_serve.cli.shared.load_options import option_groups

FLAGS = {
    "max_model_len": ("--max-model-len=64", 64),
    "max_num_seqs": ("--max-num-seqs=3", 3),
    "max_num_batched_tokens": ("--max-num-batched-tokens=128", 128),
    "max_num_steps": ("--max-num-steps=2", 2),
    "max_decode_slowdown": ("--max-decode-slowdown=1.5", 1.5),
    "max_num_waiting": ("--max-num-waiting=5", 5),
    "max_num_waiting_tokens": ("--max-num-waiting-tokens=500", 500),
    "tpot_target_ms": ("--tpot-target-ms=40", 40.0),
    "ttft_target_ms": ("--ttft-target-ms=500", 500.0),
    "max_logprobs": ("--max-logprobs=5", 5),
    "page_size": ("--block-size=8", 8),
    "kv_cache_memory_bytes": ("--kv-cache-memory-bytes=65536", 65536),
    "kv_cache_dtype": ("--kv-cache-dtype=int8", "int8"),
    "kv_offloading_bytes": ("--kv-offloading-size=0.5", 1 << 29),
    "enable_prefix_caching": ("--no-enable-prefix-caching", False),
    "max_encoder_len": ("--max-encoder-len=32", 32),
    "batch_invariant": ("--batch-invariant", True),
    "kv_events_config": (
        '--kv-events-config={"enable_kv_cache_events": true, "topic": "t"}',
        {"enable_kv_cache_events": True, "topic": "t"},
    ),
    "speculative": ('--speculative-config={"method": "ngram", "num_speculative_tokens": 2}', None),
}
"""Flag and value of each field of `EngineOptions`."""
ARGUMENTS = {
    "revision": "--revision=v2",
    "token": "--token=hf_x",
    "local_files_only": "--offline",
    "dtype": "--dtype=bfloat16",
    "trust_remote_code": "--trust-remote-code",
    "allow_pickle": "--allow-pickle",
    "strict": "--strict",
    "cache_dir": "--cache-dir=/there",
    "random_weights": "--random-weights",
    "mesh": "--mesh=model=2",
    "tensor_parallel": "--tensor-parallel=2",
    "refuse_uneven": "--refuse-uneven",
    "pack_weights": "--no-pack-weights",
    "quantization": "--quantization=int8",
    "requantize": "--requantize",
    "adapter": "--adapter=/one",
    "adapters": "--adapter=one=/one",
    "max_loras": "--max-loras=2",
    "max_lora_rank": "--max-lora-rank=8",
    "lora_target_modules": "--lora-target-modules=q_proj",
}
"""Flag of each argument of `serve`."""
OTHER_ARGUMENTS = {"model", "progress", "engine", "speculative_config", "hosts"}
"""The model is no flag, progress is shown; the engine and hosts have flags of their own."""


def given(options_class, *flags):
    seen = []

    @option_groups
    def command(*, options: options_class) -> None:
        seen.append(options)

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(flags), env={"HF_TOKEN": None, "HF_HUB_OFFLINE": None})
    assert result.exit_code == 0, result.output
    return seen[0]


def test_every_field_of_engine_options_has_a_flag():
    fields = {field.name: field for field in dataclasses.fields(EngineOptions)}
    assert set(FLAGS) == set(fields)
    assert given(EngineFlags).options() == EngineOptions()
    assert given(EngineFlags).options(max_num_seqs=1) == EngineOptions(max_num_seqs=1)
    for name, (flag, value) in FLAGS.items():
        found = given(EngineFlags, flag).options(max_num_seqs=1)
        default = {"max_num_seqs": 1} | {name: value or {"method": "ngram", "num_speculative_tokens": 2}}
        default |= {name: False} if value is False else {}
        assert found == EngineOptions(**default) != EngineOptions(max_num_seqs=1), name


def test_every_argument_of_serve_has_a_flag():
    names = set(inspect.signature(serve_model).parameters)
    assert names == set(ARGUMENTS) | OTHER_ARGUMENTS
    plain = given(ServeOptions).serve_kwargs()
    for name, flag in ARGUMENTS.items():
        found = given(ServeOptions, flag).serve_kwargs()
        assert set(found) <= names and found != plain and found[name] != plain.get(name), name
    assert "hosts" in plain


@pytest.mark.parametrize("command", [serve, run])
def test_both_commands_have_them_all(command):
    parameters = inspect.signature(command).parameters
    for options_class in (EngineFlags, ServeOptions):
        assert {field.name for field in dataclasses.fields(options_class)} <= set(parameters)


def test_sizes_and_policies_are_named_whole_in_a_terminal_of_80_columns():
    app = typer.Typer()
    app.command()(option_groups(_takes_flags))
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).stdout
    for name in (
        "max-num-batched-tokens",
        "max-decode-slowdown",
        "tpot-target-ms",
        "ttft-target-ms",
        "max-num-waiting",
    ):
        assert f" --{name} " in shown


def test_a_value_out_of_its_range_is_named():
    for flag, message in {
        "--kv-cache-dtype=int4": "--kv-cache-dtype: expected auto, int8 or fp8, got 'int4'",
        "--kv-offloading-size=-1": "--kv-offloading-size: expected GiB >= 0, got -1.0",
    }.items():
        app = typer.Typer()
        app.command()(option_groups(_takes_flags))
        result = CliRunner().invoke(app, [flag])
        assert message in str(result.exception)


def _takes_flags(*, options: EngineFlags) -> None:
    """Takes the flags."""
