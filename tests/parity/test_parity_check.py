"""The harness: tiny configurations, a check that can fail, workers that crash and hang; and a handful of types."""

import copy
import dataclasses
import re

import breaking_worker
import numpy
import pytest
import torch
import transformers
from thorough import except_for
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from model_adapters.errors import UnsupportedModelError
from parity_sweep import check_causal, sweep
from parity_sweep.tiny import models
from parity_sweep.tiny.config import MAX_LAYERS, tiny_config
from torchax_serve.parity import tasks

_, SHIPPED = tasks.shipped()
# One type for each executor, among them a right-aligned cache and none at all.
HANDFUL = ("qwen3", "gpt_neo", "openai-gpt")  # and a twelfth of all in `.ci/run`

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("model_type", except_for(["qwen3", "gpt_neo"], HANDFUL))
def test_type_passes_on_the_executor_of_the_table(model_type):
    result = check_causal.check(model_type)
    assert result.status == "passed", result
    assert result.executor == SHIPPED[model_type].executor


def test_wrong_token_fails_the_check(monkeypatch):
    model, expected = models.model_with_margins("llama")
    wrong = (expected.unbatched[0], (expected.unbatched[1] + 1) % 90)
    monkeypatch.setattr(
        check_causal,
        "model_with_margins",
        lambda name: (model, dataclasses.replace(expected, unbatched=wrong, padded=None)),
    )
    result = check_causal.check("llama")
    assert (result.status, result.unbatched_equal, result.engine_equal) == ("failed", True, False)


def test_torch_error_is_reported(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(models, "_forward", broken)
    result = check_causal.check("llama")
    assert result.status == "impossible"
    assert "fails in PyTorch itself: RuntimeError: no such thing" in result.error


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NOT_EXPERTS = {"gemma3n"}  # whose vision tower is of another package


def test_tiny_config_keeps_experts():
    """A tiny mixture without a mixture checks nothing: layers before the first one, or steps between them."""
    checked = 0
    for task in (tasks.CAUSAL, "seq2seq"):
        for model_type in set(tasks.TASKS[task].types()) - NOT_EXPERTS:
            try:
                configs = tiny_config(model_type), CONFIG_MAPPING[model_type]()
                text = configs[1].get_text_config()
                if not any(getattr(text, name, None) for name in EXPERTS):
                    continue
                tiny, default = (expert_classes(task, model_type, config) for config in configs)
            except Exception:  # test_parity_table has these
                continue
            assert tiny == default, model_type
            checked += 1
    assert checked > 30


def expert_classes(task, model_type, config):
    """Names of the classes of modules that have experts, built without weights."""
    names = getattr(modeling_auto, tasks.TASKS[task].mapping)[model_type]
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    with torch.device("meta"):
        modules = model_class._from_config(models._config_for(model_class, config)).modules()
    return {name for name in (type(module).__name__ for module in modules) if re.search("Expert|MoE|Sparse", name)}


def test_tiny_config_keeps_every_layer_kind():
    checked = 0
    for model_type in tasks.TASKS[tasks.CAUSAL].types():
        try:
            tiny = tiny_config(model_type).get_text_config()
            default = CONFIG_MAPPING[model_type]().get_text_config()
        except Exception:  # test_parity_table has these
            continue
        kinds = set(getattr(default, "layer_types", None) or ())
        if len(kinds) > 1:
            assert kinds <= set(tiny.layer_types), model_type
            checked += 1
        assert (getattr(tiny, "num_hidden_layers", None) or 0) <= MAX_LAYERS + 10
    assert checked > 20


def test_unknown_type():
    with pytest.raises(UnsupportedModelError, match="expected a model type that transformers knows, got 'lama'"):
        tiny_config("lama")


def test_prompts_are_padded_on_the_left():
    ids, mask = models.padded_batch()
    assert ids.shape == mask.shape == (2, 14)
    assert mask[1].tolist() == [0] * 5 + [1] * 9
    assert torch.equal(ids[1, 5:], models.prompts()[1][0])


def test_crash_and_timeout_do_not_end_the_sweep():
    names = ["a", "crash", "b", "hang", "c"]
    found = {r.model_type: r for r in sweep.sweep(names, time_limit_s=5, work=breaking_worker.work)}
    assert {name: result.status for name, result in found.items()} == {
        "a": "passed",
        "b": "passed",
        "c": "passed",
        "crash": "crashed",
        "hang": "timed out",
    }
    assert "status 3" in found["crash"].error


def test_update_continues_stored_results(tmp_path):
    path, versions = tmp_path / "results.json", {"transformers": "1"}

    def run(names, **options):
        said = []
        sweep.update(path, names, versions, again=lambda known: known is None, say=said.append, **options)
        return [result.model_type for result in said]

    assert sorted(run(["a", "b"], work=breaking_worker.work)) == ["a", "b"]
    assert run(["a", "b", "c"], work=breaking_worker.work) == ["c"]
    assert list(tasks.read(path)[1]) == ["a", "b", "c"]


def test_full_sweep_time_is_stored(tmp_path):
    path = tmp_path / "results.json"
    work = breaking_worker.work
    for names in (["a", "b"], ["c"]):
        sweep.update(path, names, {}, again=lambda known: known is None, say=lambda one: None, work=work)
        whole = sweep.load(path)["full_sweep"]
        assert (whole["types"], whole["workers"]) == (2, 2)


def test_packages_of_a_model():
    assert check_causal.packages_of(models.tiny_model("llama")) == []
    other = type("Other", (torch.nn.Linear,), {"__module__": "numpy.layers"})
    assert check_causal.packages_of(torch.nn.Sequential(other(1, 1))) == [f"numpy {numpy.__version__}"]


def test_model_that_amplifies_rounding_has_no_margins():
    model = models.tiny_model("llama")
    ids = models.prompts()[0]
    exact = copy.deepcopy(model).double()(input_ids=ids).logits
    found = models.rounding_error(model, lambda twin: twin(input_ids=ids).logits, exact.float() + 1)
    assert found == pytest.approx(1, abs=1e-5)
    expected = models.expect(model)
    assert 0 < expected.rounding <= models.MAX_ROUNDING
    assert not dataclasses.replace(expected, rounding=2 * models.MAX_ROUNDING).has_margins


def test_rounding_error_without_float64():
    model = models.tiny_model("llama")
    ids = models.prompts()[0]

    def forward(twin):
        assert next(twin.parameters()).dtype == torch.float32, "no float64 here"
        return twin(input_ids=ids).logits

    with torch.no_grad():
        logits = forward(model)
        found = models.rounding_error(model, forward, logits)
    assert 0 < found <= models.MAX_ROUNDING


def test_model_with_least_rounding_is_chosen():
    model = models.tiny_model("llama")
    clear = models.expect(model)
    roundings = {0: 7.5, 1: 1.6, 2: 1.9, 3: 1.7}
    gaps = {0: 0.9, 1: 0.01, 2: 0.03, 3: 0.02}

    def expect(seed):
        rounding = roundings[seed] * models.MAX_ROUNDING
        return dataclasses.replace(clear, rounding=rounding, smallest_gap=gaps[seed])

    chosen, _ = models.clearest(lambda seed: seed, expect, seeds=range(4))
    assert chosen == 2  # 1, 2 and 3 are as good, and its choices are the clearest
