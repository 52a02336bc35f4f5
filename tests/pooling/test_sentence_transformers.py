"""Rules of sentence-transformers' files beside a recomputation by torch.nn, one text at a time.

The recomputation was compared with the package itself (release 6.2), to 3e-6 over these and further rules.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from encoder_models import TEXTS, folder, tokenizer, write
from safetensors.torch import save_file

from torchax_serve import CheckpointError, InvalidArgumentError, UnsupportedModelError, serve
from torchax_serve.pooling.layers import ACTIVATIONS, Layer, PoolingOptions, TokenRows, embeddings
from torchax_serve.pooling.sentence_transformers import rule_in

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")

OLD = "sentence_transformers.models."
POOL = {"word_embedding_dimension": 32}
MEAN = POOL | {"pooling_mode_mean_tokens": True}
FLAGS = ["cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]


def modules(path, *steps):
    entries = [
        {"idx": index, "name": str(index), "path": where, "type": kind if "." in kind else OLD + kind}
        for index, (where, kind) in enumerate([("", "Transformer"), *steps])
    ]
    write(path / "modules.json", entries)


@pytest.fixture
def bert(tmp_path):
    """A folder with a tiny BERT that pools by the mean, and the eager model."""
    eager = folder(tmp_path, "BertModel")
    modules(tmp_path, ("1_Pooling", "Pooling"))
    write(tmp_path / "1_Pooling" / "config.json", MEAN)
    return tmp_path, eager


def hidden_of(eager, text, max_len=64):
    with torch.no_grad():
        inputs = tokenizer()(text, truncation=True, max_length=max_len, return_tensors="pt")
        return eager(**inputs).last_hidden_state[0]


def check(path, expected, texts=tuple(TEXTS), **options):
    with serve(path, allow_pickle=True) as served:
        check_served(served, expected, texts, **options)


def check_served(served, expected, texts=tuple(TEXTS), **options):
    found = served.embed(list(texts), **options)
    wanted = np.stack([expected(text).detach().numpy() for text in texts])
    np.testing.assert_allclose(found, wanted, atol=2e-5)


BY_FLAG = {
    "cls_token": lambda x: x[0],
    "max_tokens": lambda x: x.max(0).values,
    "mean_tokens": lambda x: x.mean(0),
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / len(x) ** 0.5,
    "weightedmean_tokens": lambda x: (torch.arange(1, len(x) + 1)[:, None] * x).sum(0) / sum(range(1, len(x) + 1)),
    "lasttoken": lambda x: x[-1],
}


@pytest.mark.parametrize("chosen", [[], ["max_tokens"], FLAGS[::-1]], ids=len)
def test_poolings_by_their_flags(bert, chosen):
    """Joined in the order of the flags in the package, whatever that in the file; the mean where none is set."""
    path, eager = bert
    flags = {f"pooling_mode_{flag}": flag in chosen for flag in FLAGS[::-1]}
    write(path / "1_Pooling" / "config.json", POOL | flags)
    names = [flag for flag in FLAGS if flag in chosen] or ["mean_tokens"]
    check(path, lambda text: torch.cat([BY_FLAG[name](hidden_of(eager, text)) for name in names]))


def test_names_of_newer_releases(bert):
    path, eager = bert
    modules(
        path,
        ("1_Pooling", "sentence_transformers.sentence_transformer.modules.pooling.Pooling"),
        ("2_Normalize", "sentence_transformers.base.modules.normalize.Normalize"),
        ("3_Dropout", "sentence_transformers.sentence_transformer.modules.dropout.Dropout"),
    )
    write(path / "1_Pooling" / "config.json", {"embedding_dimension": 32, "pooling_mode": ["lasttoken", "cls"]})
    write(path / "2_Normalize" / "config.json", {"module_input_name": "sentence_embedding"})
    write(
        path / "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            "module_output_name": "token_embeddings",
            "processor_kwargs": {"model_max_length": 9},
            "model_kwargs": {"attn_implementation": "sdpa"},
        },
    )

    def expected(text):
        hidden = hidden_of(eager, text, 9)
        return torch.nn.functional.normalize(torch.cat([hidden[-1], hidden[0]]), dim=0)

    check(path, expected, [*TEXTS, "cat " * 30])


def dense(path, name, config, tensors, file="model.safetensors"):
    write(path / name / "config.json", config)
    if file.endswith(".bin"):
        torch.save(tensors, path / name / file)
    else:
        save_file(tensors, path / name / file)


def test_layers_before_and_after_the_pooling_run_in_order(bert):
    path, eager = bert
    torch.manual_seed(1)
    first, second, over = torch.nn.Linear(32, 16), torch.nn.Linear(16, 8, bias=False), torch.nn.Linear(16, 8, False)
    norm = torch.nn.LayerNorm(8)
    torch.nn.init.normal_(norm.weight)
    modules(
        path,
        ("1_Dense", "Dense"),
        ("2_Pooling", "Pooling"),
        ("3_Normalize", "Normalize"),
        ("4_Dense", "Dense"),
        ("5_LayerNorm", "LayerNorm"),
    )
    write(path / "2_Pooling" / "config.json", POOL | {"pooling_mode_max_tokens": True})
    of_tokens = {"module_input_name": "token_embeddings", "activation_function": "torch.nn.modules.activation.SiLU"}
    sizes = {"in_features": 32, "out_features": 16, "bias": True}
    dense(path, "1_Dense", sizes | of_tokens, {f"linear.{k}": v for k, v in first.state_dict().items()})
    sizes = {"in_features": 16, "out_features": 8, "bias": False, "use_residual": True}
    tensors = {"linear.weight": second.weight.detach(), "residual.weight": over.weight.detach()}
    dense(path, "4_Dense", sizes, tensors, "pytorch_model.bin")  # without a name the activation is Tanh
    dense(path, "5_LayerNorm", {"dimension": 8}, {f"norm.{k}": v for k, v in norm.state_dict().items()})

    def expected(text):
        pooled = torch.nn.functional.silu(first(hidden_of(eager, text))).max(0).values
        unit = torch.nn.functional.normalize(pooled, dim=0)
        return norm(torch.tanh(second(unit)) + over(unit))

    check(path, expected)
    with serve(path) as served, pytest.raises(CheckpointError, match=r"4_Dense are pickle files .* allow_pickle=True"):
        served.embed("cat")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_match_torch(name):
    module = getattr(torch.nn, name)()
    x = torch.linspace(-9, 9, 37)
    weights = ({"linear.weight": np.eye(37, dtype=np.float32)},)
    layers = (Layer("pooling", ("cls",)), Layer("dense", activation=name))
    none = np.zeros(1, np.int32)
    one_text = TokenRows(none, none, 1)
    options = PoolingOptions(pooling=0, num_values=37, keeps_norms=True, normalize=False)
    found = embeddings(layers, ({}, *weights), jnp.asarray(x.numpy()[None]), one_text, none, options)
    np.testing.assert_allclose(found[0], module(x).numpy(), atol=1e-6, rtol=1e-6)


def test_the_prompt_is_read_and_not_pooled(bert):
    path, eager = bert
    flags = {f"pooling_mode_{flag}": True for flag in FLAGS}
    write(path / "1_Pooling" / "config.json", POOL | flags | {"include_prompt": False})
    prompts = {"query": "the cat ", "passage": "small "}
    write(path / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})

    def expected(prompt):
        num_tokens = 1 + len(prompt.split()) if prompt else 0  # the start of the text, and a token a word

        def of(text):
            hidden = hidden_of(eager, prompt + text)
            places = torch.arange(1, len(hidden) + 1)[num_tokens:, None]
            weighted = (places * hidden[num_tokens:]).sum(0) / places.sum()  # the place counts the prompt
            found = {flag: BY_FLAG[flag](hidden[num_tokens:]) for flag in FLAGS} | {"weightedmean_tokens": weighted}
            return torch.cat([found[flag] for flag in FLAGS])

        return of

    with serve(path) as served:
        check_served(served, expected("the cat "))
        check_served(served, expected("small "), prompt_name="passage")
        check_served(served, expected("red "), prompt="red ")
        check_served(served, expected(""), prompt="")
        check_served(served, expected(""), prompt_name="document")  # there and empty where no file fills it


def test_token_ids_get_no_prompt_and_are_all_pooled(bert):
    path, eager = bert
    write(path / "1_Pooling" / "config.json", MEAN | {"include_prompt": False})
    write(path / "config_sentence_transformers.json", {"prompts": {"a": "the "}, "default_prompt_name": "a"})
    ids = tokenizer()(TEXTS[0])["input_ids"]
    with serve(path) as served:
        found = served.embed([ids, TEXTS[0]])
    np.testing.assert_allclose(found[0], hidden_of(eager, TEXTS[0]).mean(0), atol=2e-5)
    np.testing.assert_allclose(found[1], hidden_of(eager, "the " + TEXTS[0])[2:].mean(0), atol=2e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_max_length_is_read_from_any_of_the_files(tmp_path, kind):
    modules(tmp_path, ("1_Pooling", "Pooling"))
    write(tmp_path / "1_Pooling" / "config.json", MEAN)
    write(tmp_path / f"sentence_{kind}_config.json", {"max_seq_length": 7, "do_lower_case": True})
    rule = rule_in(tmp_path).text
    assert (rule.max_len, rule.lower_case) == (7, True)


def test_longer_texts_are_cut_with_one_warning(bert, caplog):
    path, eager = bert
    write(path / "sentence_roberta_config.json", {"max_seq_length": 7, "do_lower_case": False})
    with serve(path) as served:
        served.embed(["a dog"])
        assert not [each for each in caplog.records if each.name == "torchax_serve"]
        for _ in range(2):
            check_served(served, lambda text: hidden_of(eager, text, 7).mean(0), [*TEXTS, "cat " * 70])
    said = [each.getMessage() for each in caplog.records if each.name == "torchax_serve"]
    assert said == [f"{path}: texts are cut to 7 tokens, as its files say; 3 of 4 are longer"]


def test_max_length_of_the_files_precedes_that_of_the_tokenizer(bert):
    path, eager = bert
    config = json.loads((path / "tokenizer_config.json").read_text())
    write(path / "tokenizer_config.json", config | {"model_max_length": 5})
    write(path / "sentence_bert_config.json", {"max_seq_length": 512})  # more than the model's positions
    check(path, lambda text: hidden_of(eager, text, 64).mean(0), [TEXTS[2], "cat " * 70])


def test_lower_case_keeps_special_tokens(bert):
    path, eager = bert
    write(path / "sentence_bert_config.json", {"max_seq_length": 32, "do_lower_case": True})
    with serve(path) as served:
        check_served(served, lambda text: hidden_of(eager, "the dog [SEP] ran").mean(0), ["THE DOG [SEP] RAN"])
        assert served.tokenizer("DOG")["input_ids"] != served.tokenizer("dog")["input_ids"]  # the model's own stays


def test_dimensions_of_matryoshka(bert):
    path, eager = bert
    modules(path, ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    write(path / "config_sentence_transformers.json", {"truncate_dim": 8})
    unit = torch.nn.functional.normalize
    with serve(path) as served:
        check_served(served, lambda text: unit(hidden_of(eager, text).mean(0), dim=0)[:8])
        check_served(served, lambda text: unit(hidden_of(eager, text).mean(0), dim=0)[:4], truncate_dim=4)
        check_served(served, lambda text: unit(hidden_of(eager, text).mean(0)[:8], dim=0), normalize=True)
        for wrong in (0, -1, True, "4", 33):
            with pytest.raises(InvalidArgumentError, match=r"truncate_dim: expected a number from 1 to 32"):
                served.embed("cat", truncate_dim=wrong)


def test_model_in_its_own_folder(tmp_path):
    eager = folder(tmp_path / "0_Transformer", "BertModel")
    entries = [("0_Transformer", "Transformer"), ("1_Pooling", "Pooling")]
    write(tmp_path / "modules.json", [{"path": path, "type": OLD + kind} for path, kind in entries])
    write(tmp_path / "1_Pooling" / "config.json", MEAN)
    write(tmp_path / "0_Transformer" / "sentence_bert_config.json", {"max_seq_length": 5})
    write(tmp_path / "config_sentence_transformers.json", {"prompts": {"a": "the "}, "default_prompt_name": "a"})
    check(tmp_path, lambda text: hidden_of(eager, "the " + text, 5).mean(0))


@pytest.mark.parametrize(
    ("file", "content", "error", "said"),
    [
        ("1_Pooling/config.json", POOL | {"pooling_mode": "median"}, CheckpointError, "expected a pooling of"),
        ("1_Pooling/config.json", MEAN | {"window": 3}, UnsupportedModelError, "got window, which would not be hon"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, CheckpointError, "max_seq_length is 0, expected a pos"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, UnsupportedModelError, "transformer_task is"),
        ("sentence_bert_config.json", {"config_args": {"hidden_act": "relu"}}, UnsupportedModelError, "config_kwargs"),
        ("sentence_bert_config.json", {"tokenizer_args": {"truncation_side": "left"}}, UnsupportedModelError, "proces"),
        ("sentence_bert_config.json", {"query_length": 3}, UnsupportedModelError, "query_length is 3, which is not"),
        ("sentence_bert_config.json", [], CheckpointError, "expected a JSON object, got list"),
        ("config_sentence_transformers.json", {"prompts": ["a"]}, CheckpointError, "expected texts by name"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, CheckpointError, "default_prompt_name is"),
        ("config_sentence_transformers.json", {"truncate_dim": "8"}, CheckpointError, "truncate_dim is '8'"),
        ("modules.json", [{"type": OLD + "Transformer", "path": "../x"}], CheckpointError, "within its own folder"),
        (
            "modules.json",
            [{"type": OLD + "Transformer"}],
            CheckpointError,
            "one module of type Pooling, got 0",
        ),
        ("modules.json", [{"type": OLD + "LSTM", "path": "1"}], UnsupportedModelError, "type sentence_tr.*models.LSTM"),
        ("modules.json", [{"type": "own_code.Pooling", "path": "1"}], UnsupportedModelError, "type own_code.Pooling"),
        ("modules.json", [{"type": OLD + "Normalize", "path": "1"}], UnsupportedModelError, "writes token_embeddings"),
        ("modules.json", [{"type": OLD + "Dense", "path": "9"}], CheckpointError, "lacks config.json, which modules"),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path, file, content, error, said):
    modules(tmp_path, ("1_Pooling", "Pooling"))
    write(tmp_path / "config.json", {"hidden_act": "gelu"})
    write(tmp_path / "1_Pooling" / "config.json", MEAN)
    write(tmp_path / file, content)
    with pytest.raises(error, match=said) as caught:
        rule_in(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({"activation_function": "own.Swish"}, {"linear.weight": torch.ones(2, 32)}, r"activation own\.Swish, exp"),
        ({"activation_function": "torch.nn.PReLU"}, {"linear.weight": torch.ones(2, 32)}, "activation torch.nn.PReLU"),
        ({"gate": True}, {"linear.weight": torch.ones(2, 32)}, "got gate, which would not be honoured"),
        ({}, {"weight": torch.ones(2, 32)}, "expected tensors linear.weight, got weight"),
        ({}, {"linear.weight": torch.ones(2, 31)}, r"linear\.weight is \[2, 31\], expected \[2, 32\]"),
        ({"bias": True}, {"linear.weight": torch.ones(2, 32)}, "linear.bias"),
    ],
)
def test_invalid_dense_layer(bert, config, tensors, said):
    path, _ = bert
    modules(path, ("1_Pooling", "Pooling"), ("2_Dense", "Dense"))
    dense(path, "2_Dense", {"in_features": 32, "out_features": 2, "bias": False} | config, tensors)
    with serve(path) as served, pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        served.embed("cat")


def test_invalid_prompts(bert):
    path, _ = bert
    with serve(path) as served:
        with pytest.raises(InvalidArgumentError, match="prompt and prompt_name: expected one of them, got both"):
            served.embed("cat", prompt="a", prompt_name="query")
        with pytest.raises(InvalidArgumentError, match="prompt: expected a text, got 3"):
            served.embed("cat", prompt=3)


def test_encoder_decoder_that_pools_the_decoder_is_refused(tmp_path):
    import transformers

    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(vocab_size=40, d_model=8, max_position_embeddings=32, **sizes, **heads)
    transformers.BartModel(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    modules(tmp_path, ("1_Pooling", "Pooling"))
    write(tmp_path / "1_Pooling" / "config.json", MEAN)
    with serve(tmp_path) as served:
        with pytest.raises(UnsupportedModelError, match="embeds by the decoder of a model of type bart"):
            served.embed([[5, 6]])
        assert served.embed([[5, 6]], pooling="mean").shape == (1, 8)


def test_missing_files_are_named(bert):
    path, _ = bert
    (path / "1_Pooling" / "config.json").unlink()
    with serve(path) as served:
        with pytest.raises(CheckpointError, match=r"1_Pooling lacks config\.json, which modules\.j"):
            served.embed("cat")
        assert served.embed("cat", pooling="mean").shape == (32,)
