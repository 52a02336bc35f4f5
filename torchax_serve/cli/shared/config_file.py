"""Options of a command from a TOML file: ``--config FILE``."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Makes the values in `file` the defaults of the command's options; returns `file`.

    Options on the command line and variables of the environment come first. Names are those of the flags, such as
    ``max-num-seqs = 64`` or ``max_num_seqs = 64``. One value stands for a list of one, as one flag does.

    Raises:
        typer.BadParameter: the file is not readable, is no TOML, or has a name that is no option.
    """
    if file is None:
        return None
    try:
        values = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"expected a TOML file, got {str(file)!r} ({error})") from error
    options = {
        flag.lstrip("-").replace("-", "_"): param
        for param in context.command.params
        if param.param_type_name == "option"
        for flag in param.opts
        if flag.startswith("--")
    }
    defaults: dict[str, Any] = {}
    for name, value in values.items():
        if (param := options.get(name.replace("-", "_"))) is None or param.name in ("config", "help"):
            near = difflib.get_close_matches(name.replace("-", "_"), options, 1)
            meant = f"; did you mean {near[0].replace('_', '-')}?" if near else f"; {context.command_path} --help"
            raise typer.BadParameter(f"expected options of this command in {str(file)!r}, got {name!r}{meant}")
        if isinstance(value, dict) or (isinstance(value, list) and not param.multiple):
            kind = "one value or a list" if param.multiple else "one value"
            raise typer.BadParameter(f"{name}: expected {kind} in {str(file)!r}, got {value!r}")
        assert param.name is not None
        defaults[param.name] = [value] if param.multiple and not isinstance(value, list) else value
    context.default_map = {**(context.default_map or {}), **defaults}
    return file


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="TORCHAX_SERVE_CONFIG",
        show_envvar=False,
        is_eager=True,
        callback=read_config,
        help="TOML file with options, such as port = 8000; the command line and variables come first.",
    ),
]
