"""``torchax-serve show``: describes a model that is on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from model_adapters.errors import CheckpointError
from model_adapters.loading.downloads import find_download
from model_adapters.loading.hub_cache import snapshot
from model_adapters.loading.model_source import parse_name
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.downloads import CacheDir, size_of
from torchax_serve.cli.shared.model_name import complete_downloaded

_SIZES: Mapping[str, str] = {
    "layers": "num_hidden_layers",
    "hidden size": "hidden_size",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
}
"""What is shown of a configuration, by its name here."""


def show(
    model: Annotated[
        str,
        typer.Argument(help="Short name, hub id or folder of a model here.", autocompletion=complete_downloaded),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Describe a model on this machine: its type, sizes, dtype and files.

    torchax-serve show qwen3-0.6b
    """
    found = _described(_folder(model, cache_dir))
    if as_json:
        print(json.dumps({"model": model, **found}, indent=1))
        return
    for name, value in found.items():
        shown = size_of(value) if name == "files" else ", ".join(value) if isinstance(value, list) else value
        print(f"{name:14}{shown}")


def _folder(model: str, cache_dir: Path | None) -> Path:
    """Returns the folder with a model's files.

    Raises:
        ModelNotFoundError: It is not on this machine.
        CheckpointError: Its configuration is not.
    """
    source = parse_name(model)
    if isinstance(source, str):
        download = find_download(source, cache_dir)
        path = snapshot(download.hub_id, None, cache_dir)
    else:
        path = source.path
    if path is None or not (path / "config.json").is_file():
        raise CheckpointError(f"MODEL: expected a folder with config.json, got {model} without one; pull it again")
    return path


def _described(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"config.json: expected JSON, got another text ({error}); pull it again") from error
    if not isinstance(config, dict):
        raise CheckpointError("config.json: expected a JSON object, got another value; pull it again")
    text_config = {**config, **(config.get("text_config") or {})}
    found = {"type": config.get("model_type", "unknown"), "architectures": config.get("architectures") or []}
    found |= {name: text_config[field] for name, field in _SIZES.items() if field in text_config}
    dtype = text_config.get("dtype", text_config.get("torch_dtype"))
    found |= {"dtype": dtype} if dtype else {}
    found |= {"quantization": method} if (method := _quantization(config)) else {}
    found["chat template"] = "yes" if _has_template(folder) else "no"
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {**found, "files": sum(path.stat().st_size for path in files), "folder": str(folder)}


def _quantization(config: Mapping[str, Any]) -> str | None:
    given = config.get("quantization_config")
    return str(given.get("quant_method", "yes")) if isinstance(given, Mapping) else None


def _has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and '"chat_template"' in settings.read_text(errors="replace")


COMMAND = Command("show", show, position=83)
