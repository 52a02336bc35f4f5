"""GPTQ: layers that GPTQModel packs on a CPU, in both of its formats, against what they compute.

``pip install --no-deps --target FOLDER gptqmodel pypcre logbar device-smi threadpoolctl defuser tokenicer``.
"""

import tools  # noqa: F401  # isort: skip

import types

import pytest
import torch
from gptq_layers import GROUP, layer_of, parts_of
from quantized_folders import check_weights, replaced, tiny_llama, write

pytest.importorskip("gptqmodel", reason="gptqmodel is not installed; the first lines of this file say how")

from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

PARTS = ("qweight", "qzeros", "scales", "g_idx")


@pytest.mark.parametrize("layout", ["gptq_v2", "gptq"])
@pytest.mark.parametrize(("bits", "desc_act"), [(2, False), (4, True), (8, False)])
def test_every_number_is_that_of_the_tools_layer(layout, bits, desc_act, tmp_path):
    model, expected = tiny_llama(torch.float16, num_hidden_layers=1), {}

    def make(module, weight):
        num_rows, num_columns = weight.shape
        group_of = torch.arange(num_columns) // GROUP
        if desc_act:
            group_of = group_of[torch.randperm(num_columns, generator=torch.Generator().manual_seed(num_columns))]
        layer, scale, zero = layer_of(weight.float(), bits, group_of)
        packed = TorchLinear(bits, GROUP, False, desc_act, num_columns, num_rows)
        packed.pack_original(layer, scale, zero, group_of.int())
        packed.scales = packed.scales.float()  # which the layer multiplies in
        expected[f"{module}.weight"] = packed.dequantize_weight().T.contiguous()
        packed.scales = packed.scales.half()  # as in checkpoints, which these scales are exact in
        if layout == "gptq":  # whose zero points are stored less one
            form = types.SimpleNamespace(bits=bits, pack_dtype=torch.int32)
            convert_gptq_v2_to_v1_format_module(packed, form)
        return parts_of(module, packed, PARTS)

    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": desc_act}
    settings |= {"checkpoint_format": layout, "sym": False}
    folder = write(tmp_path / "model", model, replaced(model, make), settings)
    loaded = check_weights(folder, expected)
    assert not loaded.report.unused_tensors
