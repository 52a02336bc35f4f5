"""The training of the embedded model: corpus split, tokenizer, packing, loss, resuming, and the folder it writes."""

import random
import re
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import torch
from typer.testing import CliRunner

from model_adapters.errors import CheckpointError, InvalidArgumentError

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_embedded  # noqa: E402
import typer  # noqa: E402
from embedded_corpus import Corpus, Exchange, hand_written_held_out, is_held_out, normal_form  # noqa: E402
from embedded_corpus.conversation import wordings  # noqa: E402
from embedded_corpus.mix import _check_one_answer_each  # noqa: E402
from embedded_training.model import embedded_config, fresh_model, load_params, params_and_loss  # noqa: E402
from embedded_training.packing import Packer, encode  # noqa: E402
from embedded_training.tokenizer import train_tokenizer, turns_of  # noqa: E402
from embedded_training.trainer import Trainer, TrainingPlan  # noqa: E402

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "head_dim": 16,
    "sliding_window": 16,
}


@pytest.fixture(scope="module")
def corpus():
    return Corpus()


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return train_tokenizer(corpus, vocab_size=400, num_conversations=500, seed=0)


@pytest.fixture
def tiny_model(tokenizer):
    return fresh_model(embedded_config(tokenizer, **TINY), seed=0)


def test_alternatives_are_expanded():
    assert wordings("[How do|Can] I run [it|]?") == ["How do I run it?", "How do I run?", "Can I run it?", "Can I run?"]


def test_a_prompt_with_two_answers_is_an_error():
    with pytest.raises(ValueError, match="'Hi' has two answers: 'a' and 'b'"):
        _check_one_answer_each([Exchange("t", "Hi", "a", "Hi"), Exchange("t", "Hi", "b", "Hi")])


def test_no_held_out_question_is_ever_drawn(corpus):
    listed = [e for group in corpus.held_out(200).values() for e in group]
    by_hand = [e for group in hand_written_held_out().values() for e in group]
    held_out = {normal_form(e.prompt) for e in [*listed, *by_hand]}
    rng = random.Random(3)
    drawn = [e for _ in range(6000) for e in corpus.draw(rng).exchanges]
    assert len(drawn) > 9000
    assert not [e.prompt for e in drawn if normal_form(e.prompt) in held_out]
    sums = [e.answer.split(" = ")[0] for e in drawn if re.fullmatch(r"\d+ [+-] \d+ = -?\d+", e.answer)]
    two_digit = [operands for operands in sums if len(operands) > len("9 + 9")]
    assert len(two_digit) > 2000
    assert not [operands for operands in two_digit if is_held_out(f"sum {operands}")]
    one_digit = set(sums) - set(two_digit)
    assert len(one_digit) == 200  # the whole table is learned; what is held out are questions


def test_sums_of_the_corpus_are_right(corpus):
    rng = random.Random(4)
    for exchange in [corpus.draw_exchange(rng) for _ in range(3000)]:
        if " = " in exchange.answer and exchange.task != "project":
            sum_, result = exchange.answer.split(" = ")
            left, sign, right = sum_.split()
            assert int(result) == (int(left) + int(right) if sign == "+" else int(left) - int(right))


def test_pieces_are_what_the_chat_template_writes(corpus, tokenizer):
    rng = random.Random(5)
    num_with_system = 0
    for conversation in [corpus.draw(rng) for _ in range(200)]:
        if conversation.plain_text is None:
            ids, _ = encode(tokenizer, list(turns_of(conversation)))
            assert ids == tokenizer.apply_chat_template(conversation.messages(), tokenize=True, return_dict=False)
            num_with_system += conversation.system is not None
    assert num_with_system > 5


def test_packed_loss_is_the_loss_of_each_conversation_alone(corpus, tokenizer, tiny_model):
    """Eager PyTorch over one unpacked conversation after the other, with transformers' own masks, is the measure."""
    params, loss = params_and_loss(tiny_model)
    batch = Packer(corpus, tokenizer, num_rows=2, row_len=384, seed=0).batch(0)
    total, num_learned = 0.0, 0
    for row in range(2):
        assert batch.segment[row].max() >= 2
        for number in range(1, batch.segment[row].max() + 1):
            here = batch.segment[row] == number
            ids = torch.tensor(batch.tokens[row, here][None], dtype=torch.long)
            learned = torch.tensor(batch.learned[row, here][1:], dtype=torch.bool)
            with torch.no_grad():
                logits = tiny_model(input_ids=ids).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits[learned], ids[0, 1:][learned], reduction="sum").item()
            num_learned += int(learned.sum())
    assert float(jax.jit(loss)(params, batch)) == pytest.approx(total / num_learned, rel=1e-5)


def test_only_parameters_are_trained_and_ties_stay(corpus, tokenizer, tiny_model, tmp_path):
    params, loss = params_and_loss(tiny_model)
    assert set(params) == {name for name, _ in tiny_model.named_parameters()}
    before = {name: np.array(array) for name, array in params.items()}
    trainer = Trainer(TrainingPlan(num_steps=2, num_rows=2, row_len=128), params, loss, tmp_path)
    trainer.run(Packer(corpus, tokenizer, 2, 128, 0).batch, lambda *report: None)
    assert all(np.any(before[name] != np.array(array)) for name, array in trainer.params.items())
    load_params(tiny_model, trainer.params)
    assert tiny_model.lm_head.weight.data_ptr() == tiny_model.model.embed_tokens.weight.data_ptr()
    assert np.array_equal(tiny_model.lm_head.weight.detach(), trainer.params["model.embed_tokens.weight"])


def test_untied_model_is_refused(tokenizer):
    config = embedded_config(tokenizer, **TINY)
    config.tie_word_embeddings = False
    with pytest.raises(ValueError, match="tie_word_embeddings=True"):
        params_and_loss(fresh_model(config, 0))


def _bigram_trainer(workdir, **plan):
    """Resuming does not depend on the model, so a table of next-token scores stands in for it: it compiles at once."""

    def loss(params, batch):
        scores = params["table"][batch.tokens[:, :-1]] + params["bias"]
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch.tokens[:, 1:])
        return (losses * batch.learned[:, 1:]).sum() / batch.learned[:, 1:].sum()

    params = {"table": jax.numpy.zeros((400, 400)), "bias": jax.numpy.zeros(400)}
    return Trainer(TrainingPlan(**({"num_steps": 6, "num_rows": 2, "row_len": 128} | plan)), params, loss, workdir)


def test_interrupted_training_goes_on_to_the_same_result(corpus, tokenizer, tmp_path):
    packer = Packer(corpus, tokenizer, 2, 128, 0)
    whole = _bigram_trainer(tmp_path / "whole")
    assert whole.run(packer.batch, lambda *report: None)
    assert whole.history.losses[-1] < whole.history.losses[0]

    def interrupt_at_three(step, loss, num_tokens, step_s):
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    stopped = _bigram_trainer(tmp_path / "parts")
    assert not stopped.run(packer.batch, interrupt_at_three)
    resumed = _bigram_trainer(tmp_path / "parts")
    assert resumed.step == 3
    assert resumed.run(packer.batch, lambda *report: None)
    assert resumed.history.losses == whole.history.losses
    assert resumed.history.num_tokens == whole.history.num_tokens
    for name, array in whole.params.items():
        assert np.array_equal(array, resumed.params[name]), name


def test_resuming_with_other_settings_or_a_broken_checkpoint_is_refused(tmp_path):
    _bigram_trainer(tmp_path).save()
    with pytest.raises(InvalidArgumentError, match="was made with num_steps=6; give the same settings"):
        _bigram_trainer(tmp_path, num_steps=7)
    (tmp_path / "checkpoint.npz").write_bytes((tmp_path / "checkpoint.npz").read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"expected a training checkpoint, got .*checkpoint\.npz"):
        _bigram_trainer(tmp_path)
    with pytest.raises(InvalidArgumentError, match="expected num_rows above 0, got 0"):
        TrainingPlan(num_steps=1, num_rows=0)


def test_the_command_writes_an_ordinary_folder(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    app = typer.Typer()
    app.command()(train_embedded.main)
    arguments = f"--output {tmp_path}/out --workdir {tmp_path}/work --steps 2 --rows 1 --row-len 128 --eval-per-task 1"
    sizes = " --vocab-size 400 --hidden-size 32 --intermediate-size 32 --num-layers 3 --tokenizer-conversations 300"
    result = CliRunner().invoke(app, (arguments + sizes).split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (model.config.model_type, model.config.vocab_size) == ("gemma3_text", len(tokenizer))
    with np.load(tmp_path / "work" / "checkpoint.npz") as file:
        stored = dict(file)
    assert model.model.embed_tokens.weight.shape == (400, 32)
    assert any(np.array_equal(model.model.embed_tokens.weight.detach(), array) for array in stored.values())
    assert (tmp_path / "out" / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in card
    assert "| sentiment (by hand) | " in card and "2 steps of 1 packed rows" in card
