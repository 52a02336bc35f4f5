"""Programs from disk that call LAPACK and Fourier transforms, in processes that lower no such operation."""

import json
import subprocess
import sys

import numpy as np
import pytest

# Prints what a function gives, from a program in the folder if there is one, and whether there was.
PROGRAM = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax import export
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache

def solved(weights, b, spec):
    return jax.scipy.linalg.solve_triangular(weights["a"], b, lower=True), jnp.abs(jnp.fft.fft(b, axis=0))

class Exported:
    def function(self, name, args, spec):
        return export.deserialize(bytearray((Path(sys.argv[1]) / "solved.jax_export").read_bytes())).call

weights = {"a": jnp.asarray(np.tril(np.arange(16.0).reshape(4, 4) + 1), jnp.float32)}
b = jnp.asarray(np.arange(8.0).reshape(4, 2), jnp.float32)
kind, folder = sys.argv[2], Path(sys.argv[1])
if kind == "export":
    made = export.export(jax.jit(lambda weights, b: solved(weights, b, None)))(weights, b)
    (folder / "solved.jax_export").write_bytes(bytes(made.serialize()))
    raise SystemExit
exported = Exported() if kind == "bundle" else None
cache = ExecutableCache(folder / "programs", kind, exported=exported)
function = CachedFunction(cache, "solved", solved, is_pure=True)
print(json.dumps([cache.num_loaded, *(np.asarray(each).tolist() for each in function(weights, b, spec=None))]))
cache.wait_for_writes()
print(cache.num_loaded)
"""


def run(folder, kind):
    """What a new process has computed, and how many programs it has read."""
    command = [sys.executable, "-c", PROGRAM, str(folder), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kind", ["model", "bundle"])
def test_a_program_from_disk_calls_lapack_and_fourier_transforms(kind, tmp_path):
    if kind == "bundle":
        run(tmp_path, "export")
    (_, *first), num_read = run(tmp_path, kind)
    assert num_read == 0
    (_, *second), num_read = run(tmp_path, kind)
    assert num_read == 1
    a, b = np.tril(np.arange(16.0).reshape(4, 4) + 1), np.arange(8.0).reshape(4, 2)
    for solution, spectrum in (first, second):
        np.testing.assert_allclose(solution, np.linalg.solve(a, b), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(spectrum, np.abs(np.fft.fft(b, axis=0)), rtol=1e-5, atol=1e-5)
