"""HQQ: layers that it quantizes and saves on a CPU, against its own dequantization."""

import pytest
import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from quantized_folders import check_weights, replaced, tiny_llama, write

from model_adapters.errors import UnsupportedModelError
from model_adapters.loading import load_model


def make_folder(folder, model, bits, *, axis=1):
    expected = {}

    def make(module, weight):
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight.float()
        config = BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
        made = HQQLinear(layer, config, compute_dtype=torch.float32, device="cpu")
        expected[f"{module}.weight"] = made.dequantize()
        return {f"{module}.{name}": tensor for name, tensor in made.state_dict().items()}

    settings = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": bits, "group_size": 64}}}
    return write(folder, model, replaced(model, make), settings), expected


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_number_is_that_of_the_tools_dequantization(bits, tmp_path):
    import numpy as np

    folder, expected = make_folder(tmp_path / "model", tiny_llama(), bits)
    loaded = load_model(folder, dtype="float32")
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        np.testing.assert_allclose(loaded.weights[name].unpacked(), tensor.detach(), rtol=0, atol=2e-7 * scale)
    assert not loaded.report.unused_tensors
    if bits == 4:
        check_weights(folder, {}, quantized=14)


def test_groups_along_the_rows_are_refused_by_name(tmp_path):
    folder, _ = make_folder(tmp_path / "model", tiny_llama(num_hidden_layers=1), 4, axis=0)
    with pytest.raises(UnsupportedModelError, match=r"hqq with axis 0 .*quantize it with axis=1"):
        load_model(folder)
