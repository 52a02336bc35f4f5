"""Reads the parity results in the package: all of a task, and those of one model type."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


def shipped_tasks() -> dict[str, dict[str, Any]]:
    """Returns the title, versions, counts of types and results of each task.

    Versions are those of libraries; there is a result for each type.
    """
    from torchax_serve.parity.tasks import TASKS, all_shipped, summary

    found = {}
    for name, task in TASKS.items():
        for versions, results in all_shipped(name)[:1]:
            by_type = {model_type: dataclasses.asdict(result) for model_type, result in results.items()}
            counts = summary(results)
            if name != next(iter(TASKS)):
                del counts["executors"]  # these counts are of causal models
            found[name] = {"title": task.title, "versions": versions, **counts, "results": by_type}
    return found


@functools.cache
def types_by_task() -> dict[str, tuple[str, ...]]:
    """Returns for each task the model types of the installed transformers that it checks."""
    from torchax_serve.parity.tasks import TASKS

    return {name: tuple(task.types()) for name, task in TASKS.items() if task.is_of_types}


def of_type(model_type: str) -> dict[str, dict[str, Any]]:
    """Returns the results of `model_type` by task.

    Each has the cause where the type did not pass, or says that the type is new.
    """
    from torchax_serve.parity.known_failures import CAUSES
    from torchax_serve.parity.result import PASSED

    shipped, found = shipped_tasks(), {}
    for task, types in types_by_task().items():
        result = shipped.get(task, {}).get("results", {}).get(model_type)
        if result is not None:
            cause = None if result["status"] == PASSED else CAUSES.get(model_type, "Not looked into.")
            found[task] = {**result, "cause": cause}
        elif model_type in types:
            found[task] = {"status": "not checked", "cause": "Newer than the table that comes with this package."}
    return found


def quirk_of_type(model_type: str) -> dict[str, str]:
    """Returns file, reason and fields of the quirk of `model_type`; empty if it has none."""
    from model_adapters import quirks

    if (file := quirks.file_of_type(model_type)) is None or not (fields := quirks.of_type(model_type).summary()):
        return {}
    reason = (file.__doc__ or "").partition("\n")[0]
    return {"file": f"{file.__name__.replace('.', '/')}.py", "reason": reason, **fields}


def print_type(model_type: str) -> None:
    """Prints a block for each task that checks `model_type`."""
    from torchax_serve.parity.tasks import TASKS

    for task, result in of_type(model_type).items():
        class_name = result.get("class_name")
        print(f"{TASKS[task].title} ({task}){f': {class_name}' if class_name else ''}")
        for name, value in result.items():
            if name in ("model_type", "class_name") or value is None or value == [] or value == "":
                continue
            print(f"  {name:20} {', '.join(value) if isinstance(value, list) else value}")
    if quirk := quirk_of_type(model_type):
        print("Done differently for this architecture")
        for name, text in quirk.items():
            print(f"  {name:20} {text}")
