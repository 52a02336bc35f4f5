"""Programs that outlive the process: found by what they were made from, refused when anything of it differs."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch
from tiny_models import prompts, tiny_model

from model_adapters import disk_cache
from model_adapters.ops import use
from model_adapters.ops.cpu import build
from torchax_serve import serve, to_jax
from torchax_serve.compilation import environment
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache

RUN = """
import sys, torch
from torchax_serve import serve
with serve(sys.argv[1]) as model:
    steps = model.torch_model._jax_runtime.steps
    ids = torch.arange(3, 9)[None]
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)[0].tolist()
    steps.executables.wait_for_writes()
    print(tokens, dict(steps.num_traces), steps.executables.num_loaded)
"""


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder that programs are kept in."""
    folder = tmp_path / "compiled"
    monkeypatch.setattr("torchax_serve.entrypoints.torch_model.programs_dir", lambda: folder / "programs")
    return folder / "programs"


@pytest.fixture
def checkpoint(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def generate(checkpoint, **kwargs):
    """(tokens, traces by function, programs read from the folder) of one life of a model."""
    with serve(checkpoint, **kwargs) as model:
        steps = model.torch_model._jax_runtime.steps
        ids = prompts()[0][1:]
        output = model.generate(ids, max_new_tokens=5)
        steps.executables.wait_for_writes()
        return output.tolist(), dict(steps.num_traces), steps.executables.num_loaded


def test_a_second_process_neither_traces_nor_compiles(checkpoint, tmp_path):
    ours = tmp_path / "cache" / "torchax-serve"
    shutil.copytree(build.library_path().parent, ours / "kernels")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    lines = [
        subprocess.run(
            [sys.executable, "-c", RUN, str(checkpoint)], env=environment, capture_output=True, text=True, check=True
        ).stdout.splitlines()[-1]
        for _ in range(2)
    ]
    tokens = tiny_model("qwen3").generate(torch.arange(3, 9)[None], max_new_tokens=6)[0].tolist()
    assert lines == [f"{tokens} {{'forward': 1, 'decode': 1}} 0", f"{tokens} {{}} 2"]
    assert len(list((ours / "compiled" / "programs").glob("forward-*"))) == 1
    others = [file.name for file in (ours / "compiled").iterdir()]
    assert not [name for name in others if "forward" in name or "decode" in name], "kept twice"


def test_a_second_model_of_the_same_folder_takes_the_first_ones_programs(checkpoint, kept):
    first, second = generate(checkpoint), generate(checkpoint)
    assert first[1:] == ({"forward": 1, "decode": 1}, 0)
    assert second == (first[0], {}, 2)


@pytest.mark.parametrize("is_stored", [True, False])
def test_stored_programs_do_not_say_where_their_operations_come_from(is_stored, tmp_path):
    """XLA holds these names as long as a program, and three times more while it reads one."""
    cache = ExecutableCache(tmp_path if is_stored else None, "a model")
    sine = CachedFunction(cache, "sine", lambda weights, x, spec: jnp.sin(x), is_pure=True)
    program = sine.compiled({}, jnp.ones(3), spec=None)
    cache.wait_for_writes()
    cache.close()
    assert ("op_name" in program.as_text()) is not is_stored
    assert len(list(tmp_path.glob("sine-*"))) == is_stored


@pytest.mark.parametrize("change", ["dtype", "config", "source", "xla flags", "precision"])
def test_a_program_of_something_else_is_not_taken(checkpoint, kept, change, monkeypatch):
    generate(checkpoint)
    kwargs = {}
    if change == "dtype":
        kwargs["dtype"] = "bfloat16"
    if change == "config":
        file = checkpoint / "config.json"
        file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1'))
        assert "0.1" in file.read_text()
    if change == "source":
        monkeypatch.setattr(environment, "_installed", lambda source: "another state of this project's code")
    if change == "xla flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    with jax.default_matmul_precision("highest" if change == "precision" else None):
        assert generate(checkpoint, **kwargs)[1:] == ({"forward": 1, "decode": 1}, 0)


def test_an_implementation_chosen_by_hand_is_compiled_anew_and_not_kept(checkpoint, kept):
    with use("decode_attention", "reference"):
        assert generate(checkpoint)[2] == 0
    assert not kept.exists()


def flipped(whole, place):
    return whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :]


DAMAGES = {  # tests/core/test_disk_cache.py flips each bit, and cuts anywhere
    "a pickle that runs code": lambda whole: b"cbuiltins\nexit\n(I3\ntR.",
    "cut at 1000": lambda whole: whole[:1000],
    "without its seal": lambda whole: whole[: -disk_cache.SEAL_BYTES],
    "a bit of the machine code": lambda whole: flipped(whole, len(whole) // 2),
}


def test_a_damaged_file_costs_a_compilation_and_is_replaced(checkpoint, kept):
    tokens, *_ = generate(checkpoint)
    good = {file: file.read_bytes() for file in kept.iterdir() if not file.name.startswith(".")}
    assert len(good) >= 2
    for name, damage in DAMAGES.items():
        for file, content in good.items():
            file.write_bytes(damage(content))
            file.chmod(0o600)
        assert generate(checkpoint) == (tokens, {"forward": 1, "decode": 1}, 0), name
        assert generate(checkpoint) == (tokens, {}, 2), name  # replaced


def test_programs_of_a_folder_that_others_can_write_are_not_loaded(checkpoint, kept):
    tokens, *_ = generate(checkpoint)
    kept.chmod(0o777)
    assert generate(checkpoint) == (tokens, {"forward": 1, "decode": 1}, 0)


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(checkpoint, kept):
    kept.parent.mkdir()
    kept.write_text("a file where the folder should be")
    assert generate(checkpoint) == generate(checkpoint)


def test_programs_of_an_object_are_not_kept(kept):
    to_jax(tiny_model("llama")).generate(prompts()[0][1:], max_new_tokens=3)
    with serve(tiny_model("llama")) as model:
        model.generate(prompts()[0][1:], max_new_tokens=3)
    assert not kept.exists()


def test_what_tracing_found_out_comes_with_the_program(tmp_path, kept):
    """opt counts positions by a mask, which shows at the first trace of a decode step."""
    tiny_model("opt").save_pretrained(tmp_path / "opt")
    first = generate(tmp_path / "opt")
    with serve(tmp_path / "opt") as model:
        output = model.generate(prompts()[0][1:], max_new_tokens=5, return_dict_in_generate=True, output_logits=True)
        assert output.sequences.tolist() == first[0]
        assert model.torch_model._jax_runtime.program.needs_mask
        logits = model(prompts()[0][1:])
        assert type(logits).__name__ == "CausalLMOutputWithPast"


JAX_RUN = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from torchax_serve.compilation.xla_cache import enable_compile_cache
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
folder = Path(sys.argv[1])
assert enable_compile_cache(folder) == folder

def run():
    "Computes what a process without programs in memory would; says whether a file was used."
    jax.clear_caches()
    del hits[:]
    print(float(jax.jit(lambda x: (x * 3 + 1).sum())(jnp.arange(5.0))), bool(hits))

run()
if sys.argv[2:] == ["damage"]:
    run()
    for file in folder.glob("jit*"):
        whole = bytearray(file.read_bytes())
        whole[len(whole) // 2] ^= 8
        file.write_bytes(whole)
    run()
    run()
"""


def test_what_jax_itself_keeps_is_checked_too(tmp_path):
    def run(*arguments, **variables):
        command = [sys.executable, "-c", JAX_RUN, str(tmp_path / "compiled"), *arguments]
        environment = {**os.environ, **variables}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return done.stdout.splitlines()

    def entries():
        return [file for file in (tmp_path / "compiled").iterdir() if file.name.startswith("jit")]

    assert run() == ["35.0 False"]
    kept = set(entries())
    assert run("damage") == ["35.0 True", "35.0 True", "35.0 False", "35.0 True"]
    assert set(entries()) == kept
    for file in kept:
        file.unlink()
    assert run(TORCHAX_SERVE_CACHE_SIZE="1k", XDG_CACHE_HOME=str(tmp_path)) == ["35.0 False"]
    assert sum(file.stat().st_size for file in entries()) <= 1000


def test_a_folder_that_cannot_be_written_is_read(tmp_path):
    """As in an image whose programs were compiled when it was made."""
    cannot_write = "import os\nos.access = lambda path, mode: False\n"
    for script, is_found in ((JAX_RUN, False), (cannot_write + JAX_RUN, True)):
        command = [sys.executable, "-c", script, str(tmp_path / "compiled")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["35.0", str(is_found)]
        said = f"compiled programs are not kept: {tmp_path}/compiled cannot be written; until"
        assert done.stderr.count(said) == is_found


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A copy of this project's packages, whose source counts."""
    for package in environment.PACKAGES:
        sources = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.json")
        shutil.copytree(environment.ROOT / package, tmp_path / package, ignore=sources)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("model_adapters/program/model_program.py", True),
        ("model_adapters/ops/cpu/linear.cc", True),
        ("model_adapters/quirks/aria.py", True),
        ("sharding_rules/__init__.py", True),
        ("torchax_serve/runtime/step_functions.py", True),
        ("torchax_serve/executors/packed/executor.py", True),
        ("torchax_serve/sampling/truncation.py", True),
        ("torchax_serve/cli/main.py", False),
        ("torchax_serve/text/chat.py", False),
        ("torchax_serve/bench/report.py", False),
        ("torchax_serve/distributed/ray/application.py", False),
    ],
)
def test_an_edit_invalidates_programs_where_they_depend_on_it(packages, file, counts):
    digest = environment.program_source_digest.__wrapped__
    before, whole = digest(), environment.source_digest.__wrapped__()
    (packages / file).write_text((packages / file).read_text() + "\n# edited\n")
    assert (digest() != before) == counts
    assert environment.source_digest.__wrapped__() != whole


def test_what_is_left_out_of_the_digest_is_reached_by_no_traced_function():
    """Follows imports, wherever they stand, from all that holds or hands over functions that are kept."""
    root = Path(environment.__file__).parents[2]
    files = {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for package in environment.PACKAGES
        for file in (root / package).rglob("*.py")
    }
    left_out = {f"torchax_serve.{name.removesuffix('.py').replace('/', '.')}" for name in environment.NOT_TRACED}
    assert left_out <= set(files), "a name that matches nothing"

    def is_left_out(module):
        return any(f"{module}.".startswith(f"{name}.") for name in left_out)

    def imported(module):
        waiting = [ast.parse(files[module].read_text())]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            if isinstance(node, ast.Import):
                yield from (each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{each.name}" for each in node.names)
            waiting += ast.iter_child_nodes(node)

    holders = ("CachedFunction", "memoize(", "steps.call_method", "MethodSpec")
    reached = {
        name
        for name, file in files.items()
        if not is_left_out(name) and any(each in file.read_text() for each in holders)
    }
    assert {"torchax_serve.runtime.step_functions", "torchax_serve.executors.packed.executor"} <= reached
    waiting = list(reached)
    while waiting:
        found = {name for name in imported(waiting.pop()) if name in files} - reached
        assert not [name for name in found if is_left_out(name)]
        reached |= found
        waiting += found
