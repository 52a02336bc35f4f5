"""Collects facts about the environment: versions, machine, devices, compiler, folders, hub.

Nothing here needs torch, jax or transformers to be importable: a report may have to state that they are not.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from model_adapters.tested_releases import NOT_TESTED_FROM, newer_releases
from torchax_serve import __version__
from torchax_serve.diagnostics.report import Fact

DISTRIBUTION = "torchax-serve"
PACKAGES = ("torch", "torchax", "jax", "jaxlib", "transformers")
EXTRAS = {
    "cuda": "NVIDIA GPUs; plan for GPUs",
    "diffusion": "diffusion pipelines",
    "events": "serve --kv-events-config: events of the prefix cache",
    "export": "export: bundles",
    "images": "models that see images",
    "orbax": "weights and training states in Orbax's format",
    "otel": "serve --otlp-traces-endpoint: spans of requests",
    "pathways": "devices of Pathways (JAX_PLATFORMS=proxy)",
    "plan": "plan for TPUs",
    "plot": "bench --plot, profile --plot",
    "ray": "deploy: replicas on a Ray cluster",
    "real": "tests with trained models",
    "server": "serve: the OpenAI-compatible HTTP server",
    "tokamax": "Tokamax's kernels for products of experts",
    "tpu": "TPUs",
    "train": "training the embedded model anew",
    "xprof": "roofline of profiles on TPUs and GPUs",
}
"""Purpose of each extra of the package."""
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_ENABLE_X64",
    "JAX_PLATFORMS",
    "LIBTPU_INIT_ARGS",
    "OMP_NUM_THREADS",
    "XDG_CACHE_HOME",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)
"""Environment variables that change what runs, and contain no secrets."""
CPU_FEATURES = (
    "f16c",
    "fma",
    "avx2",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimdhp",
    "bf16",
    "i8mm",
    "sve",
)
"""CPU features that the C++ kernels or XLA use, by their names in Linux."""


def versions() -> Iterator[Fact]:
    """Yields the versions of this package, Python and the dependencies.

    Each is checked against the supported ones.
    """
    yield Fact(DISTRIBUTION, __version__)
    newer = newer_releases()
    yield _tested("python", f"{platform.python_version()} ({platform.python_implementation()})", newer)
    required = {requirement.name: requirement for requirement, extra in _requirements() if extra is None}
    others = sorted(set(required) - set(PACKAGES))
    for name in (*PACKAGES, *others):
        yield _version(name, required.get(name), newer)


def _tested(name: str, version: str, newer: Mapping[str, str]) -> Fact:
    """Returns a fact about a version; a note if it is newer than what was tested."""
    if name in newer:
        return Fact(name, f"{version}; tested below {NOT_TESTED_FROM[name]}", "note")
    return Fact(name, version)


def _version(name: str, requirement: Any, newer: Mapping[str, str]) -> Fact:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Fact(name, "not installed; install torchax-serve again with pip", "problem")
    if requirement is not None and not requirement.specifier.contains(version, prereleases=True):
        return Fact(name, f"{version}; expected {requirement.specifier}", "note")
    return _tested(name, version, newer)


def _requirements() -> Iterator[tuple[Any, str | None]]:
    """Yields the requirements of the installed package, each with its extra."""
    from packaging.requirements import Requirement

    try:
        listed = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # the sources, not installed
        return
    extras = importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    for line in listed:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement, None
            continue
        for extra in extras:
            if requirement.marker.evaluate({"extra": extra}):
                yield requirement, extra


def machine() -> Iterator[Fact]:
    """Reports system, processor, memory and disk."""
    import psutil  # type: ignore[import-untyped]

    yield Fact("system", platform.platform())
    yield Fact("processor", f"{_cpu_model()}, {_num_cores()} cores for this process")
    flags = _cpu_flags()
    yield Fact("instructions", " ".join(name for name in CPU_FEATURES if name in flags) or "none of those we look for")
    memory = psutil.virtual_memory()
    yield Fact("memory", f"{_gb(memory.total)}, {_gb(memory.available)} of it free")
    yield _disk()


def _disk() -> Fact:
    from model_adapters.loading.hub_cache import hub_cache

    folder = next((each for each in (hub_cache(), *hub_cache().parents) if each.is_dir()), Path("/"))
    free = shutil.disk_usage(folder).free
    return Fact("disk", f"{_gb(free)} free at {folder}", "ok" if free > 2e9 else "note")


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _cpu_model() -> str:
    named = (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _cpu_flags() -> set[str]:
    lines = (line for line in _cpuinfo() if line.lower().startswith(("flags", "features")))
    return set(next(lines, ":").partition(":")[2].split())


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices() -> Iterator[Fact]:
    """Reports the devices of JAX, and accelerators that it does not see."""
    import jax

    found = jax.devices()
    yield Fact("platform", f"{jax.default_backend()} ({found[0].device_kind} x {len(found)})")
    for device in found[:8]:
        stats = device.memory_stats() if device.platform != "cpu" else None
        if stats and "bytes_limit" in stats:
            used, limit = stats.get("bytes_in_use", 0), stats["bytes_limit"]
            yield Fact(f"device {device.id}", f"{device.device_kind}, {_gb(limit)}, {_gb(used)} of it in use")
    if jax.default_backend() == "cpu" and (unseen := _unseen_accelerator()):
        yield Fact("accelerator", unseen, "note")


def _unseen_accelerator() -> str | None:
    """Describes an accelerator of this machine that JAX does not use, and what it needs."""
    if os.environ.get("JAX_PLATFORMS", "").lower() == "cpu":
        return None
    if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        return "there is an NVIDIA driver, and JAX runs on the CPU; pip install 'torchax-serve[cuda]'"
    if any(Path("/dev").glob("accel*")) or Path("/dev/vfio/0").exists():
        return "there is an accelerator in /dev, and JAX runs on the CPU; on a TPU: pip install 'torchax-serve[tpu]'"
    return None


def extras() -> Iterator[Fact]:
    """Reports which extras are not installed, and their purpose."""
    wanted: dict[str, list[Any]] = {}
    for requirement, extra in _requirements():
        if extra in EXTRAS:
            wanted.setdefault(str(extra), []).append(requirement)
    for extra, use in EXTRAS.items():
        missing = [name for each in wanted.get(extra, ()) for name in _missing(each)]
        if extra not in wanted:
            yield Fact(extra, f"not known to the installed package ({use})", "note")
        elif missing:
            remedy = f"pip install 'torchax-serve[{extra}]'"
            yield Fact(extra, f"{', '.join(missing)} not installed: {use}; {remedy}", "note")
        else:
            yield Fact(extra, f"installed: {use}")


def _missing(requirement: Any) -> list[str]:
    """Returns the missing packages of a requirement.

    Those of its extras (``jax[cuda13]``) are included.
    """
    from packaging.requirements import Requirement

    try:
        importlib.metadata.version(requirement.name)
        further = [Requirement(line) for line in importlib.metadata.requires(requirement.name) or []]
    except importlib.metadata.PackageNotFoundError:
        return [requirement.name]
    return [
        name
        for extra in requirement.extras
        for each in further
        if each.marker is not None
        and not each.marker.evaluate({"extra": ""})
        and each.marker.evaluate({"extra": extra})
        for name in _missing(each)
    ]


def folders() -> Iterator[Fact]:
    """Yields the folders of downloads, compiled programs, kernels and plans.

    Each has its size, and whether it is writable.
    """
    from model_adapters.loading.hub_cache import hub_cache

    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchax-serve"
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    yield _folder("downloads", hub_cache())
    yield _folder("compiled programs", Path(chosen) if chosen else base / "compiled")
    yield _folder("kernels", base / "kernels")
    yield _folder("plans", base / "plans")


def _folder(name: str, path: Path) -> Fact:
    if not path.exists():
        above = next(each for each in path.parents if each.exists())
        can_be_made = os.access(above, os.W_OK | os.X_OK)
        if can_be_made:
            return Fact(name, f"{path}, not there yet")
        return Fact(name, f"{path} cannot be made: {above} cannot be written; make it, or allow it", "problem")
    if not os.access(path, os.W_OK | os.X_OK):
        return Fact(name, f"{path} cannot be written; allow it, or every start downloads and compiles anew", "problem")
    size, number = _size(path)
    text = f"{path}, {_gb(size)} in {number} files"
    if name != "downloads" and path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return Fact(name, f"{text}; others may write there what this program runs; chmod go-w it", "note")
    return Fact(name, text)


def _size(folder: Path) -> tuple[int, int]:
    """Returns bytes and number of the files below `folder`; links are not followed."""
    size = number = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(root, name))
            except OSError:  # gone meanwhile
                continue
            if stat.S_ISREG(found.st_mode):
                size, number = size + found.st_size, number + 1
    return size, number


def compiler() -> Iterator[Fact]:
    """Reports the C++ compiler, and the kernel library that it builds."""
    from model_adapters.ops.cpu import build, ffi

    try:
        command = build.find_compiler()
        yield Fact("compiler", _first_line([*command, "--version"]))
        has_compiler = True
    except build.BuildError as error:
        yield Fact("compiler", f"{error}; XLA's own operations are used, which are slower; install g++", "note")
        has_compiler = False
    start = time.perf_counter()
    if (reason := ffi.missing()) is not None:
        yield Fact("kernel library", reason, "problem" if has_compiler else "note")
    else:
        yield Fact("kernel library", f"ready in {time.perf_counter() - start:.1f} s")


def _first_line(command: list[str]) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]} ({error})"
    return (said.splitlines() or [command[0]])[0]


def environment() -> Iterator[Fact]:
    """Yields environment variables that change what runs.

    For the hub's token this is only whether it is set.
    """
    for name in VARIABLES:
        if (value := os.environ.get(name)) is not None:
            yield Fact(name, value or "(empty)")
    yield Fact("HF_TOKEN", "set" if os.environ.get("HF_TOKEN") else "not set")


def hub(*, online: bool) -> Iterator[Fact]:
    """Reports whether the hub may be contacted, and with `online` whether it answers."""
    from huggingface_hub import constants, get_token

    offline = constants.is_offline_mode()
    yield Fact("endpoint", constants.ENDPOINT)
    yield Fact("token", "there is one" if get_token() else "none: gated and private models cannot be read")
    if offline:
        yield Fact("network", "switched off (HF_HUB_OFFLINE); what is on disk is used", "problem" if online else "note")
    elif not online:
        yield Fact("network", "not asked (--online asks)")
    else:
        yield _answer_of(constants.ENDPOINT)


def _answer_of(endpoint: str) -> Fact:
    from huggingface_hub.utils import get_session

    start = time.perf_counter()
    try:
        status = get_session().head(endpoint, timeout=10).status_code
    except Exception as error:  # the classes of the HTTP client, whichever the hub's release uses
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Fact(
            "network", f"{endpoint} does not answer ({reason}); check the network, or set HF_ENDPOINT", "problem"
        )
    taken = f"{endpoint} answers {status} after {time.perf_counter() - start:.2f} s"
    return Fact("network", taken, "ok" if status < 500 else "problem")


def _gb(num_bytes: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"
