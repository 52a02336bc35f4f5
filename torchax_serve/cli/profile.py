"""``torchax-serve profile``: where the time of a model's steps goes, by its own modules."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.load_model import end_if_explained
from torchax_serve.cli.shared.load_options import LoadOptions, option_groups
from torchax_serve.cli.shared.model_name import OptionalModel, refuse_bundle
from torchax_serve.cli.shared.terminal import print_note
from torchax_serve.validation.extras import require_matplotlib

if TYPE_CHECKING:
    from torchax_serve.profiling import Profile

BY = ("module", "op", "kernel")
MAX_STEPS = 2000
"""Tokens of each request that are traced at most: a thousand steps of a model are some hundred megabytes."""


@dataclass(frozen=True)
class WorkOptions:
    """What is profiled, and how it is shown."""

    prompt: Annotated[int, typer.Option("--prompt", "--prompt-len", help="Tokens of each prompt.")] = 512
    steps: Annotated[int, typer.Option("--steps", help="Tokens generated behind it; forwards, of an encoder.")] = 32
    rows: Annotated[str, typer.Option("--rows", help="Requests at once, such as 1,8: a profile for each number.")] = (
        "1,8"
    )
    by: Annotated[
        str, typer.Option("--by", help="module, op (primitive of JAX) or kernel.", autocompletion=lambda: list(BY))
    ] = "module"
    out: Annotated[
        Path | None,
        typer.Option("--out", show_default=False, help="Folder for the traces, which XProf and Perfetto show."),
    ] = None
    plot: Annotated[
        Path | None, typer.Option("--plot", show_default=False, help="Write a picture of the first table (.svg, .png).")
    ] = None

    def __post_init__(self) -> None:
        for flag, number, most in (("--prompt", self.prompt, None), ("--steps", self.steps, MAX_STEPS)):
            if number < 1 or (most is not None and number > most):
                raise InvalidArgumentError(
                    f"{flag}: expected a number from 1{'' if most is None else f' to {most}'}, got {number}"
                )
        if self.by not in BY:
            raise InvalidArgumentError(f"--by: expected one of {', '.join(BY)}, got {self.by!r}")
        self.numbers_of_rows()

    def numbers_of_rows(self) -> list[int]:
        """Returns the numbers of requests.

        Raises:
            InvalidArgumentError: They are no positive numbers.
        """
        parts = self.rows.split(",")
        if not all(part.strip().isdigit() and 0 < int(part) <= 1024 for part in parts):
            raise InvalidArgumentError(f"--rows: expected numbers from 1 to 1024 such as 1,8, got {self.rows!r}")
        return [int(part) for part in parts]


@option_groups
def profile(
    model: OptionalModel = None,
    *,
    work: WorkOptions,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    load: LoadOptions,
) -> None:
    """Show where the time of a model's steps goes: by module, operation or kernel.

    Modules have the bytes of their weights over the memory's measured bandwidth.

    torchax-serve profile qwen3-0.6b --rows 1,8

    torchax-serve profile qwen3-0.6b --by kernel --out trace/
    """
    refuse_bundle(model, "name the model that it was exported from")
    if work.plot is not None:
        require_matplotlib("--plot")
    from torchax_serve.cli.chat.interrupts import prompt_interrupts

    with prompt_interrupts(leave_at=1):
        end_if_explained(model, load)
        load.show_details()
        from torchax_serve.bench.profile_steps import profile_steps
        from torchax_serve.profiling.picture import check_plot

        if work.plot is not None:
            check_plot(work.plot)
        print_note("running what is profiled; the first time, compiling takes a while")
        found = profile_steps(
            model,
            prompt_len=work.prompt,
            num_steps=work.steps,
            rows=work.numbers_of_rows(),
            folder=work.out,
            **load.serve_kwargs(),
        )
        if work.plot is not None:
            next(iter(found.values())).plot(work.plot, work.by)
    if as_json:
        print(json.dumps({str(rows): _as_dict(each, work) for rows, each in found.items()}, allow_nan=False))
        return
    for rows, each in found.items():
        _print(rows, each, work)


def _as_dict(profile: Profile, work: WorkOptions) -> dict[str, Any]:
    file = None if work.out is None else str(profile.file)
    return {"file": file, "bandwidth": profile.bandwidth.bytes_per_s, **profile.as_dict(work.by)}


def _print(rows: int, profile: Profile, work: WorkOptions) -> None:
    """Prints a table for each program that took a hundredth of the time or more."""
    from torchax_serve.cli.shared.tables import console

    output = console()
    total = profile.table(work.by).seconds
    for program in profile.programs:
        table = profile.table(work.by, program)
        if table.seconds < 0.01 * total:
            continue
        output.print(
            f"{rows} {'request' if rows == 1 else 'requests'}, program {program.removeprefix('jit_')}: "
            f"{table.seconds * 1e3:.1f} ms, {table.seconds / total:.0%} of all",
            style="bold",
            markup=False,
        )
        output.print(str(table), markup=False, soft_wrap=True)
        output.print()
    bandwidth = profile.bandwidth
    output.print(
        f"bandwidth: {bandwidth.bytes_per_s / 1e9:.1f} GB/s reading ({bandwidth.method}); GB read: weights alone",
        markup=False,
    )
    if work.out is not None:
        output.print(f"trace: {profile.file}", markup=False, soft_wrap=True)


COMMAND = Command(
    "profile",
    profile,
    position=45,
    examples=(("profile qwen3-0.6b", "where the time of its steps goes, by module"),),
)
