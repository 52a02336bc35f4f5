"""Biases by distance and sinks that each query has by itself: attention against numpy, and what is refused."""

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


def with_token_sinks(case, dtype="float32"):
    sinks = np.random.default_rng(2).standard_normal(case.q.shape[:2], dtype=np.float32)
    case.options["token_sinks"] = jnp.asarray(3 * sinks, dtype)
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
    end = len(out) - features.get("padding", 0)  # rows behind it are no tokens, and nothing reads them
    assert_close(out[:end], exact_paged(case)[0][:end])


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


@pytest.mark.parametrize(
    "features", [{}, {"window": 9}, {"padding": 4, "softcap": 2.0}], ids=lambda given: ",".join(given)
)
def test_prompts_with_sinks_of_each_token(features):
    case = with_token_sinks(
        with_biases(paged_case(**features), 9) if "softcap" not in features else paged_case(**features)
    )
    out, _ = paged_attention(*case.args)
    end = len(out) - features.get("padding", 0)  # rows behind it are no tokens, and nothing reads them
    assert_close(out[:end], exact_paged(case)[0][:end])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_single_tokens_with_sinks_of_each(dtype):
    case = with_token_sinks(paged_case(q_lens=(1, 1, 1), kv_lens=(1, 33, 64), dtype=dtype), dtype)
    *arrays, lens, _, args = case.args
    out, _ = decode_attention(*arrays, lens, jnp.zeros_like(lens), args)
    assert_close(out, exact_paged(case)[0])


def test_sinks_of_tokens_that_do_not_fit_are_refused():
    case = with_token_sinks(paged_case(sinks=True))
    *arrays, args = case.args
    with pytest.raises(InvalidArgumentError, match="expected sinks or token_sinks, got both"):
        paged_attention(*arrays, args)
    few = dataclasses.replace(args, sinks=None, token_sinks=args.token_sinks[:3])
    with pytest.raises(InvalidArgumentError, match=r"token_sinks of shape \(24, 4\), got \(3, 4\)"):
        paged_attention(*arrays, few)
