"""Formats a plan as text."""

from __future__ import annotations

import sys

from torchax_serve.planning.compiled_steps import ProgramReport
from torchax_serve.planning.plan import PlanReport
from torchax_serve.planning.roofline import StepBound

_EXECUTORS = {"per-sequence": "per-sequence", "static": "static, by generate on rows that begin together"}


def print_plan(report: PlanReport, *, from_cache: bool) -> None:
    """Prints `report`: the answer first, then the numbers behind it."""
    for line in lines_of(report, from_cache=from_cache):
        print(line)
    sys.stdout.flush()


def lines_of(report: PlanReport, *, from_cache: bool) -> list[str]:
    """Formats the report as lines."""
    used = " x ".join(f"{axis} {size}" for axis, size in report.mesh.items() if size > 1) or "one device"
    lines = [
        f"{report.model} ({report.model_type}, {report.dtype}) on {report.topology}: "
        f"{report.num_devices} devices, {used}",
        f"{'fits' if report.fits else 'DOES NOT FIT'}: "
        f"{report.max_num_seqs} requests of {report.max_model_len} tokens at once"
        + (f" in each of {report.num_replicas} replicas" if report.num_replicas > 1 else ""),
        *([f"{_EXECUTORS[report.executor]}: {report.fallback_reason}"] if report.fallback_reason else []),
        "",
        "each device",
        f"  memory            {_gb(report.memory_bytes)}",
        f"  weights           {_gb(report.weights_bytes)}  of {_gb(report.weights_bytes_of_one_device).strip()} in all"
        f", {report.weight_bits:.2f} bits a weight",
        *([f"{'':20}{report.quantization}"] if report.quantization else []),
        f"  pages             {_gb(report.pages_bytes_wanted)}  {report.kv_cache_dtype}, {report.page_size} tokens each"
        + ("" if report.fits else f"; compiled with {_gb(report.pages_bytes).strip()}"),
        *_states(report),
        *_drafts(report),
        f"  temporary         {_gb(report.temporary_bytes)}  temporaries and code of the largest step",
        *_room(report),
    ]
    if report.remedies:
        lines += ["", "what is missing, and what would fit", *(f"  {each}" for each in report.remedies)]
    for program, bound in zip(report.programs, report.bounds, strict=True):
        lines += ["", *_step(program, bound, report)]
    if from_cache:
        lines += ["", "planned before; --no-cache compiles again"]
    return lines


def _states(report: PlanReport) -> list[str]:
    if not report.states_bytes:
        return []
    lines = [f"  states            {_gb(report.states_bytes)}  of fixed size, for all requests"]
    if report.executor == "packed":
        of_prefix = report.states_bytes // (report.max_num_seqs + 1)  # a row more takes what nobody reads
        pages = f", as much as {of_prefix // report.token_bytes:,} tokens of pages" if report.token_bytes else ""
        lines.append(f"{'':20}{_gb(of_prefix)}  for each prefix that is kept{pages}")
    return lines


def _drafts(report: PlanReport) -> list[str]:
    if not report.draft_weights_bytes:
        return []
    lines = [f"  drafts            {_gb(report.draft_weights_bytes)}  weights of {report.speculation}"]
    if report.draft_pages_bytes:
        lines.append(f"{'':20}{_gb(report.draft_pages_bytes)}  pages of the draft model, for all requests")
    return lines


def _room(report: PlanReport) -> list[str]:
    if not report.token_bytes and not report.states_bytes:
        return ["  room for          any number of requests: they have no cache"]
    lines = [f"  room for          {report.most_slots:>9,} requests of {report.max_model_len} tokens"]
    if report.token_bytes:
        lines.append(f"{'':20}{report.most_tokens:>9,} tokens of cache in all, {report.token_bytes:,} bytes each")
    return lines


def _step(program: ProgramReport, bound: StepBound, report: PlanReport) -> list[str]:
    is_decode, verifies = program.name == "decode", program.name == "verify"
    lines = [f"{program.name}, {program.num_tokens} {'requests' if is_decode else 'tokens'}"]
    if bound.seconds is not None:
        lines.append(
            f"  no faster than    {_ms(bound.seconds)}  bound by {bound.bound_by}, {bound.context_len} tokens long"
        )
        if is_decode:
            lines.append(f"{'':20}{program.num_tokens / bound.seconds:>9,.0f} tokens/s at most")
        if verifies:
            lines += _accepted(program, bound, report)
    if program.compiler_s is not None:
        kernels = f" and {program.num_opaque} calls of kernels" if program.num_opaque else ""
        lines.append(f"  compiler says     {_ms(program.compiler_s)}  at least, without exchange{kernels}")
    took = f"  compiled in       {program.trace_s:>9.1f} s traced, {program.compile_s:.1f} s compiled"
    return [*lines, *_counts(program), took]


def _accepted(program: ProgramReport, bound: StepBound, report: PlanReport) -> list[str]:
    """Returns lines of what drafting takes, and of tokens/s with no and all drafts accepted."""
    assert bound.seconds is not None
    seconds, lines = bound.seconds, []
    if report.draft_bound is not None and report.draft_bound.seconds is not None:
        seconds += report.draft_bound.seconds
        lines.append(f"{'':20}{_ms(report.draft_bound.seconds)}  for the drafts, before it")
    few, most = program.num_rows / seconds, program.num_tokens / seconds
    return [*lines, f"{'':20}{few:>9,.0f} tokens/s at most if no draft is accepted, {most:,.0f} if all are"]


def _counts(program: ProgramReport) -> list[str]:
    lines = []
    for kind, (number, size) in program.collectives.items():
        lines.append(f"  {kind:<17} {number:>9,}    {size / 1e6:,.2f} MB")
    if not program.collectives:
        lines.append("  exchange               none")
    if program.flops is not None and program.bytes_accessed is not None:
        lines.append(f"  compiler counts   {program.flops / 1e9:>9,.1f} GFLOP, {program.bytes_accessed / 1e9:,.2f} GB")
    return lines


def _gb(size: int) -> str:
    return f"{size / 1e9:>9.2f} GB" if size >= 1e8 else f"{size / 1e6:>9.3f} MB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:>9.3f} ms"
