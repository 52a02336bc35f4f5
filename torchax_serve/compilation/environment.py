"""What programs depend on besides the model: versions, processor, devices, settings."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from model_adapters.ops.cpu import build, ffi

LIBRARIES = ("jax", "jaxlib", "torch", "torchax", "transformers")


def devices() -> list[jax.Device]:
    """Returns the device that programs without a mesh run on, in a list."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return [device] if isinstance(device, jax.Device) else jax.devices()[:1]


ROOT = Path(__file__).parents[2]
PACKAGES = ("model_adapters", "pytree_registry", "sharding_rules", "torchax_serve")
NOT_TRACED = ("bench", "cli", "distributed/ray", "export", "parity", "planning", "profiling", "text")
"""Parts of `torchax_serve` that programs do not depend on: an edit there leaves them valid.

Listed is what is left out, not what is taken, so that a new module counts until somebody has looked at it. What may
be listed is what no module with a traced function imports, directly or through others; a test holds that. Everything
in the other packages counts: model code reaches it while it is traced, or it decides which weights a program gets.
"""


@functools.cache
def source_digest() -> str:
    """Returns a digest of all source of this project; equal on all hosts of a model."""
    return _digest_of(())


@functools.cache
def program_source_digest() -> str:
    """Returns a digest of the source that programs depend on; see `NOT_TRACED`."""
    return _digest_of(NOT_TRACED)


def _digest_of(left_out: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for package in PACKAGES:
        root = ROOT / package
        for file in sorted(root.rglob("*")):
            name = file.relative_to(root).as_posix()
            if package == "torchax_serve" and any(f"{name}/".startswith(f"{each}/") for each in left_out):
                continue
            if file.suffix in (".py", ".cc", ".h"):
                digest.update(f"{package}/{name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _installed(source: str) -> str:
    """Returns what is constant in a process: source, library versions, processor."""
    versions = [f"{name} {_version(name)}" for name in LIBRARIES]
    return "\n".join([source, sys.version, *versions, build.processor()])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # a process that runs a bundle needs neither torch nor transformers
        return "none"


def installed_versions() -> str:
    """Returns a digest of all source and library versions, for any platform."""
    return _installed(source_digest())


def environment() -> str:
    """Returns everything outside of model and arguments that a program depends on."""
    settings = {k: v for k, v in jax.config.values.items() if "cache" not in k and "log" not in k}
    device = devices()[0]
    return "\n".join(
        [
            _installed(program_source_digest()),
            f"{device.platform} {device.device_kind} {device.client.platform_version}",
            f"kernels {ffi.missing() is None}" if device.platform == "cpu" else "",
            os.environ.get("XLA_FLAGS", ""),
            os.environ.get("LIBTPU_INIT_ARGS", ""),
            repr(sorted(settings.items())),
        ]
    )
