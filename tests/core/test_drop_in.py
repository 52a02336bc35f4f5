"""An existing model object after ``to_jax``: still the object that existing code knows."""

import copy
import inspect
import json
import warnings

import jax
import pytest
import torch
import transformers
from cache_name import CACHE
from tiny_models import prompts, tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast, TextStreamer
from transformers.generation import GenerationMixin

from model_adapters.program.call_signature import cache_in
from torchax_serve import InvalidArgumentError, UnsupportedArgumentError, extract_jax, to_jax


@pytest.fixture(scope="module")
def eager():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def model():
    return to_jax(tiny_model("llama"))


@pytest.fixture(scope="module")
def tokenizer():
    """One token per printable character, and a padding token."""
    vocab = {"<pad>": 0, **{chr(code): code - 31 for code in range(32, 127)}, "<eos>": 96}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>", padding_side="left"
    )


def test_the_object_stays_what_it_was(model):
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert to_jax(model) is model
    assert model.device == torch.device("cpu")
    assert inspect.signature(type(model).generate) == inspect.signature(GenerationMixin.generate)
    assert inspect.signature(type(model).forward) == inspect.signature(transformers.LlamaForCausalLM.forward)


def test_weights_are_shared_not_copied(model):
    runtime = model._jax_runtime
    name = "model.layers.0.mlp.up_proj.weight"
    assert runtime.weights[name].unsafe_buffer_pointer() == model.get_parameter(name).data_ptr()


@pytest.mark.parametrize("length", [1, 5, 33])
def test_forward_gives_eager_logits(eager, model, length):
    ids = torch.arange(3, 3 + length)[None] % 90
    with torch.no_grad():
        expected = eager(ids)
    got = model(ids)
    assert type(got) is type(expected)
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=1e-5)


def test_forward_with_any_mask(eager, model):
    ids, mask = prompts()
    mask = mask.flip(1)  # padding on the right, as evaluation code has it
    with torch.no_grad():
        expected = eager(ids, attention_mask=mask).logits
    got = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-5)


def test_a_mask_of_each_query_keeps_two_texts_of_a_row_apart(eager, model):
    ids = prompts()[0][1:, :9]
    sees = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    sees[..., 4:, :4] = False
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    added = torch.where(sees, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = eager(ids, attention_mask=added, position_ids=places).logits
    for mask in (sees, added):
        got = model(ids, attention_mask=mask, position_ids=places).logits
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_64_bit_types_of_jax_change_no_token(eager):
    ids = prompts()[0][1:]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    with jax.enable_x64(True):
        got = to_jax(tiny_model("llama")).generate(ids, **options)
    assert got.tolist() == eager.generate(ids, **options).tolist()


def test_forward_options(eager, model):
    ids = prompts()[0][1:]
    with torch.no_grad():
        expected = eager(ids, output_hidden_states=True, output_attentions=True, logits_to_keep=3)
    got = model(ids, output_hidden_states=True, output_attentions=True, logits_to_keep=3)
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.hidden_states, expected.hidden_states, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.attentions, expected.attentions, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        expected = eager(ids, labels=ids)
    torch.testing.assert_close(model(ids, labels=ids).loss, expected.loss, atol=1e-5, rtol=1e-5)
    assert isinstance(model(ids, return_dict=False), tuple)
    embeds = eager.get_input_embeddings()(ids).detach()
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


ATTENTION = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32}
WITH_LABELS = {
    "llama": (transformers.LlamaForCausalLM, {"intermediate_size": 48, "num_attention_heads": 4}),
    "mamba": (transformers.MambaForCausalLM, {"state_size": 4}),
    "bert": (transformers.BertLMHeadModel, {"is_decoder": True, "num_attention_heads": 4, "intermediate_size": 48}),
    "t5": (
        transformers.T5ForConditionalGeneration,
        {"d_kv": 8, "d_ff": 48, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "bart": (transformers.BartForConditionalGeneration, {"encoder_layers": 1, "decoder_layers": 1, **ATTENTION}),
}


@pytest.mark.parametrize("name", WITH_LABELS)
def test_a_forward_with_labels_returns_a_cache_where_pytorch_does(name):
    cls, sizes = WITH_LABELS[name]
    common = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    eager = cls(cls.config_class(**common, **sizes)).eval()
    on_jax = to_jax(copy.deepcopy(eager))
    ids = torch.randint(3, 39, (2, 7))
    for options in ({}, {"use_cache": False}):
        with torch.no_grad():
            expected = eager(input_ids=ids, labels=ids, **options)
        found = on_jax(input_ids=ids, labels=ids, **options)
        assert [*found] == [*expected]
        torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert (cache_in(on_jax(input_ids=ids, labels=ids)) is None) == (name in ("bert", "bart"))


def test_a_forward_continues_from_its_cache(eager, model):
    ids = prompts()[0][1:]
    first = model(ids[:, :7])
    second = model(ids[:, 7:], **{CACHE: first[CACHE]})
    with torch.no_grad():
        expected = eager(ids).logits[:, 7:]
    torch.testing.assert_close(second.logits, expected, atol=1e-5, rtol=1e-5)


def test_generate_continues_from_what_it_returned(eager, model):
    ids = prompts()[0][1:]
    for_both = {"max_new_tokens": 4, "return_dict_in_generate": True}
    outputs = []
    for each in (eager, model):
        first = each.generate(ids, **for_both)
        following = torch.cat([first.sequences, torch.tensor([[5, 6, 7]])], 1)
        outputs.append(each.generate(following, **{CACHE: first[CACHE]}, **for_both))
    assert outputs[1].sequences.tolist() == outputs[0].sequences.tolist()


def test_a_cache_of_the_caller_is_filled(eager, model):
    ids = prompts()[0][1:]
    caches = [DynamicCache(config=eager.config), DynamicCache(config=eager.config)]
    for each, cache in zip((eager, model), caches, strict=True):
        each.generate(ids, max_new_tokens=5, **{CACHE: cache})
    torch.testing.assert_close(caches[1].layers[1].keys, caches[0].layers[1].keys, atol=1e-5, rtol=1e-5)


def test_the_older_name_of_the_cache_is_taken_as_transformers_takes_it(eager, model):
    ids = prompts()[0][1:]
    logits, warned = [], []
    for each in (eager, model):
        with torch.no_grad(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            first = each(ids[:, :7])
            logits.append(each(ids[:, 7:], past_key_values=first[CACHE]).logits)
        warned.append([one.category for one in said if "past_key_values" in str(one.message)])
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-5)
    assert warned[1] == warned[0] == ([] if CACHE == "past_key_values" else [FutureWarning])


class NamedAsBefore(transformers.LlamaForCausalLM):
    """Calls its cache as transformers did before 5.24, whose generate calls it otherwise now."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
        given = {"attention_mask": attention_mask, "position_ids": position_ids, CACHE: past_key_values}
        return super().forward(input_ids, **given, **kwargs)


def test_a_forward_that_calls_its_cache_by_the_older_name_generates():
    known = tiny_model("llama")
    renamed = NamedAsBefore(known.config).eval()
    renamed.load_state_dict(known.state_dict())
    renamed.generation_config = known.generation_config
    served, ids = to_jax(renamed), torch.tensor([[3, 4, 5]])
    assert served._jax_runtime.cache_support.unsupported_reason is None
    for options in ({}, {"num_beams": 2}):
        options |= {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
        ours, theirs = served.generate(ids, **options), known.generate(ids, **options)
        assert ours.sequences.tolist() == theirs.sequences.tolist()
        assert ours[CACHE].get_seq_length() == theirs[CACHE].get_seq_length()


def test_streamer(eager, model, tokenizer, capsys):
    ids = prompts()[0][1:]
    for each in (eager, model):
        each.generate(ids, max_new_tokens=6, streamer=TextStreamer(tokenizer))
    printed = capsys.readouterr().out
    assert printed[: len(printed) // 2] == printed[len(printed) // 2 :]
    assert printed.strip()


def test_stop_strings(eager, model, tokenizer):
    ids, mask = prompts()
    plain = eager.generate(ids, attention_mask=mask, max_new_tokens=8)
    arguments = {"attention_mask": mask, "max_new_tokens": 8, "tokenizer": tokenizer}
    for row in (0, 1):
        word = tokenizer.decode(plain[row, 13:15])
        for end in ({}, {"eos_token_id": 96}):
            expected = eager.generate(ids, stop_strings=[word], **arguments, **end)
            assert model.generate(ids, stop_strings=[word], **arguments, **end).tolist() == expected.tolist()
    alone = {**arguments, "attention_mask": None}
    expected = eager.generate(ids[1:], stop_strings=[word], **alone)
    assert expected.shape[1] < 19
    assert model.generate(ids[1:], stop_strings=[word], **alone).tolist() == expected.tolist()


def test_assisted_decoding(eager, model):
    ids = prompts()[0][1:]
    assistant = tiny_model("llama")
    expected = eager.generate(ids, max_new_tokens=8)
    assert model.generate(ids, max_new_tokens=8, assistant_model=assistant).tolist() == expected.tolist()
    assert model.generate(ids, max_new_tokens=8, assistant_model=to_jax(assistant)).tolist() == expected.tolist()


def test_sampling_is_reproducible_by_torchs_seed(model):
    ids = prompts()[0]
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(model.generate(ids, do_sample=True, top_k=0, max_new_tokens=12).tolist())
    assert draws[0] == draws[1] != draws[2]


def test_pipeline(eager, model, tokenizer):
    texts = ["one two", "a longer prompt"]
    answers = []
    for each in (eager, model):
        pipe = transformers.pipeline("text-generation", model=each, tokenizer=tokenizer)
        answers.append(pipe(texts, max_new_tokens=5, do_sample=False, batch_size=2))
    assert answers[1] == answers[0]


@pytest.mark.filterwarnings("default")  # lm-eval's own
def test_lm_eval(eager, model, tokenizer, tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    rows = [{"question": f"What is {i}?", "choices": ["one", "2", "many"], "answer": i % 3} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task.yaml").write_text(
        "task: tiny_choice\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        "test_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
        "metric_list:\n  - {metric: acc}\n"
    )
    results = []
    for each in (eager, model):
        backend = HFLM(pretrained=each, tokenizer=tokenizer, batch_size=2, max_length=64)
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        outcome = simple_evaluate(
            backend, tasks=["tiny_choice"], task_manager=manager, log_samples=True, bootstrap_iters=0
        )
        scores = [[float(score) for ((score, _),) in sample["resps"]] for sample in outcome["samples"]["tiny_choice"]]
        results.append((outcome["results"]["tiny_choice"]["acc,none"], torch.tensor(scores)))
    assert results[1][0] == results[0][0]
    torch.testing.assert_close(results[1][1], results[0][1], atol=1e-4, rtol=1e-4)


def test_nothing_is_compiled_from_token_to_token():
    model = to_jax(tiny_model("qwen3"))
    traces = model._jax_runtime.steps.num_traces
    ids = prompts()[0][1:]
    model.generate(ids, max_new_tokens=3)
    assert dict(traces) == {"forward": 1, "decode": 1}
    model.generate(ids, max_new_tokens=20)
    model.generate(ids[:, :5], max_new_tokens=9)  # the same bucket of prompts and of caches
    model.generate(ids, max_new_tokens=9, do_sample=True, temperature=0.7)
    model.generate(ids, max_new_tokens=9, repetition_penalty=1.2)
    assert dict(traces) == {"forward": 1, "decode": 1}
    model.generate(ids, max_new_tokens=60)  # a longer cache
    assert dict(traces) == {"forward": 2, "decode": 2}


def test_weights_are_arguments_never_constants():
    model = to_jax(tiny_model("llama"))
    runtime = model._jax_runtime
    ids = prompts()[0][1:]
    model.generate(ids, max_new_tokens=3)
    closed = jax.make_jaxpr(runtime.program.forward, static_argnums=4)(
        runtime.weights, None, None, {"input_ids": ids.int().numpy()}, _plain_call()
    )
    assert sum(constant.size for constant in closed.consts) <= 64


def test_the_cache_is_updated_in_place():
    model = to_jax(tiny_model("llama"))
    runtime = model._jax_runtime
    cache = runtime.cache_support.new(32)
    runtime.forward({"input_ids": prompts()[0][1:]}, _plain_call(), cache)
    before = cache.states[0].pool.unsafe_buffer_pointer()
    runtime.forward({"input_ids": torch.tensor([[5]])}, _plain_call(), cache)
    assert cache.states[0].pool.unsafe_buffer_pointer() == before


def _plain_call():
    from model_adapters.program.model_program import CallSpec

    return CallSpec()


def test_extract_jax_outside_serve(eager):
    weights, function = extract_jax(tiny_model("gpt2"))
    ids = prompts()[0].int().numpy()
    logits = jax.jit(lambda weights, ids: function(weights, (ids,), {"use_cache": False}).logits)(weights, ids)
    with torch.no_grad():
        expected = tiny_model("gpt2")(prompts()[0]).logits
    torch.testing.assert_close(torch.from_numpy(jax.device_get(logits).copy()), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "at least one token, got an empty one"),
        ({"input_ids": torch.tensor([[3, 97]])}, "token ids from 0 to 96, got 97"),
        ({"input_ids": torch.tensor([[3, -1]])}, "token ids from 0 to 96, got -1"),
        ({"input_ids": torch.ones(1, 129, dtype=torch.long)}, "at most 128 tokens, the positions this model has"),
        ({"attention_mask": torch.tensor([[0, 0], [1, 1]])}, "only padding in row 0"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be greater than 0"),
        ({"temperature": -1.0, "do_sample": True}, "temperature"),
        ({"top_p": 1.5, "do_sample": True}, "top_p"),
        ({"top_k": -3, "do_sample": True}, "top_k"),
        ({"temperature": float("nan"), "do_sample": True}, "temperature"),
        ({"repetition_penalty": 0.0}, "penalty"),
        ({"max_new_token": 3}, "max_new_token"),
        ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded' is not supported here"),
    ],
)
def test_bad_input_is_one_clear_error(model, arguments, message):
    inputs = {"input_ids": torch.tensor([[3, 4], [5, 6]]), "max_new_tokens": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        model.generate(**inputs)
    assert model.generate(torch.tensor([[3, 4]]), max_new_tokens=2).shape == (1, 4)  # and the model goes on


def test_learned_positions_end_where_their_table_ends():
    model = to_jax(tiny_model("gpt2"))
    with pytest.raises(InvalidArgumentError, match="at most 128 tokens in all"):
        model.generate(torch.ones(1, 100, dtype=torch.long), max_new_tokens=40)


def test_what_to_jax_refuses():
    with pytest.raises(InvalidArgumentError, match="expected a transformers PreTrainedModel, got str"):
        to_jax("gpt2")
    config = tiny_model("llama").config
    with pytest.raises(InvalidArgumentError, match=r'call model.to\("cpu"\) first'), torch.device("meta"):
        to_jax(transformers.AutoModelForCausalLM.from_config(config))
    model = to_jax(tiny_model("llama"))
    model.train()
    with pytest.raises(InvalidArgumentError, match=r"call model.eval\(\)"):
        model(torch.tensor([[1]]))


def test_caches_of_other_kinds_are_refused(model):
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(UnsupportedArgumentError, match=f"{CACHE}: expected a DynamicCache"):
        model.generate(torch.tensor([[3, 4]]), **{CACHE: cache}, max_new_tokens=2)
