"""Which replica a request prefers; and the options of a deployment. Nothing here needs Ray."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.cli import deploy as command
from torchax_serve.distributed.ray.options import DeployOptions
from torchax_serve.distributed.ray.prefix_affinity import BLOCK_CHARS, PrefixAffinity, choose_replica


def text_of(*letters):
    return "".join(letter * BLOCK_CHARS for letter in letters)


def test_longest_prefix_wins():
    table = PrefixAffinity()
    table.record(text_of("a", "b"), "one")
    table.record(text_of("a", "c"), "two")
    assert table.replica_for(text_of("a", "b", "z"), ["one", "two"]) == "one"
    assert table.replica_for(text_of("a", "c", "z"), ["one", "two"]) == "two"
    assert table.replica_for(text_of("a", "z"), ["one", "two"]) == "two"  # who had it last
    assert table.replica_for(text_of("b"), ["one", "two"]) is None


def test_removed_replica_owns_no_prefix():
    table = PrefixAffinity()
    table.record(text_of("a"), "one")
    table.record(text_of("a", "b"), "two")
    assert table.replica_for(text_of("a", "b"), ["one"]) is None
    table.record(text_of("a"), "one")
    assert table.replica_for(text_of("a", "b"), ["one"]) == "one"


def test_short_prompts_have_prefixes():
    table = PrefixAffinity()
    table.record("Hello", "one")
    assert table.replica_for("Hello", ["one"]) == "one"
    assert table.replica_for("Hello!", ["one"]) is None


def test_least_recently_used_prefixes_are_dropped():
    table = PrefixAffinity(most_known=3)
    for letter in "abcd":
        table.record(text_of(letter), letter)
    assert len(table) == 3
    assert [table.replica_for(text_of(letter), "abcd") for letter in "abcd"] == [None, "b", "c", "d"]


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 20), min_size=1), st.data())
def test_every_replica_is_tried_and_the_idlest_first(loads, data):
    owner = data.draw(st.sampled_from([None, *loads]))
    order = choose_replica(owner, loads, 4)
    assert sorted(order) == sorted(loads)
    if owner is not None and loads[owner] - min(loads.values()) <= 4:
        assert order[0] == owner
        order = order[1:]
    assert [loads[replica] for replica in order] == sorted(loads[replica] for replica in order)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replicas": "2"}, "expected arguments out of model, dtype"),
        ({"max_num_seqs": "many"}, "max_num_seqs: expected a number, got 'many'"),
        ({"min_replicas": "3", "max_replicas": "2"}, "expected 1 <= min <= max, got 3 and 2"),
        ({"accelerator": "NPU"}, "accelerator: expected GPU or TPU, got 'NPU'"),
        ({"max_num_seqs": "0"}, "max_num_seqs: expected a whole number >= 1, got 0"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype: expected int8 or fp8, got 'int4'"),
    ],
)
def test_wrong_arguments_of_rays_command_line(given, said):
    with pytest.raises(InvalidArgumentError, match=said):
        DeployOptions.of_text(given)


def test_ray_actor_options():
    options = DeployOptions.of_text({"model": "a/b", "tensor_parallel": "4", "accelerator": "TPU", "num_cpus": "8"})
    assert (options.model, options.actor_options()) == ("a/b", {"num_cpus": 8.0, "resources": {"TPU": 4}})
    assert DeployOptions(accelerator="GPU").actor_options() == {"num_cpus": 1.0, "num_gpus": 1}


def test_replicas_on_the_command_line():
    assert command._range("1:4") == (1, 4)
    assert command._range("2") == (2, 2)
    with pytest.raises(InvalidArgumentError, match="expected a number or LEAST:MOST, got 'few'"):
        command._range("few")


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"deploy: expected the package ray, .*; pip install 'torchax-serve\[ray\]'"):
        command.deploy()


NODES = [{"CPU": 8.0, "GPU": 4.0, "memory": 1e9}, {"CPU": 16.0}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"accelerator": "GPU", "tensor_parallel": 8},
            "with 1 CPU and 8 GPU .* at most 16 CPU, 4 GPU; a",
        ),
        (
            {"accelerator": "TPU", "tensor_parallel": 4},
            "with 1 CPU and 4 TPU .* at most 16 CPU, 0 TPU; a",
        ),
        ({"accelerator": "GPU", "tensor_parallel": 4, "num_cpus": 12}, "a node with 12 CPU and 4 GPU"),  # on two nodes
    ],
)
def test_replica_that_fits_no_node_is_refused(options, said):
    with pytest.raises(UnsupportedArgumentError, match=said):
        DeployOptions(**options).check_nodes(NODES)


@pytest.mark.parametrize("options", [{}, {"accelerator": "GPU", "tensor_parallel": 4}, {"num_cpus": 16}])
def test_replica_that_fits_a_node_is_accepted(options):
    DeployOptions(**options).check_nodes(NODES)
