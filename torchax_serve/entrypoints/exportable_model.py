"""`ExportableModel`: the part of a served model that writes bundles."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from model_adapters.errors import UnsupportedModelError
from torchax_serve.engine.options import EngineOptions

if TYPE_CHECKING:
    from torchax_serve.runtime.model_runtime import ModelRuntime


class ExportableModel:
    """A model whose programs can be exported."""

    _runtimes: list[ModelRuntime]

    def export(
        self,
        out: str | os.PathLike[str],
        *,
        platforms: Sequence[str] = ("cpu",),
        engine: EngineOptions | None = None,
        weights: Literal["safetensors", "orbax"] = "safetensors",
        native: bool = True,
        reference: bool = True,
        advance: Callable[[int], object] = lambda number: None,
    ) -> Path:
        """Writes programs, weights and tokenizer as a bundle that runs without torch.

        Returns the version's folder.

        Args:
            out: folder of the bundle, new or with other versions.
            platforms: platforms of the programs: ``cpu``, ``tpu:v6e``, ``cuda:h100``; their devices need not be here.
            engine: sizes of the engine, which its programs have; None: those that the model was served with.
            weights: format of the weights; safetensors are mapped.
            native: let programs for a CPU call the C++ kernels.
            reference: write programs for a CPU without kernels as well, for processors without a compiler.
            advance: called with the number of programs written since the last call.

        Raises:
            UnsupportedModelError: requests of the model need more than a bundle has.
            InvalidArgumentError: options that do not fit the model; a folder with something else in it.
            TorchaxServeError: the disk is full, or a package is missing.
        """
        from torchax_serve.export.writer import ExportRequest, export_model

        if len(self._runtimes) > 1:
            raise UnsupportedModelError(
                "export: expected one replica, got several on the axis data; serve the model without it"
            )
        if self._runtimes[0].lora is not None:
            raise UnsupportedModelError(
                "export: expected a model without adapters of requests, which a bundle has not; serve it without "
                "adapters=, or with adapter= to merge one"
            )
        options = engine or vars(self).get("_engine_options") or EngineOptions()
        request = ExportRequest(
            platforms=platforms, engine=options, weights=weights, native=native, reference=reference, advance=advance
        )
        model: Any = self  # a `BaseModel`
        return export_model(model._followed(), self._runtimes[0], Path(out), request).folder
