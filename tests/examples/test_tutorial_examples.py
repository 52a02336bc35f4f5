"""The tutorial: every example runs, and says what eager PyTorch says about the same weights."""

import io
import re
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import torchax_serve
from model_adapters.bridge.extract import extract_jax
from model_adapters.errors import ModelNotFoundError
from model_adapters.loading.model_source import EMBEDDED

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = sorted(path.stem for path in EXAMPLES.glob("step*.py"))

# torchax asks JAX for the 64-bit integers that torch code names; JAX says that it makes 32-bit ones of them.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")


@pytest.fixture(scope="module")
def eager():
    return AutoModelForCausalLM.from_pretrained(EMBEDDED).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example as a script; returns its globals and what it printed."""

    def run(name, *arguments, stdin=""):
        monkeypatch.setattr("sys.argv", [name, *arguments])
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        names = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return names, capsys.readouterr().out

    return run


def eager_logits(eager, tokenizer, text):
    with torch.no_grad():
        return eager(tokenizer(text, return_tensors="pt").input_ids, use_cache=False).logits.numpy()


def eager_answer(eager, tokenizer, messages, max_new_tokens):
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = eager.generate(**prompt, do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def user(text):
    return {"role": "user", "content": text}


def test_every_step_is_run_here_listed_and_short():
    listed = re.findall(r"\((step\w+)\.py\)", (EXAMPLES / "README.md").read_text())
    assert listed == STEPS
    tested = Path(__file__).read_text()
    for name in STEPS:
        assert f'run("{name}"' in tested
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 45, f"{name} is no longer read at a glance"


def test_first_forward_pass(run, eager, tokenizer):
    names, printed = run("step1_forward_pass")
    expected = eager_logits(eager, tokenizer, "Gemma is")
    assert isinstance(names["array"], jax.Array)
    np.testing.assert_allclose(names["array"], expected, atol=1e-3)
    assert f"shape {expected.shape}" in printed
    assert f"next token: {tokenizer.decode(int(expected[0, -1].argmax()))!r}" in printed


def test_extract_jax(run, eager, tokenizer):
    names, printed = run("step2_extract_jax")
    expected = eager_logits(eager, tokenizer, "Gemma is")
    weights, compiled = names["weights"], names["compiled"]
    np.testing.assert_allclose(compiled(weights, names["input_ids"]), expected, atol=1e-3)
    # the program follows the weights it is given: they are no constants in it
    blank = jax.tree.map(jax.numpy.zeros_like, weights)
    assert not np.any(compiled(blank, names["input_ids"]))
    assert names["compiled_s"] < names["eager_s"]
    assert re.search(r"op by op [\d.]+ ms, compiled [\d.]+ ms\n", printed)
    assert f"next token: {tokenizer.decode(int(expected[0, -1].argmax()))!r}" in printed


def test_torchax_compile(run, eager, tokenizer):
    names, printed = run("step3_torchax_compile")
    expected = eager_logits(eager, tokenizer, "Gemma is")
    np.testing.assert_allclose(names["logits"].jax(), expected, atol=1e-3)
    assert f"next token: {tokenizer.decode(int(expected[0, -1].argmax()))!r}" in printed


def test_sentiment(run, eager, tokenizer):
    names, printed = run("step4_sentiment")
    ids = [tokenizer(label, add_special_tokens=False).input_ids[0] for label in ("positive", "negative")]
    lines = printed.splitlines()
    assert len(lines) == len(names["SENTENCES"]) >= 4
    for sentence, line in zip(names["SENTENCES"], lines, strict=True):
        # one by one, without padding
        messages = [user(f"Is this positive or negative? {sentence}")]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            probabilities = eager(**inputs).logits[0, -1, ids].softmax(-1)
        label = ("positive", "negative")[int(probabilities.argmax())]
        assert line == f"{label} ({float(probabilities.max()):.0%})  {sentence}"


def test_generation_with_a_static_cache(run, eager, tokenizer, monkeypatch):
    traced_lens = []

    def counting_extract_jax(module):
        weights, forward = extract_jax(module)

        def counted(weights, args, kwargs):
            traced_lens.append(args[0].shape[1])
            return forward(weights, args, kwargs)

        return weights, counted

    monkeypatch.setattr(torchax_serve, "extract_jax", counting_extract_jax, raising=False)
    names, printed = run("step5_static_cache")
    expected = eager_answer(eager, tokenizer, [user("What is JAX?")], names["NUM_NEW_TOKENS"])
    assert printed == expected + "\n"
    # one program for the prompt, one for all further tokens
    assert traced_lens == [names["prompt"].input_ids.shape[1], 1]
    assert len(names["new_tokens"]) > 2


def test_chatbot(run, eager, tokenizer):
    _, printed = run("step6_chatbot", stdin="Hello!\nWhat is JAX?\n\nnever asked\n")
    history, transcript = [], ""
    for question in ("Hello!", "What is JAX?"):
        history.append(user(question))
        answer = eager_answer(eager, tokenizer, history, eager.generation_config.max_new_tokens)
        history.append({"role": "assistant", "content": answer})
        transcript += f"> {answer}\n"
    assert printed == transcript + "> "


def test_another_model(run, eager, tokenizer, tmp_path):
    _, printed = run("step7_another_model")
    assert printed.startswith("the embedded model: Gemma3ForCausalLM, ")
    assert printed.splitlines()[1:] == eager_answer(eager, tokenizer, [user("What is JAX?")], 64).splitlines()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    other = LlamaForCausalLM(config).eval()
    other.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    _, printed = run("step7_another_model", str(tmp_path / "llama"), "Hello!")
    assert printed.startswith(f"{tmp_path / 'llama'}: LlamaForCausalLM, ")
    assert printed.partition("\n")[2] == eager_answer(other, tokenizer, [user("Hello!")], 64) + "\n"

    with pytest.raises(ModelNotFoundError, match=r"did you mean qwen3-0\.6b"):
        run("step7_another_model", "qwen3-0.6", "Hello!")
