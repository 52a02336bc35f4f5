"""Keywords of other libraries are answered with one line that names what to use here."""

import dataclasses
import inspect

import pytest

from torchax_serve import EngineOptions, SamplingParams, UnsupportedArgumentError, serve, to_jax
from torchax_serve.validation.argument_hints import ENGINE, HINTS, SAMPLING, refuses_unknown, unknown_argument

FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    "call, name, remedy",
    [
        (serve, "torch_dtype", 'serve(dtype="bfloat16")'),
        (serve, "device_map", "JAX places the weights"),
        (serve, "max_model_len", "serve(engine=EngineOptions(max_model_len=...))"),
        (serve, "quantization_config", 'serve(quantization="int8")'),
        (serve, "load_in_8bit", 'serve(quantization="int8")'),
        (serve, "tensor_parallel_size", "serve(tensor_parallel=4)"),
        (serve, "max_tokens", "SamplingParams(max_new_tokens=...)"),
        (serve, "tokenizer", "model's folder"),
        (serve, "attn_implementation", "leave it out"),
        (serve, "revison", "did you mean revision?"),
        (to_jax, "device_map", "JAX places the weights"),
        (to_jax, "nonsense", "it takes model"),
        (EngineOptions, "gpu_memory_utilization", "kv_cache_memory_bytes"),
        (serve, "enable_prefix_caching", "serve(engine=EngineOptions(enable_prefix_caching=...))"),
        (EngineOptions, "page_sise", "did you mean page_size?"),
    ],
)
def test_a_neighbours_keyword_is_named_with_what_to_use(call, name, remedy):
    with pytest.raises(UnsupportedArgumentError) as refused:
        call(**{name: 1})
    assert f"{call.__name__} has no argument {name}: " in str(refused.value)
    assert remedy in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name, field", [("max_tokens", "max_new_tokens"), ("stop_sequences", "stop"), ("timeout", "timeout_s")]
)
def test_fields_of_requests_under_other_names(name, field):
    with pytest.raises(ValueError, match=rf"SamplingParams has no '{name}'; did you mean {field}\?"):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize(
    "old, new",
    [
        ("max_len", "max_model_len"),
        ("num_slots", "max_num_seqs"),
        ("page_len", "page_size"),
        ("token_budget", "max_num_batched_tokens"),
        ("kv_cache_bytes", "kv_cache_memory_bytes"),
        ("prefix_caching", "enable_prefix_caching"),
        ("max_source_len", "max_encoder_len"),
    ],
)
@pytest.mark.parametrize("call", [serve, EngineOptions])
def test_earlier_names_of_engine_options_are_refused_with_the_new_one(call, old, new):
    with pytest.raises(UnsupportedArgumentError) as refused:
        call(**{old: 1})
    assert str(refused.value).startswith(f"{call.__name__} has no argument {old}: use EngineOptions({new}=...)")
    assert "\n" not in str(refused.value)


def test_hints_name_what_there_is_and_nothing_that_is_taken():
    assert set(SAMPLING.values()) <= FIELDS
    taken = {*inspect.signature(serve).parameters, *inspect.signature(EngineOptions).parameters}
    assert set(inspect.signature(EngineOptions).parameters) == ENGINE
    assert not taken & (HINTS.keys() | SAMPLING.keys()) - {"seed"}


def test_signatures_stay_what_they_were():
    assert "local_files_only" in inspect.signature(serve).parameters
    assert [field.name for field in dataclasses.fields(EngineOptions)] == list(
        inspect.signature(EngineOptions).parameters
    )
    assert EngineOptions(page_size=8).page_size == 8

    @refuses_unknown
    def add(a, *, b=1):
        return a + b

    assert add(1, b=2) == 3
    assert add.__name__ == "add"
    assert "did you mean b?" not in str(unknown_argument("add", "zzz", ["a", "b"]))
