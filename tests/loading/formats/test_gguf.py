"""GGUF files that the package `gguf` writes, against transformers' and its own dequantization."""

import dataclasses
import json
import struct

import numpy as np
import pytest
import torch
import transformers as tf
from quantized_folders import check_generates
from transformers import modeling_gguf_pytorch_utils

from model_adapters.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from model_adapters.loading import load_model
from model_adapters.loading.formats import gguf_model
from model_adapters.loading.formats.gguf_blocks import BLOCK_BYTES, QUANTIZED_TYPES, unpack_blocks
from model_adapters.loading.formats.gguf_file import GgufFile
from model_adapters.loading.formats.placement import StoredWeights
from model_adapters.loading.gguf_names import pick, split_tag
from model_adapters.loading.model_source import parse_name
from model_adapters.ops.compressed_weight import unpacked
from model_adapters.ops.quantized_weight import QuantizedWeight

gguf = pytest.importorskip("gguf", reason="the format's own tool is part of the extra dev")

from gguf_files import BY_TOOL, CONFIGS, DRAWN, SIZES, tiny_model, write_gguf  # noqa: E402 it needs the tool


def by_transformers(file):
    return tf.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)


def check_same(file, theirs):
    """Every weight of the file, in float32, has transformers' numbers; returns the model and the dense ones' names."""
    loaded = load_model(file, dtype="float32")
    dense = []
    for name, tensor in theirs.state_dict().items():
        weight = loaded.weights[name]
        np.testing.assert_array_equal(np.asarray(unpacked(weight)), tensor.numpy(), err_msg=name)
        if tensor.ndim > 1 and "bias" not in name and not isinstance(weight, QuantizedWeight):
            dense.append(name)
    return loaded, dense


@pytest.mark.parametrize("kind", QUANTIZED_TYPES)
def test_blocks_have_every_number_of_the_tools_dequantization(kind):
    rng, (block, num_bytes) = np.random.default_rng(0), BLOCK_BYTES[kind]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (block, num_bytes)
    blocks = rng.integers(0, 256, (6 * 512 // block, num_bytes)).astype(np.uint8)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
    for place in halves.get(kind, (0,)):
        blocks[:, place : place + 2] = rng.uniform(-0.1, 0.1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(0, 250, len(blocks))
    theirs = gguf.dequantize(blocks.reshape(6, -1), gguf.GGMLQuantizationType[kind])
    ours = unpack_blocks(torch.from_numpy(blocks.reshape(-1)), kind, (6, 512)).dense()
    np.testing.assert_array_equal(ours.numpy(), theirs)


@pytest.mark.parametrize("kind", [*BY_TOOL, *DRAWN])
def test_a_llama_in_each_type_has_transformers_numbers(kind, tmp_path):
    model = tiny_model("llama")
    loaded, dense = check_same(
        write_gguf(tmp_path / "m.gguf", model, "llama", kind), by_transformers(tmp_path / "m.gguf")
    )
    assert dense == [] and not loaded.report.unused_tensors
    assert loaded.config.rope_parameters["rope_theta"] == 50000.0 and loaded.config.eos_token_id == 1


@pytest.mark.parametrize("architecture", [name for name in CONFIGS if name != "llama"])
def test_every_architecture_has_transformers_numbers(architecture, tmp_path):
    model = tiny_model(architecture)
    file = write_gguf(tmp_path / "m.gguf", model, architecture, "Q4_1")
    own = ("qwen3", "qwen3moe", "gemma", "granitemoe", "gpt-oss")  # transformers reads none, or not all of it
    loaded, dense = check_same(file, dequantized(model, architecture) if architecture in own else by_transformers(file))
    assert dense == [], "matrices were made dense"
    ours, given = loaded.config.to_dict(), model.config.to_dict()
    said = ("hidden_size", "head_dim", "num_key_value_heads", "moe_intermediate_size", "sliding_window", "layer_types")
    said += ("rope_parameters", "query_pre_attn_scalar", "embedding_multiplier", "attention_multiplier")
    for key in [key for key in said if key in given]:
        assert ours[key] == given[key], key


def dequantized(model, architecture):
    """`model` with its matrices rounded by the tool: transformers' own reading lacks sizes of the configuration."""
    kind = gguf.GGMLQuantizationType.Q4_1
    rounded = {}
    for name, tensor in model.state_dict().items():
        is_turned = architecture == "gpt-oss" and tensor.ndim == 3
        numbers = (tensor.mT if is_turned else tensor).contiguous().numpy()
        if tensor.ndim > 1 and tensor.shape[-1] % 256 == 0 and "bias" not in name:
            numbers = gguf.dequantize(gguf.quantize(numbers, kind), kind)
        elif architecture == "gemma" and "norm" in name:  # stored plus one
            numbers = numbers + np.float32(1) - np.float32(1)
        rounded[name] = torch.as_tensor(numbers).mT if is_turned else torch.as_tensor(numbers)
    model.load_state_dict(rounded)
    return model


def test_it_generates_the_tokens_of_its_dequantized_twin(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", tiny_model("llama", tie_word_embeddings=True), "llama", "Q4_1")
    check_generates(file, by_transformers(file))


def test_a_tied_table_is_placed_when_it_is_read(tmp_path, monkeypatch):
    """Not at the end, when all weights are in memory: so a load takes little more than the weights."""
    file = write_gguf(tmp_path / "m.gguf", tiny_model("llama", tie_word_embeddings=True), "llama", "Q8_0")
    names, place = [], StoredWeights.__call__

    def noted(self, name, tensor):
        names.append(name)
        return place(self, name, tensor)

    monkeypatch.setattr(StoredWeights, "__call__", noted)
    loaded = load_model(file)
    assert names.index("model.embed_tokens.weight") < names.index("model.layers.0.mlp.down_proj.weight")
    assert loaded.weights["lm_head.weight"] is loaded.weights["model.embed_tokens.weight"]


def test_experts_generate_the_tokens_of_their_dequantized_twin(tmp_path):
    model = tiny_model("qwen3moe")
    file = write_gguf(tmp_path / "m.gguf", model, "qwen3moe", "Q4_0")
    kind = gguf.GGMLQuantizationType.Q4_0
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.shape[-1] % 256 == 0:
            parameter.data = torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.detach().numpy(), kind), kind))
    check_generates(file, model)


def test_tokenizer_and_chat_template_are_those_of_the_file(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", tiny_model("llama", num_hidden_layers=1), "llama", "Q8_0")
    tokenizer = load_model(file).tokenizer()
    tokens = GgufFile.read(file).metadata["tokenizer.ggml.tokens"]
    ids = tokenizer("hello</s>", add_special_tokens=False)["input_ids"]
    assert [tokens[i] for i in ids] == ["hel", "l", "o", "</s>"]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<s>hi</s>" and tokenizer.eos_token_id == 1 and tokenizer.bos_token_id == 0


def test_older_releases_of_transformers_get_the_vocabulary_from_the_header(good_file):
    header = GgufFile.read(good_file)
    with gguf_model._header_for_transformers(header, with_vocabulary=True):
        found = modeling_gguf_pytorch_utils.load_gguf_checkpoint(str(good_file))["tokenizer"]
    assert found["tokens"] == header.metadata["tokenizer.ggml.tokens"]
    assert found["merges"] == ["h e", "he l"]


def test_dtype_on_a_cpu_is_float32_unless_another_is_asked_for(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", tiny_model("llama", num_hidden_layers=1), "llama", "Q8_0")
    assert load_model(file).dtype == "float32" and load_model(file, dtype="bfloat16").dtype == "bfloat16"


def test_linear_and_yarn_scaling_of_positions(tmp_path):
    model, keys = tiny_model("llama", num_hidden_layers=1), "llama__rope__scaling__"
    scaling = {f"{keys}type": "linear", f"{keys}factor": 4.0}
    file = write_gguf(tmp_path / "linear.gguf", model, "llama", "Q8_0", **scaling)
    rope = load_model(file).config.rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)
    scaling = {f"{keys}type": "yarn", f"{keys}factor": 4.0, f"{keys}original_context_length": 16}
    file = write_gguf(tmp_path / "yarn.gguf", model, "llama", "Q8_0", **scaling)
    rope = load_model(file).config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 16)


def test_llama_3s_scaling_of_positions_is_found_by_the_factors_of_its_frequencies(tmp_path):
    """llama.cpp's converter writes the factors alone; transformers computes them from four numbers."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    model = tiny_model("llama", num_hidden_layers=1)
    config = tf.LlamaConfig(**{**SIZES, "head_dim": 64, "rope_parameters": {"rope_theta": 50000.0, **scaling}})
    scaled = tf.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    plain = tf.models.llama.modeling_llama.LlamaRotaryEmbedding(model.config).inv_freq
    factors = {"rope_freqs.weight": (plain / scaled).numpy()}
    file = write_gguf(tmp_path / "m.gguf", model, "llama", "Q8_0", tensors=factors)
    loaded = load_model(file)
    found = loaded.config.rope_parameters
    assert {key: found[key] for key in scaling} == scaling and not loaded.report.unused_tensors
    file = write_gguf(tmp_path / "n.gguf", model, "llama", "Q8_0", tensors={"rope_freqs.weight": np.full(32, 1.5)})
    with pytest.raises(
        UnsupportedModelError, match=r"factors of rotary frequencies \(rope_freqs\) that are not Llama 3's"
    ):
        load_model(file)


def test_longrope_has_the_factors_of_the_file(tmp_path):
    model, rng = tiny_model("phi3", num_hidden_layers=1), np.random.default_rng(0)
    factors = {f"rope_factors_{kind}.weight": rng.uniform(1, 2, 32).astype(np.float32) for kind in ("long", "short")}
    more = {"phi3__rope__scaling__original_context_length": 32, "phi3__rope__scaling__attn_factor": 1.25}
    loaded = load_model(write_gguf(tmp_path / "m.gguf", model, "phi3", "Q8_0", tensors=factors, **more))
    rope = loaded.config.rope_parameters
    assert (rope["rope_type"], rope["original_max_position_embeddings"], rope["attention_factor"]) == (
        "longrope",
        32,
        1.25,
    )
    np.testing.assert_array_equal(np.float32(rope["long_factor"]), factors["rope_factors_long.weight"])
    np.testing.assert_array_equal(np.float32(rope["short_factor"]), factors["rope_factors_short.weight"])


@pytest.fixture(scope="module")
def good_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(folder / "m.gguf", tiny_model("llama", num_hidden_layers=1), "llama", "Q8_0")


def changed(good_file, folder, change):
    file = folder / "m.gguf"
    data = bytearray(good_file.read_bytes())
    file.write_bytes(change(data))
    return file


def version(number):
    return lambda data: data[:4] + struct.pack("<I", number) + data[8:]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-1000], "is truncated: .* bytes expected for tensor .*get the file again"),
        (lambda data: data[:300], "is truncated: its header needs"),
        (lambda data: b"", "is not a GGUF file"),
        (lambda data: b"PK\x03\x04" + data[4:], "is not a GGUF file: it starts with"),
        (lambda data: b"version https://git-lfs", "is a Git LFS pointer"),
        (version(1), "of version 1, expected 2 or 3"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "is a big-endian GGUF file"),
    ],
)
def test_a_damaged_file_is_one_line(change, said, good_file, tmp_path):
    with pytest.raises(CheckpointError, match=said) as caught:
        load_model(changed(good_file, tmp_path, change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "metadata", "said"),
    [
        ("llama", {"split__count": 3}, "is one of 3 parts: merge them"),
        ("llama", {"general__type": "mmproj"}, r"is the image encoder \(mmproj\) of a model"),
        ("llama", {"llama__rope__scaling__type": "other", "llama__rope__scaling__factor": 2.0}, "positions by 'other'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(architecture, metadata, said, tmp_path):
    model = tiny_model(architecture, num_hidden_layers=1)
    file = write_gguf(tmp_path / "m.gguf", model, architecture, "Q8_0", **metadata)
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(file)


def rewritten(good_file, folder, changes):
    """The file with other values of some keys; None leaves a key out. Values are of its type or of their own."""
    reader = gguf.GGUFReader(good_file)
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    values = {key: (each.contents(), each.types) for key, each in reader.fields.items() if not key.startswith("GGUF.")}
    for key, value in changes.items():
        kind = gguf.GGUFValueType.get_type(value) if value is not None else None
        values[key] = (value, [kind] if kind != gguf.GGUFValueType.ARRAY else [kind, None])
    for key, (value, types) in values.items():
        if value is not None and key != "general.architecture":
            writer.add_key_value(key, value, types[0], types[-1] if len(types) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m.gguf"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general.alignment": 0}, "expected general.alignment of 1 or more bytes, got 0"),
        ({"llama.block_count": None}, "expected llama.block_count as a positive number in the header, got none"),
        ({"llama.block_count": 0}, "expected llama.block_count as a positive number in the header, got 0"),
        ({"llama.block_count": 10**9}, "expected llama.block_count of at most 1 in the header, for as many layers"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon as a positive .*, got none"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon as a positive .*, got nan"),
        ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base as a positive number in the header, got -1.0"),
        ({"llama.embedding_length": "x"}, "llama.embedding_length as a positive number in the header, got 'x'"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, r"vocabulary of .* makes no tokenizer \(.*out of vocabulary"),
        ({"tokenizer.ggml.model": "other"}, r"vocabulary of .* makes no tokenizer \(.*stating tokenizer 'other'"),
        ({"tokenizer.ggml.eos_token_id": 99999}, r"vocabulary of .* makes no tokenizer \(IndexError"),
    ],
)
def test_odd_metadata_is_one_line(changes, said, good_file, tmp_path):
    with pytest.raises(CheckpointError, match=said) as caught:
        load_model(rewritten(good_file, tmp_path, changes)).tokenizer()
    assert "\n" not in str(caught.value) and str(tmp_path / "m.gguf") in str(caught.value)


def test_a_tensor_twice_and_arrays_in_arrays_are_one_line(good_file, tmp_path):
    names = b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"
    with pytest.raises(CheckpointError, match=r"is corrupt: it has tensor blk.0.attn_\w.weight twice"):
        load_model(changed(good_file, tmp_path, lambda data: data.replace(*names)))
    nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", 1) + b"k" + nested
    with pytest.raises(CheckpointError, match="is corrupt: arrays in arrays in its header"):
        load_model(changed(good_file, tmp_path, lambda data: header + bytes(100)))
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 5000)
    with pytest.raises(CheckpointError, match="is corrupt: a tensor's name has 5000 characters, expected 256 at most"):
        load_model(changed(good_file, tmp_path, lambda data: header + bytes(6000)))


NOT_READ = sorted({kind.name for kind in gguf.GGMLQuantizationType} - BLOCK_BYTES.keys())


@pytest.mark.parametrize("kind", NOT_READ)
def test_a_type_that_is_not_read_is_refused_by_name(kind, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said = rf"attn_q.weight of .* is in {kind.name}, which is not read: use a file in one of Q4_0, .* Q4_K_M or Q8_0$"
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(tmp_path / "m.gguf")


def test_an_architecture_that_is_not_read_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv6")
    writer.add_tensor("output.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModelError, match=r"architecture 'rwkv6', which is not read \(expected one of .*llama"
    ):
        load_model(tmp_path / "m.gguf")


def test_a_folder_with_one_file_is_that_model(good_file, tmp_path):
    (tmp_path / "m.gguf").symlink_to(good_file)
    (tmp_path / "mmproj-m.gguf").write_bytes(b"not read")
    source = parse_name(tmp_path)
    assert source.gguf == tmp_path / "m.gguf" and source.folder is None
    assert load_model(tmp_path).report.quantization.startswith("9 weights int8")
    (tmp_path / "other.gguf").symlink_to(good_file)
    with pytest.raises(
        ModelNotFoundError, match=r"holds several GGUF files: give the path of one; there are m.gguf, other"
    ):
        parse_name(tmp_path)


def test_names_of_the_hub_with_a_type_behind_the_colon():
    assert split_tag("org/repo-GGUF:Q4_K_M") == ("org/repo-GGUF", "Q4_K_M")
    assert parse_name("org/repo-GGUF:Q4_K_M") == "org/repo-GGUF" == parse_name("org/repo-GGUF")


FILES = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-Q4_K_S.gguf", "mmproj-m-f16.gguf", "m.imatrix.gguf"]


@pytest.mark.parametrize(
    ("files", "tag", "found"),
    [
        (FILES, None, "m-Q8_0.gguf"),
        (FILES, "Q4_K_M", "m-Q4_K_M.gguf"),
        (FILES, "q4_k_s", "m-Q4_K_S.gguf"),
        (FILES, "m-Q4_K_M.gguf", "m-Q4_K_M.gguf"),
        ([FILES[1], FILES[3]], None, "m-Q4_K_M.gguf"),
        (["only.gguf"], None, "only.gguf"),
        (["sub/m.Q4_0.gguf", "sub/m.Q8_0.gguf"], "Q4_0", "sub/m.Q4_0.gguf"),
    ],
)
def test_which_file_of_a_repository_is_taken(files, tag, found):
    assert pick(files, tag, "org/repo", "name one") == found


@pytest.mark.parametrize(
    ("files", "tag", "said"),
    [
        (FILES, "Q3_K", r"org/repo holds no GGUF file 'Q3_K': name one; there are m-Q4_K_M.gguf"),
        (["a-Q6_K.gguf", "b-Q5_0.gguf"], None, "holds several GGUF files: name one"),
        (["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"], None, "holds GGUF files in parts alone"),
    ],
)
def test_a_repository_without_such_a_file_is_one_line(files, tag, said):
    with pytest.raises(ModelNotFoundError, match=said):
        pick(files, tag, "org/repo", "name one")


def test_a_configuration_next_to_it_does_not_count(good_file, tmp_path):
    (tmp_path / "m.gguf").symlink_to(good_file)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert type(load_model(tmp_path).module).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("metadata", "control", "expected"),
    [
        ({}, {}, 1),
        ({}, {3: "<|im_end|>"}, [1, 3]),
        ({}, {3: "<|im_start|>"}, 1),
        ({"tokenizer.ggml.eot_token_id": 4}, {3: "<end_of_turn>"}, [1, 4, 3]),
        ({"tokenizer.ggml.eom_token_id": 5}, {}, [1, 5]),
    ],
)
def test_answers_end_at_control_tokens_that_end_a_turn(good_file, metadata, control, expected):
    """As in llama.cpp: a header often names the end of a document only."""
    own = GgufFile.read(good_file)
    tokens, kinds = (list(own.metadata[f"tokenizer.ggml.{name}"]) for name in ("tokens", "token_type"))
    for index, text in control.items():
        tokens[index], kinds[index] = text, 3
    vocabulary = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    file = dataclasses.replace(own, metadata={**own.metadata, **vocabulary, **metadata})
    assert gguf_model.config_of(file).eos_token_id == expected
