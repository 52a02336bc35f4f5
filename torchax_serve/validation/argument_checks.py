"""Checks of single arguments: the range of a number, lists of token ids, texts.

Each failure is one short line. This module imports neither jax nor torch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from model_adapters.errors import InvalidArgumentError

KV_CACHE_DTYPES = ("int8", "fp8")
"""Values of the option `kv_cache_dtype`: pages in 8 bits."""
MAX_INT = 2**31 - 1
"""Largest integer on the device (int32)."""
MAX_LISTED_IDS = 2**20
"""Most token ids in a list; no vocabulary is larger."""
MAX_SEQUENCE_IDS = 2**16
"""Most token ids in all sequences of `bad_words_ids` or `sequence_bias` together; every step compares with each."""
MAX_TEXT_LEN = 1024
"""Longest stop string and cache salt, in characters."""
MAX_PROMPT_CHARS = 2**26
"""Longest prompt and rendered chat, in characters; far more than models have positions for."""
_MAX_REPR_LEN = 200  # characters of a value in an error message
_LARGEST = 2.0**128 - 2.0**104  # float32
_SMALLEST_NORMAL = 2.0**-126  # float32; the device takes what is smaller for zero


@dataclasses.dataclass(frozen=True)
class ValueRange:
    """Range of an option: an interval of integers or of numbers."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    is_integer: bool = False

    def __contains__(self, value: object) -> bool:
        """Returns whether `value` is a finite number, no bool, inside the interval.

        The interval is checked after conversion to float32.
        """
        kind = numbers.Integral if self.is_integer else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        number: Any = value if self.is_integer else _in_float32(value)
        if not self.is_integer and not math.isfinite(number):
            return False
        above = number > self.low if self.low_open else number >= self.low
        below = number < self.high if self.high_open else number <= self.high
        return bool(above and below)

    def __str__(self) -> str:
        """Returns the range in words, for errors; the limit of int32 is left out."""
        kind = "a whole number" if self.is_integer else "a number"
        above = f"{'>' if self.low_open else '>='} {self.low:g}"
        goes_without_saying = math.isinf(self.high) or self.high == MAX_INT
        below = "" if goes_without_saying else f" and {'<' if self.high_open else '<='} {self.high:g}"
        return f"{kind} {above}{below}"

    def against(self, value: object) -> str:
        """Returns the range in words, for an error about `value`."""
        if self.high == MAX_INT and isinstance(value, numbers.Integral) and int(value) > MAX_INT:
            return f"{self} and <= {MAX_INT}"
        given: Any = value
        if not self.is_integer and isinstance(value, numbers.Real) and given > self.low:
            number = _in_float32(given)
            if number == math.inf and self.high == math.inf:
                return f"{self} and <= {_LARGEST:.1e}"
            if number <= self.low == 0:
                return f"{self}, at least {_SMALLEST_NORMAL:.1e}"
        return str(self)


def _in_float32(value: Any) -> float:
    """Converts `value` to the device's float32: 1e-40 becomes zero there, and 10**400 infinite."""
    try:
        number = ctypes.c_float(float(value)).value
    except OverflowError:
        return math.inf
    return 0.0 if abs(number) < _SMALLEST_NORMAL else number


def invalid(name: str, expected: object, got: object, remedy: str | None = None) -> InvalidArgumentError:
    """Returns the one-line error of an argument: expected, got, remedy."""
    return _error(name, expected, short_repr(got), remedy or "None leaves it unset")


def _error(name: str, expected: object, got: str, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name}: expected {expected}, got {got}; {remedy}")


class _Repr(reprlib.Repr):
    """`repr` that shows and reads the first items of long containers only."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 8
        self.maxstring = self.maxother = self.maxlong = 80


_REPR = _Repr()


def short_repr(value: object) -> str:
    """Returns the `repr` of `value` in one line of at most about 200 characters.

    It works even if ``__repr__`` of `value` fails.
    """
    try:
        text = _REPR.repr(value)
    except Exception:  # such as an int of more digits than Python prints
        text = f"<{type(value).__name__}>"
    text = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return text if len(text) <= _MAX_REPR_LEN else f"{text[:_MAX_REPR_LEN]}..."


def python_number(value: Any) -> Any:
    """Returns a number of another library, such as numpy, as int or float.

    Anything else is returned unchanged.
    """
    if isinstance(value, numbers.Integral) and type(value) not in (int, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral) and type(value) is not float:
        return _in_float32(value) if not math.isfinite(_in_float32(value)) else float(value)
    return value


def is_list(value: object) -> bool:
    """Returns whether `value` is a sequence other than text and bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def check_token_ids(name: str, value: object, *, may_be_empty: bool = False, most: int = MAX_LISTED_IDS) -> None:
    """Raises `InvalidArgumentError` unless `value` is a sequence of token ids.

    Token ids are integers >= 0; there may be at most `most` of them.
    """
    if is_list(value) and len(value) > most:  # type: ignore[arg-type]
        raise _error(name, f"at most {most} token ids", f"{len(value)} of them", "shorten it")  # type: ignore[arg-type]
    if not is_list(value) or not (may_be_empty or value) or any(item not in TOKEN_ID for item in value):  # type: ignore[attr-defined]
        raise invalid(name, f"a {'' if may_be_empty else 'non-empty '}list of token ids >= 0", value)


def check_bad_words(value: object) -> None:
    """Raises `InvalidArgumentError` unless `value` is a list of lists of token ids.

    None of the lists may be empty.
    """
    if not is_list(value) or not value:
        raise invalid("bad_words_ids", "a non-empty list of lists of token ids", value)
    _check_num_ids("bad_words_ids", value)
    for word in value:  # type: ignore[attr-defined]
        check_token_ids("bad_words_ids", word)


def _check_num_ids(name: str, sequences: Any) -> None:
    num_ids = sum(len(ids) for ids in sequences if is_list(ids))
    if num_ids > MAX_SEQUENCE_IDS:
        raise _error(name, f"at most {MAX_SEQUENCE_IDS} token ids in all", f"{num_ids} of them", "shorten it")


def bias_pairs(value: object) -> list[tuple[tuple[int, ...], float]]:
    """Returns the pairs (token ids, bias) of a `sequence_bias`.

    It may have either of transformers' two forms.

    Raises:
        InvalidArgumentError: it is neither a non-empty ``{(ids): bias}`` nor a non-empty ``[[ids, bias]]``.
    """
    expected = "a non-empty {(token ids): bias} or [[[token ids], bias]] with finite or infinite biases"
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif is_list(value) and all(is_list(item) and len(item) == 2 for item in value):  # type: ignore[attr-defined]
        pairs = [(item[0], item[1]) for item in value]  # type: ignore[attr-defined]
    else:
        raise invalid("sequence_bias", expected, value)
    _check_num_ids("sequence_bias", [ids for ids, _ in pairs])
    for ids, bias in pairs:
        check_token_ids("sequence_bias", ids)
        if isinstance(bias, bool) or not isinstance(bias, numbers.Real) or math.isnan(_in_float32(bias)):
            raise invalid("sequence_bias", expected, value)
    if not pairs:
        raise invalid("sequence_bias", expected, value)
    return list({tuple(int(i) for i in ids): _as_float(bias) for ids, bias in pairs}.items())


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def check_logit_bias(value: object) -> None:
    """Raises `InvalidArgumentError` unless `value` maps token ids to biases.

    Biases are from -100 to 100, as in OpenAI's API.
    """
    expected = "{token id: bias from -100 to 100}"
    if not isinstance(value, Mapping):
        raise invalid("logit_bias", expected, value)
    if len(value) > MAX_LISTED_IDS:
        raise _error("logit_bias", f"at most {MAX_LISTED_IDS} biases", f"{len(value)} of them", "shorten it")
    for token_id, bias in value.items():
        if token_id not in TOKEN_ID or bias not in _LOGIT_BIAS:
            raise invalid("logit_bias", expected, {token_id: bias}, "use whole token ids and clip the biases")


def check_text(name: str, value: str, most: int = MAX_TEXT_LEN) -> None:
    """Raises `InvalidArgumentError` for a text that is too long or cannot be encoded.

    A text may have at most `most` characters.
    """
    if len(value) > most:
        raise _error(name, f"at most {most} characters", f"{len(value)} of them", "shorten it")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _error(
            name,
            "text that UTF-8 can encode",
            f"half of a surrogate pair, {value[error.start]!a}, at character {error.start}",
            "decode it as UTF-16 first, or replace it",
        ) from None


TOKEN_ID = ValueRange(0, MAX_INT, is_integer=True)
_LOGIT_BIAS = ValueRange(-100, 100)
