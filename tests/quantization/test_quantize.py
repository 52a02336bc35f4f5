"""Quantized numbers: equal to Qwix's, and to numpy where Qwix has no such method."""

import jax.numpy as jnp
import numpy as np
import pytest

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.quantized_weight import NF4, dequantize
from model_adapters.quantization.quantize import quantize_weight
from model_adapters.quantization.rules import QuantizationRule

SYMMETRIC = ("absmax", "absmax,0.8", "rms,3", "fixed,-1,1")
ASYMMETRIC = ("minmax", "minmax,0.9", "fixed,-1,2")  # with a zero point, which float8 has not
METHODS = [(qtype, method) for qtype in ("int8", "int4") for method in (*SYMMETRIC, *ASYMMETRIC)]
METHODS += [("float8_e4m3fn", method) for method in SYMMETRIC]


def weights(seed=0, shape=(24, 128)):
    made = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    made[3] = 0  # a row of zeros
    return made


@pytest.mark.parametrize("tile", [None, 32, 0.25])
@pytest.mark.parametrize(("qtype", "method"), METHODS)
def test_values_and_scales_are_those_of_qwix(qtype, tile, method):
    qwix = pytest.importorskip("qwix", reason="qwix is not installed: pip install qwix")
    weight = weights()
    tiled = {1: tile} if tile else None
    theirs = qwix.quantize(
        jnp.asarray(weight), qtype, channelwise_axes=[0], tiled_axes=tiled, calibration_method=method
    )
    rule = QuantizationRule(weight_qtype=qtype, tile_size=tile, weight_calibration_method=method)
    ours = quantize_weight("w", jnp.asarray(weight), rule)
    np.testing.assert_array_equal(np.asarray(ours.values, np.float32), np.asarray(theirs.qvalue, np.float32))
    np.testing.assert_array_equal(ours.scale, np.broadcast_to(theirs.scale, ours.scale.shape))
    np.testing.assert_allclose(dequantize(ours, jnp.float32), qwix.dequantize(theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("qtype", "largest"), [("int8", 127.5), ("int4", 7.5)])
def test_symmetric_values_are_those_of_numpy(qtype, largest):
    weight, bits = weights(), int(qtype[3:])
    ours = quantize_weight("w", jnp.asarray(weight), QuantizationRule(weight_qtype=qtype, tile_size=32))
    tiles = weight.reshape(24, 4, 32)
    expected = np.abs(tiles).max(-1) / np.float32(largest)
    expected[expected == 0] = 1
    scale = np.asarray(ours.scale)
    np.testing.assert_allclose(scale, expected, rtol=1.2e-7)  # XLA multiplies by the inverse of a constant
    quotients = np.clip(tiles / scale[..., None], -(1 << bits - 1), (1 << bits - 1) - 1)
    np.testing.assert_allclose(np.asarray(ours.values).reshape(tiles.shape), quotients, atol=0.5 + 1e-5)
    error = np.abs(np.asarray(dequantize(ours, jnp.float32)) - weight).reshape(tiles.shape)
    assert (error <= 0.5001 * scale[..., None]).all()


def test_signed_absmax_gives_the_largest_number_the_lowest_value():
    weight = weights()
    rule = QuantizationRule(weight_qtype="int4", tile_size=32, weight_calibration_method="signed_absmax")
    ours = quantize_weight("w", jnp.asarray(weight), rule)
    tiles = weight.reshape(24, 4, 32)
    at = np.abs(tiles).argmax(-1)[..., None]
    values = np.asarray(ours.values, np.int32).reshape(tiles.shape)
    is_zero = ~tiles.any(-1)
    assert (np.take_along_axis(values, at, -1)[..., 0][~is_zero] == -8).all() and not values[is_zero].any()
    restored = np.asarray(dequantize(ours, jnp.float32)).reshape(tiles.shape)
    np.testing.assert_allclose(np.take_along_axis(restored, at, -1), np.take_along_axis(tiles, at, -1), rtol=1e-6)
    plain = quantize_weight("w", jnp.asarray(weight), QuantizationRule(weight_qtype="int4", tile_size=32))
    error, plain_error = (np.square(dequantize(each, jnp.float32) - weight).sum() for each in (ours, plain))
    assert error < plain_error


def test_nf4_gives_each_number_the_nearest_of_its_table():
    weight = weights()
    ours = quantize_weight("w", jnp.asarray(weight), QuantizationRule(weight_qtype="nf4", tile_size=64))
    tiles = weight.reshape(24, 2, 64)
    largest = np.abs(tiles).max(-1)
    largest[largest == 0] = 1
    np.testing.assert_array_equal(ours.scale, largest)
    nearest = np.abs(tiles[..., None] / largest[..., None, None] - np.float32(NF4)).argmin(-1)
    np.testing.assert_array_equal(np.asarray(ours.values).reshape(tiles.shape), nearest)
    restored = np.float32(NF4)[nearest] * largest[..., None]
    np.testing.assert_allclose(dequantize(ours, jnp.float32), restored.reshape(24, 128), rtol=1e-6)
    int4 = quantize_weight("w", jnp.asarray(weight), QuantizationRule(weight_qtype="int4", tile_size=64))
    error, int4_error = (np.square(dequantize(each, jnp.float32) - weight).sum() for each in (ours, int4))
    assert error < int4_error  # of normal numbers


def test_a_group_may_be_cut_at_the_end_of_a_row():
    weight = weights(shape=(5, 40))
    ours = quantize_weight("w", jnp.asarray(weight), QuantizationRule(weight_qtype="int8", tile_size=32))
    assert ours.scale.shape == (5, 2)
    np.testing.assert_allclose(dequantize(ours, jnp.float32), weight, atol=0.02)


def test_a_transposed_weight_is_quantized_along_the_dimension_that_is_summed():
    weight = weights()
    rule = QuantizationRule(weight_qtype="int8", tile_size=32)
    ours, turned = (
        quantize_weight("w", jnp.asarray(each), rule, transposed=is_turned)
        for each, is_turned in ((weight, False), (weight.T, True))
    )
    assert turned.shape == (128, 24)
    np.testing.assert_array_equal(turned.values, ours.values)
    np.testing.assert_array_equal(turned.unpacked(), ours.unpacked().T)


def test_scales_are_rounded_before_values_are_computed():
    weight = weights()
    rule = QuantizationRule(weight_qtype="int8", tile_size=32, scale_dtype="float16")
    ours = quantize_weight("w", jnp.asarray(weight), rule)
    scale = np.asarray(ours.scale, np.float32)
    assert ours.scale.dtype == jnp.float16
    want = np.clip(np.rint(weight.reshape(24, 4, 32) / scale[..., None]), -128, 127)
    np.testing.assert_array_equal(np.asarray(ours.values).reshape(want.shape), want)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_with_nan_or_infinity_is_an_error_that_names_it(bad):
    weight = weights()
    weight[2, 5] = bad
    with pytest.raises(InvalidArgumentError, match=r"^model.w: expected finite numbers to quantize, got NaN"):
        quantize_weight("model.w", jnp.asarray(weight), QuantizationRule(weight_qtype="int8"))
