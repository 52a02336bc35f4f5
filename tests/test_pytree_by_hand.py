"""Classes that a script registers with JAX by hand, before or after this project does."""

import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from thorough import thorough
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

import pytree_registry
from pytree_registry import RegistrationError

TUTORIAL = """
import jax, torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
{before}
def flatten(out):
    return (out.logits,), None

def unflatten(aux, children):
    return CausalLMOutputWithPast(logits=children[0])

jax.tree_util.register_pytree_node(CausalLMOutputWithPast, flatten, unflatten)
jax.tree_util.register_pytree_node(
    DynamicCache, lambda c: ([(x.keys, x.values) for x in c.layers], None), lambda aux, c: DynamicCache(list(c))
)
from torchax_serve import extract_jax, to_jax

torch.manual_seed(0)
config = LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
model = LlamaForCausalLM(config).eval()
ids = torch.arange(5, 14)[None]
expected = model(input_ids=ids, use_cache=False).logits.detach()
weights, function = extract_jax(model)
out = jax.jit(lambda w, x: function(w, (x,), {{"use_cache": False}}))(weights, ids.numpy())
assert len(jax.tree.leaves(out)) == 1
assert abs(expected.numpy() - out.logits).max() < 1e-4
served = to_jax(model)
assert served.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 12)
assert (served(input_ids=ids).logits - expected).abs().max() < 1e-4
print("ok")
"""


@pytest.mark.parametrize("before", ["", "import pytree_registry; pytree_registry.register_all()"])
def test_a_tutorials_registrations_take_effect_before_and_after_ours(before):
    done = subprocess.run([sys.executable, "-c", TUTORIAL.format(before=before)], capture_output=True, text=True)
    assert done.stdout.strip() == "ok", done.stderr


def test_a_registration_with_keys_is_taken_over_with_its_keys():
    pytree_registry.register_all()

    class Answer(CausalLMOutputWithPast):
        pass

    pytree_registry.register(Answer)
    apart = Answer(logits=np.zeros(3))
    children, ours = jax.tree.flatten(apart)
    assert pytree_registry.is_registered(Answer)
    key = jax.tree_util.GetAttrKey("scores")
    jax.tree_util.register_pytree_with_keys(
        Answer, lambda out: ([(key, out.logits)], "theirs"), lambda aux, new: (aux, *new)
    )
    assert not pytree_registry.is_registered(Answer)
    assert Answer not in pytree_registry.registered_classes()
    [(path, leaf)], tree = jax.tree_util.tree_flatten_with_path(apart)
    assert path == (key,) and leaf is apart.logits
    assert jax.tree.unflatten(tree, [5]) == ("theirs", 5)
    assert isinstance(jax.tree.unflatten(ours, children), Answer)  # taken apart before, by our functions
    with pytest.raises(ValueError, match="Duplicate"):  # a third time
        jax.tree_util.register_pytree_node(Answer, lambda out: ((), None), lambda aux, new: None)


def test_cache_layers_are_refused_in_one_line():
    pytree_registry.register_all()
    with pytest.raises(RegistrationError, match="DynamicLayer, which somebody else has registered") as refused:
        jax.tree_util.register_pytree_node(DynamicLayer, lambda x: ((), None), lambda aux, new: None)
    assert "\n" not in str(refused.value)
    assert pytree_registry.is_registered(DynamicLayer)


HALF = """
import sys
try:
    import torchax
except AttributeError:
    assert "torchax" not in sys.modules
import {package}
import torchax
torchax.default_env()
import model_adapters.bridge.views
assert model_adapters.bridge.views.torchax is torchax
"""


@pytest.mark.parametrize("package", ["torchax_serve", thorough("pytree_registry"), thorough("sharding_rules")])
def test_torchax_imports_behind_any_package_and_after_it_has_failed(package):
    done = subprocess.run([sys.executable, "-c", HALF.format(package=package)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_plain_torch_is_untouched_by_the_finder():
    with pytest.raises(AttributeError):
        _ = torch.ops.aten.prod.no_such_dimname
