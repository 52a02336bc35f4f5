"""Lists the sharding of each parameter of a model on a mesh."""

from __future__ import annotations

import sys
from typing import Any

from jax.sharding import AbstractMesh
from transformers import PreTrainedModel

from sharding_rules import MESH_AXES
from torchax_serve.distributed.mesh_shape import parse_mesh
from torchax_serve.planning.abstract_model import Quantization, abstract_model
from torchax_serve.planning.chips import CHIPS, chip_of, num_devices

DEFAULT_MESH = "model=8"


def sharding_rows(
    module: PreTrainedModel,
    topology: str | None = None,
    mesh: str | None = None,
    *,
    refuse_uneven: bool = False,
    quantization: Quantization = None,
) -> list[dict[str, Any]]:
    """Returns a row for each form of a parameter's name.

    A row has name, shape, spec, source, and bytes per device.

    Args:
        module: Module on the meta device.
        topology: Topology that sets the number of devices; None: `mesh` does.
        mesh: Sizes of mesh axes, such as ``model=4``; None: all devices on ``model``, 8 without a topology.
        refuse_uneven: Whether sizes that would be padded are an error.
        quantization: Which weights have fewer bits; without a topology as on a TPU.
    """
    shape = parse_mesh(
        mesh or (DEFAULT_MESH if topology is None else None), None if topology is None else num_devices(topology)
    )
    sizes = tuple(shape[axis] for axis in MESH_AXES)
    abstract: Any = AbstractMesh(sizes, MESH_AXES)
    chip = CHIPS["v6e"] if topology is None else chip_of(topology)
    model = abstract_model(module, abstract, refuse_uneven=refuse_uneven, quantization=quantization, chip=chip)
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name in model.sharding.placed:
        placed = model.sharding.placed[name]
        form = ".".join("*" if part.isdigit() else part for part in name.split("."))
        key = (form, placed.shape, placed.rule)
        row = rows.setdefault(
            key,
            {
                "parameter": form,
                "number": 0,
                "shape": list(placed.shape),
                "laid_out_shape": list(placed.laid_out_shape),
                "spec": list(placed.spec),
                "source": placed.rule.source,
                "bytes_per_device": model.bytes_per_device(name),
            },
        )
        row["number"] += 1
    return list(rows.values())


def print_sharding(rows: list[dict[str, Any]]) -> None:
    """Prints the rows as a table, with the bytes of all parameters together."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for heading in ("parameter", "number", "shape", "spec", "source", "bytes per device"):
        table.add_column(heading, no_wrap=heading == "parameter", justify="right" if "bytes" in heading else "left")
    for row in rows:
        shape = " x ".join(map(str, row["shape"])) or "scalar"
        if row["laid_out_shape"] != row["shape"]:
            shape += " (" + " x ".join(map(str, row["laid_out_shape"])) + " on the mesh)"
        spec = ", ".join(axis or "-" for axis in row["spec"]) or "-"
        each = f"{row['bytes_per_device']:,}"
        table.add_row(row["parameter"], str(row["number"]), shape, spec, row["source"], each)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table, highlight=False)
