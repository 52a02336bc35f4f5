"""Folders that are not what they should be: one line that says so, whatever is wrong with them."""

import json
import shutil
import struct

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from loading_models import edit_json, tiny_folder, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from model_adapters.errors import CheckpointError, UnsupportedModelError
from model_adapters.loading import load_model, require_causal_lm
from model_adapters.loading.checkpoint import Checkpoint, read_entries


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "model")


def check_refused(folder, *parts, error=CheckpointError, **options):
    with pytest.raises(error) as caught:
        load_model(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message


def change_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


# --- tensors


def test_missing_tensors_are_listed(folder):
    def drop(tensors):
        for name in [name for name in tensors if "q_proj" in name or name == "model.norm.weight"]:
            del tensors[name]

    change_tensors(folder, drop)
    check_refused(
        folder,
        "do not fit LlamaForCausalLM",
        "3 missing: model.layers.0.self_attn.q_proj.weight, model.layers.1.self_attn.q_proj.weight, model.norm.weight",
        "get both again",
    )


def test_a_long_list_is_cut(folder):
    change_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name])
    message = check_refused(folder, "18 missing: ", " and 12 more")
    assert message.count("model.layers") == 6


def test_extra_tensors_are_left_unused_and_said_in_one_line(folder, caplog):
    change_tensors(folder, lambda tensors: tensors.update({"model.novel.weight": torch.ones(3)}))
    loaded = load_model(folder)
    assert "model.novel.weight" not in loaded.weights
    assert loaded.report.unused_tensors == ("model.novel.weight",)
    (record,) = [each for each in caplog.records if each.name == "torchax_serve"]
    assert record.getMessage() == f"{folder}: 1 tensor of the files unused by LlamaForCausalLM (model.novel.weight)"
    check_refused(folder, "1 without a place: model.novel.weight", "leave strict out", strict=True)


def test_wrong_shapes_are_listed_with_both_shapes(folder):
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    check_refused(folder, "1 of another shape: model.norm.weight [31], expected [32]")
    check_refused(folder, "of another shape", strict=True)


def test_all_that_is_wrong_is_said_at_once(folder):
    def change(tensors):
        del tensors["lm_head.weight"]
        tensors["model.norm.weight"] = torch.ones(1)
        tensors["other"] = torch.ones(1)

    change_tensors(folder, change)
    check_refused(folder, "1 missing: lm_head.weight", "1 of another shape: model.norm", "1 without a place: other")


def test_a_missing_expert(tmp_path):
    tiny_folder(tmp_path, "qwen3_moe")
    change_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight"))
    check_refused(tmp_path, "Qwen3MoeForCausalLM", "model.layers.1.mlp.experts")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/model.safetensors", "a/../../b.safetensors", 3])
def test_weights_outside_of_the_folder(folder, name):
    shutil.copytree(folder, folder.parent / "other")
    edit_json(folder / "config.json", transformers_weights=name)
    check_refused(folder, "config.json names ", "expected a path within its own folder: do not trust")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "..", "sub/model.safetensors"])
def test_an_index_that_leads_out_of_the_folder(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    check_refused(folder, "names no weight files of its own folder")


def test_weights_by_another_name(folder):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    edit_json(folder / "config.json", transformers_weights="other.safetensors")
    assert load_model(folder).report.num_tensors


# --- safetensors files


def test_a_truncated_file(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    check_refused(folder, f"is truncated: {len(whole)} bytes expected, {len(whole) - 100} there; get the file again")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is truncated or corrupt: 0 bytes"),
        (b"1234", "is truncated or corrupt: 4 bytes"),
        (struct.pack("<Q", 2**40) + b"{}", "its header says"),
        (struct.pack("<Q", 4) + b"nope", "is corrupt: its header is not JSON"),
        (struct.pack("<Q", 2) + b"[]", "is corrupt: its header is not a JSON object"),
        (struct.pack("<Q", 2) + b"{}", "not one tensor in it"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "is a Git LFS pointer"),
    ],
)
def test_files_that_are_no_safetensors(folder, content, part):
    (folder / "model.safetensors").write_bytes(content)
    check_refused(folder, part)


def with_header(header, data=b""):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_overlapping_tensors_and_unknown_dtypes(folder):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    (folder / "model.safetensors").write_bytes(with_header({"a": entry, "b": entry}, b"0000"))
    check_refused(folder, "is corrupt", "get the file again")
    (folder / "model.safetensors").write_bytes(
        with_header({"a": entry | {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"000")
    )
    check_refused(folder, "tensor 'a'", "has dtype F6_E2M3", "use another checkpoint")


def test_a_file_that_shrinks_while_it_is_read(folder):
    file = folder / "model.safetensors"
    checkpoint = Checkpoint.of([file])
    file.write_bytes(file.read_bytes()[:-1000])
    with (
        checkpoint.readers(lambda amount: None) as readers,
        pytest.raises(CheckpointError, match="ends within tensor"),
    ):
        for reader in readers.values():
            reader[...]


@pytest.fixture(scope="module")
def whole_file(good):
    return (good / "model.safetensors").read_bytes()


def check_only_checkpoint_errors(file):
    try:
        checkpoint = Checkpoint.of([file])
        with checkpoint.readers(lambda amount: None) as readers:
            for name, reader in readers.items():
                assert tuple(reader[...].shape) == checkpoint.entries[name].shape
    except CheckpointError as error:
        assert str(file) in str(error)
        assert "\n" not in str(error)


_FEW = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@_FEW
@given(data=st.data())
def test_damaged_files_give_checkpoint_errors_alone(data, whole_file, tmp_path):
    """Cut anywhere, bytes flipped in the header or the length before it."""
    content = bytearray(whole_file)
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    for position in data.draw(st.lists(st.integers(0, header_end - 1), max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    file = tmp_path / "model.safetensors"
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    check_only_checkpoint_errors(file)


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["F32", "BF16", "I64", "Q3", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@_FEW
@given(header=_json | st.dictionaries(st.text(max_size=5), _json, max_size=3), data=st.binary(max_size=64))
def test_any_header_gives_tensors_or_a_checkpoint_error(header, data, tmp_path):
    file = tmp_path / "any.safetensors"
    file.write_bytes(with_header(header, data))
    check_only_checkpoint_errors(file)


@_FEW
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]),
    shape=st.lists(st.integers(0, 5), max_size=3),
)
def test_a_written_tensor_is_read_back(dtype, shape, tmp_path):
    file = tmp_path / "one.safetensors"
    tensor = (torch.randn(shape) > 0) if dtype == torch.bool else (torch.randn(shape) * 10).to(dtype)
    save_file({"tensor": tensor, "before": torch.ones(3, dtype=torch.uint8)}, file)
    with Checkpoint.of([file]).readers(lambda amount: None) as readers:
        got = readers["tensor"][...]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got.float(), tensor.float())
        if got.numel():
            assert got.data_ptr() % 64 == 0  # what JAX takes over without a copy


def test_a_reader_reads_whole_tensors_alone(folder):
    with Checkpoint.of([folder / "model.safetensors"]).readers(lambda amount: None) as readers:
        reader = next(iter(readers.values()))
        with pytest.raises(TypeError, match="is read whole"):
            reader[0]


# --- sets of files


@pytest.fixture
def sharded(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    return tmp_path / "sharded"


def test_a_missing_shard(sharded):
    files = sorted(sharded.glob("model-*.safetensors"))
    assert len(files) > 3
    for file in files[1:3]:
        file.unlink()
    check_refused(sharded, f"lacks 2 of the {len(files)} weight files", files[1].name, files[2].name)


@pytest.mark.parametrize(
    "index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}']
)
def test_an_index_that_is_none(sharded, index):
    (sharded / "model.safetensors.index.json").write_text(index)
    check_refused(sharded, "model.safetensors.index.json", "get the file again")


def test_of_a_tensor_in_two_shards_the_later_one_counts(sharded, caplog):
    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor + 1}, second, metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(sharded).get_parameter(name)
    ours = load_model(sharded).weights[name]
    np.testing.assert_array_equal(np.asarray(ours), theirs.detach().numpy())
    np.testing.assert_array_equal(theirs.detach().numpy(), (tensor + 1).numpy())
    assert f"{second} holds {name}, which an earlier file" in caplog.text


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_to_a_file_that_is_gone(folder, name):
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "blob")
    check_refused(folder, name, "to a file that is gone", "download the model again")


def test_architectures_that_are_a_string(folder):
    edit_json(folder / "config.json", architectures="LlamaForCausalLM")
    assert type(load_model(folder).module).__name__ == "LlamaForCausalLM"


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").rename(folder / "other.h5")
    check_refused(folder, "holds no weights: expected model.safetensors", "found config.json", "other.h5")


def test_the_file_that_the_configuration_names(folder):
    (folder / "model.safetensors").rename(folder / "special.safetensors")
    edit_json(folder / "config.json", transformers_weights="special.safetensors")
    assert load_model(folder).report.num_tensors
    edit_json(folder / "config.json", transformers_weights="gone.safetensors")
    check_refused(folder, "holds no weights: expected gone.safetensors")


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 not a zip"])
def test_a_pickle_file_that_is_none(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    check_refused(folder, "cannot be unpickled as tensors", allow_pickle=True)


def test_a_pickle_file_of_other_things(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"state": {"a": torch.ones(1)}}, folder / "pytorch_model.bin")
    check_refused(folder, "not a flat mapping of names to tensors", allow_pickle=True)
    torch.save({"a": CheckpointError}, folder / "pytorch_model.bin")
    check_refused(folder, "cannot be unpickled as tensors", allow_pickle=True)


# --- configuration


def test_a_folder_without_a_configuration(folder):
    (folder / "config.json").unlink()
    check_refused(folder, "holds no config.json, so it is not a model folder")
    (folder / "adapter_config.json").write_text("{}")
    check_refused(folder, "it holds an adapter: merge it into its base model")


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "\x00"])
def test_a_configuration_that_is_none(folder, content):
    (folder / "config.json").write_text(content)
    check_refused(folder, "config.json", "get the file again")


def test_an_adapter_beside_the_model(folder):
    (folder / "adapter_config.json").write_text("{}")
    check_refused(folder, "adapter_config.json", "would not be applied", error=UnsupportedModelError)


@pytest.mark.parametrize("model_type", ["warp_drive", None, 7, ["llama"]])
def test_an_architecture_that_transformers_does_not_know(folder, model_type):
    edit_json(folder / "config.json", model_type=model_type, architectures=["WarpDriveForCausalLM"])
    check_refused(folder, "does not know the architecture", "WarpDriveForCausalLM", error=UnsupportedModelError)


def test_a_configuration_without_a_type_goes_by_its_architecture(folder):
    edit_json(folder / "config.json", model_type=None)
    assert type(load_model(folder).module).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_configuration_that_asks_for_flash_attention(folder, key):
    edit_json(folder / "config.json", **{key: "flash_attention_2"})
    assert type(load_model(folder).module).__name__ == "LlamaForCausalLM"


def test_an_unknown_class_of_a_known_type(folder):
    edit_json(folder / "config.json", architectures=["LlamaForTimeTravel"])
    check_refused(folder, "has no class 'LlamaForTimeTravel' for model type 'llama'", error=UnsupportedModelError)
    edit_json(folder / "config.json", architectures=["MyOwnLlamaForCausalLM"])
    assert type(load_model(folder).module).__name__ == "LlamaForCausalLM"
    edit_json(folder / "config.json", architectures=None)
    assert type(load_model(folder).module).__name__ == "LlamaForCausalLM"
    edit_json(folder / "config.json", architectures="LlamaForCausalLM")
    assert type(load_model(folder).module).__name__ == "LlamaForCausalLM"


def test_a_quantization_that_is_not_read_is_named(folder):
    edit_json(folder / "config.json", quantization_config={"quant_method": "aqlm"})
    check_refused(
        folder, "quantization_config: aqlm", "expected one of awq", "unquantized", error=UnsupportedModelError
    )


def test_values_that_the_architecture_refuses(folder):
    edit_json(folder / "config.json", hidden_size="wide")
    check_refused(folder, "config.json")
    edit_json(folder / "config.json", hidden_size=32, hidden_act="no_such_function")
    check_refused(folder, "no_such_function")


def test_integer_weights_are_no_dtype_for_a_model(folder):
    edit_json(folder / "config.json", dtype="int8")
    check_refused(folder, "is in torch.int8, expected float32, bfloat16 or float16", error=UnsupportedModelError)


def test_a_broken_generation_configuration(folder):
    (folder / "generation_config.json").write_text("{")
    check_refused(folder, "generation_config.json", "correct or remove it")


# --- what a model is for


@pytest.mark.parametrize(
    ("name", "task"),
    [("bert", "an encoder that fills in masked words; BertLMHeadModel"), ("t5", "a sequence-to-sequence model")],
)
def test_models_that_do_not_generate_say_what_they_are_for(name, task, tmp_path):
    loaded = load_model(tiny_folder(tmp_path, name))
    with pytest.raises(UnsupportedModelError, match=task):
        require_causal_lm(loaded)


def test_a_base_model_is_no_language_model(folder):
    edit_json(folder / "config.json", architectures=["LlamaModel"])
    loaded = load_model(folder)  # the head has no place
    with pytest.raises(UnsupportedModelError, match="a base model without a language-model head; LlamaForCausalLM"):
        require_causal_lm(loaded)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba"])
def test_causal_language_models_pass(name, tmp_path):
    require_causal_lm(load_model(tiny_folder(tmp_path, name)))


# --- code of the repository

_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    is_own = True
"""


@pytest.fixture
def with_code(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_json(folder / "config.json", model_type="own_llama", architectures=["OwnForCausalLM"], auto_map=auto_map)
    (folder / "own.py").write_text(_CODE)
    return folder


def test_code_runs_only_when_trusted(with_code):
    check_refused(with_code, "brings code of its own", "trust_remote_code=True", error=UnsupportedModelError)
    loaded = load_model(with_code, trust_remote_code=True)
    assert loaded.module.is_own
    assert loaded.config.model_type == "own_llama"
    require_causal_lm(loaded)


@pytest.mark.parametrize("reference", ["/etc/own.OwnConfig", "../own.OwnConfig", "own", 7, "a/b--../own.Config"])
def test_code_outside_of_the_folder_is_not_run(with_code, reference):
    edit_json(with_code / "config.json", auto_map={"AutoConfig": reference, "AutoModel": "own.OwnForCausalLM"})
    check_refused(with_code, "auto_map names ", "a file of the same folder", trust_remote_code=True)


def test_a_tokenizer_of_code_outside_of_the_folder(with_code):
    auto_map = {"AutoTokenizer": ["/etc/own.OwnTokenizer", None]}
    (with_code / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    check_refused(with_code, "tokenizer_config.json: auto_map names '/etc/own.OwnT", trust_remote_code=True)


def test_model_code_over_a_known_configuration(folder):
    edit_json(folder / "config.json", architectures=["OwnThing"], auto_map={"AutoModelForCausalLM": "own.OwnThing"})
    check_refused(folder, "brings model code of its own", "trust_remote_code=True", error=UnsupportedModelError)


# --- tokenizer


def test_no_tokenizer_and_a_broken_one(folder):
    assert load_model(folder).tokenizer() is None
    (folder / "tokenizer.json").write_text("{ broken")
    loaded = load_model(folder)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"the tokenizer files in .* do not make a tokenizer"):
            loaded.tokenizer()


def test_a_tokenizer_is_loaded_once(folder):
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    loaded = load_model(folder)
    assert loaded.tokenizer()("b").input_ids == [1]
    assert loaded.tokenizer() is loaded.tokenizer()
    as_object = load_model(AutoModelForCausalLM.from_pretrained(folder))
    assert as_object.tokenizer()("b").input_ids == [1]


def test_a_tokenizer_with_code_of_its_own(folder):
    auto_map = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": auto_map}))
    with pytest.raises(UnsupportedModelError, match=r"the tokenizer in .* brings code of its own"):
        load_model(folder).tokenizer()


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_entries(tmp_path / "gone.safetensors")
