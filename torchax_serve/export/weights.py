"""Weights of a bundle: a file of safetensors that is mapped, or a checkpoint of Orbax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Sharding, SingleDeviceSharding

from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from model_adapters.ops.compressed_weight import Weight
from model_adapters.ops.memory_layout import inputs_first, put
from torchax_serve.export.layout import INPUTS_FIRST
from torchax_serve.export.manifest import AGAIN, Manifest
from torchax_serve.export.mesh import BundleSharding
from torchax_serve.export.trees import restored_weights
from torchax_serve.start.weights_file import NotStorableError, TensorNames, assembled, file_of, mapped
from torchax_serve.validation.extras import require_package

WeightsFormat = Literal["safetensors", "orbax"]
SAFETENSORS, ORBAX = "weights.safetensors", "weights"


def check_format(name: str) -> None:
    """Raises unless `name` is a format that can be written here.

    Raises:
        InvalidArgumentError: there is no such format.
        UnsupportedArgumentError: Orbax is not installed.
    """
    if name not in get_args(WeightsFormat):
        raise InvalidArgumentError(f"weights: expected safetensors or orbax, got {name!r}; choose one of them")
    if name == "orbax":
        require_package("orbax", "weights", extra="orbax", package="orbax-checkpoint")


def write_weights(folder: Path, tensors: Mapping[str, jax.Array], format: WeightsFormat) -> list[str]:
    """Writes the weights of a bundle; returns the names of their files.

    Args:
        folder: Folder of the version.
        tensors: Tensors by name.
        format: Format of the files.

    Raises:
        UnsupportedModelError: a dtype that the format does not have.
        OSError: the disk is full.
    """
    if format == "orbax":
        _write_orbax(folder / ORBAX, tensors)
        return sorted(path.relative_to(folder).as_posix() for path in (folder / ORBAX).rglob("*") if path.is_file())
    try:
        _, pieces = file_of(tensors)
    except NotStorableError as error:
        raise UnsupportedModelError(f"export: expected weights that safetensors can hold, got {error}") from error
    with open(folder / SAFETENSORS, "wb") as file:
        for piece in pieces:
            file.write(piece)
    return [SAFETENSORS]


def read_weights(
    manifest: Manifest, sharding: BundleSharding | None = None
) -> tuple[dict[str, Weight], TensorNames, np.ndarray | None]:
    """Returns a bundle's weights, the names of their tensors, and the mapped file, uint8[n].

    Args:
        manifest: The manifest of the bundle.
        sharding: How they are divided; None: they lie on this process's first device.

    Raises:
        CheckpointError: the files cannot be read.
    """
    names = restored_weights(manifest["weights"]["names"])
    experts = frozenset(manifest["weights"].get(INPUTS_FIRST, ()))
    first_device = SingleDeviceSharding(jax.local_devices()[0])

    def place(name: str) -> Sharding | Format:
        found = first_device if sharding is None else sharding.of_tensor(name)
        return inputs_first(found) if name in experts else found

    if manifest["weights"]["format"] == "orbax":
        check_format("orbax")
        return assembled(names, _read_orbax(manifest.folder / ORBAX, place)), names, None
    path = manifest.folder / SAFETENSORS
    try:
        weights, content = mapped(path, names, place)
    except OSError as error:
        raise CheckpointError(f"{path}: expected the weights of the bundle, got {error}; {AGAIN}") from error
    return weights, names, content if sharding is None else None


def _write_orbax(folder: Path, tensors: Mapping[str, jax.Array]) -> None:
    import orbax.checkpoint

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve(), dict(tensors))


def _read_orbax(folder: Path, place: Callable[[str], Sharding | Format]) -> dict[str, Any]:
    import orbax.checkpoint

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        saved = dict(checkpointer.metadata(folder.resolve()).item_metadata)
        places = {name: place(name) for name in saved}
        shapes = {
            name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=_sharding_of(places[name]))
            for name, each in saved.items()
        }
        restored = dict(checkpointer.restore(folder.resolve(), shapes))
    return {name: put(array, places[name], may_alias=True) for name, array in restored.items()}


def _sharding_of(place: Sharding | Format) -> Any:
    return place.sharding if isinstance(place, Format) else place
