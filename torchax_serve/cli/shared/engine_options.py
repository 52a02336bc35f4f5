"""Options of the engine, and those of loading that only commands with an engine have."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError
from torchax_serve.cli.shared.load_options import DeviceOptions, check_choice
from torchax_serve.cli.shared.speculative import SpeculativeJson, parse_json_option, parse_speculative
from torchax_serve.validation.argument_checks import KV_CACHE_DTYPES

if TYPE_CHECKING:
    from torchax_serve import EngineOptions


def _option(*names: str, help: str, panel: str = "Engine", **further: Any) -> Any:
    variable = "TORCHAX_SERVE_" + names[0].split("/")[0].lstrip("-").upper().replace("-", "_")
    return typer.Option(*names, envvar=variable, show_envvar=False, help=help, rich_help_panel=panel, **further)


# In a panel of their own: beside their opposites, names of other options would be cut in a terminal of 80 columns.
_switch = functools.partial(_option, panel="Engine: on or off")


@dataclass(frozen=True)
class EngineFlags:
    """Sizes and policies of the engine: a field for each one of `torchax_serve.EngineOptions`.

    None stands for the default of that class. `kv_offloading_size` is in GiB.
    """

    max_model_len: Annotated[
        int | None, _option("--max-model-len", min=2, help="Tokens of a request, prompt and answer.")
    ] = None
    max_num_seqs: Annotated[
        int | None, _option("--max-num-seqs", min=1, help="Requests that run at once; 32 of a server, 1 of a chat.")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        _option("--max-num-batched-tokens", min=1, help="Tokens of all requests in one step; 256."),
    ] = None
    max_num_steps: Annotated[
        int | None, _option("--max-num-steps", min=1, help="Most decode steps in one dispatch, while none waits; 16.")
    ] = None
    max_decode_slowdown: Annotated[
        float | None,
        _option("--max-decode-slowdown", help="Factor by which new prompts may slow running requests down; 8."),
    ] = None
    tpot_target_ms: Annotated[
        float | None,
        _option(
            "--tpot-target-ms",
            help="ms per token of running requests beside new prompts; replaces the factor.",
        ),
    ] = None
    ttft_target_ms: Annotated[
        float | None,
        _option("--ttft-target-ms", help="ms to a first token; prompts take their time if it allows; none: at once."),
    ] = None
    max_logprobs: Annotated[
        int | None, _option("--max-logprobs", min=-1, help="Likeliest tokens with log-probabilities, 20; -1: all.")
    ] = None
    max_num_waiting: Annotated[
        int | None, _option("--max-num-waiting", min=1, help="Requests that wait, 256 of a server; one more: 429.")
    ] = None
    max_num_waiting_tokens: Annotated[
        int | None,
        _option("--max-num-waiting-tokens", min=1, help="Tokens of waiting prompts; more are answered with 429."),
    ] = None
    page_size: Annotated[
        int | None, _option("--page-size", "--block-size", min=1, help="Tokens of a page of the cache; 16.")
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None,
        _option("--kv-cache-memory-bytes", min=1, help="Bytes of all pages together; what is free, by default."),
    ] = None
    kv_cache_dtype: Annotated[
        str | None, _option("--kv-cache-dtype", help="auto (that of the model), int8 or fp8.")
    ] = None
    kv_offloading_size: Annotated[
        float | None,
        _option("--kv-offloading-size", help="GiB of host memory for evicted prefixes; 0."),
    ] = None
    enable_prefix_caching: Annotated[
        bool | None,
        _switch(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Whether requests share the pages of a common prefix; they do by default.",
        ),
    ] = None
    max_encoder_len: Annotated[
        int | None, _option("--max-encoder-len", min=1, help="Of an encoder-decoder: tokens of the encoder's input.")
    ] = None
    batch_invariant: Annotated[
        bool | None,
        _switch(
            "--batch-invariant/--no-batch-invariant",
            help="Results are bit-equal for any other requests in the batch; not so by default.",
        ),
    ] = None
    speculative_config: SpeculativeJson = None
    kv_events_config: Annotated[
        str | None,
        _option("--kv-events-config", help="Publish which prefixes are cached, in JSON, with the keys of vLLM's."),
    ] = None

    def __post_init__(self) -> None:
        if self.kv_cache_dtype is not None:
            check_choice("--kv-cache-dtype", self.kv_cache_dtype, ("auto", *KV_CACHE_DTYPES))
        if self.kv_offloading_size is not None and not 0 <= self.kv_offloading_size <= 1 << 30:
            raise InvalidArgumentError(
                f"--kv-offloading-size: expected GiB >= 0, got {self.kv_offloading_size}; 0 is none"
            )

    @property
    def given(self) -> dict[str, Any]:
        """The options of `EngineOptions` that differ from its defaults, by name."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        gib, speculative = found.pop("kv_offloading_size"), found.pop("speculative_config")
        found["kv_offloading_bytes"] = None if gib is None else int(gib * 2**30)
        found["speculative"] = parse_speculative(speculative)
        events, example = self.kv_events_config, '{"enable_kv_cache_events": true}'
        found["kv_events_config"] = parse_json_option("--kv-events-config", events, example)
        found["kv_cache_dtype"] = None if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        return {name: value for name, value in found.items() if value is not None}

    def options(self, **defaults: Any) -> EngineOptions:
        """Returns the options of the engine, with other defaults than its own."""
        from torchax_serve import EngineOptions

        return EngineOptions(**{**defaults, **self.given})


_load_option = functools.partial(typer.Option, rich_help_panel="Loading")


@dataclass(frozen=True)
class ServeOptions(DeviceOptions):
    """Loading options of commands that serve a model: the arguments of `torchax_serve.serve`."""

    random_weights: Annotated[
        bool, _load_option("--random-weights", help="Make weights up from the configuration alone, to measure speed.")
    ] = False
    refuse_uneven: Annotated[
        bool, _load_option("--refuse-uneven", help="Refuse a mesh that does not divide the weights evenly.")
    ] = False
    no_pack_weights: Annotated[
        bool, _load_option("--no-pack-weights", help="Keep bfloat16 weights of a CPU as they are, not compressed.")
    ] = False

    def serve_kwargs(self) -> dict[str, Any]:
        """Returns the keyword arguments of `torchax_serve.serve`."""
        further = {"random_weights": self.random_weights, "refuse_uneven": self.refuse_uneven}
        packed = {"pack_weights": False} if self.no_pack_weights else {}
        return {**super().serve_kwargs(), **{name: True for name, is_on in further.items() if is_on}, **packed}
