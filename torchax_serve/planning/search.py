"""Finds the smallest topology of each chip on which a model and a number of requests fit."""

from __future__ import annotations

import math
import sys
from typing import Any

from transformers import PreTrainedModel

from model_adapters.errors import TorchaxServeError
from torchax_serve.planning.abstract_model import Quantization, stored_forms
from torchax_serve.planning.chips import CHIPS, Chip
from torchax_serve.planning.plan import Note, PlanReport, PlanRequest, no_note
from torchax_serve.planning.plan_cache import cached_plan


def search(
    module: PreTrainedModel,
    name: str,
    max_num_seqs: int,
    max_model_len: int,
    options: dict[str, Any],
    *,
    note: Note = no_note,
) -> list[dict[str, Any]]:
    """Returns a row for each chip: the smallest topology that fits, or why there is none.

    A topology fits if the compiled steps do. Chips whose compiler is not installed are listed with the package to
    install. `note` is called before each compilation.
    """
    fields = {**options, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    return [_row(module, name, chip, fields, note) for chip in CHIPS.values()]


def _row(module: PreTrainedModel, name: str, chip: Chip, fields: dict[str, Any], note: Note) -> dict[str, Any]:
    weights = _weights_bytes(module, fields.get("quantization"), chip)
    row: dict[str, Any] = {"chip": chip.name, "topology": None, "fits": False}
    for shape in chip.topologies:
        devices = chip.devices_per_chip * math.prod(map(int, shape.split("x")))
        if weights > devices * chip.memory_bytes:
            continue  # need not be compiled
        try:
            request = PlanRequest(**{**fields, "topology": f"{chip.name}:{shape}"})
            report, _ = cached_plan(module, name, request, note=note)
        except TorchaxServeError as error:
            return row | {"why": str(error)}
        row |= _summary(report)
        if report.fits:
            return row
    return row | {"why": "none of its topologies is large enough" if row["topology"] is None else "too small"}


def _weights_bytes(module: PreTrainedModel, quantization: Quantization, chip: Chip) -> int:
    forms = stored_forms(module, quantization, chip)
    return sum(
        forms[name].num_bytes(tensor.shape) if name in forms else tensor.numel() * tensor.element_size()
        for name, tensor in module.named_parameters()
    )


def _summary(report: PlanReport) -> dict[str, Any]:
    decode = next((bound for bound in report.bounds if bound.step == "decode"), None)
    return {
        "topology": report.topology,
        "fits": report.fits,
        "num_devices": report.num_devices,
        "gb_per_device": round(report.total_bytes / 1e9, 2),
        "gb_of_device": round(report.memory_bytes / 1e9, 2),
        "weight_bits": report.weight_bits,
        "ms_per_token": None if decode is None or decode.seconds is None else round(decode.seconds * 1e3, 3),
        "why": None if report.fits else (report.remedies[0] if report.remedies else "too small"),
    }


def print_search(rows: list[dict[str, Any]], wanted: str) -> None:
    """Prints the rows as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", title=f"the smallest of each chip for {wanted}", title_justify="left")
    for heading in ("chip", "topology", "fits", "devices", "GB each", "of", "ms a token at least", ""):
        table.add_column(heading, justify="left" if heading in ("chip", "topology", "fits", "") else "right")
    for row in rows:
        table.add_row(
            row["chip"],
            (row["topology"] or "-").partition(":")[2] or "-",
            "yes" if row["fits"] else "no",
            *(str(row.get(key) or "-") for key in ("num_devices", "gb_per_device", "gb_of_device", "ms_per_token")),
            row.get("why") or "",
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table, highlight=False)
