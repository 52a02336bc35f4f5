"""Tensors that stay on the device while torch code of the host computes with them.

A diffusion pipeline's loop and scheduler are torch code that runs between compiled calls of a model. With a
`DeviceTensor` among their operands they run on JAX, operator by operator, and their results are such tensors again, so
latents cross to the host at the end alone. What torchax cannot lower, what draws random numbers and what writes into a
tensor of the host is computed by PyTorch on the host.
"""

from __future__ import annotations

import collections
from typing import Any

import jax
import torch
from torch.utils import _pytree

from model_adapters.bridge.views import (
    TorchTensor,
    computing,
    default_env,
    in_torch_mode,
    is_view,
    jax_view,
    to_torch_tensor,
    torchax,
)
from model_adapters.lowerings import aliases, constant_folding, install

NUM_TRANSFERS: collections.Counter[str] = collections.Counter()
"""How often values were copied to the host, by the torch function that needed them there."""
_ON_HOST = ("cpu", "numpy", "__array__", "tolist", "item", "__float__", "__int__", "__bool__", "__format__", "__repr__")
_RANDOM = ("randn_like", "rand_like", "randint_like", "bernoulli", "multinomial", "normal", "normal_", "uniform_")
_PROPERTIES = ("__get__", "__set__")


class DeviceTensor(TorchTensor):
    """A tensor around a JAX array that may be used outside of a trace.

    Its ``device`` is the CPU, so code that follows it makes new tensors on the host; ``cpu()`` and ``numpy()`` copy.
    """

    @classmethod
    def of(cls, array: jax.Array) -> DeviceTensor:
        """Returns a tensor around `array`."""
        install.install()
        return cls(array, default_env())

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def __repr__(self) -> str:
        return f"DeviceTensor({self._elem!r})"

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns a copy on the host."""
        NUM_TRANSFERS["cpu"] += 1
        return to_torch_tensor(self._elem)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes `func` on the device where torchax can, else on the host."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if in_torch_mode() or name in _PROPERTIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in (*_ON_HOST, *_RANDOM) or _writes_on_host(func, args):
            return _on_host(name, func, args, kwargs)
        try:
            with computing(), torch.no_grad():
                result = func(*args, **kwargs)
        except (torchax.tensor.OperatorNotFound, NotImplementedError):
            return _on_host(name, func, args, kwargs)
        return _pytree.tree_map_only(torch.Tensor, _kept, result)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DeviceTensor) or not is_view(tensor):
        return tensor
    made = DeviceTensor(jax_view(tensor), default_env())
    aliases.moved(made, tensor)
    return made


def _writes(func: Any) -> bool:
    return bool(constant_folding.writes_in_place(func))


def _writes_on_host(func: Any, args: Any) -> bool:
    return _writes(func) and bool(args) and isinstance(args[0], torch.Tensor) and not is_view(args[0])


def _on_host(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Computes `func` on copies on the host."""

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        if not is_view(tensor):
            return tensor
        NUM_TRANSFERS[name] += 1
        return to_torch_tensor(jax_view(tensor))

    args, kwargs = _pytree.tree_map_only(torch.Tensor, taken, (args, kwargs))
    return func(*args, **kwargs)
