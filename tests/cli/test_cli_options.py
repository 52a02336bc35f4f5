"""The loading options: defined once, the same in every command that loads a model."""

import dataclasses
import inspect
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from torchax_serve.cli.bench import bench
from torchax_serve.cli.run import run
from torchax_serve.cli.shared.load_options import LoadOptions, option_groups
from torchax_serve.cli.shared.sampling_options import DecodingOptions
from torchax_serve.cli.verify import VerifyLoadOptions, verify

GIVEN = {
    "revision": ("--revision=v2", "v2"),
    "dtype": ("--dtype=bfloat16", "bfloat16"),
    "token": ("--token=hf_x", "hf_x"),
    "offline": ("--offline", True),
    "trust_remote_code": ("--trust-remote-code", True),
    "allow_pickle": ("--allow-pickle", True),
    "cache_dir": ("--cache-dir=/there", Path("/there")),
    "strict": ("--strict", True),
    "quantization": ("--quantization=int8", "int8"),
    "requantize": ("--requantize", True),
    "explain": ("--explain", True),
    "verbose": ("--verbose", True),
}


def called(options_class, *arguments):
    """What a command with one argument of its own gets from the command line."""
    seen = []

    @option_groups
    def command(name: str, *, load: options_class, last: int = 3) -> None:
        seen.append((name, load, last))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["model", *arguments], env={"HF_TOKEN": None, "HF_HUB_OFFLINE": None})
    assert result.exit_code == 0, result.output
    return seen[0]


@pytest.mark.parametrize("options_class", [LoadOptions, VerifyLoadOptions])
def test_options_arrive_as_one_object(options_class):
    assert set(GIVEN) == {field.name for field in dataclasses.fields(LoadOptions)}
    assert called(options_class) == ("model", options_class(), 3)
    for name, (flag, value) in GIVEN.items():
        assert called(options_class, flag, "--last=4") == ("model", options_class(**{name: value}), 4)


def test_two_groups_of_one_command():
    seen = []

    @option_groups
    def command(*, decoding: DecodingOptions, load: LoadOptions) -> None:
        seen.append((decoding, load))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["--dtype=bfloat16", "--stop=a", "--stop=b", "--greedy"], env={"HF_TOKEN": None})
    assert result.exit_code == 0, result.output
    ((decoding, load),) = seen
    assert decoding == DecodingOptions(stop=["a", "b"], greedy=True)
    assert load.dtype == "bfloat16"
    assert (decoding.params().stop, decoding.params().do_sample) == (("a", "b"), False)


@pytest.mark.parametrize(
    ("command", "options_class"), [(run, LoadOptions), (bench, LoadOptions), (verify, VerifyLoadOptions)]
)
def test_every_command_that_loads_has_all_of_them(command, options_class):
    parameters = inspect.signature(command).parameters
    assert "load" not in parameters
    for field in dataclasses.fields(options_class):
        assert parameters[field.name].default == field.default
    assert options_class().dtype == ("float32" if command is verify else "auto")
