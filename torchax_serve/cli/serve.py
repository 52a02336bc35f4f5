"""``torchax-serve serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError, IsPipelineError
from model_adapters.loading.model_source import bundle_folder
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.config_file import ConfigFile
from torchax_serve.cli.shared.engine_options import EngineFlags, ServeOptions
from torchax_serve.cli.shared.load_model import end_if_explained
from torchax_serve.cli.shared.load_options import check_quantization, option_groups
from torchax_serve.cli.shared.model_name import ServedModels, check_model
from torchax_serve.cli.shared.several_models import (
    Named,
    adapters_by_model,
    check_several,
    file_bytes,
    named_model,
    names_of,
)
from torchax_serve.validation.extras import require_package
from torchax_serve.validation.library_objects import is_cached_pipeline, is_pipeline_folder

if TYPE_CHECKING:
    from torchax_serve.server.model_pool import ModelSpec
    from torchax_serve.server.options import ServerOptions
    from torchax_serve.server.start_progress import StartProgress


def _option(*names: str, help: str, panel: str, **further: Any) -> Any:
    variable = "TORCHAX_SERVE_" + names[0].lstrip("-").upper().replace("-", "_")
    return typer.Option(*names, envvar=variable, show_envvar=False, help=help, rich_help_panel=panel, **further)


MAX_NUM_WAITING = 256
"""Default limit of waiting requests: a client is told to come back, where a script of Python would wait."""

_address = functools.partial(_option, panel="Address")
_access = functools.partial(_option, panel="Access")
_limits = functools.partial(_option, panel="Limits")
_files = functools.partial(_option, panel="Files and batches")
_several = functools.partial(_option, panel="Several models")
_life = functools.partial(_option, panel="Start and end")


@dataclass(frozen=True)
class AddressOptions:
    """Address on which the server listens."""

    host: Annotated[str, _address("--host", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, _address("--port", help="Port; 0 chooses a free one.", min=0, max=65535)] = 8000
    uds: Annotated[Path | None, _address("--uds", help="Unix socket, in place of host and port.")] = None
    served_model_name: Annotated[
        list[str] | None,
        _address("--served-model-name", help="Name of the model in requests; may be given several times."),
    ] = None
    allowed_host: Annotated[
        list[str] | None, _address("--allowed-host", help="Further header Host that is taken on a loopback address.")
    ] = None
    tls_certificate: Annotated[
        Path | None, _address("--tls-certificate", "--ssl-certfile", help="Certificate chain (PEM).")
    ] = None
    tls_key: Annotated[Path | None, _address("--tls-key", "--ssl-keyfile", help="Its private key (PEM).")] = None
    tls_client_ca: Annotated[
        Path | None, _address("--tls-client-ca", "--ssl-ca-certs", help="Ask clients for a certificate signed by it.")
    ] = None


@dataclass(frozen=True)
class AccessOptions:
    """Who may use the server, and what it writes down."""

    api_key: Annotated[
        list[str] | None,
        _access("--api-key", help="KEY (at least 8 characters) or NAME:KEY, then limits; better by variable or file."),
    ] = None
    api_key_file: Annotated[
        Path | None,
        _access("--api-key-file", help="File with a key and its limits a line, read when it changes."),
    ] = None
    cors_origin: Annotated[
        list[str] | None, _access("--cors-origin", help="Origin whose pages may call the server from a browser.")
    ] = None
    media_host: Annotated[
        list[str] | None,
        _access("--media-host", help="Host, or HOST:PORT, that images and audio of chats may be fetched from."),
    ] = None
    log_format: Annotated[str, _access("--log-format", help="text or json.")] = "text"
    no_access_log: Annotated[bool, _access("--no-access-log", help="No line for each request.")] = False
    response_template: Annotated[
        str | None,
        _access("--response-template", help="Format of reasoning and tool calls: a family, a JSON file, or none."),
    ] = None
    metrics_compat: Annotated[
        str | None, _access("--metrics-compat", help="vllm: vLLM's metric names next to our own.")
    ] = None
    metrics_without_key: Annotated[
        bool, _access("--metrics-without-key", help="Answer /metrics to whoever asks, such as Prometheus.")
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        _access("--otlp-traces-endpoint", help="URL of an OpenTelemetry collector, with its path: spans of requests."),
    ] = None
    allow_runtime_lora_updating: Annotated[
        bool,
        _access("--allow-runtime-lora-updating", help="Let requests load adapters, from any folder of this machine."),
    ] = False
    allow_model_downloads: Annotated[
        bool,
        _access("--allow-model-downloads", help="Let requests download models of the hub, and delete them."),
    ] = False
    profile_dir: Annotated[
        Path | None, _access("--profile-dir", help="Folder of the profiles of /start_profile and /stop_profile.")
    ] = None


@dataclass(frozen=True)
class LimitOptions:
    """Limits of requests and connections."""

    max_body_mib: Annotated[int, _limits("--max-body-mib", help="MiB of a request's body.", min=1)] = 32
    max_connections: Annotated[int, _limits("--max-connections", help="Open connections.", min=1)] = 4096
    max_connections_per_address: Annotated[
        int, _limits("--max-connections-per-address", help="Open connections of one client address.", min=1)
    ] = 2048
    max_stored_responses: Annotated[
        int, _limits("--max-stored-responses", help="Responses of a key that later requests may name; 0: none.", min=0)
    ] = 0
    stored_response_ttl: Annotated[
        float, _limits("--stored-response-ttl", help="Seconds for which they are stored.")
    ] = 3600.0
    request_timeout: Annotated[
        float | None, _limits("--request-timeout", help="Seconds that a request may take, waiting included.")
    ] = None
    queue_timeout: Annotated[
        float | None, _limits("--queue-timeout", help="Seconds that a request may wait before it begins.")
    ] = None
    first_token_timeout: Annotated[
        float | None, _limits("--first-token-timeout", help="Seconds until an answer's first token, waiting included.")
    ] = None
    keep_alive: Annotated[
        float, _limits("--keep-alive", help="Seconds of silence of a stream after which a comment is sent.")
    ] = 15.0


@dataclass(frozen=True)
class FileStorageOptions:
    """Files and batches of clients."""

    file_storage_path: Annotated[
        Path | None, _files("--file-storage-path", help="Folder of /v1/files and /v1/batches; they need one.")
    ] = None
    file_storage_mib: Annotated[
        int, _files("--file-storage-mib", help="MiB of the files of a key together.", min=1)
    ] = 4096
    max_file_mib: Annotated[int, _files("--max-file-mib", help="MiB of a file that is sent.", min=1)] = 200
    max_stored_files: Annotated[int, _files("--max-stored-files", help="Files of a key, and its batches.", min=1)] = (
        1000
    )
    stored_file_ttl: Annotated[
        float, _files("--stored-file-ttl", help="Seconds for which files are stored, and batches that have ended.")
    ] = 30 * 86400.0


@dataclass(frozen=True)
class SeveralOptions:
    """Memory of a server of several models."""

    max_loaded_models: Annotated[
        int | None,
        _several("--max-loaded-models", min=1, help="Models loaded at once; all. The one used longest ago makes room."),
    ] = None
    model_memory: Annotated[
        float | None, _several("--model-memory", help="GiB of weights and caches of loaded models.")
    ] = None
    model_idle_timeout: Annotated[
        float | None,
        _several("--model-idle-timeout", help="Seconds after which a model that nobody uses is unloaded; never."),
    ] = None


@dataclass(frozen=True)
class LifeOptions:
    """Start and end of the server."""

    pre_stop: Annotated[float, _life("--pre-stop", help="Seconds after SIGTERM with requests still accepted.")] = 0.0
    drain_timeout: Annotated[float, _life("--drain-timeout", help="Seconds for requests to finish after that.")] = 30.0
    watchdog: Annotated[
        float, _life("--watchdog", help="Seconds without progress of the engine that end the process; 0: none.")
    ] = 300.0
    watch: Annotated[
        bool, _life("--watch", help="Of a bundle: take new versions as they come, while requests of the old one end.")
    ] = False
    no_warm_up: Annotated[bool, _life("--no-warm-up", help="Compile at the first requests, not before.")] = False


@option_groups
def serve(
    models: ServedModels = None,
    *,
    address: AddressOptions,
    access: AccessOptions,
    limits: LimitOptions,
    files: FileStorageOptions,
    several: SeveralOptions,
    life: LifeOptions,
    engine: EngineFlags,
    config: ConfigFile = None,
    load: ServeOptions,
) -> int:
    """Serve models over HTTP, with the interfaces of OpenAI, Anthropic and Ollama.

    torchax-serve serve qwen3-0.6b --port 8000

    Several models, of which requests name one: torchax-serve serve chat=qwen3-0.6b words=./my-embedder

    Each option has a variable, such as TORCHAX_SERVE_PORT for --port, and can stand in the TOML file of --config.
    """
    from torchax_serve.server import require_packages
    from torchax_serve.server.logs import log_to_stderr

    named = [named_model(each) for each in models or ()] or [((), None)]
    model = named[0][1]
    if len(named) == 1:
        end_if_explained(model, load)
    _check_watched(model, life)
    require_packages()
    if access.otlp_traces_endpoint is not None:
        require_package("opentelemetry", "--otlp-traces-endpoint", extra="otel", package="opentelemetry-sdk")
    for _, each in named:
        check_model(each, load.revision, takes_pipelines=True)
    check_several(named, _given(address=address, life=life, engine=engine, load=load))
    check_quantization(load.quantization)  # a server that cannot load does not listen first
    options = server_options(address, access, limits, files, several, life)
    log_to_stderr(options.log_format)
    from torchax_serve.server.lifespan import Server, end_children
    from torchax_serve.server.model_pool import ModelSpec
    from torchax_serve.text.template_renderer import shared_renderer

    engine.options()  # wrong ones are an error at once
    load.show_details()
    _warn_if_open(options)
    load_any = functools.partial(_load, engine=engine)
    if len(named) == 1:
        (names, _), is_watched = named[0], life.watch
        load_here = functools.partial(load_any, **load.serve_kwargs())
        only = ModelSpec(names, lambda: _loaded(model, load_here, server.context.start, is_watched=is_watched))
        server = Server(options, [only])
    else:
        server = Server(options, _specs(named, load, load_any))
    print(*(f"listening on {each}" for each in server.addresses), sep="\n", file=sys.stderr, flush=True)
    try:
        status = server.run()
    finally:
        shared_renderer().close()
        end_children()
    # A thread that still compiles must not keep the process, and an orderly end of torch and jax takes seconds.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def _load(model: str | None, *, engine: EngineFlags, **options: Any) -> Any:
    """Returns a model, or a pipeline, which has no engine.

    Raises:
        InvalidArgumentError: options of the engine for a pipeline.
    """
    from torchax_serve.entrypoints.serve import serve as serve_here
    from torchax_serve.entrypoints.serve import serve_without_pipelines

    if not (is_pipeline_folder(model) or is_cached_pipeline(model, options.get("revision"))):
        try:
            return serve_without_pipelines(model, engine=engine.options(max_num_waiting=MAX_NUM_WAITING), **options)
        except IsPipelineError:  # known once the hub has listed the files of the model
            require_package("diffusers", f"MODEL: {model}", extra="diffusion")
    if engine.given:
        flag = "--" + next(iter(engine.given)).replace("_", "-")
        raise InvalidArgumentError(
            f"{flag}: expected no option of the engine with a pipeline of diffusers, got one; leave it out"
        )
    return serve_here(model, **options)


def _loaded(model: str | None, load: Callable[..., Any], progress: StartProgress, *, is_watched: bool) -> Any:
    """Returns the model, or the newest version of a bundle that is watched."""
    load = functools.partial(load, progress=progress)
    if not is_watched:
        return load(model)
    from torchax_serve.export.watch import WatchedBundle

    return WatchedBundle(Path(model or ""), load)


def _spec(named: Named, load: Callable[..., Any]) -> ModelSpec:
    """Returns one of several models, with the bytes of its files if they are in a folder."""
    from torchax_serve.server.model_pool import ModelSpec

    _, model = named
    return ModelSpec(names_of(named), functools.partial(load, model), model or "", file_bytes(model))


def _specs(named: Sequence[Named], load: ServeOptions, serve_here: Callable[..., Any]) -> list[ModelSpec]:
    """Returns several models, each with its own adapters."""
    by_model = adapters_by_model(named, load.adapter or ())
    if not by_model and (room := load.adapter_kwargs((), {})):
        flag = next(iter(room)).replace("_", "-")
        raise InvalidArgumentError(f"--{flag}: expected adapters with it, got none; give --adapter NAME@BASE=FOLDER")
    without = dataclasses.replace(load, adapter=None, max_loras=None, max_lora_rank=None, lora_target_modules=None)
    found = []
    for each in named:
        adapters = by_model.get(names_of(each)[0], {})
        kwargs = without.serve_kwargs() | (load.adapter_kwargs((), adapters) if adapters else {})
        spec = _spec(each, functools.partial(serve_here, **kwargs))
        found.append(dataclasses.replace(spec, adapters=adapters))
    return found


def _given(**groups: Any) -> dict[str, Any]:
    """Returns the options of groups that are not their defaults, by the name of the field."""
    fields = [(group, field) for group in groups.values() for field in dataclasses.fields(group)]
    values = {field.name: (getattr(group, field.name), field.default) for group, field in fields}
    return {name: value for name, (value, default) in values.items() if value != default}


def server_options(
    address: AddressOptions,
    access: AccessOptions,
    limits: LimitOptions,
    files: FileStorageOptions,
    several: SeveralOptions,
    life: LifeOptions,
) -> ServerOptions:
    """Returns the options of a server that the groups of a command line give."""
    from torchax_serve.server.options import MIB, ConnectionLimits, ServerOptions

    return ServerOptions(
        host=address.host,
        port=address.port,
        uds=address.uds,
        served_model_names=tuple(address.served_model_name or ()),
        allowed_hosts=tuple(address.allowed_host or ()),
        tls_certificate=address.tls_certificate,
        tls_key=address.tls_key,
        tls_client_ca=address.tls_client_ca,
        api_keys=tuple(_named_key(index, key) for index, key in enumerate(access.api_key or ())),
        api_key_file=access.api_key_file,
        cors_origins=tuple(access.cors_origin or ()),
        media_hosts=tuple(access.media_host or ()),
        log_format=access.log_format,
        access_log=not access.no_access_log,
        metrics_compat=access.metrics_compat,
        metrics_without_key=access.metrics_without_key,
        otlp_traces_endpoint=access.otlp_traces_endpoint,
        profile_dir=access.profile_dir,
        allow_runtime_lora_updating=access.allow_runtime_lora_updating,
        allow_model_downloads=access.allow_model_downloads,
        response_template=access.response_template,
        max_stored_responses=limits.max_stored_responses,
        stored_response_ttl_s=limits.stored_response_ttl,
        request_timeout_s=limits.request_timeout,
        queue_timeout_s=limits.queue_timeout,
        first_token_timeout_s=limits.first_token_timeout,
        keep_alive_s=limits.keep_alive,
        file_storage_path=files.file_storage_path,
        file_storage_bytes=files.file_storage_mib * MIB,
        max_stored_files=files.max_stored_files,
        stored_file_ttl_s=files.stored_file_ttl,
        pre_stop_s=life.pre_stop,
        drain_timeout_s=life.drain_timeout,
        watchdog_s=life.watchdog,
        warm_up=not life.no_warm_up,
        max_loaded_models=several.max_loaded_models,
        model_memory_bytes=None if several.model_memory is None else int(several.model_memory * 2**30),
        model_idle_timeout_s=several.model_idle_timeout,
        connection=ConnectionLimits(
            max_body_bytes=limits.max_body_mib * MIB,
            max_upload_bytes=files.max_file_mib * MIB,
            max_connections=limits.max_connections,
            max_connections_per_address=limits.max_connections_per_address,
        ),
    )


def _named_key(index: int, text: str) -> tuple[str, str]:
    name, colon, key = text.partition(":")
    return (name, key) if colon else (f"key-{index}", text)


def _check_watched(model: str | None, life: LifeOptions) -> None:
    if life.watch and bundle_folder(model) is None:
        raise InvalidArgumentError(
            f"--watch: expected a bundle as MODEL, got {model or 'none'}; leave it out, or export the model"
        )


def _warn_if_open(options: ServerOptions) -> None:
    if not options.is_loopback and not options.api_keys and options.api_key_file is None:
        logging.getLogger("torchax_serve.server").warning(
            "the server listens on %s and needs no key: whoever reaches it can use it; --api-key-file sets keys",
            options.host,
        )


COMMAND = Command(
    "serve",
    serve,
    position=15,
    examples=(("serve qwen3-0.6b", "an OpenAI-compatible server on port 8000"),),
)
