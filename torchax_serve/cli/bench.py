"""``torchax-serve bench``: latency, throughput and memory of a model, next to a peer's."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.model_source import bundle_folder
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.load_model import end_if_explained
from torchax_serve.cli.shared.load_options import LoadOptions, option_groups
from torchax_serve.cli.shared.model_name import OptionalModel, check_one_model
from torchax_serve.cli.shared.tables import console
from torchax_serve.cli.shared.terminal import print_note
from torchax_serve.validation.extras import require_matplotlib

if TYPE_CHECKING:
    from torchax_serve.bench import BenchSettings

_DEFAULT_BATCHES = (1, 8)


@dataclass(frozen=True)
class MeasureOptions:
    """Options of the measurement and its peer."""

    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            show_default=False,
            help="A peer to run in turns with: hf, the generate of transformers on the same weights.",
        ),
    ] = None
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", show_default=False, help="Rows of a batch; may be given several times (1 and 8)."),
    ] = None
    prompt_len: Annotated[int, typer.Option("--prompt-len", help="Tokens of each prompt.")] = 128
    new_tokens: Annotated[int, typer.Option("--new-tokens", help="Tokens generated behind it.")] = 64
    repeats: Annotated[int, typer.Option("--repeats", help="Timed calls of each side; medians are shown.")] = 5

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> BenchSettings:
        """Returns the settings of the benchmark.

        Raises:
            InvalidArgumentError: A number is out of range, or the peer is unknown.
        """
        from torchax_serve.bench import BenchSettings

        return BenchSettings(
            tuple(self.batch or _DEFAULT_BATCHES), self.prompt_len, self.new_tokens, self.repeats, self.against
        )


@option_groups
def bench(
    model: OptionalModel = None,
    *,
    measured: MeasureOptions,
    random_weights: Annotated[
        Path | None,
        typer.Option(
            "--random-weights",
            show_default=False,
            help="In place of MODEL: a configuration (JSON file or folder) with weights made up.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", show_default=False, help="Write a picture of the rates to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    load: LoadOptions,
) -> None:
    """Measure time to first token, tokens/s, memory and use of the memory's bandwidth.

    torchax-serve bench qwen3-0.6b --against hf --batch 1 --batch 8

    torchax-serve bench qwen3-0.6b --quantization bf16,int8,int4
    """
    check_one_model(model, random_weights, load.revision)
    if plot is not None:
        require_matplotlib("--plot")
    if (folder := bundle_folder(model)) is not None:
        _bundle(folder, measured, load, plot, as_json=as_json)
        return
    from torchax_serve.cli.chat.interrupts import prompt_interrupts

    with prompt_interrupts(leave_at=1):
        from torchax_serve.bench import bench as measure
        from torchax_serve.bench.plot import check_plot
        from torchax_serve.bench.plot import plot as draw

        settings = measured.settings()
        source, options = model if random_weights is None else str(random_weights), load.serve_kwargs()
        end_if_explained(source, load)
        load.show_details()
        if plot is not None:
            check_plot(plot)
        command = shlex.join(["torchax-serve", *sys.argv[1:]])
        options |= {"random_weights": random_weights is not None, "note": print_note, "command": command}
        if load.quantization is not None and "," in load.quantization:
            _refuse_plot(plot)
            _quantizations(source, load.quantization.split(","), settings, options, as_json=as_json)
            return
        report = measure(source, settings, **options)
        if plot is not None:
            draw(report, plot)
    print(json.dumps(report.as_dict(), allow_nan=False)) if as_json else print_report(report)


def _bundle(folder: Path, measured: MeasureOptions, load: LoadOptions, plot: Path | None, *, as_json: bool) -> None:
    """Measures a bundle, without PyTorch, and prints a table."""
    without_variables = dataclasses.replace(load, offline=False, token=None)  # which the environment may set
    given_options = without_variables != LoadOptions()
    given = {"--against": measured.against, "--plot": plot, "options of loading": given_options or None}
    if wrong := [flag for flag, value in given.items() if value is not None]:
        raise InvalidArgumentError(
            f"{wrong[0]}: expected none with a bundle, which has no PyTorch model; leave them out, or name the model"
        )
    from rich.table import Table

    from torchax_serve.bench.bundle import bench_bundle

    found = bench_bundle(folder, measured.settings())
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in found]))
        return
    table = Table(header_style="bold")
    for heading in ("batch", "first token ms", "decode tok/s"):
        table.add_column(heading, justify="right")
    for each in found:
        table.add_row(str(each.batch), f"{each.ttft_s * 1e3:.1f}", f"{each.decode_tokens_per_s:.1f}")
    console().print(table)


def _refuse_plot(plot: Path | None) -> None:
    if plot is not None:
        raise InvalidArgumentError("--plot: expected one --quantization, got several; leave --plot out")


def _quantizations(
    source: str | None, names: list[str], settings: BenchSettings, options: dict[str, Any], *, as_json: bool
) -> None:
    """Measures the model with its weights stored in several ways and prints a table of them."""
    from rich.table import Table

    from torchax_serve.bench.quantizations import bench_quantizations

    del options["quantization"]
    reports = bench_quantizations(source, names, settings, **options)
    if as_json:
        print(json.dumps({name: report.as_dict() for name, report in reports.items()}, allow_nan=False))
        return
    first = next(iter(reports.values()))
    output = console()
    output.print("\n".join(_heading(first)[:5]), markup=False)
    table = Table(header_style="bold")
    table.add_column("batch", justify="right")
    table.add_column("weights")
    for heading in ("GB", "first token ms", "decode tok/s", "ms per step", "read per step", "MBU", "x the first"):
        table.add_column(heading, justify="right")
    for index, batch in enumerate(settings.batches):
        base = first.cases[index].ours.decode_tokens_per_s
        for number, (name, report) in enumerate(reports.items()):
            side = report.cases[index].ours
            table.add_row(
                "" if number else str(batch),
                name,
                f"{report.model.weights_bytes / 1e9:.3f}",
                f"{side.ttft_s * 1e3:.1f}",
                f"{side.decode_tokens_per_s:.1f}",
                f"{side.tpot_s * 1e3:.2f}",
                "-" if side.step_bytes is None else _gb(side.step_bytes),
                "-" if side.mbu is None else f"{side.mbu:.0%}",
                f"{side.decode_tokens_per_s / base:.2f}",
                end_section=number == len(reports) - 1,
            )
    output.print(table)
    for line in _remarks(first):
        output.print(line, markup=False)


def print_report(report: Any) -> None:
    """Prints `report` (a `BenchReport`) as tables."""
    output = console()
    output.print("\n".join(_heading(report)), markup=False)
    output.print(_rates(report))
    output.print(_costs(report))
    for line in _remarks(report):
        output.print(line, markup=False)


def _heading(report: Any) -> list[str]:
    model, machine, settings = report.model, report.machine, report.settings
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    weights = ", random weights" if model.random_weights else ""
    return [
        f"{model.name}: {model.architecture}, {model.num_parameters / 1e6:.1f} M parameters, {model.dtype}{weights}",
        f"{settings.prompt_len} prompt + {settings.new_tokens} new tokens, greedy, medians of {settings.repeats}",
        f"machine: {machine.cpu}, {machine.num_cores} cores, {_gb(machine.memory_bytes)}; "
        f"JAX on {machine.device} x {machine.num_devices}",
        f"versions: {versions}",
        f"bandwidth: {report.bandwidth.bytes_per_s / 1e9:.1f} GB/s reading ({report.bandwidth.method})",
        f"load: {model.load_s:.2f} s, peak memory {_gb(model.load_peak_bytes)}, "
        f"{model.load_peak_bytes / model.checkpoint_bytes:.2f} x the checkpoint",
        *([] if report.peer is None else [f"hf: {report.peer}, on the same weights"]),
        f"command: {report.command}",
    ]


def _rates(report: Any) -> Any:
    from rich.table import Table

    table = Table(header_style="bold")
    table.add_column("batch", justify="right")
    table.add_column("engine")
    for heading in ("first token ms", "prefill tok/s", "decode tok/s", "ms per step", "MBU"):
        table.add_column(heading, justify="right")
    if report.peer is not None:
        for heading in ("prefill x", "decode x"):
            table.add_column(heading, justify="right")
    for case in report.cases:
        for side in (case.ours, case.peer):
            if side is None:
                continue
            cells = [
                str(case.batch) if side is case.ours else "",
                side.engine,
                f"{side.ttft_s * 1e3:.1f}",
                f"{side.prefill_tokens_per_s:.0f}",
                f"{side.decode_tokens_per_s:.1f}",
                f"{side.tpot_s * 1e3:.2f}",
                "-" if side.mbu is None else f"{side.mbu:.0%}",
            ]
            if side is case.ours and case.peer is not None:
                cells += [f"{case.ratio(name):.2f}" for name in ("prefill_tokens_per_s", "decode_tokens_per_s")]
            table.add_row(*cells, end_section=side is not case.ours or case.peer is None)
    return table


def _costs(report: Any) -> Any:
    from rich.table import Table

    table = Table(header_style="bold")
    table.add_column("batch", justify="right")
    table.add_column("engine")
    for heading in ("first call s", "of it compile, warm-up s", "peak memory", "beside weights", "read per step"):
        table.add_column(heading, justify="right")
    table.add_column("compilation cache")
    for case in report.cases:
        for side in (case.ours, case.peer):
            if side is None:
                continue
            cache = side.compile_cache
            table.add_row(
                str(case.batch) if side is case.ours else "",
                side.engine,
                f"{side.first_call_s:.2f}",
                f"{side.compile_s:.2f}",
                _gb(side.peak_bytes),
                _gb(side.growth_bytes),
                "-" if side.step_bytes is None else _gb(side.step_bytes),
                "" if cache is None else f"{cache.state}: {cache.num_hits} of {cache.num_programs} programs",
                end_section=side is not case.ours or case.peer is None,
            )
    return table


def _remarks(report: Any) -> list[str]:
    remarks = []
    agreed = [f"{case.same_tokens:.0%} at batch {case.batch}" for case in report.cases if case.same_tokens is not None]
    if agreed:
        remarks.append(f"tokens the same as the peer's, up to the first difference in a row: {', '.join(agreed)}")
    if report.machine.is_busy:
        in_use, cores = report.machine.cores_in_use, report.machine.num_cores
        remarks.append(
            f"note: other programs kept {in_use:.1f} of {cores} cores busy; these rates are not to be trusted"
        )
    return remarks


def _gb(num_bytes: float) -> str:
    from model_adapters.loading.memory import gigabytes

    return gigabytes(num_bytes)


COMMAND = Command(
    "bench", bench, position=40, examples=(("bench --against hf", "its speed compared with that of transformers"),)
)
