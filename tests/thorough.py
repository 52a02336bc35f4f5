"""Parameters of tests, most of which are left to `pytest --thorough`."""

import argparse
import zlib
from collections.abc import Iterable
from typing import Any

import pytest


def part(text: str) -> tuple[int, int]:
    """Returns the numbers of ``N/M``: which of how many parts.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected N/M with N from 1 to M, such as 2/6, got {text!r}")
    return int(number), int(count)


def is_in_part(name: str, number: int, count: int) -> bool:
    """Returns whether the test `name` is in part `number`, in every run and whatever else is collected."""
    return zlib.crc32(name.encode()) % count == number - 1


def thorough(*values: Any, name: str | None = None) -> Any:
    """Returns parameters of one test that runs with `--thorough` alone."""
    return pytest.param(*values, marks=pytest.mark.thorough, id=name)


def except_for(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Returns the parameters `values`, of which all but those in `kept` run with `--thorough` alone.

    Raises:
        ValueError: something in `kept` is not among `values`.
    """
    kept, values = list(kept), list(values)
    unknown = [each for each in kept if each not in values]
    if unknown:
        raise ValueError(f"expected some of {values}, got {unknown}")
    return [each if each in kept else thorough(each) for each in values]


def pairs(firsts: Iterable[Any], seconds: Iterable[Any], one_in: int) -> list[Any]:
    """Returns all pairs as parameters: each `one_in`-th of them runs always, the rest with `--thorough` alone.

    The kept ones go through `seconds` for each of `firsts` from another start, so that each value is in some.
    """
    seconds = list(seconds)
    return [
        (first, second) if (i + j) % one_in == 0 else thorough(first, second)
        for i, first in enumerate(firsts)
        for j, second in enumerate(seconds)
    ]
