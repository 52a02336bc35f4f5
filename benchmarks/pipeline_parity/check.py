"""Checks one pipeline class: its output on JAX and in eager PyTorch, with components that diffusers' tests make."""

import contextlib
import copy
import dataclasses
import importlib
import inspect
import itertools
import os
import re
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from parity_sweep.pipelines_table import SENSITIVE
from parity_sweep.sweep import QUICK_COMPILATION
from torchax_serve.parity.result import PASSED, Result, error_line

TOLERANCE = 1e-3
"""Largest difference of images, whose values are from 0 to 1; relative to the largest value of other outputs."""
_CLASS = re.compile(r"^class (\w+)\b", re.M)
_PIPELINE = re.compile(r"^    pipeline_class = (\w+)", re.M)


def pipelines_in(tests):
    """Path and name of the first test class of each pipeline class in diffusers' folder ``tests``."""
    found = {}
    for path in sorted((tests / "pipelines").rglob("test_*.py")):
        text = path.read_text()
        starts = [match.start() for match in _CLASS.finditer(text)] + [len(text)]
        for start, end in itertools.pairwise(starts):
            body = text[start:end]
            if (pipeline := _PIPELINE.search(body)) and "def get_dummy_components" in body:
                found.setdefault(pipeline[1], (path.relative_to(tests.parent), _CLASS.match(body)[1]))
    return found


def work(connection, tests):
    """The loop of a worker process of a sweep."""
    warnings.filterwarnings("ignore")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILATION}"
    os.environ["HF_HUB_OFFLINE"] = "1"  # what has no replacement is said at once
    sys.path.insert(0, str(tests.parent))
    import diffusers
    import torch
    import transformers

    torch.set_num_threads(1)
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    from pipeline_parity import dummy_hub

    dummy_hub.install()
    known = pipelines_in(tests)
    connection.send("ready")
    while True:
        name = connection.recv()
        began = time.perf_counter()
        try:
            result = check(name, *known[name])
        except Exception as error:  # of the harness; the other pipelines go on
            result = Result(name, "", status="crashed", error=error_line(error))
        connection.send(dataclasses.asdict(dataclasses.replace(result, total_s=time.perf_counter() - began)))


class ImpossibleError(Exception):
    """Eager PyTorch gives nothing to compare with."""


@dataclasses.dataclass
class Case:
    """Two pipelines of the same weights, and what one of them gives in eager PyTorch.

    Attributes:
        makes: The test class that makes components and inputs.
        eager: Pipeline for PyTorch.
        pipeline: Pipeline for JAX.
        wanted: Output of `eager`.
        classes: Names of the classes of its models.
    """

    makes: object
    eager: object
    pipeline: object
    wanted: list[np.ndarray]
    classes: str


def case_of(path, class_name):
    """The case of the test class `class_name` in `path`.

    Raises:
        ImpossibleError: Eager PyTorch fails, or its output shows nothing.
    """
    import diffusers
    import torch

    from pipeline_parity.dummy_hub import NotReplacedError

    try:
        test = getattr(importlib.import_module(".".join(Path(path).with_suffix("").parts)), class_name)
        makes = test.__new__(test)
        components = makes.get_dummy_components()
        for part in components.values():
            if isinstance(part, torch.nn.Module):
                part.eval()  # some tests leave dropout on
        eager = test.pipeline_class(**copied(components, makes))
        pipeline = test.pipeline_class(**components)
        share_weights(eager, pipeline)
        for each in (eager, pipeline):
            each.set_progress_bar_config(disable=True)
        with torch.no_grad():
            prepare(makes, eager)
            wanted = arrays_of(eager(**inputs_of(makes, eager)))
    except NotReplacedError as error:
        raise ImpossibleError(f"its test loads {error} from the hub") from error
    except Exception as error:  # whatever stands in the way of eager PyTorch
        raise ImpossibleError(f"in eager PyTorch: {error_line(error)}") from error
    if not any(np.ptp(each) for each in wanted if each.size):
        raise ImpossibleError("its output in eager PyTorch is constant, which shows nothing")
    if not all(np.isfinite(each).all() for each in wanted):
        raise ImpossibleError("its output in eager PyTorch is not finite")
    classes = [type(part).__name__ for part in components.values() if isinstance(part, diffusers.ModelMixin)]
    return Case(makes, eager, pipeline, wanted, " + ".join(classes))


def check(name, path, class_name):
    """The result for a pipeline whose test class is `class_name` in `path`."""
    from torchax_serve import to_jax

    try:
        case = case_of(path, class_name)
    except ImpossibleError as error:
        return Result(name, "", status="impossible", error=str(error))
    makes, pipeline, wanted = case.makes, case.pipeline, case.wanted
    found = Result(name, case.classes)
    began = time.perf_counter()
    try:
        to_jax(pipeline)
        prepare(makes, pipeline)
        got = arrays_of(pipeline(**inputs_of(makes, pipeline)))
        compile_s = time.perf_counter() - began
        traces = num_traces(pipeline)
        again = arrays_of(pipeline(**inputs_of(makes, pipeline)))
    except Exception as error:
        return dataclasses.replace(found, error=error_line(error))
    difference = largest_difference(wanted, got)
    problems = []
    if difference > TOLERANCE:
        moved, by = rounding_of(makes, case.eager, wanted)
        if moved > difference / 2:
            return dataclasses.replace(
                found,
                status=SENSITIVE,
                forward_difference=difference,
                compile_s=compile_s,
                error=f"differs by {difference:.1e}, eager PyTorch {by} by {moved:.1e}",
            )
    if difference > TOLERANCE:
        problems.append(f"differs by {difference:.1e}")
    if largest_difference(got, again) > TOLERANCE:
        problems.append("another output at the second call")
    if num_traces(pipeline) != traces:
        problems.append("further traces at the second call")
    if not any(number for _, number in traces):
        problems.append("nothing ran on JAX")
    status = "failed" if problems else PASSED
    return dataclasses.replace(
        found, status=status, forward_difference=difference, compile_s=compile_s, error="; ".join(problems) or None
    )


def copied(components, makes):
    """The same components with weights of their own."""
    import torch

    try:
        return copy.deepcopy(components)
    except RuntimeError:  # torch copies no module with weight_norm
        made = makes.get_dummy_components()
        for name, part in components.items():
            if isinstance(part, torch.nn.Module):
                made[name].load_state_dict(part.state_dict())
                made[name].eval()
        return made


def share_weights(eager, pipeline):
    """Gives `pipeline` the weights of `eager`.

    Some classes draw weights when a pipeline is made: `UNetMotionModel.from_unet2d` those of its ``add_embedding``.
    """
    import torch

    for name, part in eager.components.items():
        if isinstance(part, torch.nn.Module):
            pipeline.components[name].load_state_dict(part.state_dict())


def rounding_of(makes, eager, wanted):
    """How far rounding moves the output `wanted` of `eager`, at most, and how that was seen; `eager` ends with it."""
    import torch

    found = []
    with contextlib.suppress(Exception):  # some code mixes float64 with its own float32
        found.append((largest_difference(wanted, of_float64(makes, eager)), "in float64"))
    eager.to(torch.float32)
    found.append((largest_difference(wanted, of_rounded_layers(makes, eager)), "with other rounding of layers"))
    return max(each for each in found if np.isfinite(each[0]))


def of_float64(makes, eager):
    """Output of `eager` computed in float64, from the random numbers that float32 draws."""
    import torch

    own = torch.randn

    def randn(*size, dtype=None, **options):
        is_double = dtype == torch.float64
        drawn = own(*size, dtype=torch.float32 if is_double else dtype, **options)
        return drawn.double() if is_double else drawn

    torch.randn = randn
    try:
        eager.to(torch.float64)
        with torch.no_grad():
            prepare(makes, eager)
            return arrays_of(eager(**inputs_of(makes, eager)))
    finally:
        torch.randn = own


def of_rounded_layers(makes, eager):
    """Output of `eager` with each result of a layer changed by about one unit in the last place of float32.

    `eager` is not to be used again.
    """
    import torch

    generator = torch.Generator().manual_seed(0)

    def rounded(layer, inputs, output):
        if isinstance(output, torch.Tensor) and output.dtype == torch.float32:
            return output * (1 + 2.0**-23 * torch.randn(output.shape, generator=generator))
        return output

    for part in eager.components.values():
        for layer in part.modules() if isinstance(part, torch.nn.Module) else ():
            if not any(layer.children()):
                layer.register_forward_hook(rounded)
    with torch.no_grad():
        prepare(makes, eager)
        return arrays_of(eager(**inputs_of(makes, eager)))


def prepare(makes, pipeline):
    """Makes the call that has to come first, where a pipeline has one."""
    if hasattr(makes, "get_dummy_inversion_inputs"):
        pipeline.invert(**makes.get_dummy_inversion_inputs("cpu"))


def inputs_of(makes, pipeline):
    """Arguments of a call, with an output of numbers rather than pictures."""
    given = (
        makes.get_dummy_inputs("cpu")
        if "device" in inspect.signature(makes.get_dummy_inputs).parameters
        else (makes.get_dummy_inputs())
    )
    if given.get("output_type", "pil") == "pil" and "output_type" in inspect.signature(pipeline.__call__).parameters:
        given["output_type"] = "np"
    return given


def num_traces(pipeline):
    """Traces of each module of diffusers in `pipeline`, by cache: one whose structure has changed has a new cache."""
    runtimes = [vars(part).get("_jax_runtime") for part in pipeline.components.values() if hasattr(part, "modules")]
    return [(each.programs, each.programs.num_traces.total()) for each in runtimes if hasattr(each, "programs")]


def arrays_of(output):
    """All numbers of an output: arrays, tensors, pictures, in lists or fields."""
    import torch

    if isinstance(output, torch.Tensor):
        return [output.float().numpy()]
    if isinstance(output, np.ndarray):
        return [output.astype(np.float32)] if output.dtype != object else arrays_of(list(output))
    if hasattr(output, "getbands"):
        return [np.asarray(output, np.float32) / 255]
    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    if isinstance(values, list | tuple):
        return [array for value in values for array in arrays_of(value)]
    return []


def largest_difference(wanted, got):
    """Largest difference of two lists of arrays, relative to the largest value where that is more than 1."""
    if [each.shape for each in wanted] != [each.shape for each in got] or not wanted:
        return float("inf")
    pairs = zip(wanted, got, strict=True)
    values = [float(np.abs(a - b).max() / max(1.0, np.abs(a).max())) for a, b in pairs if a.size]
    return float("inf") if any(np.isnan(values)) else max(values)
