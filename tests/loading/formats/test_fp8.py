"""8-bit floats: every number against transformers' own dequantization, or by hand where it needs a GPU."""

import json

import pytest
import torch
import transformers as tf
from quantized_folders import check_generates, check_weights, dense_twin, projections, replaced, tiny_llama, write

from model_adapters.errors import CheckpointError
from model_adapters.loading import load_model
from model_adapters.loading.formats.fp8 import of_float8

BLOCK = 128


def in_blocks(weight, rows=BLOCK, columns=BLOCK, scale_of=lambda largest: largest / 448):
    """float8 values and scales of blocks, and the numbers they mean."""
    num_rows, num_columns = weight.shape
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-num_rows // rows), -(-num_columns // columns))
    dense = torch.empty(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = scale_of(weight[place].float().abs().max())
            values[place] = (weight[place].float() / scale[i, j]).to(torch.float8_e4m3fn)
            dense[place] = values[place].float() * scale[i, j]
    return values, scale, dense


def block_folder(folder, model, scale_of=lambda largest: largest / 448, scale_as=lambda scale: scale):
    expected = {}

    def make(module, weight):
        values, scale, expected[f"{module}.weight"] = in_blocks(weight, scale_of=scale_of)
        return {f"{module}.weight": values, f"{module}.weight_scale_inv": scale_as(scale)}

    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head"],
    }
    return write(folder, model, replaced(model, make), settings), expected


def test_blocks_have_the_numbers_that_transformers_dequantizes(tmp_path):
    model = tiny_llama(intermediate_size=256, num_key_value_heads=4)  # it divides rows evenly, whatever the block
    folder, expected = block_folder(tmp_path / "model", model)
    check_weights(folder, expected)
    theirs = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name in projections(model):
        torch.testing.assert_close(theirs.state_dict()[name].float(), expected[name], rtol=0, atol=0)


def test_mxfp8_has_the_numbers_that_transformers_dequantizes(tmp_path):
    model, expected = tiny_llama(), {}

    def make(module, weight):
        exponents = torch.empty(weight.shape[0], weight.shape[1] // 32, dtype=torch.uint8)
        groups = weight.float().reshape(*exponents.shape, 32)
        exponents[:] = 127 + torch.ceil(torch.log2(groups.abs().amax(-1) / 448))
        powers = torch.exp2(exponents.float() - 127)[..., None]
        values = (groups / powers).to(torch.float8_e4m3fn)
        expected[f"{module}.weight"] = (values.float() * powers).reshape(weight.shape)
        return {f"{module}.weight": values.reshape(weight.shape), f"{module}.weight_scale_inv": exponents}

    settings = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "modules_to_not_convert": ["lm_head"]}
    folder = write(tmp_path / "model", model, replaced(model, make), settings)
    loaded = check_weights(folder, expected)
    assert not loaded.report.unused_tensors
    theirs = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name in projections(model):
        torch.testing.assert_close(theirs.state_dict()[name].float(), expected[name], rtol=0, atol=0)


def test_blocks_that_end_before_the_matrix_does(tmp_path):
    model = tiny_llama()
    folder, expected = block_folder(tmp_path / "model", model)
    check_weights(folder, expected)


def test_a_model_in_blocks_generates_the_tokens_of_its_dequantized_twin(tmp_path):
    model = tiny_llama()
    folder, expected = block_folder(tmp_path / "model", model)
    check_generates(folder, dense_twin(model, expected))


def test_scales_that_are_exponents_are_powers_of_two(tmp_path):
    def power(largest):
        return torch.exp2(torch.ceil(torch.log2(largest / 448)))

    model = tiny_llama()
    folder, expected = block_folder(
        tmp_path / "model", model, scale_of=power, scale_as=lambda scale: scale.to(torch.float8_e8m0fnu)
    )
    check_weights(folder, expected)


@pytest.mark.parametrize("method", ["fbgemm_fp8", "fp8"])
def test_a_scale_for_each_row_or_for_the_matrix(method, tmp_path):
    expected = {}

    def make(module, weight):
        largest = weight.float().abs().amax(1, keepdim=True) if method == "fbgemm_fp8" else weight.float().abs().max()
        scale = largest / 448
        values = (weight.float() / scale).to(torch.float8_e4m3fn)
        expected[f"{module}.weight"] = values.float() * scale
        more = {f"{module}.input_scale_ub": torch.tensor([1200.0])} if method == "fbgemm_fp8" else {}
        return {f"{module}.weight": values, f"{module}.weight_scale": scale, **more}

    model = tiny_llama()
    folder = write(tmp_path / "model", model, replaced(model, make), {"quant_method": method})
    loaded = check_weights(folder, expected)
    assert not loaded.report.unused_tensors


def test_experts_that_transformers_stacks_and_joins_stay_in_8_bits(tmp_path):
    torch.manual_seed(0)
    config = tf.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = tf.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    from safetensors.torch import load_file

    tensors, dense = load_file(tmp_path / "dense" / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"], dense[name] = in_blocks(tensors.pop(name))
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    folder = write(tmp_path / "model", model, tensors, settings)
    prefix = "model.layers.0.mlp.experts"
    expected = {name: numbers for name, numbers in dense.items() if "experts" not in name}
    expected[f"{prefix}.gate_up_proj"] = torch.stack(
        [torch.cat([dense[f"{prefix}.{i}.gate_proj.weight"], dense[f"{prefix}.{i}.up_proj.weight"]]) for i in range(4)]
    )
    expected[f"{prefix}.down_proj"] = torch.stack([dense[f"{prefix}.{i}.down_proj.weight"] for i in range(4)])
    loaded = check_weights(folder, expected)
    assert not loaded.report.unused_tensors and not loaded.report.missing_tensors
    check_generates(folder, dense_twin(model, expected))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda name, tensors: {f"{name}_scale_inv": torch.ones(3, 1)},
            r"expected scales \[1, 1\] .*blocks of 128 x 128",
        ),
        (lambda name, tensors: {f"{name}_scale_inv": torch.full((1, 1), torch.nan)}, "expected a finite scale"),
        (lambda name, tensors: {name: tensors[name].float()}, "expected float8_e4m3fn, got torch.float32"),
    ],
)
def test_tensors_that_do_not_fit_are_one_line_that_names_the_weight(change, said, tmp_path):
    from safetensors.torch import load_file

    model = tiny_llama(num_hidden_layers=1)
    folder, _ = block_folder(tmp_path / "model", model)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    write(folder, model, {**tensors, **change(name, tensors)}, settings)
    with pytest.raises(CheckpointError, match=f"^{name}: .*{said}"):
        load_model(folder)


@pytest.mark.parametrize("block", [None, [BLOCK, BLOCK]])
def test_scales_of_another_number_are_told_in_words_of_what_the_configuration_has(block, tmp_path):
    def make(module, weight):
        return {f"{module}.weight": weight.to(torch.float8_e4m3fn), f"{module}.weight_scale": torch.ones(5, 1)}

    model = tiny_llama(num_hidden_layers=1)
    settings = {"quant_method": "fp8", "weight_block_size": block}
    folder = write(tmp_path / "model", model, replaced(model, make), settings)
    said = "a scale for each of 128 rows, one for the matrix, or" if block is None else r"scales \[1, 2\] for .* blocks"
    with pytest.raises(CheckpointError, match=rf"down_proj.weight: expected {said}.*got \[5, 1\]"):
        load_model(folder)


def test_nan_among_the_numbers_stays_where_it_is_and_one_line_says_so(tmp_path, caplog):
    from safetensors.torch import load_file

    model, name = tiny_llama(num_hidden_layers=1), "model.layers.0.self_attn.q_proj.weight"
    folder, expected = block_folder(tmp_path / "model", model)
    tensors = load_file(folder / "model.safetensors")
    codes = tensors[name].view(torch.uint8)
    codes[0, 0], codes[3, 5] = 0x7F, 0xFF
    expected[name] = expected[name].clone()
    expected[name][0, 0] = expected[name][3, 5] = torch.nan
    write(folder, model, tensors, json.loads((folder / "config.json").read_text())["quantization_config"])
    check_weights(folder, expected)
    said = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith(f"{name}: 2 of 16384 numbers are NaN, and stay so: ")


def test_8_bit_tensors_without_a_quantization_in_the_configuration(tmp_path):
    model = tiny_llama(num_hidden_layers=1)
    folder, _ = block_folder(tmp_path / "model", model)
    config = folder / "config.json"
    content = json.loads(config.read_text())
    settings = content.pop("quantization_config")
    config.write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=r"is part of a quantized weight.*no quantization_config: get config.json"
    ):
        load_model(folder)
    write(folder, model, dict(model.state_dict()), settings)
    with pytest.raises(CheckpointError, match=r"states a quantization .fp8., and the files hold no tensor of it"):
        load_model(folder)


def test_one_scale_where_the_configuration_states_blocks():
    values, scale, _ = in_blocks(torch.randn(256, 128))
    with pytest.raises(
        CheckpointError, match=r"expected scales \[2, 1\] for \[256, 128\] in blocks of 128 x 128, got "
    ):
        of_float8("w", values, scale[0, 0], [BLOCK, BLOCK], "fp8")
    assert of_float8("w", values[:BLOCK], scale[0, 0], [BLOCK, BLOCK], "fp8").scale.shape == (BLOCK, 1)
