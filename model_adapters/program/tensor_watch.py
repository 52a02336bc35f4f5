"""Detection of tensors of a module that have been exchanged or written to."""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.bridge.views import named_tensors

# Number of values compared per tensor: edits through ``tensor.data`` change neither identity nor version.
NUM_SAMPLES = 8


class TensorWatch:
    """The tensors of a module at construction: parameters, buffers and plain attributes.

    Args:
        module: whose tensors are watched.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._records: list[tuple[dict[str, Any], str, torch.Tensor, int, Any, str]] = []
        self._shapes: dict[str, tuple[Any, ...]] = {}
        views: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
        for prefix, child in module.named_modules(remove_duplicate=False):
            dot = prefix + "." if prefix else ""
            for table in (child._parameters, child._buffers, vars(child)):
                for key, tensor in table.items():
                    if not isinstance(tensor, torch.Tensor) or key == "rope_deltas":
                        continue
                    name = dot + key
                    self._records.append((table, key, tensor, tensor.data_ptr(), _version(tensor), name))
                    self._shapes[name] = (tensor.shape, tensor.dtype, tensor.device)
                    if tensor.numel() and not tensor.is_meta and tensor.layout is torch.strided:
                        views.setdefault(tensor.dtype, []).append((name, _sample(tensor)))
        # One concatenation of small views for each dtype: a look at each tensor would take a call into PyTorch.
        self._views = [([name for name, _ in of_dtype], [v for _, v in of_dtype]) for of_dtype in views.values()]
        self._samples = [_values(views) for _, views in self._views]

    def changed(self, *, of_all: bool = False) -> list[str]:
        """Returns the names of tensors that were replaced, moved to another address or written to.

        Args:
            of_all: look for names that were not there as well, and for those now reached through other modules.
        """
        names = [
            name
            for table, key, tensor, address, version, name in self._records
            if table.get(key) is not tensor
            or tensor.data_ptr() != address
            or (version is not None and tensor._version != version)
        ]
        for (of_views, views), before in zip(self._views, self._samples, strict=True):
            now = _values(views)
            if not torch.equal(now, before):
                names += self._sampled(of_views, views, now != before)
        if of_all:
            known = {record[-1]: record[2] for record in self._records}
            names += [name for name, tensor in named_tensors(self._module).items() if known.get(name) is not tensor]
        return names

    def has_other_shape(self, name: str) -> bool:
        """Tells whether the tensor `name` has another shape, dtype or device now."""
        now = next((table.get(key) for table, key, *_, known in self._records if known == name), None)
        return now is None or (now.shape, now.dtype, now.device) != self._shapes[name]

    def _sampled(self, names: list[str], views: list[torch.Tensor], differs: torch.Tensor) -> list[str]:
        parts = differs.split([view.numel() * _per_value(view) for view in views])
        return [name for name, part in zip(names, parts, strict=True) if part.any()]


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # which do not count


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view [n] of some values of `tensor`.

    The first and the last value are among them if the tensor is contiguous.
    """
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        for dim, size in enumerate(tensor.shape):
            tensor = tensor.narrow(dim, size // 2, 1) if dim < tensor.ndim - 1 else tensor
        return tensor.flatten()[: NUM_SAMPLES * 4]
    flat = tensor.view(-1)
    step = max((flat.numel() - 1) // (NUM_SAMPLES - 1), 1)
    return flat[::step][: NUM_SAMPLES + 1]


def _values(views: list[torch.Tensor]) -> torch.Tensor:
    """Returns the values of `views` of one dtype as bytes, so that NaN equals itself."""
    return torch.cat(views).view(torch.uint8)


def _per_value(view: torch.Tensor) -> int:
    return view.element_size()
