"""The shape of the code: imports without circles and only downwards, sizes, and the field's terms for names.

An exception that no longer applies fails its test, so lists of exceptions only shrink.
"""

import ast
import collections
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("torchax_serve", "model_adapters", "pytree_registry", "sharding_rules")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MIN_COMPANION_LINES = 60
MAX_SUMMARY_CHARS = 90
# From the top down: a package imports from those behind it, never from those in front of it.
LAYERS = (
    ("cli", "server", "distributed.ray"),
    ("bench", "parity", "diagnostics", "training"),
    ("entrypoints", "planning", "export"),
    ("diffusion", "tasks"),
    ("modules",),
    ("generation", "distributed.hosts", "start"),
    ("engine",),
    ("executors",),
    ("kv_cache", "pooling"),
    ("runtime",),
    ("sampling",),
    ("text", "multimodal"),
    ("profiling",),
    ("scheduler", "compilation", "distributed.mesh", "distributed.mesh_shape", "distributed.pathways"),
    ("request_params",),
    ("sampling_params", "outputs", "buckets"),
    ("validation",),
    ("model_adapters",),
    ("sharding_rules",),
    ("pytree_registry",),
)
# Words of a private language, and what to write in their place. `in_flight` is a term of the field.
BANNED_WORDS = {
    "road": "executor",
    "rung": "bucket",
    "flight": "step in flight",
    "ticket": "request handle",
    "seat": "slot",
    "lone": "history",
    "alone": "single, unbatched",
    "twin": "eager reference",
    "heard": "fixed input length",
    "roster": "request queues",
    "beside": "with, next to",
    "whole": "full, integer",
    "forget": "free, evict, discard",
}
PLURALS = {f"{word}s" for word in BANNED_WORDS}
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
# Short modules that one neighbour in their package imports: they belong into it. No others may join.
COMPANIONS = {
    "model_adapters.loading.formats.mxfp4",
    "model_adapters.ops.cpu.targets",
    "model_adapters.ops.tpu.query_blocks",
    "model_adapters.quirks.padded_images",
    "model_adapters.quirks.speecht5",
    "torchax_serve.cli.chat.completion",
    "torchax_serve.compilation.locations",
    "torchax_serve.compilation.native_calls",
    "torchax_serve.planning.gpu_targets",
    "torchax_serve.sampling.grammar_check",
    "torchax_serve.server.loop_lag",
}
# Functions that read private attributes of an argument, which are methods of its class without its name. No others may
# join.
READERS_OF_PRIVATE = {
    "torchax_serve.entrypoints.live_adapters.enable_adapters",
    "torchax_serve.entrypoints.served_model.record_start",
    "torchax_serve.executors.packed.executor.step_calls",
    "torchax_serve.generation.engine_rows._engine_outputs",
    "torchax_serve.generation.engine_rows.encoded_request",
    "torchax_serve.generation.engine_rows.engine_request_for",
    "torchax_serve.generation.engine_rows.prompt_call",
    "torchax_serve.generation.jax_forward._forward_followed",
    "torchax_serve.generation.jax_forward.call_forward",
    "torchax_serve.generation.media_requests.media_request",
    "torchax_serve.generation.model_copies.state_to_copy",
    "torchax_serve.generation.model_copies.torch_state",
    "torchax_serve.generation.model_copies.with_values",
    "torchax_serve.generation.single_request._forward_request",
    "torchax_serve.generation.single_request.single_request",
    "torchax_serve.multimodal.processor.processor_of",
}
# Private in name only (of every named tuple), or of other libraries, whose classes ours stand for.
OF_OTHERS = {"_asdict", "_fields", "_field_defaults", "_make", "_replace"}
OF_OTHERS |= {"_buffers", "_elem", "_get_default_generation_params", "_parameters", "_schema"}
OF_OTHERS |= {"_alias", "_array", "_env", "_noted", "_strided"}  # what lowerings note on tensors of torchax


@functools.cache
def modules():
    """Every module of the packages by its dotted name, parsed."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = (path, ast.parse(path.read_text("utf-8")))
    return found


@functools.cache
def imports():
    """For each module the modules of the packages that it imports, wherever the import stands."""
    found = collections.defaultdict(set)
    for name, (_, tree) in modules().items():
        for node in ast.walk(tree):
            targets = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [target if target in modules() else node.module for target in inner]
            # A module's own parents are imported with it in any case.
            found[name] |= {each for each in targets if each in modules() and not f"{name}.".startswith(f"{each}.")}
    return found


def circles():
    """Strongly connected components of the import graph with more than one module (Tarjan 1972)."""
    index, low, stack, on_stack, found = {}, {}, [], set(), []

    def visit(name):
        index[name] = low[name] = len(index)
        stack.append(name)
        on_stack.add(name)
        for target in imports()[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in on_stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            component = set()
            while name not in component:
                component.add(stack.pop())
            on_stack.difference_update(component)
            if len(component) > 1:
                found.append(frozenset(component))

    for name in modules():
        if name not in index:
            visit(name)
    return found


def layer(name):
    """Position of a module's package in `LAYERS`; None of the package's face, which names what users import."""
    inner = name.removeprefix("torchax_serve.")
    for position, packages in enumerate(LAYERS):
        if any(inner == package or inner.startswith(package + ".") for package in packages):
            return position
    return None


def upward_imports():
    found = set()
    for name, targets in imports().items():
        for target in targets:
            if (above := layer(name)) is not None and (below := layer(target)) is not None and below < above:
                found.add((name, target))
    return found


def definitions(kind):
    for name, (path, tree) in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield name, path, node


def scripts():
    """Every benchmark and example, parsed."""
    for folder in ("benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text("utf-8"))


def num_lines(node):
    return node.end_lineno - node.lineno + 1


@functools.cache
def importers():
    """For each module the modules that import it."""
    found = collections.defaultdict(set)
    for name, targets in imports().items():
        for target in targets:
            found[target].add(name)
    return found


def companions():
    """Modules of a few lines that exist for one neighbour."""
    for name, (path, _) in modules().items():
        is_short = len(path.read_text("utf-8").splitlines()) < MIN_COMPANION_LINES
        if is_short and not path.name.startswith("__") and len(importers()[name]) == 1:
            (importer,) = importers()[name]
            if importer.rpartition(".")[0] == name.rpartition(".")[0]:
                yield name


@functools.cache
def own_private_names():
    """Private attributes and methods of the packages' own classes, and those that they give to torch modules."""
    found = {"_jax_runtime"}
    for _, _, node in definitions(ast.ClassDef):
        found |= {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                found.add(each.attr)
            elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                found.add(each.target.id)
    return {name for name in found if name.startswith("_") and not name.startswith("__")} - OF_OTHERS


def readers_of_private(tree):
    """Names of a module's functions that read private attributes of an argument."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            given = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
            for each in ast.walk(node):
                is_read = isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name)
                if is_read and each.value.id in given and each.attr in own_private_names():
                    yield node.name


def identifiers(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.arg


def banned_words_of(identifier):
    """The banned words in an identifier, whether in snake case or in camel case."""
    snake = re.sub(r"([A-Z])", r"_\1", identifier).lower().replace("in_flight", "")
    return set(re.findall(r"[a-z]+", snake)) & (BANNED_WORDS.keys() | PLURALS)


def test_imports_have_no_circles():
    assert circles() == []


def test_imports_run_downwards():
    assert upward_imports() == set()


def test_every_package_has_a_layer():
    assert [name for name in modules() if name.count(".") > 1 and layer(name) is None] == []


def test_files_are_short():
    lengths = {name: len(path.read_text("utf-8").splitlines()) for name, (path, _) in modules().items()}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == LONG_FILES


def test_functions_are_short():
    lengths = {f"{n}.{f.name}": num_lines(f) for n, _, f in definitions(ast.FunctionDef | ast.AsyncFunctionDef)}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == LONG_FUNCTIONS


def test_functions_of_benchmarks_and_examples_are_short():
    lengths = {
        f"{path.relative_to(ROOT)}:{node.name}": num_lines(node)
        for path, tree in scripts()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_no_module_exists_for_a_neighbour():
    assert set(companions()) == COMPANIONS


def test_no_function_reads_private_attributes_of_its_arguments():
    found = {f"{name}.{function}" for name, (_, tree) in modules().items() for function in readers_of_private(tree)}
    assert found == READERS_OF_PRIVATE


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(engine): return engine._scheduler", ["f"]),
        ("async def f(*, engine): engine._scheduler.add(1)", ["f"]),
        ("def f(engine): return engine.scheduler", []),
        ("def f(row): return row._replace(a=1)", []),
        ("class Engine:\n def f(self): return self._scheduler", []),
        ("def f(module): return module._parameters", []),  # torch's
    ],
)
def test_reads_of_private_attributes_are_found(source, found):
    assert list(readers_of_private(ast.parse(source))) == found


def test_first_lines_of_docstrings_are_short():
    nodes = [(name, tree) for name, (_, tree) in modules().items()]
    nodes += [(name, node) for name, _, node in definitions(ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    lines = [(name, line) for name, node in nodes for line in (ast.get_docstring(node) or "").splitlines()[:1]]
    assert len(lines) > 1000 and [each for each in lines if len(each[1]) > MAX_SUMMARY_CHARS] == []


def test_extras_are_quoted_in_commands():
    """Zsh takes brackets for a pattern."""
    files = [*(path for path, _ in modules().values()), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    bare = [path.name for path in files if re.search(r"(?<!')torchax-serve\[", path.read_text())]
    assert bare == []


def test_no_two_classes_share_a_name():
    homes = collections.defaultdict(list)
    for name, _, node in definitions(ast.ClassDef):
        homes[node.name].append(name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_names_are_the_terms_of_the_field():
    found = {
        f"{name}: {identifier}": sorted(words)
        for name, (_, tree) in modules().items()
        for identifier in set(identifiers(tree))
        if (words := banned_words_of(identifier))
    }
    assert found == {}


@pytest.mark.parametrize(("name", "words"), [("PackedRoad", {"road"}), ("num_in_flight", set()), ("_seats", {"seats"})])
def test_banned_words_are_found_in_both_spellings(name, words):
    assert banned_words_of(name) == words
