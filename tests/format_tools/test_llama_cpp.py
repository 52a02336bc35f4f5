"""GGUF files that llama.cpp itself converts and quantizes, against its dequantization and its logits."""

import math
import shutil
import unicodedata

import numpy as np
import pytest
import torch
import transformers as tf
from gguf_files import SIZES, tiny_model, write_gguf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from model_adapters.loading import load_model
from model_adapters.loading.formats.gguf_blocks import QUANTIZED_TYPES, unpack_blocks
from model_adapters.loading.formats.gguf_file import GgufFile
from model_adapters.loading.formats.gguf_model import tokenizer_of
from model_adapters.loading.formats.gguf_words import NAMES
from model_adapters.ops.compressed_weight import unpacked

_SIZES = {**SIZES, "vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GPT = {"vocab_size": 320, "n_embd": 256, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
_FALCON = {**_GPT, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False, "bias": False}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MOE = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2}
_GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.0156, "residual_multiplier": 0.22}
_GRANITE |= {"logits_scaling": 8.0}
_GPT_OSS = {**_SIZES, "head_dim": 64, "intermediate_size": 256, "sliding_window": 16}
_GPT_OSS |= {"num_local_experts": 4, "num_experts_per_tok": 4}  # all: a near tie of experts falls either way
_FULL = ["full_attention"] * _SIZES["num_hidden_layers"]
_WINDOW = {"num_hidden_layers": 4, "sliding_window": 16}


def rope(**changes):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0, **changes}}


_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

CONFIGS = {
    "bloom": (tf.BloomConfig, {**_GPT, "hidden_size": 256}),
    "cohere2": (
        tf.Cohere2Config,
        {**_SIZES, **_WINDOW, **rope(), "logit_scale": 0.25, "rotary_pct": 1.0, "head_dim": 64},
    ),
    "command-r": (tf.CohereConfig, {**_SIZES, **rope(), "logit_scale": 0.0625}),
    "ernie4_5": (tf.Ernie4_5Config, {**_SIZES, **rope(), "head_dim": 64}),
    "exaone4": (tf.Exaone4Config, {**_SIZES, **rope(), "sliding_window": None, "layer_types": _FULL}),
    "exaone4-with-windows": (tf.Exaone4Config, {**_SIZES, **_WINDOW, **rope()}),
    "falcon": (tf.FalconConfig, {**_FALCON, "num_kv_heads": 1, "new_decoder_architecture": False}),
    "falcon-40b": (tf.FalconConfig, {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "gemma": (tf.GemmaConfig, {**_SIZES, "head_dim": 128}),
    "gemma2": (tf.Gemma2Config, {**_SIZES, "head_dim": 128, "sliding_window": 16, "query_pre_attn_scalar": 128}),
    "gemma3": (
        tf.Gemma3TextConfig,
        {**_SIZES, "num_hidden_layers": 7, "head_dim": 128, "sliding_window": 16, "query_pre_attn_scalar": 128},
    ),
    "glm4": (tf.Glm4Config, {**_SIZES, **rope(partial_rotary_factor=0.5), "head_dim": 64}),
    "gpt-oss": (tf.GptOssConfig, {**_GPT_OSS, **rope()}),
    "gpt-oss-with-yarn": (tf.GptOssConfig, {**_GPT_OSS, **rope(**_YARN, original_max_position_embeddings=4096)}),
    "granite": (tf.GraniteConfig, {**_SIZES, **rope(), **_GRANITE}),
    "granitemoe": (tf.GraniteMoeConfig, {**_SIZES, **rope(), **_GRANITE, **_EXPERTS}),
    "hunyuan-dense": (tf.HunYuanDenseV1Config, {**_SIZES, **rope(), "head_dim": 64}),
    "lfm2": (tf.Lfm2Config, {**_SIZES, **rope(), "layer_types": ["conv", "full_attention"]}),
    "llama": (tf.LlamaConfig, {**_SIZES, **rope(**_LLAMA3, original_max_position_embeddings=8192)}),
    "llama-with-biases": (tf.LlamaConfig, {**_SIZES, **rope(), "attention_bias": True}),
    "mamba": (tf.MambaConfig, {**_SIZES, "state_size": 16}),
    "mixtral": (tf.MixtralConfig, {**_SIZES, **rope(), **_EXPERTS, "sliding_window": None}),
    "nemotron": (tf.NemotronConfig, {**_SIZES, **rope(partial_rotary_factor=0.5), "head_dim": 64}),
    "olmo2": (tf.Olmo2Config, {**_SIZES, **rope()}),
    "olmo3": (tf.Olmo3Config, {**_SIZES, **_WINDOW, **rope()}),
    "phi2": (tf.PhiConfig, {**_SIZES, "num_key_value_heads": 4, "intermediate_size": 1024}),
    "phi3": (tf.Phi3Config, {**_SIZES, **rope(partial_rotary_factor=0.75), "sliding_window": 16}),
    "qwen2moe": (tf.Qwen2MoeConfig, {**_SIZES, **rope(), **_MOE, "shared_expert_intermediate_size": 512}),
    "qwen3": (tf.Qwen3Config, {**_SIZES, **rope(), "head_dim": 128}),
    "qwen3moe": (tf.Qwen3MoeConfig, {**_SIZES, **rope(), **_MOE, "head_dim": 64, "norm_topk_prob": True}),
    "seed_oss": (tf.SeedOssConfig, {**_SIZES, **rope(), "head_dim": 64}),
    "smollm3": (tf.SmolLM3Config, {**_SIZES, **rope(), "num_hidden_layers": 4}),
    "stablelm": (tf.StableLmConfig, {**_SIZES, "use_qkv_bias": True}),
    "starcoder2": (tf.Starcoder2Config, {**_SIZES, **rope()}),
}
# It wants a vocabulary of SentencePiece, has windows in EXAONE 4 of 64 layers alone, and rounds the bounds of YaRN's
# ramp, which gpt-oss does not.
NOT_IN_LLAMA_CPP = ("phi3", "exaone4-with-windows", "gpt-oss-with-yarn")
PROMPT = torch.randint(3, 256, (1, 48), generator=torch.Generator().manual_seed(3))


def made(name, **changes):
    config_class, settings = CONFIGS[name]
    model = tf.AutoModelForCausalLM.from_config(config_class(**{**settings, **changes})).float().eval()
    rng = torch.Generator().manual_seed(1)
    for key, parameter in model.named_parameters():
        drawn = torch.empty_like(parameter).normal_(std=0.08, generator=rng)
        parameter.data = drawn if parameter.ndim > 1 and not key.endswith("A_log") else parameter.data + drawn
    return model


def saved(folder, model):
    """The folder of a model with a byte-level tokenizer, as the converter wants it."""
    from serving_peers.conversion import write_tokenizer

    model.save_pretrained(folder)
    write_tokenizer(folder, model.config.vocab_size)
    return folder


@pytest.fixture(scope="module")
def converted(llama_cpp, tmp_path_factory):
    """Models by name, and the folder of their files, all made by one process of the converter."""
    root = tmp_path_factory.mktemp("converted")
    models = {name: made(name) for name in CONFIGS}
    llama_cpp.convert([saved(root / name, model) for name, model in models.items()])
    yield models, root
    shutil.rmtree(root)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_the_converter_writes_is_the_model_again(name, llama_cpp, converted):
    """llama.cpp computes the same of it, too, but for its cache in float16."""
    models, root = converted
    model, loaded = models[name], load_model(root / f"{name}.gguf", dtype="float32")
    weights = {key: torch.from_numpy(np.array(unpacked(weight))) for key, weight in loaded.weights.items()}
    for key, tensor in model.state_dict().items():  # norms of Gemma and Nemotron are stored plus one
        np.testing.assert_allclose(weights[key], tensor, rtol=0, atol=2e-7, err_msg=key)
    assert not loaded.report.unused_tensors
    twin = tf.AutoModelForCausalLM.from_config(loaded.config).float().eval()
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        wanted, ours = model(PROMPT).logits[0], twin(PROMPT).logits[0]
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)
    if name not in NOT_IN_LLAMA_CPP:
        theirs = llama_cpp.open(root / f"{name}.gguf").logits(PROMPT[0].tolist(), model.config.vocab_size)
        assert np.abs(theirs - wanted.numpy()).mean() < 0.003 * wanted.std()


def check_blocks(llama_cpp, file):
    """Every quantized tensor has the numbers that ggml computes; returns the types."""
    header, kinds = GgufFile.read(file), set()
    data = np.memmap(file, np.uint8, "r")
    for tensor in header.tensors.values():
        if tensor.type_name in QUANTIZED_TYPES:
            raw = np.array(data[tensor.offset : tensor.offset + tensor.num_bytes])
            theirs = llama_cpp.dequantize(raw, tensor.type_name, math.prod(tensor.shape))
            ours = unpack_blocks(torch.from_numpy(raw), tensor.type_name, tensor.shape).dense()
            np.testing.assert_array_equal(ours.numpy().ravel(), theirs, err_msg=tensor.name)
            kinds.add(tensor.type_name)
    return kinds


def check_greedy(llama_cpp, file, *, within, new_tokens=12):
    """Each greedy token of the engine is llama.cpp's, or one that it finds as likely but for `within`, as a logarithm.

    llama.cpp rounds activations to 8 bits and the cache to float16, so that near ties fall another way.
    """
    from torchax_serve import EngineOptions, SamplingParams, serve

    prompt = PROMPT[0, :16].tolist()
    with serve(file, engine=EngineOptions(max_num_seqs=2)) as model:
        params = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=True)
        tokens = list(model.iter_tokens(prompt, params=params))
        size = model.config.vocab_size
    logits = llama_cpp.open(file).logits([*prompt, *tokens], size)[len(prompt) - 1 : -1]
    gaps = logits.max(-1) - logits[np.arange(len(tokens)), tokens]
    assert len(tokens) == new_tokens and gaps.max() < within, gaps


MIXES = {
    "Q4_0": {"Q4_0", "Q6_K"},
    "Q5_0": {"Q5_0", "Q6_K"},
    "Q8_0": {"Q8_0"},
    "Q4_K_S": {"Q4_K", "Q5_K", "Q6_K"},
    "Q4_K_M": {"Q4_K", "Q6_K"},
    "Q5_K_M": {"Q5_K", "Q6_K"},
    "Q6_K": {"Q6_K"},
}


@pytest.mark.parametrize("mix", MIXES)
def test_its_quantizers_blocks(mix, llama_cpp, converted, tmp_path):
    """Also experts of gpt-oss, whose gate and up projection are joined by rows."""
    for name in ("llama", "gpt-oss"):
        file = tmp_path / f"{name}.gguf"
        llama_cpp.quantize(converted[1] / f"{name}.gguf", file, mix)
        assert check_blocks(llama_cpp, file) >= MIXES[mix] - {"Q5_K"}
        load_model(file)
    check_greedy(llama_cpp, tmp_path / "llama.gguf", within=0.2)


def test_rows_that_no_block_of_256_fits(llama_cpp, tmp_path):
    """The quantizer takes types with blocks of 32 for them."""
    model = made("llama", hidden_size=288, intermediate_size=544, num_attention_heads=4, head_dim=72)
    llama_cpp.convert([saved(tmp_path / "m", model)])
    for mix, kinds in (("Q4_K_M", {"Q5_0", "Q8_0"}), ("Q5_K_M", {"Q5_1", "Q8_0"}), ("Q6_K", {"Q8_0"})):
        llama_cpp.quantize(tmp_path / "m.gguf", tmp_path / "q.gguf", mix)
        assert check_blocks(llama_cpp, tmp_path / "q.gguf") == kinds
        check_greedy(llama_cpp, tmp_path / "q.gguf", within=0.2)


def test_experts_in_mxfp4(llama_cpp, converted, tmp_path):
    llama_cpp.quantize(converted[1] / "gpt-oss.gguf", tmp_path / "m.gguf", "MXFP4_MOE")
    assert check_blocks(llama_cpp, tmp_path / "m.gguf") >= {"MXFP4"}
    check_greedy(llama_cpp, tmp_path / "m.gguf", within=0.2)


TEXTS = [
    "I'll say WE'RE don't  they'VE\n\n\n  indented\t\tcode = x1y22zz333;\r\n",
    "12 + 30 = 42, 1984, 3.14159, 1234567 ½ €20 ²",
    "naïve café — “quoted” … 東京は日本の 今天天气很好，我们 안녕하세요 नमस्ते दुनिया مرحبا ۔",  # noqa: RUF001
    "a_b-c/d\\e {[(<$x>)]} #include <stdio.h>\n\tfor (int i=0; i<10; ++i) {}  \n",
    "HTTPServer camelCase XMLHttpRequest über ÄÖÜ 😀👩‍👩‍👧‍👦 ",
]


def byte_level(writer, vocab_size, name):
    """A vocabulary whose merges cross words, so that every difference of a split is seen."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=1, initial_alphabet=alphabet)
    backend.train_from_iterator(TEXTS * 2, trainer)
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    import json

    merges = json.loads(backend.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in range(vocab_size - len(tokens)))])
    writer.add_token_types([1] * len(tokens) + [5] * (vocab_size - len(tokens)))
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(0)


# llama.cpp's expressions for these take marks, as vowel signs in Hindi, for no part of a word. The tokenizers of the
# models do, and this project follows them.
WITHOUT_MARKS = ("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_split_as_llama_cpp_splits_them(name, llama_cpp, tmp_path):
    model = tiny_model("llama", num_hidden_layers=1, vocab_size=600)
    write = lambda writer, size: byte_level(writer, size, name)  # noqa: E731
    file = write_gguf(tmp_path / "m.gguf", model, "llama", "Q8_0", tokenizer=write)
    theirs, ours = llama_cpp.open(file), tokenizer_of(GgufFile.read(file))
    for text in TEXTS:
        if name in WITHOUT_MARKS:
            text = "".join(each for each in text if not unicodedata.category(each).startswith("M"))
        assert ours(text)["input_ids"] == theirs.tokenize(text), text
