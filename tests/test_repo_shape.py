"""The shape of the code: imports without circles and only downwards, sizes, and the field's words for names.

Each list of exceptions may only shrink: an entry that no longer applies fails its test.
"""

import ast
import collections
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("torchax_serve", "model_adapters", "pytree_registry", "sharding_rules")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CLASS_METHODS = 20
# From the top down: a package imports from those behind it, never from those in front of it.
LAYERS = (
    ("cli", "server"),
    ("bench", "parity"),
    ("distributed.ray",),
    ("entrypoints", "planning"),
    ("generation", "distributed.hosts"),
    ("engine",),
    ("executors",),
    ("kv_cache", "pooling"),
    ("runtime",),
    ("sampling",),
    ("text", "multimodal"),
    ("scheduler", "compilation", "distributed.mesh"),
    ("sampling_params", "outputs", "buckets", "argument_hints"),
    ("model_adapters",),
    ("pytree_registry",),
    ("sharding_rules",),
)
BANNED_WORDS = frozenset(
    [
        "road",
        "roads",
        "rung",
        "rungs",
        "flight",
        "flights",
        "ticket",
        "tickets",
        "seat",
        "seats",
        "lone",
        "twin",
        "heard",
        "roster",
        "beside",
        "alone",
        "whole",
    ]
)


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
            found[name] |= {target for target in targets if target in modules()} - {name}
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
