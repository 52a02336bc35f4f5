"""Biases of scores that a query mixes of profiles by distance: attention against numpy, and what is refused."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from ops_oracle import assert_close
from paged_oracle import exact_paged, paged_case

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import decode_attention, paged_attention
from model_adapters.ops.attention_args import DistanceBiases


def with_biases(case, extent, dtype="float32"):
    rng = np.random.default_rng(1)
    weights, profiles = (
        jnp.asarray(rng.standard_normal(shape, dtype=np.float32), dtype)
        for shape in ((*case.q.shape[:2], 3), (3, extent))
    )
    case.options["distance_biases"] = DistanceBiases(weights, profiles)
    return case


@pytest.mark.parametrize("extent", [1, 9, 100])
@pytest.mark.parametrize(
    "features",
    [{}, {"window": 9, "sinks": True}, {"padding": 4, "alibi": True}, {"images": ((1, 4), (8, 15)), "padding": 2}],
    ids=lambda features: ",".join(features) or "plain",
)
def test_prompts_and_single_tokens(features, extent):
    case = with_biases(paged_case(**features), extent)
    out, _ = paged_attention(*case.args)
    assert_close(out, exact_paged(case)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_of_each_row(dtype):
    case = with_biases(paged_case(q_lens=(1, 1, 1), kv_lens=(1, 33, 64), dtype=dtype, window=40), 20, dtype)
    *arrays, lens, _, args = case.args
    out, _ = decode_attention(*arrays, lens, jnp.zeros_like(lens), args)
    assert_close(out, exact_paged(case)[0])


def test_what_does_not_fit_is_refused():
    case = with_biases(paged_case(), 9)
    *arrays, args = case.args
    few = dataclasses.replace(args.distance_biases, weights=args.distance_biases.weights[:3])
    with pytest.raises(
        InvalidArgumentError, match=r"weights of distance_biases of shape \(24, 4, 3\), got \(3, 4, 3\)"
    ):
        paged_attention(*arrays, dataclasses.replace(args, distance_biases=few))
    with pytest.raises(InvalidArgumentError, match="expected softcap or distance_biases, got both"):
        paged_attention(*arrays, dataclasses.replace(args, softcap=1.0))
