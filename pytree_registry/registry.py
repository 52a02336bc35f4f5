"""Registration of transformers' and diffusers' output and cache classes as JAX pytree nodes.

Each is registered when it comes into being. Importing every modeling file of transformers takes many seconds, so
nothing is imported for its classes. The base classes are watched instead: ``__init_subclass__``, by which transformers
itself registers its outputs with torch's own pytrees, registers each later subclass here too. Some models bring cache
classes without any base, as transformers of diffusers do, and its autoencoders distributions of latents; those are
found by name in the modeling files that are loaded when :func:`register_all` is called, so call it again once a model
is built.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.tree_util import GetAttrKey

from pytree_registry.errors import RegistrationError
from pytree_registry.flatten_attributes import join_attributes, split_attributes
from pytree_registry.shared_classes import Handover, hands_over, refusal
from pytree_registry.traced_counts import CountRule, TracedCount

OWNER = "pytree_registry"

# The two kinds of cache layer whose Python counter would change the static part at every decode step. Other counters
# only move together with a tensor's shape: ``cumulative_length`` of the quantized layers, ``entry_count`` of DeepSeek
# V4, ``_seen_tokens`` of Reformer, ``_previous_number_of_accepted_tokens`` of DFlash. They stay static at no cost.
_COUNT_RULES = {
    "DynamicSlidingWindowLayer": CountRule("cumulative_length", "sliding_window", exact_below_window=True),
    "StaticSlidingWindowLayer": CountRule("cumulative_length_int", "max_cache_len", exact_below_window=False),
}
# Buffers that are views of one another come out of a pytree as separate arrays, so that an update of one would no
# longer reach the other: wrong numbers, if it were let through.
_VIEWS_OF_ONE_BUFFER = {"UnlimitedOcrStaticReferenceSlidingWindowLayer": "all_keys"}
_BASELESS = (
    (re.compile(r"transformers(_modules)?\..*\b(modeling|generation)_\w+"), re.compile(r"\w+Cache(Layer)?")),
    (re.compile(r"diffusers\.models\.autoencoders\.\w+"), re.compile(r"\w+Distribution")),
    (re.compile(r"diffusers\.models\.transformers\.\w+"), re.compile(r"\w+KV(Layer)?Cache")),
)
"""Names of modules and of the classes without a base that are taken from them."""

_registered: dict[type, Handover] = {}  # in the order of registration
_registered_by_others: set[type] = set()
_watched: set[type] = set()
_searched_modules: set[str] = set()
_lock = threading.RLock()


def register_all() -> None:
    """Registers transformers' and diffusers' outputs, caches and cache layers as pytree nodes.

    It registers those that exist now, and further ones as they are defined. Idempotent, and cheap when repeated. A
    class that must be left to another package says so in its body by ``pytree_owner = "name of that package"``.

    An output or a cache that a script registers itself, before or afterwards, stays the script's.

    Raises:
        RegistrationError: a cache layer has been registered with JAX by somebody else; names it.
    """
    with _lock:
        for root in _roots():
            for cls in (root, *_subclasses(root)):
                _register_unless_owned(cls)
            _watch(root)
        for cls in _baseless_classes():
            _register_unless_owned(cls)


def register(cls: type) -> None:
    """Registers one class of the same manner.

    Its attributes are in ``vars``, or it is an ordered dict with attributes.

    Raises:
        RegistrationError: `cls` declares another owner, or is a cache layer that a script has registered; names it.
    """
    with _lock:
        hands_over(_registered, may_be_shared)
        if cls in _registered or cls in _registered_by_others:
            return
        owner = getattr(cls, "pytree_owner", OWNER)
        if owner != OWNER:
            raise RegistrationError(
                f"expected a class without an owner, got {_name(cls)}, which declares pytree_owner = {owner!r}; "
                f"let {owner} register it"
            )
        handover = Handover(*_functions_for(cls))
        try:
            jax.tree_util.register_pytree_with_keys(
                cls, handover.flatten_with_keys, handover.unflatten, handover.flatten
            )
        except ValueError:  # a script has registered it by hand
            if not may_be_shared(cls):
                raise refusal(cls) from None
            _registered_by_others.add(cls)
            return
        _registered[cls] = handover


def is_registered(cls: type) -> bool:
    """Returns whether this package has registered `cls`, and takes it apart."""
    return cls in _registered and not _registered[cls].is_handed_over


def may_be_shared(cls: type) -> bool:
    """Returns whether a script may register `cls` itself.

    These are outputs and caches, whose layers are flattened here.
    """
    from transformers.cache_utils import Cache
    from transformers.utils import ModelOutput

    return issubclass(cls, (ModelOutput, Cache, *_diffusers_outputs()))


def registered_classes() -> tuple[type, ...]:
    """Returns all classes that this package has registered so far, oldest first."""
    return tuple(cls for cls in _registered if is_registered(cls))


def owner_of(cls: type) -> str | None:
    """Returns the owner of `cls` as a pytree node; None if it is no pytree node.

    The owner is ``"pytree_registry"``, the ``pytree_owner`` of the class, or ``"unknown"``: registered by code that
    does not say its name, as JAX's own containers.
    """
    if is_registered(cls):
        return OWNER
    declared = getattr(cls, "pytree_owner", None)
    if declared is not None:
        return str(declared)
    make: Any = cls.__new__
    try:
        instance = make(cls)
    except TypeError:  # abstract, or wants arguments: nothing to show to JAX
        return None
    return None if jax.tree_util.all_leaves((instance,)) else "unknown"


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _roots() -> Iterator[type]:
    """Yields the base classes of outputs, and the classes of caches without a base there.

    The caches are those of transformers' cache module.
    """
    from transformers import cache_utils
    from transformers.utils import ModelOutput

    yield ModelOutput
    yield from _diffusers_outputs()
    own = {cls for cls in vars(cache_utils).values() if inspect.isclass(cls) and cls.__module__ == cache_utils.__name__}
    yield from sorted((cls for cls in own if not own.intersection(cls.__mro__[1:])), key=_name)


def _diffusers_outputs() -> tuple[type, ...]:
    """Returns the base class of diffusers' outputs.

    Nothing where diffusers has not been imported.
    """
    module = sys.modules.get("diffusers.utils.outputs")
    base: type | None = getattr(module, "BaseOutput", None)
    return () if base is None else (base,)


def _subclasses(cls: type) -> Iterator[type]:
    subclass: type
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _baseless_classes() -> Iterable[type]:
    """Returns classes of `_BASELESS` in the modeling files loaded since the last call."""
    found = []
    for name, module in list(sys.modules.items()):
        patterns = [classes for files, classes in _BASELESS if files.fullmatch(name)]
        if name in _searched_modules or not patterns:
            continue
        _searched_modules.add(name)
        found += [
            cls
            for key, cls in vars(module).items()
            if inspect.isclass(cls) and cls.__module__ == name and patterns[0].fullmatch(key)
        ]
    return found


def _register_unless_owned(cls: type) -> None:
    if getattr(cls, "pytree_owner", OWNER) == OWNER:
        register(cls)


def _watch(root: type) -> None:
    """Has each later subclass of `root` registered when its class statement ends."""
    if root in _watched:
        return
    own = vars(root).get("__init_subclass__")

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        if own is not None:
            own.__get__(None, cls)(**kwargs)
        else:
            super(root, cls).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        _register_unless_owned(cls)

    root.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]
    _watched.add(root)


def _functions_for(cls: type) -> tuple[Any, Any, Any]:
    """Returns the functions ``(flatten with keys, flatten, unflatten)`` of `cls`.

    The static part is ``(attributes, keys)``: the skeletons of the attributes, and the keys of an ordered dict, whose
    entries repeat attributes; entries that differ from their attribute are appended to the skeletons.
    """
    is_dict = issubclass(cls, OrderedDict)
    make: Any = cls.__new__
    rule = next((_COUNT_RULES[base.__name__] for base in cls.__mro__ if base.__name__ in _COUNT_RULES), None)

    buffer = next(
        (_VIEWS_OF_ONE_BUFFER[base.__name__] for base in cls.__mro__ if base.__name__ in _VIEWS_OF_ONE_BUFFER), None
    )

    def split(obj: Any) -> tuple[Any, Any]:
        attributes = dict(vars(obj))
        if buffer is not None and attributes.get(buffer) is not None:
            raise RegistrationError(
                f"expected a layer of independent tensors, got {cls.__qualname__}, whose tensors are views of its "
                f"{buffer}; use the dynamic cache of this model"
            )
        if rule is not None and isinstance(attributes.get(rule.attribute), int | TracedCount):
            count, window = attributes[rule.attribute], attributes[rule.window]
            attributes[rule.attribute] = rule.canonicalize(count, window)
        keys: tuple[str, ...] = ()
        if is_dict:
            keys = tuple(OrderedDict.keys(obj))
            stale = {key: value for key, value in OrderedDict.items(obj) if attributes.get(key) is not value}
            if stale:  # an output whose attribute was set to None keeps the entry
                attributes[_STALE] = stale
        splitter, static = split_attributes(obj, attributes)
        return splitter, (static, keys)

    def flatten(obj: Any) -> tuple[list[Any], Any]:
        splitter, static = split(obj)
        return splitter.children, static

    def flatten_with_keys(obj: Any) -> tuple[list[tuple[Any, Any]], Any]:
        splitter, static = split(obj)
        pairs = zip(splitter.paths, splitter.children, strict=True)
        return [(GetAttrKey(path), child) for path, child in pairs], static

    def unflatten(static: Any, children: Any) -> Any:
        skeletons, keys = static
        attributes = join_attributes(skeletons, tuple(children), rule.attribute if rule is not None else None)
        obj = make(cls)
        stale = attributes.pop(_STALE, {})
        vars(obj).update(attributes)
        for key in keys:
            value = stale.get(key, attributes.get(key))
            if value is not None:  # as in transformers, what is None is no entry
                OrderedDict.__setitem__(obj, key, value)
        return obj

    return flatten_with_keys, flatten, unflatten


_STALE = "_pytree_stale_items"
