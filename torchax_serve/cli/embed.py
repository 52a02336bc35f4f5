"""``torchax-serve embed``: embeddings of texts."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.bundle_folder import version_folder
from model_adapters.loading.model_source import bundle_folder
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.load_model import end_if_explained
from torchax_serve.cli.shared.load_options import LoadOptions, check_choice, option_groups
from torchax_serve.cli.shared.model_name import check_model, complete_model, refuse_bundle
from torchax_serve.cli.shared.terminal import is_terminal

ENDINGS = (".npy", ".json")


def _poolings() -> tuple[str, ...]:
    """Returns the names that ``--pooling`` takes."""
    from torchax_serve.pooling.methods import POOLINGS

    return POOLINGS


@dataclass(frozen=True)
class EmbeddingOptions:
    """Options of tokenization and pooling."""

    pooling: Annotated[
        str | None,
        typer.Option(
            "--pooling",
            autocompletion=_poolings,
            show_default=False,
            help="How a text's tokens become one embedding: mean, cls, last, max, mean_sqrt_len or weighted_mean; "
            "what the checkpoint's files say without it.",
        ),
    ] = None
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize", show_default=False, help="To length 1 or not; as the files say without it."
        ),
    ] = None
    prompt_name: Annotated[
        str | None,
        typer.Option("--prompt-name", show_default=False, help="Of the checkpoint's prompts, to stand before a text."),
    ] = None
    prompt: Annotated[
        str | None, typer.Option("--prompt", show_default=False, help="Text to stand before each text.")
    ] = None
    truncate: Annotated[
        bool | None,
        typer.Option(
            "--truncate/--no-truncate",
            show_default=False,
            help="Cut texts that are too long, or refuse them; without it they are cut where the checkpoint's files "
            "say how texts are read.",
        ),
    ] = None
    truncate_dim: Annotated[
        int | None,
        typer.Option("--truncate-dim", show_default=False, help="Keep so many numbers; as the files say without it."),
    ] = None

    def __post_init__(self) -> None:
        if self.pooling is not None:
            check_choice("--pooling", self.pooling, _poolings())


@option_groups
def embed(
    model: Annotated[str, typer.Argument(help="Short name, hub id or folder.", autocompletion=complete_model)],
    texts: Annotated[
        list[str] | None,
        typer.Argument(show_default=False, help="Texts; without any, the lines of standard input."),
    ] = None,
    *,
    embedding: EmbeddingOptions,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", show_default=False, help="File: NAME.npy, float32[texts, dim], or NAME.json; not stdout."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a line for each text.")] = False,
    load: LoadOptions,
) -> None:
    """Embed texts: an array of numbers for each, on a line of its own.

    torchax-serve embed BAAI/bge-small-en-v1.5 "JAX is fast." "Gemma is a model."
    """
    check_model(model, load.revision)
    if bundle_folder(model) is not None and not _reads_texts(model):
        refuse_bundle(model, "name the model that it was exported from")
    end_if_explained(model, load)
    _check_output(output, as_json=as_json)
    asked = list(texts) if texts else _lines()
    from torchax_serve.cli.chat.interrupts import prompt_interrupts
    from torchax_serve.cli.shared.load_model import loaded_model
    from torchax_serve.cli.shared.terminal import print_note

    with loaded_model(model, load) as served, prompt_interrupts(leave_at=1):
        vectors = served.embed(asked, **dataclasses.asdict(embedding))
        name = served.name
    if output is None:
        _print(name, asked, vectors, as_json=as_json)
        return
    _write(output, name, asked, vectors)
    print_note(f"{len(asked)} embeddings of {vectors.shape[1]} numbers in {output}")


def _reads_texts(bundle: str) -> bool:
    """Returns whether a bundle is of a model that returns embeddings, labels or scores."""
    from torchax_serve.export.layout import TEXTS
    from torchax_serve.export.manifest import read_manifest

    return TEXTS in read_manifest(version_folder(Path(bundle).expanduser())).content


def _check_output(output: Path | None, *, as_json: bool) -> None:
    """Raises, before a model is loaded, if the file cannot be written."""
    if output is None:
        return
    if output.suffix not in ENDINGS:
        raise InvalidArgumentError(f"--output: expected a name that ends with {' or '.join(ENDINGS)}, got {output}")
    if as_json and output.suffix != ".json":
        raise InvalidArgumentError(f"--json: expected a file that ends with .json beside it, got --output {output}")
    if not output.parent.is_dir():
        raise InvalidArgumentError(f"--output: expected a folder that is there, got {output.parent}; make it first")


def _lines() -> list[str]:
    r"""Reads the lines of standard input, a file or a pipe; only ``
    `` and ``\r
    `` end a line.

        Raises:
            InvalidArgumentError: no line, or bytes that are no UTF-8; says in which line.
    """
    data = b"" if is_terminal(sys.stdin) else sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        data, at = error.object, error.start
        number, column = data.count(b"\n", 0, at) + 1, at - (data.rfind(b"\n", 0, at) + 1)
        raise InvalidArgumentError(
            f"TEXT: expected lines of UTF-8 text on standard input, got byte 0x{data[at]:02x} in line {number}, "
            f"behind {column} bytes; convert it first, with iconv for example"
        ) from error
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []
    if not lines:
        raise InvalidArgumentError(
            "TEXT: expected at least one text, got none; give texts behind the model, or as lines of standard input"
        )
    return lines


def _print(name: str, texts: list[str], vectors: Any, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_object(name, texts, vectors), ensure_ascii=False))
        return
    for vector in vectors.tolist():
        print(json.dumps(vector))


def _write(output: Path, name: str, texts: list[str], vectors: Any) -> None:
    import numpy as np

    try:
        if output.suffix == ".npy":
            np.save(output, vectors)
        else:
            output.write_text(json.dumps(_as_object(name, texts, vectors), ensure_ascii=False), encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"--output: {output} cannot be written ({error}); choose another file") from error


def _as_object(name: str, texts: list[str], vectors: Any) -> dict[str, Any]:
    rows = zip(texts, vectors.tolist(), strict=True)
    return {
        "model": name,
        "dim": int(vectors.shape[1]),
        "embeddings": [{"text": text, "embedding": vector} for text, vector in rows],
    }


COMMAND = Command("embed", embed, position=20, examples=(("embed ./my-model Hello", "the embedding of a text"),))
