"""Option groups, and the options of loading a model, shared by every command that loads one."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from model_adapters.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torchax_serve.distributed.hosts.options import Hosts

DTYPES = ("auto", "float32", "bfloat16", "float16")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_option = functools.partial(typer.Option, rich_help_panel="Loading")
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", min=2, help="Tokens of a request, prompt and answer.")
]
"""Option of commands that make a cache for requests."""
_hosts_option = functools.partial(typer.Option, rich_help_panel="Several hosts, the same command on each")


def complete_dtype() -> list[str]:
    """Returns the shell's completions for a dtype of weights."""
    return list(DTYPES)


def complete_quantization() -> list[str]:
    """Returns the shell's completions for a preset of quantization."""
    from model_adapters.quantization.rules import PRESETS

    return list(PRESETS)


def check_quantization(given: str | None) -> None:
    """Raises `InvalidArgumentError` for what is neither a preset nor a file of rules."""
    if given is not None:
        from model_adapters.quantization.rules import parse_rules  # imports jax

        parse_rules(given)


@dataclass(frozen=True)
class ConfigOptions:
    """Source of a model's configuration and code.

    Each field is an option of the commands (`option_groups`).
    """

    revision: Annotated[str | None, _option("--revision", help="Branch, tag or commit of a hub model.")] = None
    dtype: Annotated[
        str,
        _option(
            "--dtype",
            "--torch-dtype",
            autocompletion=complete_dtype,
            help="auto (that of the checkpoint), float32, bfloat16 or float16.",
        ),
    ] = "auto"
    token: Annotated[
        str | None,
        _option(
            "--token",
            "--hf-token",
            envvar="HF_TOKEN",
            show_default=False,
            help="Hub token for gated and private models; better given by the variable than on the command line.",
        ),
    ] = None
    offline: Annotated[
        bool,
        _option("--offline", envvar="HF_HUB_OFFLINE", help="Use only files that are already on this machine."),
    ] = False
    trust_remote_code: Annotated[
        bool,
        _option("--trust-remote-code", help="Run Python code that comes with the model. Only for authors you trust."),
    ] = False
    cache_dir: Annotated[
        Path | None,
        _option("--cache-dir", "--download-dir", help="Folder for downloads, in place of the hub's default."),
    ] = None

    def __post_init__(self) -> None:
        check_choice("--dtype", self.dtype, DTYPES)

    def kwargs(self) -> dict[str, Any]:
        """Returns the keyword arguments of the options."""
        return {
            "revision": self.revision,
            "dtype": self.dtype,
            "token": self.token or None,
            "local_files_only": True if self.offline else None,
            "trust_remote_code": self.trust_remote_code,
            "cache_dir": str(self.cache_dir) if self.cache_dir else None,
        }


@dataclass(frozen=True)
class LoadOptions(ConfigOptions):
    """Options of loading a model with its weights."""

    allow_pickle: Annotated[
        bool,
        _option("--allow-pickle", help="Load weights from pickle files (.bin, .pt). Only from authors you trust."),
    ] = False
    strict: Annotated[
        bool, _option("--strict", help="Refuse files with tensors that the model has no use for, or without its head.")
    ] = False
    quantization: Annotated[
        str | None,
        _option(
            "--quantization",
            autocompletion=complete_quantization,
            show_default=False,
            help="Store weights with fewer bits: int8, int4, fp8, w8a8, fp8-w8a8, nf4, or a .toml, .yaml or .json file "
            "of rules.",
        ),
    ] = None
    requantize: Annotated[
        bool,
        _option("--requantize", help="Let --quantization round weights again that the checkpoint has quantized."),
    ] = False
    explain: Annotated[bool, _option("--explain", help="Print what --quantization does to each weight, and end.")] = (
        False
    )
    verbose: Annotated[
        bool, _option("--verbose", help="More lines on stderr, such as the name of each tensor that is left unused.")
    ] = False

    def serve_kwargs(self) -> dict[str, Any]:
        """Returns the keyword arguments of `torchax_serve.serve`."""
        return {
            **self.kwargs(),
            "allow_pickle": self.allow_pickle,
            "strict": self.strict,
            "quantization": self.quantization,
            "requantize": self.requantize,
        }

    def show_details(self) -> None:
        """With ``--verbose``, sends the project's own log to stderr, details included."""
        if self.verbose:
            logging.getLogger("torchax_serve").setLevel(logging.INFO)
            if logging.lastResort is not None:
                logging.lastResort.setLevel(logging.INFO)


@dataclass(frozen=True)
class MeshOptions(LoadOptions):
    """Loading options of commands that can spread a model over the devices of a host."""

    tensor_parallel: Annotated[
        int | None,
        _option("--tensor-parallel", "--tensor-parallel-size", "--tp", min=1, help="Devices that share the model."),
    ] = None
    mesh: Annotated[
        str | None,
        _option("--mesh", help="The same by axis, such as model=2,expert=4; data=2 for replicas that share requests."),
    ] = None
    adapter: Annotated[
        list[str] | None,
        _option(
            "--adapter",
            show_default=False,
            help="Folder of a LoRA adapter of peft, added to the weights at load; or NAME=FOLDER, for requests that "
            "name it, as often as there are adapters; NAME@BASE=FOLDER where several models are served.",
        ),
    ] = None
    max_loras: Annotated[
        int | None, _option("--max-loras", min=1, help="Adapters there is room for; as many as are given.")
    ] = None
    max_lora_rank: Annotated[
        int | None, _option("--max-lora-rank", min=1, help="Largest rank of an adapter; that of those that are given.")
    ] = None
    lora_target_modules: Annotated[
        list[str] | None,
        _option(
            "--lora-target-modules",
            help="Layer that may have adapters, such as q_proj, as often as there are; those of the adapters given.",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mesh is not None and self.tensor_parallel is not None:
            raise InvalidArgumentError(
                "--mesh and --tensor-parallel: expected one of them, got both; leave --tensor-parallel out"
            )
        self.mesh_shape()
        self.adapters()

    def serve_kwargs(self) -> dict[str, Any]:
        """Returns the keyword arguments of `torchax_serve.serve`."""
        return {
            **super().serve_kwargs(),
            **self.adapter_kwargs(*self.adapters()),
            "tensor_parallel": self.tensor_parallel,
            "mesh": self.mesh_shape(),
        }

    def adapters(self) -> tuple[list[str], dict[str, str]]:
        """Returns the folders of adapters that are merged, and those of requests by name.

        Raises:
            InvalidArgumentError: two to be merged, or two of one name.
        """
        merged, named = [], {}
        for given in self.adapter or ():
            name, equals, folder = given.partition("=")
            if not equals or "/" in name or os.path.exists(given):
                merged.append(given)
            elif name in named or not name or not folder:
                raise InvalidArgumentError(f"--adapter: expected NAME=FOLDER with names of their own, got {given!r}")
            else:
                named[name] = folder
        if len(merged) > 1:
            raise InvalidArgumentError(
                f"--adapter: expected one folder to add to the weights, got {len(merged)}; name them: NAME=FOLDER"
            )
        return merged, named

    def adapter_kwargs(self, merged: Sequence[str], named: Mapping[str, str]) -> dict[str, Any]:
        """Returns the arguments of `torchax_serve.serve` for these adapters, with the room for them."""
        found: dict[str, Any] = {"adapter": merged[0]} if merged else {}
        found |= {"adapters": dict(named)} if named else {}
        for name in ("max_loras", "max_lora_rank", "lora_target_modules"):
            if (value := getattr(self, name)) not in (None, []):
                found[name] = value
        return found

    def mesh_shape(self) -> dict[str, int] | None:
        """Returns the number of devices by mesh axis; None without the option.

        Raises:
            InvalidArgumentError: An axis is unknown, or a size is not a positive number.
        """
        if self.mesh is None:
            return None
        from torchax_serve.distributed.mesh_shape import parse_mesh

        return parse_mesh(self.mesh, None)


@dataclass(frozen=True)
class DeviceOptions(MeshOptions):
    """Loading options of commands that can spread a model over the devices of several hosts."""

    coordinator: Annotated[
        str | None,
        _hosts_option(
            "--coordinator", envvar="TORCHAX_SERVE_COORDINATOR", help="HOST:PORT of host 0, as all others reach it."
        ),
    ] = None
    num_hosts: Annotated[
        int | None,
        _hosts_option("--num-hosts", envvar="TORCHAX_SERVE_NUM_HOSTS", help="Hosts whose devices share the model."),
    ] = None
    host_id: Annotated[
        int | None,
        _hosts_option(
            "--host-id", envvar="TORCHAX_SERVE_HOST_ID", help="Of this host; 0 answers, all others lend their devices."
        ),
    ] = None
    join_timeout: Annotated[
        float, _hosts_option("--join-timeout", help="Seconds that hosts wait for each other.", show_default=True)
    ] = 300.0

    hosts_secret_file: Annotated[
        Path | None,
        _hosts_option(
            "--hosts-secret-file",
            envvar="TORCHAX_SERVE_HOSTS_SECRET_FILE",
            help="File with a secret that all hosts have; TORCHAX_SERVE_HOSTS_SECRET holds one itself.",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hosts() is not None and self.adapter:
            raise InvalidArgumentError(
                "--adapter: expected one host, got several; merge it with peft, and serve the result"
            )

    def serve_kwargs(self) -> dict[str, Any]:
        """Returns the keyword arguments of `torchax_serve.serve`."""
        return {**super().serve_kwargs(), "hosts": self.hosts()}

    def hosts(self) -> Hosts | None:
        """Returns the hosts that share the model; None for a single host.

        Raises:
            InvalidArgumentError: One of the options is given without the others.
        """
        given = {"--coordinator": self.coordinator, "--num-hosts": self.num_hosts, "--host-id": self.host_id}
        missing = [name for name, value in given.items() if value is None]
        if self.coordinator is None or self.num_hosts is None or self.host_id is None:
            if len(missing) == len(given):
                return None
            raise InvalidArgumentError(f"expected {missing[0]} beside the other options of hosts, got none; add it")
        from torchax_serve.distributed.hosts.options import Hosts

        return Hosts(
            coordinator=self.coordinator,
            num_hosts=self.num_hosts,
            host_id=self.host_id,
            join_timeout_s=self.join_timeout,
            secret=self._hosts_secret(),
        )

    def _hosts_secret(self) -> str | None:
        """Reads the secret of the hosts from the file, or else from the variable."""
        if self.hosts_secret_file is None:
            return os.environ.get("TORCHAX_SERVE_HOSTS_SECRET") or None
        try:
            return self.hosts_secret_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(
                f"--hosts-secret-file: expected a file of text, got {self.hosts_secret_file} ({error}); make one: "
                "openssl rand -hex 32"
            ) from error


def check_choice(flag: str, value: str, choices: Sequence[str]) -> None:
    """Raises `InvalidArgumentError` unless `value` is one of `choices`.

    The error suggests the nearest one.
    """
    if value in choices:
        return
    meant = _SHORT.get(value.lower().removeprefix("torch."), "")
    near = [meant] if meant in choices else difflib.get_close_matches(value.lower(), choices, n=1)
    listed = f"{', '.join(choices[:-1])} or {choices[-1]}" if len(choices) > 1 else choices[0]
    raise InvalidArgumentError(
        f"{flag}: expected {listed}, got {value!r}; {f'did you mean {near[0]}?' if near else 'choose one of them'}"
    )


def option_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `command` with one option for each field of each parameter that is a dataclass.

    The options take that parameter's place. The command line is read from a function's signature, so this is a
    function with another signature: it takes the options one by one and hands them on as one object for each group.
    """
    signature = inspect.signature(command, eval_str=True)
    groups = {each.name: each.annotation for each in signature.parameters.values() if _is_group(each)}

    @functools.wraps(command)
    def with_options(**given: Any) -> Any:
        for name, group in groups.items():
            fields = [field.name for field in dataclasses.fields(group) if field.name in given]
            given[name] = group(**{field: given.pop(field) for field in fields})
        return command(**given)

    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name in groups:
            parameters += _options_of(groups[parameter.name])
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_options


def _is_group(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.annotation, type) and dataclasses.is_dataclass(parameter.annotation)


def _options_of(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    ]
