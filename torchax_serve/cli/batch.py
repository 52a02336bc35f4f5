"""``torchax-serve batch``: answers a file of requests in OpenAI's batch format."""

from __future__ import annotations

import contextlib
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from model_adapters.errors import InvalidArgumentError
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.load_model import end_if_explained
from torchax_serve.cli.shared.load_options import MaxModelLen, MeshOptions, check_quantization, option_groups
from torchax_serve.cli.shared.model_name import check_model, complete_model
from torchax_serve.cli.shared.speculative import SpeculativeJson, parse_speculative
from torchax_serve.cli.shared.terminal import activity, may_style, print_note

if TYPE_CHECKING:
    from torchax_serve import EngineOptions
    from torchax_serve.server.batch.run import BatchCounts
    from torchax_serve.server.options import ServerOptions

STREAM = "-"
NOTE_S, TERMINAL_NOTE_S = 30.0, 0.2
"""Seconds between two lines about progress: in a file or a pipe, and at a terminal, where one replaces the other."""
FAILED = 1


@dataclass(frozen=True)
class FileOptions:
    """Options of the file, and those of the server that requests meet."""

    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with OUTPUT: requests that it has no answer to are sent, errors again."),
    ] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Drop what is in OUTPUT.")] = False
    max_num_seqs: Annotated[
        int | None,
        typer.Option("--max-num-seqs", min=1, show_default=False, help="Requests that run at once; 32 by default."),
    ] = None
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            "--max-concurrency",
            min=1,
            show_default=False,
            help="Requests that are read and not answered; twice as many as run at once by default.",
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", help="Name of the model in requests; may be given several times."),
    ] = None
    media_host: Annotated[
        list[str] | None,
        typer.Option("--media-host", help="Host, or HOST:PORT, that images and audio of chats may be fetched from."),
    ] = None
    response_template: Annotated[
        str | None,
        typer.Option("--response-template", help="Format of reasoning and tool calls: a family, a JSON file, or none."),
    ] = None

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise InvalidArgumentError("--resume and --overwrite: expected one of them, got both; leave one out")

    def server_options(self) -> ServerOptions:
        """Returns the options of the server's application."""
        from torchax_serve.server.options import ServerOptions

        return ServerOptions(
            served_model_names=tuple(self.served_model_name or ()),
            media_hosts=tuple(self.media_host or ()),
            response_template=self.response_template,
            access_log=False,
        )


@option_groups
def batch(
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="File with a request on each line; - is standard input.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUTPUT", help="File of the answers; - is standard output.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            show_default=False,
            autocompletion=complete_model,
            help="Short name, hub id, folder or bundle; without it the small model of the package.",
        ),
    ] = None,
    *,
    options: FileOptions,
    max_model_len: MaxModelLen = None,
    speculative_config: SpeculativeJson = None,
    load: MeshOptions,
) -> int:
    """Answer a file of requests, in the format of OpenAI's Batch API.

    torchax-serve batch requests.jsonl answers.jsonl --model qwen3-0.6b

    Each line names a route of the server and has a body for it. Answers are written in the order in which requests
    end. Exit status 1 if one of them failed.
    """
    from torchax_serve.server import require_packages

    end_if_explained(model, load)
    _check_files(source, target, resumes=options.resume)
    require_packages()
    check_model(model, load.revision)
    check_quantization(load.quantization)
    from torchax_serve.server.batch.results import open_results

    output, began = None if str(target) == STREAM else target, time.monotonic()
    engine = _engine_options(options, max_model_len, speculative_config)
    with (
        _opened(source) as file,
        open_results(output, resume=options.resume, overwrite=options.overwrite) as results,
    ):
        from torchax_serve.cli.chat.interrupts import prompt_interrupts
        from torchax_serve.cli.shared.load_model import loaded_model

        with loaded_model(model, load, engine=lambda: engine, starts_chat=True) as served:
            from torchax_serve.server.batch.run import run_batch

            most = options.max_concurrency
            with prompt_interrupts(leave_at=1), _progress(source) as show:
                counts = run_batch(served, file, results, options.server_options(), max_in_flight=most, show=show)
    if not counts.num_done:
        raise InvalidArgumentError(f"INPUT: expected at least one request, got none in {source}")
    print_note(f"{_described(counts)}; {time.monotonic() - began:.1f} s")
    return FAILED if counts.num_failed else 0


def _check_files(source: Path, target: Path, *, resumes: bool) -> None:
    """Raises InvalidArgumentError for files that cannot be those of a batch."""
    if str(target) == STREAM:
        if resumes:
            raise InvalidArgumentError("--resume: expected a file as OUTPUT, got standard output; name one")
    elif target.is_dir() or not target.parent.is_dir():
        raise InvalidArgumentError(f"OUTPUT: expected a file in a folder that is there, got {target}; make the folder")
    if str(source) == STREAM:
        return
    if not source.exists():
        raise InvalidArgumentError(f"INPUT: expected a file of requests, and there is none at {source}")
    if target.exists() and target.samefile(source):
        raise InvalidArgumentError(f"OUTPUT: expected another file than INPUT, got {target} for both; rename one")


@contextlib.contextmanager
def _opened(source: Path) -> Iterator[BinaryIO]:
    """Yields the file of requests."""
    if str(source) == STREAM:
        yield sys.stdin.buffer
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise InvalidArgumentError(
            f"INPUT: expected a file that can be read, got {source} ({error.strerror}); name another"
        ) from error
    with file:
        if stat.S_ISREG(source.stat().st_mode) and not source.stat().st_size:
            raise InvalidArgumentError(f"INPUT: expected at least one request, got the empty file {source}")
        yield file


def _engine_options(
    options: FileOptions, max_model_len: int | None, speculative_config: str | None
) -> EngineOptions | None:
    """Returns the options of the engine; None where none is given, so that a bundle has its own."""
    given = {
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": max_model_len,
        "speculative": parse_speculative(speculative_config),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    from torchax_serve import EngineOptions

    return EngineOptions(**given)


@contextlib.contextmanager
def _progress(source: Path) -> Iterator[Callable[[BatchCounts], None]]:
    """Yields a function that shows how far a batch is, now and then."""
    total = _num_lines(source)
    pause_s = TERMINAL_NOTE_S if may_style(sys.stderr) else NOTE_S
    shown_s = time.monotonic()
    with activity() as say:

        def show(counts: BatchCounts) -> None:
            nonlocal shown_s
            if time.monotonic() - shown_s >= pause_s:
                shown_s = time.monotonic()
                say(f"{counts.num_done}{total} requests, {counts.num_failed} failed")

        yield show


def _num_lines(source: Path) -> str:
    """Returns the number of lines of a file as progress shows it; empty for a pipe."""
    if str(source) == STREAM or not stat.S_ISREG(source.stat().st_mode):
        return ""
    number, last, end = 0, b"\n", b"\n"
    with source.open("rb") as file:
        while part := file.read(1 << 20):
            number, last = number + part.count(end), part[-1:]
    return f" of {number + (last != end)}"


def _described(counts: BatchCounts) -> str:
    """Returns what a batch has done, in one line."""
    parts = [f"{counts.num_answered} requests answered", f"{counts.num_failed} failed"]
    if counts.num_skipped:
        parts.append(f"{counts.num_skipped} answered before")
    if counts.num_prompt_tokens:
        parts.append(f"{counts.num_prompt_tokens} prompt tokens, {counts.num_new_tokens} new ones")
    return ", ".join(parts)


COMMAND = Command(
    "batch",
    batch,
    position=17,
    examples=(("batch in.jsonl out.jsonl", "answers to a file of requests"),),
)
