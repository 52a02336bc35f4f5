"""Rules of what is quantized and how, in Qwix's words (https://github.com/google/qwix).

A rule is a regular expression for the full path of a module and what happens to its weight. The first rule that
matches counts. Rules come as the name of a preset, as dicts, as objects with the attributes of `qwix.QuantizationRule`
(which is not imported), or in a TOML, YAML or JSON file, also under ``quantization.qwix.rules`` as tpu-inference has
them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry

DENSE = "none"
WEIGHT_TYPES = ("int8", "int4", "float8_e4m3fn", "nf4")
_FLOATS = ("float8_e4m3fn", "nf4")
"""Types without a zero point."""
ACT_TYPES = ("int8", "float8_e4m3fn")
SCALE_TYPES = ("float32", "bfloat16", "float16")
OP_NAMES = ("dot_general", "ragged_dot", "embedding")
"""Qwix's names of ops: linear layers and `Conv1D`; experts in one tensor; embedding tables."""
CALIBRATIONS = {"absmax": (0, 1), "minmax": (0, 1), "rms": (1, 1), "fixed": (1, 2), "signed_absmax": (0, 0)}
"""Calibration methods and how many numbers may follow the name. Qwix has all but ``signed_absmax``, which gives the
number of largest magnitude the lowest value (-8 of int4), with its sign in the scale, as llama.cpp's Q4_0 does: of
4 bits it loses a third less than ``absmax``."""
ROUTERS = r"(.*\.)?(gate|router|shared_expert_gate|router\.classifier|router\.layer)"
"""Modules that presets leave dense: they choose experts, and are small."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationRule:
    """How the weights of some modules are stored.

    Attributes:
        module_path: Regular expression for the full path of a module.
        weight_qtype: One of `WEIGHT_TYPES`, or "none": these weights stay dense. nf4 is 4 bits whose 16 numbers are
            quantiles of a normal distribution.
        act_qtype: One of `ACT_TYPES`: activations are rounded to it for each product; None leaves them.
        tile_size: Columns that share a scale, or one over their number (a float); None is one scale for each row.
        weight_calibration_method: A name of `CALIBRATIONS` and its numbers, with commas.
        op_names: Out of `OP_NAMES`; empty is linear layers and experts.
        scale_dtype: Dtype that scales are rounded to before values are computed with them.
    """

    module_path: str = ".*"
    weight_qtype: str = DENSE
    act_qtype: str | None = None
    tile_size: int | float | None = None
    weight_calibration_method: str = "absmax"
    op_names: tuple[str, ...] = ()
    scale_dtype: str = "float32"

    def applies_to(self, path: str, op_name: str) -> bool:
        """Tells whether this rule matches the module at `path`, whose product is `op_name`."""
        names = self.op_names or ("dot_general", "ragged_dot")
        return op_name in names and re.fullmatch(self.module_path, path) is not None

    def __str__(self) -> str:
        if self.weight_qtype == DENSE:
            return "dense"
        tile = "one scale a row" if self.tile_size is None else f"groups of {self.tile_size}"
        acts = f", activations {self.act_qtype}" if self.act_qtype else ""
        return f"{self.weight_qtype}, {tile}{acts}"


@dataclasses.dataclass(frozen=True)
class QuantizationRules:
    """Rules in the order of precedence.

    Attributes:
        rules: The rules.
        name: Preset or file that they come from, for reports.
        is_preset: They are defaults: routers stay dense, a group may be cut at the end of a row, and a rule may match
            nothing.
        for_files: They choose what a folder in the format compressed-tensors can hold: linear layers.
    """

    rules: tuple[QuantizationRule, ...]
    name: str
    is_preset: bool = False
    for_files: bool = False

    def rule_for(self, path: str, op_name: str) -> QuantizationRule | None:
        """Returns the first rule that matches the module at `path`; None leaves its weight dense."""
        if self.is_preset and re.fullmatch(ROUTERS, path):
            return None
        return next((rule for rule in self.rules if rule.applies_to(path, op_name)), None)


def _presets(platform: str) -> dict[str, QuantizationRule]:
    """Returns what each preset means on a platform.

    The CPU's products are of bytes: activations are rounded to int8 in groups of 32, as llama.cpp does. Elsewhere
    products are of bfloat16, and weights are converted on the way.
    """
    on_cpu = platform == "cpu"
    bytes_of_32: dict[str, Any] = {"tile_size": 32, "act_qtype": "int8", "scale_dtype": "float16"}
    grouped = bytes_of_32 if on_cpu else {}
    int4: dict[str, Any] = grouped or {"tile_size": 128}
    return {
        "int8": QuantizationRule(weight_qtype="int8", **grouped),
        "int4": QuantizationRule(weight_qtype="int4", weight_calibration_method="signed_absmax", **int4),
        "fp8": QuantizationRule(weight_qtype="float8_e4m3fn"),
        "w8a8": QuantizationRule(weight_qtype="int8", act_qtype="int8"),
        "fp8-w8a8": QuantizationRule(weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn"),
        "nf4": QuantizationRule(weight_qtype="nf4", tile_size=64),
    }


PRESETS = tuple(_presets("cpu"))
_CHECKPOINT_METHODS = (
    "awq",
    "bitsandbytes",
    "compressed-tensors",
    "fbgemm_fp8",
    "gguf",
    "gptq",
    "hqq",
    "mxfp4",
    "torchao",
)


def parse_rules(given: Any) -> QuantizationRules | None:
    """Returns the rules of an argument ``quantization``; None for None and "none".

    Args:
        given: Name of a preset, path of a file, one rule or a sequence of rules as dicts or objects, or
            `QuantizationRules`.

    Raises:
        InvalidArgumentError: names all that is wrong.
    """
    if given is None or given == DENSE or isinstance(given, QuantizationRules):
        return None if given == DENSE else given
    if isinstance(given, (str, os.PathLike)):
        if (preset := _presets(registry.platform()).get(str(given))) is not None:
            return QuantizationRules((preset,), str(given), is_preset=True)
        return QuantizationRules(_checked(_read_file(str(given))), Path(given).name)
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        given = _rules_inside(given) if isinstance(given, Mapping) and "quantization" in given else [given]
    return QuantizationRules(_checked(list(given)), "rules")


def rules_for_files(given: Any) -> QuantizationRules | None:
    """Returns `parse_rules` of `given` for a folder that others read.

    Presets do not depend on this platform.

    Scales are bfloat16 and positive, and groups of int4 have 128 columns, as is usual there.
    """
    if isinstance(given, str) and given in PRESETS and given != "nf4":
        rule = dataclasses.replace(_presets("tpu")[given], weight_calibration_method="absmax", scale_dtype="bfloat16")
        return QuantizationRules((rule,), given, is_preset=True, for_files=True)
    rules = parse_rules(given)
    if rules is not None and any(rule.weight_qtype == "nf4" for rule in rules.rules):
        raise InvalidArgumentError(
            "quantization: expected numbers that the format compressed-tensors has, got nf4; choose int4"
        )
    return None if rules is None else dataclasses.replace(rules, for_files=True)


def _read_file(name: str) -> list[Any]:
    """Returns the rules of a TOML, YAML or JSON file as mappings."""
    path = Path(name)
    readers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json.loads}
    readers |= {".yaml": _yaml, ".yml": _yaml}
    if path.suffix not in readers:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
        if name.lower() in _CHECKPOINT_METHODS:
            remedy = "a quantized checkpoint is recognized by its files, so leave it out"
        else:
            remedy = f"did you mean {near[0]}?" if near else "choose one of them"
        raise InvalidArgumentError(
            f"quantization: expected {', '.join(PRESETS)}, none or a .toml, .yaml or .json file of rules, got "
            f"{name!r}; {remedy}"
        )
    try:
        return _rules_inside(readers[path.suffix](path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        said = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InvalidArgumentError(
            f"quantization: expected a file of rules, got {name} ({said}); see docs/quantization.md for an example"
        ) from error


def _yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]  # comes with transformers

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _rules_inside(content: Any) -> list[Any]:
    """Returns the list of rules in a file's content.

    It is the content, or under ``rules`` or ``quantization.qwix.rules``.
    """
    for key in ("quantization", "qwix", "rules"):
        if isinstance(content, Mapping) and key in content:
            content = content[key]
    if not isinstance(content, Sequence) or isinstance(content, str) or not content:
        raise InvalidArgumentError(
            "quantization: expected a list of rules, or one under rules or quantization.qwix.rules, got "
            f"{type(content).__name__}; see docs/quantization.md for an example"
        )
    return list(content)


def _checked(given: Sequence[Any]) -> tuple[QuantizationRule, ...]:
    """Returns rules of dicts or objects.

    Raises:
        InvalidArgumentError: lists the faults of all of them.
    """
    faults: list[str] = []
    rules = [_rule_of(number, each, faults) for number, each in enumerate(given)]
    if not given:
        faults.append("expected at least one rule, got none")
    if faults:
        raise InvalidArgumentError(f"quantization: {'; '.join(faults)}")
    return tuple(rule for rule in rules if rule is not None)


def _rule_of(number: int, given: Any, faults: list[str]) -> QuantizationRule | None:
    if isinstance(given, QuantizationRule):
        return given
    values = dict(given) if isinstance(given, Mapping) else _attributes_of(given)
    where = f"rule {number} ({values.get('module_path', '.*')})"
    found = [f"{where}: {fault}" for fault in _faults_of(values, is_object=not isinstance(given, Mapping))]
    faults += found
    if found:
        return None
    known = {field.name for field in dataclasses.fields(QuantizationRule)}
    kept = {name: value for name, value in values.items() if name in known and value is not None}
    for name in ("weight_qtype", "act_qtype", "scale_dtype"):
        if name in kept:
            kept[name] = _dtype_name(kept[name])
    if kept.get("act_qtype") == DENSE:
        del kept["act_qtype"]
    names = kept.get("op_names", ())
    kept["op_names"] = (names,) if isinstance(names, str) else tuple(names)
    return QuantizationRule(**kept)


def _attributes_of(rule: Any) -> dict[str, Any]:
    """Returns the fields of an object such as `qwix.QuantizationRule`.

    What Qwix means by None is written out.
    """
    if not hasattr(rule, "module_path") or not hasattr(rule, "weight_qtype"):
        raise InvalidArgumentError(
            f"quantization: expected a preset, a file, or rules as dicts or objects like qwix.QuantizationRule, got "
            f"{type(rule).__name__}; the presets are {', '.join(PRESETS)}"
        )
    fields = [each.name for each in dataclasses.fields(rule)] if dataclasses.is_dataclass(rule) else vars(rule)
    values = {name: getattr(rule, name) for name in fields}
    values["weight_qtype"] = DENSE if values["weight_qtype"] is None else values["weight_qtype"]
    return values


_QWIX_ONLY: dict[str, tuple[Any, ...]] = {
    "act_static_scale": (None, False),
    "act_calibration_method": (None, "absmax"),
}
"""Fields of Qwix that are honoured at these values alone: activations get scales of their own in each product."""
_QWIX_UNUSED = {"act_batch_axes"}
"""Fields of Qwix that have no meaning without static scales, there as here."""


def _faults_of(values: Mapping[str, Any], *, is_object: bool) -> Iterable[str]:
    known = {field.name for field in dataclasses.fields(QuantizationRule)}
    for name in values.keys() - known - _QWIX_ONLY.keys() - _QWIX_UNUSED:
        if is_object and values[name] is None:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        yield f"unknown key {name}; " + (f"did you mean {near[0]}?" if near else f"keys are {', '.join(sorted(known))}")
    for name, honoured in _QWIX_ONLY.items():
        if values.get(name) not in honoured:
            yield f"{name}: expected {honoured[1]!r} (scales are computed for each product), got {values[name]!r}"
    yield from _type_faults(values)
    yield from _number_faults(values)


def _type_faults(values: Mapping[str, Any]) -> Iterable[str]:
    path = values.get("module_path", ".*")
    try:
        re.compile(path)
    except (re.error, TypeError) as error:
        yield f"module_path: expected a regular expression, got {path!r} ({error})"
    if values.get("weight_qtype") is None:
        yield f"expected weight_qtype ({', '.join(WEIGHT_TYPES)}, or {DENSE} to leave these modules dense), got none"
    for name, allowed in (("weight_qtype", WEIGHT_TYPES), ("act_qtype", ACT_TYPES), ("scale_dtype", SCALE_TYPES)):
        extra = () if name == "scale_dtype" else (DENSE,)
        if values.get(name) is not None and _dtype_name(values[name]) not in (*allowed, *extra):
            yield f"{name}: expected {', '.join((*allowed, *extra))}, got {_dtype_name(values[name])}"
    weight, act = (_dtype_name(values.get(name)) for name in ("weight_qtype", "act_qtype"))
    if act in ACT_TYPES and weight in WEIGHT_TYPES and act[:3] != weight[:3]:
        yield f"act_qtype: expected a product of one kind of numbers, got {weight} times {act}"
    names = values.get("op_names") or ()
    names = (names,) if isinstance(names, str) else names
    for name in names:
        if name not in OP_NAMES:
            yield f"op_names: expected names out of {', '.join(OP_NAMES)}, got {name}"


def _number_faults(values: Mapping[str, Any]) -> Iterable[str]:
    tile = values.get("tile_size")
    is_number = isinstance(tile, (int, float)) and not isinstance(tile, bool)
    if tile is not None and not (is_number and 0 < tile <= (1 if isinstance(tile, float) else float("inf"))):
        yield f"tile_size: expected a number of columns, or one over a number of tiles, got {tile!r}"
    method = values.get("weight_calibration_method") or "absmax"
    name, *numbers = str(method).lower().split(",")
    least, most = CALIBRATIONS.get(name, (0, -1))
    try:
        floats = [float(number) for number in numbers]
    except ValueError:
        floats = [float("nan")] * (most + 1)
    is_range = name != "fixed" or len(floats) == 1 or (len(floats) == 2 and floats[0] <= 0 <= floats[1])
    if not least <= len(floats) <= most or not is_range:
        yield (
            "weight_calibration_method: expected absmax[,FACTOR], minmax[,FACTOR], rms,FACTOR, fixed,MIN,MAX or "
            f"signed_absmax, got {method!r}"
        )
    elif name in ("minmax", "signed_absmax") and (kind := _dtype_name(values.get("weight_qtype"))) in _FLOATS:
        yield f"weight_calibration_method: expected absmax, rms or fixed for {kind}, got {name}"
    elif len(floats) == 2 and floats[0] != -floats[1] and (kind := _dtype_name(values.get("weight_qtype"))) in _FLOATS:
        yield f"weight_calibration_method: expected a range around zero for {kind}, got {method}"


def _dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype; of what is none, its text."""
    if dtype is None or isinstance(dtype, str):
        name = DENSE if dtype is None else dtype
        return {"fp8": "float8_e4m3fn", "float8": "float8_e4m3fn"}.get(name, name)
    try:
        return str(jnp.dtype(dtype))
    except TypeError:
        return str(dtype)
