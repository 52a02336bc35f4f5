"""Rules from names and shapes only, for tensors that no table and no plan names.

Whatever is decided here gives right results: the partitioner moves what has to be moved. It is decided so that usual
decoders need few moves: what maps the hidden state to something wider is cut by its outputs, what maps back by its
inputs, and small tensors are replicated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sharding_rules.rules import Rule, RuleTable

MIN_ELEMENTS = 256
_BACK = re.compile(r"(out|o_proj|c_proj|down|fc2|fc_out|dense_4h_to_h|attention\.dense|attn\.dense|w2|wo)(_proj)?$")
_ROUTER = re.compile(r"(router|gate|wg)$")
MAX_ROUTES = 1024
_SOURCE = "shape"


def infer_rules(
    shapes: Mapping[str, tuple[int, ...]], hidden_size: int | None, family: str, first: Sequence[Rule] = ()
) -> RuleTable:
    """Returns a table of the rules `first`, and of one rule for each other form of a name.

    The other forms are those that `first` does not match.

    Args:
        shapes: by qualified name, of all tensors.
        hidden_size: of the state between layers; None where the configuration has no one.
        family: name in messages.
        first: rules that go before.
    """
    patterns = [re.compile(rule.pattern) for rule in first]
    found: dict[str, Rule] = {}  # by pattern
    for name, shape in shapes.items():
        if any(pattern.fullmatch(name) for pattern in patterns):
            continue
        form = re.sub(r"(?<=\.)\d+(?=\.)", r"\\d+", re.escape(name).replace(r"\.", ".")).replace(".", r"\.")
        axes = _axes(name, shape, hidden_size)
        if form in found and found[form].axes != axes:
            # Layers of one name and several shapes: each for itself.
            found[re.escape(name)] = Rule(re.escape(name), axes, True, _SOURCE)
            continue
        found.setdefault(form, Rule(form, axes, True, _SOURCE))
    # The longer patterns are the more particular ones.
    particular = sorted(found.values(), key=lambda rule: r"\d+" in rule.pattern)
    return RuleTable(family, (*first, *particular))


def _axes(name: str, shape: tuple[int, ...], hidden_size: int | None) -> tuple[str | None, ...]:
    axes: list[str | None] = [None] * len(shape)
    size = 1
    for length in shape:
        size *= length
    if len(shape) < 2 or size < MIN_ELEMENTS:
        return tuple(axes)
    if len(shape) == 3 and shape[1] == 1:  # a convolution by channels
        axes[0] = "state"
        return tuple(axes)
    if len(shape) > 3:  # a convolution over an image: its channels
        axes[0] = "columns"
        return tuple(axes)
    out, inner = shape[-2:]
    stem = name.removesuffix(".weight")
    if len(shape) == 2 and _ROUTER.search(stem) and out <= MAX_ROUTES:
        return tuple(axes)  # where tokens go, all devices must know
    if out == inner or hidden_size not in (out, inner):
        cut = -1 if _BACK.search(stem) else (-2 if out >= inner or out == inner else -1)
    else:
        cut = -1 if out == hidden_size else -2
    axes[cut] = "columns"
    return tuple(axes)
