"""``torchax-serve verify``: numbers of a model on JAX against those of eager PyTorch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.load_model import end_if_explained
from torchax_serve.cli.shared.load_options import LoadOptions, complete_dtype, option_groups
from torchax_serve.cli.shared.model_name import OptionalModel, check_one_model, refuse_bundle
from torchax_serve.cli.shared.tables import console
from torchax_serve.cli.shared.terminal import print_note

DIFFERENT = 1
NUM_TOKENS = 16
"""Greedy tokens that are compared without ``--tokens``."""


@dataclass(frozen=True)
class VerifyLoadOptions(LoadOptions):
    """Loading options; the default dtype is float32."""

    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            "--torch-dtype",
            autocompletion=complete_dtype,
            help="Of weights and computation on both sides: float32, bfloat16, float16, or auto (the checkpoint's).",
        ),
    ] = "float32"


Prompt = Annotated[
    str | None,
    typer.Option("--prompt", "-p", show_default=False, help="Text to compare on; a sentence of ours without it."),
]
NumTokens = Annotated[int, typer.Option("--tokens", min=0, help="Greedy tokens to compare; 0 for the forward alone.")]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        show_default=False,
        help="Largest |jax - eager| / (|eager| + rms) that passes. Without it 1e-4 in float32; in bfloat16 and "
        "float16 both are compared with eager float32, and JAX may be 3 times as far from it as eager PyTorch.",
    ),
]
RandomWeights = Annotated[
    Path | None,
    typer.Option(
        "--random-weights",
        show_default=False,
        help="In place of MODEL: a configuration (JSON file or folder) with weights made up.",
    ),
]


Text = Annotated[
    Path | None,
    typer.Option(
        "--text",
        show_default=False,
        help="Measure quantization on this file; --quantization alone on ours.",
    ),
]
MaxKL = Annotated[
    float | None,
    typer.Option(
        "--max-kl", show_default=False, help="Measure quantization: largest mean KL divergence in nats that passes."
    ),
]


@option_groups
def verify(
    model: OptionalModel = None,
    prompt: Prompt = None,
    tokens: NumTokens = NUM_TOKENS,
    tolerance: Tolerance = None,
    random_weights: RandomWeights = None,
    text: Text = None,
    max_kl: MaxKL = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    *,
    load: VerifyLoadOptions,
) -> int:
    """Compare a model on JAX with eager PyTorch: each layer, the logits, greedy tokens.

    Exit status 1 when they part; the tables show the first layer that does. With --quantization, compare the model
    with itself without quantization: perplexity, KL divergence, equal top tokens, bytes. With --text or --max-kl alone,
    compare a quantized checkpoint with its own weights made dense.

    torchax-serve verify qwen3-0.6b

    torchax-serve verify qwen3-0.6b --quantization int4 --max-kl 0.1
    """
    check_one_model(model, random_weights, load.revision)
    refuse_bundle(model, f"compare it with its model: torchax-serve bundle verify {model} --model NAME")
    if tolerance is not None and not tolerance > 0:
        raise InvalidArgumentError(f"--tolerance: expected a number > 0, got {tolerance}")
    from torchax_serve.cli.chat.interrupts import prompt_interrupts

    with prompt_interrupts(leave_at=1):
        source = model if random_weights is None else str(random_weights)
        end_if_explained(source, load)
        load.show_details()
        if load.quantization is not None or text is not None or max_kl is not None:
            _refuse_with_quantization(prompt, tokens, tolerance)
            return _quality(source, load, text, max_kl, is_random=random_weights is not None, as_json=as_json)
        from torchax_serve.parity.verify import verify as compare

        print_note("running both sides; the first time, compiling takes a while")
        result = compare(
            source,
            prompt=prompt,
            new_tokens=tokens,
            tolerance=tolerance,
            random_weights=random_weights is not None,
            **load.serve_kwargs(),
        )
    if as_json:
        print(json.dumps(result.as_dict(), allow_nan=False))
    else:
        _print_tables(result)
    return 0 if result.passed else DIFFERENT


def _refuse_with_quantization(prompt: str | None, tokens: int, tolerance: float | None) -> None:
    """Raises InvalidArgumentError for options that ``--quantization`` rules out.

    The comparison with the dense model has no use for them.
    """
    given = {"--prompt": prompt is not None, "--tokens": tokens != NUM_TOKENS, "--tolerance": tolerance is not None}
    if wrong := [flag for flag, is_given in given.items() if is_given]:
        raise InvalidArgumentError(
            f"{wrong[0]}: expected without --quantization, --text and --max-kl, which compare on a text; leave it out"
        )


def _quality(
    source: str | None, load: LoadOptions, text: Path | None, max_kl: float | None, *, is_random: bool, as_json: bool
) -> int:
    """Compares the model with and without quantization; returns the exit status."""
    from torchax_serve.parity.quantization import measure_quality

    print_note("running the model with and without quantization; the first time, compiling takes a while")
    found = measure_quality(source, text=text, max_kl=max_kl, random_weights=is_random, **load.serve_kwargs())
    if as_json:
        print(json.dumps(found.as_dict(), allow_nan=False))
    else:
        _print_quality(found)
    return 0 if found.passed else DIFFERENT


def _print_quality(found: Any) -> None:
    from rich.table import Table

    output = console()
    output.print(
        f"{found.model}: {found.architecture}, {found.dtype}, JAX on {found.device}; {found.num_tokens} tokens of "
        f"{found.text}\n{found.quantization}\n",
        markup=False,
    )
    table = Table(header_style="bold")
    for heading in ("weights", "perplexity", "mean KL", "99 % KL", "same top token", "MB"):
        table.add_column(heading, justify="left" if heading == "weights" else "right")
    table.add_row("dense", f"{found.dense_perplexity:.3f}", "", "", "", f"{found.dense_bytes / 1e6:,.1f}")
    change = found.perplexity / found.dense_perplexity - 1
    table.add_row(
        "quantized",
        f"{found.perplexity:.3f} ({change:+.1%})",
        f"{found.mean_kl:.4f}",
        f"{found.kl_99:.4f}",
        f"{found.same_top:.1%}",
        f"{found.num_bytes / 1e6:,.1f}",
    )
    output.print(table)
    if found.max_kl is not None:
        verdict = "passed" if found.passed else "failed"
        output.print(f"{verdict}: mean KL {found.mean_kl:.4g}, --max-kl {found.max_kl:g}", markup=False)


def _print_tables(result: Any) -> None:
    output = console()
    read = f"prompt of {len(result.prompt_ids)} tokens" if result.prompt_ids else "input of noise"
    output.print(
        f"{result.model}: {result.architecture}, {result.dtype}, JAX on {result.device} against eager PyTorch "
        f"(weights: {result.eager_weights})\n{read}, {_measure(result)}\n",
        markup=False,
    )
    output.print(_layer_table(result))
    if result.steps:
        output.print(_token_table(result))
    output.print(_verdict(result), markup=False)


def _measure(result: Any) -> str:
    """Describes how differences are measured and judged."""
    if result.tolerance is not None:
        return f"tolerance {result.tolerance:g} on |jax - eager| / (|eager| + rms)"
    from torchax_serve.parity.differences import ERROR_RATIO

    return (
        "compared with eager float32: the error of JAX, relative by position, compared with that of eager PyTorch in "
        f"{result.dtype}, of which {ERROR_RATIO:g} times as much passes"
    )


def _layer_table(result: Any) -> Any:
    from rich.table import Table

    table = Table(header_style="bold", title="one forward", title_justify="left")
    table.add_column("")
    read = "whole prompt" if result.prompt_ids else "input"
    headings = [read, "cached step"] if result.cached_step else [read]
    for heading in headings:
        table.add_column(f"{heading}:\n{_headings(result)[0]}", justify="right")
        table.add_column(f"\n{_headings(result)[1]}", justify="right")
        table.add_column("")
    parts = [result.prompt, result.cached_step] if result.cached_step else [result.prompt]
    firsts = [next((row.name for row in rows if not row.within), None) for rows in parts]
    for rows in zip(*parts, strict=True):
        cells = [rows[0].name]
        for row, first in zip(rows, firsts, strict=True):
            cells += [*_numbers(row), "" if row.within else "first beyond" if row.name == first else "beyond"]
        table.add_row(*cells, style=None if all(row.within for row in rows) else "red")
    return table


def _token_table(result: Any) -> Any:
    from rich.table import Table

    table = Table(header_style="bold", title="greedy tokens", title_justify="left")
    first, second = _headings(result)
    for heading in ("new token", "jax", "eager", f"logits: {first}", second):
        table.add_column(heading, justify="right")
    table.add_column("")
    for index, row in enumerate(result.steps):
        ours, theirs = result.tokens[index], result.eager_tokens[index]
        remarks = [] if row.within else ["beyond"]
        if ours != theirs:
            remarks.append("a tie in this dtype" if result.tie else "they part")
        style = "red" if not row.within or (ours != theirs and not result.tie) else None
        table.add_row(str(index), str(ours), str(theirs), *_numbers(row), ", ".join(remarks), style=style)
    return table


def _headings(result: Any) -> tuple[str, str]:
    return ("jax", "eager") if result.tolerance is None else ("largest", "relative")


def _numbers(row: Any) -> tuple[str, str]:
    first, second = (row.largest, row.relative) if row.error is None else (row.error, row.eager_error)
    return f"{first:.2e}", f"{second:.2e}"


def _verdict(result: Any) -> str:
    parted, num_tokens = result.first_different_token, len(result.tokens)
    if not num_tokens:
        tokens = "no tokens compared"
    elif parted is None:
        tokens = f"all {num_tokens} greedy tokens the same"
    else:
        tokens = f"greedy tokens differ from new token {parted} on"
        tokens += ", where rounding decides" if result.tie else ""
    if result.passed:
        return f"passed: every difference within {_bound(result)}, {tokens}"
    where = f"first beyond {_bound(result)} is {result.first_beyond}" if result.first_beyond else "logits are within it"
    return f"they part: {where}; {tokens}"


def _bound(result: Any) -> str:
    return "the tolerance" if result.tolerance is not None else f"what rounding to {result.dtype} explains"


COMMAND = Command(
    "verify", verify, position=30, examples=(("verify qwen3-0.6b", "its numbers compared with those of PyTorch"),)
)
