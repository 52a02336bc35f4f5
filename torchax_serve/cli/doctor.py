"""``torchax-serve doctor``: a report on this installation, to attach to a bug."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from torchax_serve.cli.chat.interrupts import prompt_interrupts
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.terminal import activity

if TYPE_CHECKING:
    from torchax_serve.diagnostics.report import Fact, Section

BROKEN = 1
_ACCELERATOR_BYTES, _HOST_BYTES = 2**30, 2**28  # to read; many times the caches, and a moment's work
Note = Callable[[str], None]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of Markdown.")] = False,
    online: Annotated[bool, typer.Option("--online", help="Also ask the hub whether it answers.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out what computes: the numbers and the speed of the kernels.")
    ] = False,
) -> int:
    """Check versions, devices, compiler, kernels and folders; write a report for bugs.

    Each kernel is compared with its reference, and memory is read to see how fast that is. The report holds no name of
    yours: your home folder is written as ~. Exit status 1 when something is broken.

    torchax-serve doctor > report.md
    """
    from torchax_serve.diagnostics.report import as_dict, as_markdown, problems_of

    with prompt_interrupts(leave_at=1), activity(only_at_terminal=True) as note:
        sections = list(_sections(note, online=online, quick=quick))
    print(json.dumps(as_dict(sections), indent=1) if as_json else as_markdown(sections))
    return BROKEN if problems_of(sections) else 0


def _sections(note: Note, *, online: bool, quick: bool) -> Iterator[Section]:
    from torchax_serve.diagnostics import environment, imports

    parts: list[tuple[str, Callable[[], Iterable[Fact]]]] = [
        ("Versions", environment.versions),
        ("Machine", environment.machine),
        ("Imports", imports.imports),
        ("Devices", environment.devices),
        ("Compiler", environment.compiler),
        ("Kernels in use", _kernels_in_use),
        ("Extras", environment.extras),
        ("Folders", environment.folders),
        ("Environment", environment.environment),
        ("Hub", lambda: environment.hub(online=online)),
    ]
    if not quick:
        parts += [("Numbers of the kernels", lambda: _numerics(note)), ("Speed", lambda: _bandwidth(note))]
    for title, look in parts:
        note(f"looking at: {title.lower()}")
        yield _section(title, look)


def _section(title: str, look: Callable[[], Iterable[Fact]]) -> Section:
    """Collects a section; a failing `look` is a problem of its own, and the report continues."""
    from torchax_serve.diagnostics.report import Fact, Section

    facts = []
    try:
        for fact in look():
            facts.append(fact)
    except Exception as error:  # an installation may be broken in any way
        reason = " ".join(str(error).split()) or "no message"
        facts.append(Fact(title.lower(), f"cannot be looked at: {type(error).__name__}: {reason}", "problem"))
    return Section(title, tuple(facts))


# These import jax and torch, which may be what is broken.


def _kernels_in_use() -> Iterable[Fact]:
    from torchax_serve.diagnostics.kernel_checks import kernels_in_use

    return kernels_in_use()


def _numerics(note: Note) -> Iterable[Fact]:
    from torchax_serve.diagnostics.kernel_checks import numerics

    return numerics(note)


def _bandwidth(note: Note) -> Iterable[Fact]:
    import jax

    from torchax_serve.diagnostics.kernel_checks import bandwidth

    size = _HOST_BYTES if jax.default_backend() == "cpu" else _ACCELERATOR_BYTES
    return bandwidth(note, buffer_bytes=size)


COMMAND = Command(
    "doctor", doctor, position=100, examples=(("doctor", "what is installed and whether it works, to attach to a bug"),)
)
