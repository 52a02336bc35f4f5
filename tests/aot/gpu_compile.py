"""Calls of the paged ops compiled for a GPU that is not there, and what the compilers say of them.

XLA's plug-in for CUDA compiles from a description of the device (``h100.txtpb``, ``h200.txtpb``); ptxas, from NVIDIA's
wheel of nvcc, then counts registers and spills of each kernel's PTX.
"""

import dataclasses
import functools
import re
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import model_adapters.ops.gpu  # noqa: F401 registers the kernels
from model_adapters.ops import AttentionArgs, KVScales, decode_attention, on_platform, paged_attention, use

GPUS = ("h100", "h200")
"""Described devices; the H100 is that of 80 GB with HBM3."""
NEEDED = (
    "pip install jax-cuda13-pjrt jax-cuda13-plugin in the version of jax, and nvidia-cuda-nvcc nvidia-nvvm "
    "nvidia-cuda-runtime 13.0"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shapes and features of a call; `num_tokens` None: a decode step."""

    dim: int = 128
    group: int = 4
    heads: int = 8
    value_dim: int | None = None
    page: int = 64
    dtype: str = "bfloat16"
    pool_dtype: str | None = None
    num_seqs: int = 8
    num_tokens: int | None = None
    capacity: int = 4096
    num_pages: int = 1024
    sinks: bool = False
    alibi: bool = False
    prefix: bool = False
    images: bool = False
    window: int | None = None
    softcap: float | None = None
    value_begin: int | None = None

    def __str__(self):
        changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return "-".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "plain"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What ptxas and XLA say of one kernel."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    grid: tuple[int, ...]
    instructions: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Report:
    """What a compiled call needs; `thunks` are the kinds of what the host launches."""

    compile_s: float
    pool_bytes: int
    alias_bytes: int
    temp_bytes: int
    kernels: dict[str, Kernel]
    thunks: list[str]


@functools.cache
def mesh(gpu="h200", num_devices=1):
    """The devices by themselves; as the mesh that is set, they tell Pallas what it compiles for."""
    described, shape = Path(__file__).with_name(f"{gpu}.txtpb").read_text(), f"1x1x{num_devices}"
    try:
        topology = topologies.get_topology_desc("", platform="cuda", target_config=described, topology=shape)
    except RuntimeError as error:
        raise RuntimeError(f"expected XLA's plug-in for CUDA, got {error}; {NEEDED}") from error
    return Mesh(np.array(topology.devices[:num_devices]), ("model",))


@functools.cache
def ptxas():
    import nvidia

    for folder in nvidia.__path__:
        for found in Path(folder).glob("*/bin/ptxas"):
            return found
    raise RuntimeError(f"expected ptxas in the wheel of nvcc, got none; {NEEDED}")


def arguments(shape, gpu):
    """Abstract arguments of the call."""
    sharding = NamedSharding(mesh(gpu), PartitionSpec())

    def abstract(dims, dtype):
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=sharding)

    value_dim = shape.value_dim or shape.dim
    pool_dtype = shape.pool_dtype or shape.dtype
    num_tokens = shape.num_tokens or shape.num_seqs
    query_heads = shape.heads * shape.group
    row = abstract((shape.num_seqs,), "int32")
    by_head = abstract((shape.heads,), "float32")
    width = shape.dim if shape.value_begin is not None else shape.dim + value_dim
    return [
        abstract((num_tokens, query_heads, shape.dim), shape.dtype),
        abstract((num_tokens, shape.heads, shape.dim), shape.dtype),
        abstract((num_tokens, shape.heads, value_dim), shape.dtype),
        abstract((shape.num_pages, shape.heads, shape.page, width), pool_dtype),
        abstract((shape.num_seqs, shape.capacity // shape.page), "int32"),
        row,
        row if shape.num_tokens is None else abstract((shape.num_seqs + 1,), "int32"),
        AttentionArgs(
            shape.dim**-0.5,
            shape.window,
            shape.softcap,
            abstract((query_heads,), shape.dtype) if shape.sinks else None,
            abstract((query_heads,), "float32") if shape.alibi else None,
            row if shape.prefix else None,
            KVScales(by_head, by_head) if pool_dtype in ("int8", "float8_e4m3fn") else None,
            abstract((num_tokens,), "int32") if shape.images else None,
            shape.value_begin,
        ),
    ]


def options(folder):
    """Of the compiler, with its notes in the empty `folder`."""
    return {"xla_gpu_autotune_level": "0", "xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def compile_call(shape, folder, implementation="gpu-triton", gpu="h200"):
    """Compiles the call, with XLA's notes in the empty `folder`."""
    op = decode_attention if shape.num_tokens is None else paged_attention
    args = arguments(shape, gpu)
    begin = time.perf_counter()
    with jax.set_mesh(mesh(gpu)), on_platform("gpu"), use(op.__name__, implementation):
        call = jax.jit(lambda *args: op(*args), donate_argnums=3).trace(*args)
        compiled = call.lower(lowering_platforms=("cuda",)).compile(options(folder))
    compile_s = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    pool = args[3]
    return Report(
        compile_s,
        pool.size * pool.dtype.itemsize,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        kernels(folder),
        thunks(folder),
    )


def thunks(folder):
    """Kinds of what the host launches, in order."""
    (path,) = folder.glob("*.thunk_sequence.txt")
    return re.findall(r"^\s*\d+: (k\w+)", path.read_text(), re.MULTILINE)


def kernels(folder, names=r"\w+_attention\w*"):
    """The kernels that are ours, by name."""
    (path,) = folder.glob("*.thunk_sequence.txt")
    launches = re.findall(rf"({names}) grid: \[(\d+), (\d+), (\d+)\].*shared_memory: (\d+)", path.read_text())
    found = {}
    for ptx in folder.glob("*.ptx"):
        text = ptx.read_text()
        for name, x, y, z, shared in launches:
            if not re.search(rf"\.entry {name}\(", text):
                continue
            registers, spill_bytes = assemble(ptx, name)
            instructions = frozenset(re.findall(r"^\s*(?:@\S+ )?([a-z][\w.]+)", text, re.MULTILINE))
            found[name] = Kernel(registers, spill_bytes, int(shared), (int(x), int(y), int(z)), instructions)
    return found


def assemble(ptx, name):
    """Registers and spilled bytes, stores and loads, of kernel `name`."""
    command = [ptxas(), "-v", "--gpu-name=sm_90a", ptx, "-o", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    notes = re.search(rf"Compiling entry function '{name}'.*?Used \d+ registers", said, re.DOTALL)[0]
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", notes)
    return int(re.search(r"Used (\d+) registers", notes)[1]), int(spilled[1]) + int(spilled[2])
