"""Embeddings of tokens, and scores by embeddings, beside a few lines of torch on eager hidden states.

The same files were compared with `MultiVectorEncoder` and `SentenceTransformer` of sentence-transformers 6.2, to 2e-6.
"""

import json

import numpy as np
import pytest
import torch
from encoder_models import TEXTS, folder, tokenizer, write
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchax_serve import CheckpointError, InvalidArgumentError, UnsupportedModelError, serve
from torchax_serve.pooling.sentence_transformers import rule_in
from torchax_serve.pooling.similarity import SIMILARITIES
from torchax_serve.pooling.text_tokenizer import keep_prefixes
from torchax_serve.pooling.token_rule import Expansion

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")

BASE = "sentence_transformers."
DENSE = {"in_features": 32, "out_features": 16, "bias": False, "activation_function": "torch.nn.Identity"}
PLACES = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
EXPANSION = {"strategy": "fixed", "attend": False, "token": None, "length": 9}
SKIPPED = ["the", "rain", "no word"]


def write_modules(path, *entries):
    modules = [{"idx": i, "name": str(i), "path": where, "type": name} for i, (where, name) in enumerate(entries)]
    write(path / "modules.json", modules)


def write_multi_vector(path, projection, expansion=EXPANSION, **mask):
    """Writes the files of a release 6 of sentence-transformers."""
    write_modules(
        path,
        ("", BASE + "base.modules.transformer.Transformer"),
        ("1_Dense", BASE + "base.modules.dense.Dense"),
        ("2_MultiVectorMask", BASE + "multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"),
        ("3_Normalize", BASE + "base.modules.normalize.Normalize"),
    )
    write(path / "sentence_bert_config.json", {"query_expansion": expansion, "document_length": 10})
    write(path / "1_Dense" / "config.json", DENSE | PLACES)
    save_file({"linear.weight": projection}, path / "1_Dense" / "model.safetensors")
    write(path / "2_MultiVectorMask" / "config.json", {"skiplist_words": SKIPPED, "keep_only_token_ids": None} | mask)
    write(path / "3_Normalize" / "config.json", PLACES)
    prompts = {"query": "red ", "document": "blue "}
    write(path / "config_sentence_transformers.json", {"model_type": "MultiVectorEncoder", "prompts": prompts})


@pytest.fixture(scope="module")
def projection():
    torch.manual_seed(2)
    return torch.randn(16, 32) / 6


@pytest.fixture(scope="module")
def colbert(tmp_path_factory, projection):
    """A served ColBERT model, and the eager model below its projection."""
    path = tmp_path_factory.mktemp("colbert")
    eager = folder(path, "BertModel")
    write_multi_vector(path, projection)
    with serve(path) as served:
        yield served, eager


def unit_tokens(eager, projection, ids, attended):
    with torch.no_grad():
        hidden = eager(input_ids=torch.tensor([ids]), attention_mask=torch.tensor([attended])).last_hidden_state[0]
    return torch.nn.functional.normalize(hidden @ projection.T, dim=-1)


def query_tokens(eager, projection, text, length=9, *, attends=False):
    ids = tokenizer()(text, truncation=True, max_length=length)["input_ids"]
    added = length - len(ids)
    attended = [1] * len(ids) + [int(attends)] * added
    return unit_tokens(eager, projection, ids + [tokenizer().mask_token_id] * added, attended)


def document_tokens(eager, projection, text, length=10, skipped=SKIPPED):
    ids = tokenizer()(text, truncation=True, max_length=length)["input_ids"]
    skipped_ids = tokenizer().convert_tokens_to_ids(skipped[:2])
    kept = torch.tensor([id_ not in skipped_ids for id_ in ids])
    return unit_tokens(eager, projection, ids, [1] * len(ids))[kept]


def check_each(found, expected):
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, wanted.numpy(), atol=1e-5)


def maxsim(query, document):
    return float((query @ document.T).max(1).values.sum())


def test_queries_are_made_longer_and_documents_lose_skipped_words(colbert, projection):
    served, eager = colbert
    check_each(
        served.embed_tokens(TEXTS[:2], task="query"),
        [query_tokens(eager, projection, "red " + text) for text in TEXTS[:2]],
    )
    check_each(served.embed_tokens(TEXTS), [document_tokens(eager, projection, "blue " + text) for text in TEXTS])
    one = served.embed_tokens(TEXTS[0], prompt="big ")
    np.testing.assert_allclose(one, document_tokens(eager, projection, "big " + TEXTS[0]).numpy(), atol=1e-5)


def test_pairs_are_scored_and_documents_ranked_by_maxsim(colbert, projection):
    served, eager = colbert
    query = query_tokens(eager, projection, "red a dog")
    expected = [maxsim(query, document_tokens(eager, projection, "blue " + text)) for text in TEXTS]
    np.testing.assert_allclose(served.score_pairs([("a dog", text) for text in TEXTS]), expected, atol=1e-5)
    ranked = served.rerank("a dog", TEXTS, top_k=2)
    assert [each.index for each in ranked] == np.argsort(expected)[::-1][:2].tolist()


def test_other_settings_of_the_files(tmp_path, projection):
    eager = folder(tmp_path, "BertModel")
    expansion = {"strategy": "min", "attend": True, "token": "[MASK]", "length": 6}
    write_multi_vector(tmp_path, projection, expansion, skiplist_words=[], keep_only_token_ids=[5, 7])
    settings = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
    write(tmp_path / "config_sentence_transformers.json", settings | {"similarity_fn_name": "meanmaxsim"})
    with serve(tmp_path) as served:
        query = query_tokens(eager, projection, "red a dog", 6, attends=True)
        long = query_tokens(eager, projection, "red " + TEXTS[0], 9)
        check_each(served.embed_tokens(["a dog", TEXTS[0]], task="query"), [query, long])
        ids = tokenizer()("blue " + TEXTS[0])["input_ids"]
        kept = unit_tokens(eager, projection, ids, [1] * len(ids))[torch.isin(torch.tensor(ids), torch.tensor([5, 7]))]
        check_each([served.embed_tokens(TEXTS[0])], [kept])
        score = served.score_pairs([("a dog", TEXTS[0])])[0]
        assert score == pytest.approx(maxsim(query, kept) / len(query), abs=1e-5)


def test_files_of_pylate(tmp_path, projection):
    eager = folder(tmp_path, "BertModel")
    write_modules(tmp_path, ("", BASE + "models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense"))
    write(tmp_path / "1_Dense" / "config.json", DENSE)
    save_file({"linear.weight": projection}, tmp_path / "1_Dense" / "model.safetensors")
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 12, "do_lower_case": False})
    legacy = {"query_prefix": "red ", "document_prefix": "blue ", "query_length": 9, "document_length": 10}
    legacy |= {"attend_to_expansion_tokens": False, "skiplist_words": SKIPPED, "similarity_fn_name": "MaxSim"}
    write(tmp_path / "config_sentence_transformers.json", {"model_type": "ColBERT", "prompts": {}} | legacy)
    with serve(tmp_path) as served:
        query, document = query_tokens(eager, projection, "red a dog"), "blue " + TEXTS[2]
        check_each([served.embed_tokens("a dog", task="query")], [query])
        expected = maxsim(query, document_tokens(eager, projection, document))
        assert served.score_pairs([("a dog", TEXTS[2])])[0] == pytest.approx(expected, abs=1e-5)
    settings = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
    for changed, expansion in (
        ({"do_query_expansion": False}, None),
        ({"query_length": None}, Expansion(32)),
        ({"attend_to_expansion_tokens": True}, Expansion(9, attends=True)),
    ):
        write(tmp_path / "config_sentence_transformers.json", settings | changed)
        assert rule_in(tmp_path).tokens.expansion == expansion


def test_tokens_of_a_prefix_are_not_taken_apart():
    plain = Tokenizer(models.WordLevel({"[UNK]": 0, "[Q]": 1, "cat": 2}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")
    assert made("[Q] cat")["input_ids"] == [0, 0, 0, 2]
    keep_prefixes(made, ("[Q] ", "no token ", ""))
    assert made("[Q] cat")["input_ids"] == [1, 2] and len(made) == 3


def test_a_pooling_of_the_caller_leaves_the_files_out_of_account(colbert):
    served, eager = colbert
    with torch.no_grad():
        hidden = eager(**tokenizer()("a dog", return_tensors="pt")).last_hidden_state[0]
    np.testing.assert_allclose(served.embed("a dog", pooling="mean"), hidden.mean(0).numpy(), atol=1e-5)


def test_what_is_refused(colbert, tmp_path, projection):
    served, _ = colbert
    with pytest.raises(UnsupportedModelError, match="embed: expected a model with one embedding for a text"):
        served.embed("a dog")
    with pytest.raises(InvalidArgumentError, match="task: expected query or document"):
        served.embed_tokens("a dog", task="passage")
    with pytest.raises(InvalidArgumentError, match="expected at most 9 tokens"):
        served.embed_tokens(TEXTS[2], task="query", truncate=False)
    with pytest.raises(UnsupportedModelError, match="which has one for each token; serve the model itself"):
        served.export(tmp_path / "bundle")
    folder(tmp_path, "BertModel")
    write_multi_vector(tmp_path, projection, {"strategy": "longest", "length": 9})
    with serve(tmp_path) as wrong, pytest.raises(CheckpointError, match="query_expansion is"):
        wrong.embed_tokens("a dog")
    write_multi_vector(tmp_path, projection, EXPANSION | {"token": "nowhere"})
    with serve(tmp_path) as wrong, pytest.raises(CheckpointError, match="expected a token of the vocabulary"):
        wrong.embed_tokens("a dog")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A served model with one embedding for each text, and the eager one."""
    path = tmp_path_factory.mktemp("dense")
    eager = folder(path, "BertModel")
    write_modules(path, ("", BASE + "models.Transformer"), ("1_Pooling", BASE + "models.Pooling"))
    write(path / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    write(path / "config_sentence_transformers.json", {"prompts": {"query": "red ", "document": "blue "}})
    with serve(path) as served:
        yield served, eager


def test_a_bi_encoder_scores_by_the_cosine(dense):
    served, eager = dense

    def mean(text):
        with torch.no_grad():
            return eager(**tokenizer()(text, return_tensors="pt")).last_hidden_state[0].mean(0)

    query = mean("red a dog")
    expected = [float(torch.cosine_similarity(query, mean("blue " + text), dim=0)) for text in TEXTS]
    ranked = served.rerank("a dog", TEXTS)
    assert [each.index for each in ranked] == np.argsort(expected)[::-1].tolist()
    assert [each.score for each in ranked] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)
    hidden = served.embed_tokens("a dog")
    with torch.no_grad():
        np.testing.assert_allclose(
            hidden, eager(**tokenizer()("a dog", return_tensors="pt")).last_hidden_state[0].numpy(), atol=1e-5
        )


@pytest.mark.parametrize(
    ("name", "torch_function"),
    [
        ("cosine", lambda a, b: torch.cosine_similarity(a, b, dim=0)),
        ("dot", torch.dot),
        ("euclidean", lambda a, b: -torch.dist(a, b)),
        ("manhattan", lambda a, b: -torch.dist(a, b, p=1)),
    ],
)
def test_similarities(name, torch_function):
    first, second = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    found = SIMILARITIES[name](first.numpy(), second.numpy())
    assert found == pytest.approx(float(torch_function(first, second)), abs=1e-5)
