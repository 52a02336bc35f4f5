"""GPTQ and AWQ: layers that AutoGPTQ and AutoAWQ pack on a CPU, against what these compute of them."""

import tools  # noqa: F401  # isort: skip

import pytest
import torch
from gptq_layers import GROUP, layer_of, parts_of
from partial_imports import without_imports
from quantized_folders import check_generates, check_weights, dense_twin, replaced, tiny_llama, write

# They import models of older releases of transformers first of all.
without_imports("awq", "auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")

from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear  # noqa: E402
from awq.modules.linear.gemm import WQLinear_GEMM  # noqa: E402
from awq.utils.packing_utils import dequantize_gemm  # noqa: E402


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_has_every_number_that_autogptq_computes(bits, act_order, tmp_path):
    model, expected = tiny_llama(torch.float16), {}

    def make(module, weight):
        num_rows, num_columns = weight.shape
        group_of = torch.arange(num_columns) // GROUP
        if act_order:
            group_of = group_of[torch.randperm(num_columns, generator=torch.Generator().manual_seed(num_columns))]
        layer, scale, zero = layer_of(weight.float(), bits, group_of)
        packed = QuantLinear(bits, GROUP, num_columns, num_rows, False, weight_dtype=torch.float32)
        packed.pack(layer, scale, zero, group_of.int())
        with torch.no_grad():
            expected[f"{module}.weight"] = packed(torch.eye(num_columns)).T.contiguous()
        packed.scales = packed.scales.half()  # as in checkpoints, which these scales are exact in
        return parts_of(module, packed, ("qweight", "qzeros", "scales", "g_idx"))

    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order}
    folder = write(tmp_path / "model", model, replaced(model, make), settings)
    loaded = check_weights(folder, expected)
    assert not loaded.report.unused_tensors
    if bits == 4 and act_order:
        check_generates(folder, dense_twin(model, expected))


def test_awq_has_every_number_that_autoawq_computes(tmp_path):
    model, expected = tiny_llama(torch.float16), {}

    def make(module, weight):
        layer, scale, zero = layer_of(weight.float(), 4, torch.arange(weight.shape[1]) // GROUP)
        packed = WQLinear_GEMM.from_linear(layer, 4, GROUP, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
        numbers = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, GROUP)
        expected[f"{module}.weight"] = numbers.T.contiguous()
        return parts_of(module, packed, ("qweight", "qzeros", "scales"))

    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    folder = write(tmp_path / "model", model, replaced(model, make), settings)
    loaded = check_weights(folder, expected)
    assert not loaded.report.unused_tensors
    check_generates(folder, dense_twin(model, expected))
