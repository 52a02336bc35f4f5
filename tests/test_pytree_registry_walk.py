"""Every output, cache and cache layer class of the installed transformers, found by importing its modeling files."""

import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
import warnings
from collections import OrderedDict, UserDict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers import cache_utils
from transformers.utils import ModelOutput

import pytree_registry

LAYER_BASES = (cache_utils.CacheLayerMixin, cache_utils.LinearAttentionCacheLayerMixin)
WITHOUT_BASE = re.compile(r"class (\w+Cache(?:Layer)?)(?:\(\w+Cache(?:Layer)?\))?:")


def tensor(*shape):
    size = int(np.prod(shape, dtype=int))
    return torch.from_numpy(np.arange(1, size + 1, dtype=np.float32).reshape(shape) / 8)


def qualified(cls):
    return f"{cls.__module__}.{cls.__qualname__}"


@pytest.fixture(scope="module")
def modules():
    """All modeling and generation modules that can be imported here, imported after ``register_all``."""
    pytree_registry.register_all()
    loaded = []
    root = Path(transformers.__file__).parent / "models"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that transformers' models import
        for file in sorted(root.glob("*/modeling_*.py")) + sorted(root.glob("*/generation_*.py")):
            name = f"transformers.models.{file.parent.name}.{file.stem}"
            try:
                loaded.append(importlib.import_module(name))
            except ModuleNotFoundError as error:
                assert not error.name.startswith("transformers"), name
                assert importlib.util.find_spec(error.name) is None, name
    return loaded


@pytest.fixture(scope="module")
def classes(modules):
    names = [name for name in sys.modules if name.startswith("transformers.")]
    everything = [cls for name in names for cls in list(vars(sys.modules[name]).values()) if inspect.isclass(cls)]
    return {qualified(cls): cls for cls in everything if cls.__module__.startswith("transformers.")}


@pytest.fixture(scope="module")
def outputs(classes):
    return {name: cls for name, cls in classes.items() if issubclass(cls, ModelOutput)}


def filled_output(cls):
    if not dataclasses.is_dataclass(cls):
        return cls(first=tensor(2), second=(tensor(3), None))
    values = {}
    for i, field in enumerate(dataclasses.fields(cls)):
        kinds = [tensor(i + 1), (tensor(2, 2), (tensor(1),)), filled_cache(), {"a": [tensor(2)], 3: None}, None, True]
        values[field.name] = kinds[i % len(kinds)]
    return cls(**values)


def filled_cache():
    cache = cache_utils.DynamicCache()
    cache.update(tensor(1, 1, 2, 4), tensor(1, 1, 2, 4), 0)
    return cache


def fill_layer(layer):
    """Stores something through each of the ways by which a layer stores something."""
    if getattr(layer, "is_initialized", False) is True:  # the layer that holds nothing
        return layer
    if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
        layer.update_conv_state(tensor(1, 3, 4))
        layer.update_recurrent_state(tensor(1, 2, 2))
    if isinstance(layer, cache_utils.CacheLayerMixin):
        layer.update(tensor(1, 1, 2, 4), tensor(1, 1, 2, 4))
    if hasattr(layer, "update_indexer"):
        layer.update_indexer(tensor(1, 2, 4))
    if hasattr(layer, "update_index"):
        layer.update_index(tensor(1, 1, 2, 4))
    if hasattr(layer, "update_compressor_states"):
        for name in layer.compressed_kv:
            layer.store_compression_weights(name, tensor(1, 2, 4), tensor(1, 2, 4))
            layer.update_compressor_states(name, tensor(1, 1, 4))
    return layer


def make_layer(cls):
    """A filled layer of any class, its constructor given what it asks for by name."""
    from transformers import DeepseekV4Config

    offered = {
        "sliding_window": 4,
        "max_cache_len": 12,
        "number_of_states": 2,
        "config": DeepseekV4Config(num_hidden_layers=2, sliding_window=4),
    }
    wanted = inspect.signature(cls.__init__).parameters
    try:
        return fill_layer(cls(**{name: value for name, value in offered.items() if name in wanted}))
    except ImportError:  # a quantization library; its stored form is a packed tensor with a description
        layer = cls.__new__(cls)
        cache_utils.QuantizedLayer.__init__(layer)
        cache_utils.DynamicLayer.update(layer, tensor(1, 1, 2, 4), tensor(1, 1, 2, 4))
        description = {"nbits": 4, "shape": torch.Size([1, 1, 2, 4]), "scale": tensor(2), "dtype": torch.float32}
        layer._quantized_keys = layer._quantized_values = (tensor(4), description)
        return layer


def make_cache(cls):
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        num_hidden_layers=2, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    )
    if issubclass(cls, cache_utils.EncoderDecoderCache):
        return cls(filled_cache(), filled_cache())
    if issubclass(cls, cache_utils.QuantizedCache):
        cache = cls.__new__(cls)
        cache_utils.Cache.__init__(cache, layers=[make_layer(cache_utils.QuantoQuantizedLayer)])
        return cache
    if cls is cache_utils.Cache:
        return cls(layers=[make_layer(cache_utils.DynamicLayer), make_layer(cache_utils.LinearAttentionLayer)])
    offered = {"config": config, "max_cache_len": 12}
    cache = cls(
        **{name: value for name, value in offered.items() if name in inspect.signature(cls.__init__).parameters}
    )
    for index in range(2):
        cache.update(tensor(1, 1, 2, 4), tensor(1, 1, 2, 4), index)
    if hasattr(cache, "set_linear_cache"):
        cache.set_linear_cache(1, tensor(1, 2, 2))
    return cache


@pytest.fixture(scope="module")
def caches(classes):
    """A filled instance of each concrete cache and cache layer class."""
    own = [cls for cls in classes.values() if cls.__module__ == cache_utils.__name__]
    roots = tuple(cls for cls in own if not set(own).intersection(cls.__mro__[1:]))
    filled = {}
    for name, cls in classes.items():
        if not issubclass(cls, roots) or inspect.isabstract(cls):
            continue
        if issubclass(cls, cache_utils.Cache):
            filled[name] = make_cache(cls)
        elif issubclass(cls, UserDict):  # by which layers share keys and values
            filled[name] = cls({"layer": (tensor(2), tensor(3))})
        else:
            filled[name] = make_layer(cls)
    return filled


@pytest.fixture(scope="module")
def baseless(modules):
    """An instance of each cache class that stands alone in its modeling file, found in the files' text."""
    pytree_registry.register_all()
    filled = {}
    for module in modules:
        for name in WITHOUT_BASE.findall(inspect.getsource(module)):
            cls = getattr(module, name)
            if issubclass(cls, (cache_utils.Cache, *LAYER_BASES)):
                continue
            instance = filled[qualified(cls)] = cls.__new__(cls)
            states = {0: tensor(2), 1: None}
            vars(instance).update(
                cache=tensor(3), states=states, layers=[(tensor(1),), filled_cache()], size=3, name="x"
            )
    return filled


def assert_same(one, other, path=""):
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor | jax.Array):
        assert one.dtype == other.dtype, path
        np.testing.assert_array_equal(as_numpy(one), as_numpy(other), err_msg=path)
    elif isinstance(one, dict) and not isinstance(one, ModelOutput):
        assert list(one) == list(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{path}[{i}]")
    elif pytree_registry.is_registered(type(one)):
        if isinstance(one, OrderedDict):
            assert_same(dict(OrderedDict.items(one)), dict(OrderedDict.items(other)), path + ".items")
        assert_same(dict(vars(one)), dict(vars(other)), path)
    else:
        assert one == other, path


def as_numpy(array):
    if getattr(array, "dtype", None) is torch.float8_e4m3fn:  # numpy has it by ml_dtypes only
        return array.view(torch.uint8).numpy().view(jnp.float8_e4m3fn)
    return np.asarray(array)


def as_jax(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(as_numpy(leaf)) if isinstance(leaf, torch.Tensor) else leaf, tree)


def check_all(instances):
    """Round trip of each instance; identity under one ``jax.jit`` of all; no second trace when only tensors change."""
    for name, instance in instances.items():
        leaves, structure = jax.tree.flatten(instance)
        rebuilt = jax.tree.unflatten(structure, leaves)
        assert_same(instance, rebuilt, name)
        assert jax.tree.structure(rebuilt) == structure, name
        assert hash(jax.tree.structure(rebuilt)) == hash(structure), name
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(instance)[0]]
        assert len(set(paths)) == len(leaves), name
        assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == len(tensors_in(instance)), name

    traces = []
    identity = jax.jit(lambda tree: traces.append(1) or tree)
    arrays = as_jax(instances)
    settled = identity(arrays)
    for name in instances:
        assert type(settled[name]) is type(instances[name])
        assert jax.tree.structure(settled[name]) == jax.tree.structure(arrays[name]), name
    jax.tree.map(np.testing.assert_array_equal, settled, arrays)
    changed = jax.tree.map(lambda leaf: leaf / 2 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, settled)
    jax.tree.map(np.testing.assert_array_equal, identity(changed), changed)
    assert len(traces) == 1


def tensors_in(value):
    """The tensors in anything, by walking attributes: an independent count of what must be leaves."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        items = list(value)
    elif isinstance(value, dict) and not isinstance(value, ModelOutput):
        items = list(value.values())
    elif type(value).__module__.startswith("transformers.") and not hasattr(value, "to_dict"):
        items = list(vars(value).values()) if not inspect.isclass(value) else []
    else:
        items = []
    return [found for item in items for found in tensors_in(item)]


def is_refused(cache):
    """Whether the tensors of `cache` are views of one another, which is said by name."""
    tensors = tensors_in(cache)
    if not any(one._base is other for one in tensors for other in tensors):
        return False
    with pytest.raises(pytree_registry.RegistrationError, match=f"{type(cache).__name__}, whose tensors are views"):
        jax.tree.flatten(cache)
    return True


def test_outputs_are_registered_as_their_files_are_imported(outputs):
    assert len(outputs) > 400
    assert [name for name, cls in outputs.items() if not pytree_registry.is_registered(cls)] == []


def test_every_output_class_goes_through_a_pytree_and_jit(outputs):
    bases = {name for name, cls in outputs.items() if cls is not ModelOutput and not dataclasses.is_dataclass(cls)}
    assert all(outputs[name].__subclasses__() for name in bases)  # transformers itself makes none of them
    check_all({name: filled_output(cls) for name, cls in outputs.items() if name not in bases})


def test_every_cache_and_layer_class_goes_through_a_pytree_and_jit(caches):
    kinds = {type(cache) for cache in caches.values()}
    named = "DynamicCache StaticCache QuantizedCache EncoderDecoderCache MtpCache DFlashCache LinearAttentionLayer"
    assert kinds >= {getattr(cache_utils, name) for name in named.split()}
    assert len(kinds) >= 25
    assert [name for name, cache in caches.items() if not pytree_registry.is_registered(type(cache))] == []
    refused = {name for name, cache in caches.items() if is_refused(cache)}
    assert {name.rsplit(".", 1)[1] for name in refused} <= {"UnlimitedOcrStaticReferenceSlidingWindowLayer"}
    check_all({name: cache for name, cache in caches.items() if name not in refused})


def test_every_cache_class_without_a_base_goes_through_a_pytree_and_jit(baseless):
    assert {"xLSTMCache", "ReformerDynamicCache", "MimiConv1dPaddingCache"} <= {
        type(c).__name__ for c in baseless.values()
    }
    check_all(baseless)


def test_abstract_bases_are_registered_too(classes):
    abstract = [cls for cls in classes.values() if inspect.isabstract(cls) and issubclass(cls, LAYER_BASES)]
    assert abstract
    assert all(pytree_registry.is_registered(cls) for cls in abstract)
