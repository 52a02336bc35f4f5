"""Errors for keyword arguments of other libraries, with what to use here.

Users bring the keywords of transformers, vLLM and OpenAI's clients. `refuses_unknown` replaces Python's ``TypeError``
for an unknown keyword by one line with a remedy.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

from model_adapters.errors import UnsupportedArgumentError
from torchax_serve.validation.sampling_hints import RENAMED, UNSUPPORTED

P = ParamSpec("P")
R = TypeVar("R")

_DTYPE = 'use serve(dtype="bfloat16")'
_DEVICES = "JAX places the weights: on one device by itself, on several with serve(mesh={'model': 4})"
_CACHE_BYTES = "use EngineOptions(kv_cache_memory_bytes=...), a number of bytes"
_QUANTIZATION = 'use serve(quantization="int8") or "int4", and EngineOptions(kv_cache_dtype="int8") for a smaller cache'
_ATTENTION = "attention is this project's own on every device; leave it out"
_TOKENIZER = "the tokenizer is the one in the model's folder; leave it out, or give token ids as prompts"
_TEMPLATE_CALL = "give it to chat, or render the template with model.tokenizer.apply_chat_template"
_COMPILED = "programs are always compiled; leave it out"
_SERVER = "it belongs to an HTTP server; leave it out"


def _in_engine(field: str) -> str:
    return f"use EngineOptions({field}=...)"


HINTS: Mapping[str, str] = {
    **UNSUPPORTED,
    # transformers' from_pretrained
    "torch_dtype": _DTYPE,
    "device_map": _DEVICES,
    "device": _DEVICES,
    "max_memory": _DEVICES,
    "tp_plan": "use serve(tensor_parallel=4)",
    "low_cpu_mem_usage": "weights go to the device file by file in any case; leave it out",
    "offload_folder": "weights are on the devices only; leave it out",
    "attn_implementation": _ATTENTION,
    "use_flash_attention_2": _ATTENTION,
    "load_in_8bit": _QUANTIZATION,
    "load_in_4bit": _QUANTIZATION,
    "quantization_config": _QUANTIZATION,
    "use_auth_token": 'use serve(token="...")',
    "hf_token": 'use serve(token="...")',
    "use_safetensors": "safetensors are taken where there are any; pickle files need serve(allow_pickle=True)",
    "subfolder": "download the folder, and pass its path",
    "config": "the configuration is the one in the model's folder; edit config.json, or pass a model object",
    "generation_config": "set fields of model.generation_config, or pass SamplingParams with a request",
    # vLLM's LLM and its engine
    "model_name": "use serve(model), the first argument",
    "model_path": "use serve(model), the first argument",
    "pretrained_model_name_or_path": "use serve(model), the first argument",
    "tokenizer": _TOKENIZER,
    "tokenizer_mode": _TOKENIZER,
    "tokenizer_revision": _TOKENIZER,
    "skip_tokenizer_init": "the tokenizer is loaded when it is first used; leave it out",
    "max_seq_len": _in_engine("max_model_len"),
    "max_seq_length": _in_engine("max_model_len"),
    "max_batch_size": _in_engine("max_num_seqs"),
    "max_num_partial_prefills": _in_engine("max_decode_slowdown"),
    "enable_chunked_prefill": "long prompts always come in chunks, of EngineOptions(max_num_batched_tokens=...) tokens",
    "block_size": _in_engine("page_size"),
    "gpu_memory_utilization": _CACHE_BYTES,
    # names that options of the engine had before
    "max_len": _in_engine("max_model_len"),
    "num_slots": _in_engine("max_num_seqs"),
    "page_len": _in_engine("page_size"),
    "token_budget": _in_engine("max_num_batched_tokens"),
    "kv_cache_bytes": _CACHE_BYTES,
    "prefix_caching": _in_engine("enable_prefix_caching"),
    "max_source_len": _in_engine("max_encoder_len"),
    "swap_space": "use EngineOptions(kv_offloading_bytes=...), bytes of host memory for evicted prefixes",
    "kv_offloading_size": "use EngineOptions(kv_offloading_bytes=...), a number of bytes instead of GiB",
    "cpu_offload_gb": "weights are on the devices only; leave it out",
    "num_scheduler_steps": _in_engine("max_num_steps"),
    "cache_dtype": 'use EngineOptions(kv_cache_dtype="int8")',
    "tensor_parallel_size": "use serve(tensor_parallel=4)",
    "data_parallel_size": "use serve(mesh={'data': 4})",
    "pipeline_parallel_size": "layers are not spread over devices; use serve(tensor_parallel=4)",
    "enable_expert_parallel": "use serve(mesh={'expert': 4})",
    "distributed_executor_backend": "use serve(hosts=Hosts(...)), or torchax_serve.distributed.ray for replicas",
    "enforce_eager": _COMPILED,
    "compilation_config": _COMPILED,
    "load_format": "the files say what they are; for weights made up use serve(random_weights=True)",
    "download_dir": 'use serve(cache_dir="...")',
    "enable_lora": "use serve(adapters={'sql': './sql'}), and name one in SamplingParams(adapter=...)",
    "num_speculative_tokens": 'use serve(speculative_config={"method": "ngram", "num_speculative_tokens": 4})',
    "served_model_name": _SERVER,
    "host": _SERVER,
    "port": _SERVER,
    "api_key": _SERVER,
    "disable_log_stats": "statistics are read by model.stats(); leave it out",
    # chats, and calls of an HTTP API
    "guided_decoding": "call model.generate(prefix_allowed_tokens_fn=...)",
    "structured_outputs": "call model.generate(prefix_allowed_tokens_fn=...)",
    "response_format": "call model.generate(prefix_allowed_tokens_fn=...)",
    "tools": _TEMPLATE_CALL,
    "chat_template": _TEMPLATE_CALL,
    "add_generation_prompt": _TEMPLATE_CALL,
}
"""Remedy by keyword; not used by functions that have the keyword."""

_OWN = """max_new_tokens min_new_tokens do_sample temperature top_k top_p min_p repetition_penalty presence_penalty
frequency_penalty logit_bias logprobs n stop seed priority bad_words_ids eos_token_id prompt_logprobs"""

SAMPLING = {
    **{name: name for name in _OWN.split()},
    **RENAMED,
}
"""Field of `SamplingParams` by the keyword of a request with the same meaning."""


_ENGINE = """max_model_len max_num_seqs page_size kv_cache_memory_bytes kv_offloading_bytes max_num_batched_tokens
enable_prefix_caching max_num_steps max_decode_slowdown batch_invariant kv_cache_dtype max_encoder_len max_num_waiting
max_num_waiting_tokens max_logprobs speculative kv_events_config tpot_target_ms ttft_target_ms"""

ENGINE = frozenset(_ENGINE.split())
"""Fields of `EngineOptions`; this module must not import the engine."""


def unknown_argument(where: str, name: str, known: Collection[str] = ()) -> UnsupportedArgumentError:
    """Returns the error for a keyword that `where` does not have.

    Args:
        where: name of a function or class, as a caller writes it, such as ``serve``.
        name: the keyword.
        known: keywords of `where`; without a hint, the error names the nearest.
    """
    remedy = hint(name, known)
    if remedy is None:
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'none'}"
    return UnsupportedArgumentError(f"{where} has no argument {name}: {remedy}")


def hint(name: str, known: Collection[str] = ()) -> str | None:
    """Returns the remedy for the keyword `name` of a call; None if there is no hint.

    The call has the keywords `known`.
    """
    if name in ENGINE and name not in known:
        return f"use serve(engine=EngineOptions({name}=...))"
    field = SAMPLING.get(name)
    if field is None:
        return HINTS.get(name)
    return f"use {field}" if field in known else f"use SamplingParams({field}=...) with a request"


def refuses_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """Returns `function`, which raises `unknown_argument` for a keyword that it does not have."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    assert not takes_any, f"{function} takes any keyword"
    where = getattr(function, "__name__", "call")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in parameters:
                raise unknown_argument(where, name, parameters.keys())
        return function(*args, **kwargs)

    return checked


T = TypeVar("T", bound=type)


def fields_refuse_unknown(cls: T) -> T:
    """Returns the dataclass `cls`, whose constructor refuses unknown fields.

    It raises `unknown_argument` for them.
    """
    any_class: Any = cls
    made: Any = any_class.__init__
    known = [name for name in inspect.signature(made).parameters if name != "self"]

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **fields: Any) -> None:
        for name in fields:
            if name not in known:
                raise unknown_argument(cls.__name__, name, known)
        made(self, *args, **fields)

    any_class.__init__ = __init__
    return cls
