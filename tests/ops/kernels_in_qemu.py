"""Runs the C++ kernels of tests compiled for ARM, under QEMU: a plugin of pytest.

    PYTHONPATH=tests/ops .venv/bin/pytest -n 0 -p kernels_in_qemu tests/ops/test_quantized_product.py

Calls of the kernels leave the program through a callback, and a process of QEMU answers them; everything else runs as
always, so that a test compares what it compares elsewhere. It needs Debian's packages g++-aarch64-linux-gnu and
qemu-user-static. `ARM_FLAGS` are the compiler's for the processor, by default those of one with products of bytes;
`ARM_SOURCES` are the C++ files whose kernels the tests call, by default all.
"""

import functools
import os
import re
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.ops.cpu import attention, build, ffi, pages
from model_adapters.ops.cpu.targets import TARGETS

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", ("qemu-aarch64-static", "qemu-aarch64")
FLAGS = ("-O1", "-std=c++20", "-ffp-contract=off", "-static", "-w")
PROCESSOR = "-march=armv8.2-a+dotprod+fp16"
DTYPES = {"bool": 1, "int8": 2, "int32": 4, "int64": 5, "uint8": 6, "uint32": 8, "float16": 10, "float32": 11}
DTYPES |= {"bfloat16": 16, "float8_e4m3fn": 20}
"""XLA's numbers of types."""


def missing():
    """Returns what there is not, or None."""
    if shutil.which(COMPILER) is None:
        return f"no {COMPILER} (Debian's package g++-aarch64-linux-gnu)"
    return None if any(map(shutil.which, EMULATOR)) else f"no {EMULATOR[0]} (Debian's package qemu-user-static)"


class Emulated:
    """The kernels in a process of QEMU."""

    def __init__(self, folder):
        named = os.environ.get("ARM_SOURCES", "").split()
        kernels = [path for path in build.sources() if not named or path.name in named]
        words = set(re.findall(r"\w+", "".join(path.read_text() for path in kernels)))
        (folder / "targets.inc").write_text("".join(f"TARGET({each})\n" for each in TARGETS if each in words))
        sources = [*kernels, Path(__file__).with_suffix(".cc")]
        flags = [*FLAGS, *os.environ.get("ARM_FLAGS", PROCESSOR).split(), f"-I{jax.ffi.include_dir()}", f"-I{folder}"]

        def compile_one(source):
            made = str(folder / source.with_suffix(".o").name)
            subprocess.run([COMPILER, *flags, "-c", str(source), "-o", made], check=True)
            return made

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compile_one, sources))
        program = str(folder / "kernels")
        subprocess.run([COMPILER, *flags, *objects, "-o", program], check=True)
        emulator = next(each for each in EMULATOR if shutil.which(each))
        self._process = subprocess.Popen([emulator, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()
        self.num_calls = 0

    def call(self, target, results, aliases, attributes, *operands):
        """Returns the results of a kernel, as `jax.ffi.ffi_call` does."""
        parts = [text(target), ints(len(operands))]
        operands = [np.ascontiguousarray(each) for each in operands]
        for each in operands:
            parts += [numbers(each), each.tobytes()]
        parts.append(ints(len(results)))
        for place, each in enumerate(results):
            operand = next((source for source, to in aliases.items() if to == place), -1)
            parts += [numbers(np.empty(each.shape, each.dtype)), ints(operand)]
        parts.append(ints(len(attributes)))
        for name, value in sorted(attributes.items()):
            value = np.asarray(value)
            parts += [text(name), numbers(value), value.tobytes()]
        with self._lock:
            self.num_calls += 1
            self._process.stdin.write(b"".join(parts))
            self._process.stdin.flush()
            if message := self._read(int.from_bytes(self._read(8), "little")).decode():
                raise ValueError(message)
            return tuple(
                np.frombuffer(self._read(np.empty(each.shape, each.dtype).nbytes), each.dtype).reshape(each.shape)
                for each in results
            )

    def _read(self, count):
        content = self._process.stdout.read(count)
        if len(content) != count:
            raise RuntimeError(f"the emulated kernels ended with status {self._process.wait()}")
        return content

    def close(self):
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()


def ints(*values):
    return np.asarray(values, np.int64).tobytes()


def text(string):
    return ints(len(string)) + string.encode()


def numbers(array):
    return ints(DTYPES[str(array.dtype)], array.ndim, *array.shape, array.nbytes)


def pytest_configure(config):
    if (reason := missing()) is not None:
        raise RuntimeError(f"kernels cannot run as on ARM: {reason}")
    config.arm_folder = tempfile.TemporaryDirectory()
    emulated = config.arm_kernels = Emulated(Path(config.arm_folder.name))

    def ffi_call(target, results, *, input_output_aliases=None, **_):
        several = isinstance(results, tuple)
        shapes = results if several else (results,)

        def call(*operands, **attributes):
            operands = [jnp.asarray(each) for each in operands]
            run = functools.partial(emulated.call, target, shapes, input_output_aliases or {}, attributes)
            found = jax.pure_callback(run, shapes, *operands, vmap_method="sequential")
            return found if several else found[0]

        return call

    for module in (ffi, attention, pages):
        module.ffi_call = ffi_call


def pytest_unconfigure(config):
    if hasattr(config, "arm_kernels"):
        config.arm_kernels.close()
        config.arm_folder.cleanup()


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.write_line(f"{config.arm_kernels.num_calls} calls of kernels on ARM")
