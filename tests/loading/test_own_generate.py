"""``custom_generate``: generation code of a repository, or of the caller, over the compiled forward."""

import sys
from pathlib import Path

import hub_lookalike
import pytest
import torch
from hub_lookalike import point_at
from huggingface_hub import constants
from loading_models import tiny_folder
from transformers import AutoModelForCausalLM

from model_adapters.errors import (
    CheckpointError,
    InvalidArgumentError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from torchax_serve import EngineOptions, serve, to_jax
from torchax_serve.engine.request_handle import RequestError
from torchax_serve.parity.verify import verify

NAME, RECIPE_NAME = "people/tiny", "people/recipe"
PROMPT = torch.tensor([[3, 9, 4, 17, 5]])
CALL = {"input_ids": PROMPT, "max_new_tokens": 7}

# A loop of its own inside transformers' preparations, as the recipes on the hub are made; `rank` is its own argument.
RECIPE = """
from transformers import GenerationMixin

from .choice import choose


def _loop(model, input_ids, logits_processor, stopping_criteria, generation_config, rank=1, **model_kwargs):
    new = input_ids.shape[1]
    while True:
        inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=new, **model_kwargs)
        new = 1
        outputs = model(**inputs, return_dict=True)
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
        scores = logits_processor(input_ids, outputs.logits[:, -1].float())
        input_ids = choose(input_ids, scores, rank)
        if stopping_criteria(input_ids, None).all():
            return input_ids


def generate(model, **kwargs):
    return GenerationMixin.generate(model, custom_generate=_loop, **kwargs)
"""
CHOICE = """
import torch


def choose(input_ids, scores, rank):
    return torch.cat([input_ids, scores.topk(rank)[1][:, -1:]], 1)
"""
# Nothing but the forward, again and again over everything.
PLAIN_RECIPE = """
import torch


def generate(model, input_ids, max_new_tokens, **kwargs):
    for _ in range(max_new_tokens):
        logits = model(input_ids, use_cache=False).logits
        input_ids = torch.cat([input_ids, logits[:, -1].argmin(-1, keepdim=True)], 1)
    return input_ids
"""


def second_best(model, input_ids, logits_processor, stopping_criteria, generation_config, step=0, **kwargs):
    """A caller's loop, with an argument of its own."""
    while not stopping_criteria(input_ids, None).all():
        logits = model(input_ids=input_ids).logits[:, -1]
        input_ids = torch.cat([input_ids, logits.topk(2)[1][:, -1:] + step], 1)
    return input_ids


def write_recipe(folder, code=RECIPE, requirements=None):
    own = folder / "custom_generate"
    own.mkdir(parents=True)
    (own / "generate.py").write_text(code)
    (own / "choice.py").write_text(CHOICE)
    if requirements:
        (own / "requirements.txt").write_text(requirements)
    return folder


@pytest.fixture(autouse=True)
def modules(monkeypatch, tmp_path):
    """A place of each test's own for imported code; Python remembers where it found the package of them."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    others = [path for path in sys.path if (Path(path) / "transformers_modules").is_dir()]
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in others])
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def folder(tmp_path):
    return tiny_folder(tmp_path / "model")


def check_same(model, eager, **kwargs):
    torch.testing.assert_close(model.generate(**CALL, **kwargs), eager.generate(**CALL, **kwargs), rtol=0, atol=0)


def eager_of(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


@pytest.mark.parametrize(("code", "options"), [(RECIPE, [{}, {"rank": 2}, {"rank": 3}]), (PLAIN_RECIPE, [{}])])
def test_the_folders_own_generate_runs_when_trusted(folder, code, options):
    write_recipe(folder, code)
    eager = eager_of(folder, trust_remote_code=True)
    with serve(folder, trust_remote_code=True) as model:
        for each in options:
            check_same(model, eager, **each)
        last = model.generate(**CALL, **options[-1])
    assert last.tolist() != eager_of(folder).generate(**CALL).tolist()  # the recipe has made a difference


def test_it_neither_runs_nor_is_read_when_not_trusted(folder):
    write_recipe(folder, "raise SystemExit('somebody ran this')")
    with serve(folder) as model:
        check_same(model, eager_of(folder))


def test_tokens_come_from_it_wherever_the_model_is_used(folder):
    write_recipe(folder)
    with serve(folder, trust_remote_code=True) as model:
        expected = model.generate(**CALL, do_sample=False)[0, PROMPT.shape[1] :].tolist()
        config = model.generation_config
        config.max_new_tokens = 7
        assert list(model.iter_tokens(PROMPT[0].tolist(), config)) == expected
        with pytest.raises(UnsupportedModelError, match="a generate of its own"):
            _ = model.engine
    with (
        serve(folder, trust_remote_code=True, engine=EngineOptions()) as model,
        pytest.raises(UnsupportedModelError, match="a generate of its own"),
    ):
        _ = model.engine


def test_one_that_returns_something_else_is_no_stream(folder):
    write_recipe(folder, "def generate(model, **kwargs):\n    return ['a', 'text']\n")
    with serve(folder, trust_remote_code=True) as model:
        assert model.generate(**CALL) == ["a", "text"]
        with pytest.raises(RequestError, match=r"UnsupportedModelError.*expected token ids .* got list; call generate"):
            list(model.iter_tokens([3, 4]))


def test_verify_compares_the_models_own_tokens(folder):
    write_recipe(folder, "def generate(model, **kwargs):\n    raise RuntimeError\n")
    assert verify(folder, prompt=None, new_tokens=2, dtype="float32", trust_remote_code=True).passed


def test_a_loaded_object_keeps_what_it_was_loaded_with(folder):
    write_recipe(folder)
    model = to_jax(eager_of(folder, trust_remote_code=True))
    check_same(model, eager_of(folder, trust_remote_code=True), rank=2)


@pytest.mark.parametrize(
    ("code", "requirements", "error", "message"),
    [
        ("def other(): ...", None, CheckpointError, "does not give a function `generate`"),
        ("import no_such_package", None, UnsupportedModelError, "needs what is not installed.*no_such_package"),
        (RECIPE, "no-such-package>=1.0", UnsupportedModelError, "needs what is not installed.*no-such-package"),
        ("1 / 0", None, CheckpointError, "ZeroDivisionError"),
    ],
)
def test_code_that_does_not_load(folder, code, requirements, error, message):
    write_recipe(folder, code, requirements)
    with pytest.raises(error, match=message) as caught:
        serve(folder, trust_remote_code=True)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tiny_folder(tmp_path_factory.mktemp("plain"))
    with serve(folder) as model:
        yield model, eager_of(folder)


def test_a_folder_given_to_generate(pair, tmp_path):
    recipe = str(write_recipe(tmp_path / "recipe"))
    model, eager = pair
    for rank in (1, 2):
        check_same(model, eager, custom_generate=recipe, trust_remote_code=True, rank=rank)
    for refused in ({}, {"trust_remote_code": False}):
        with pytest.raises(UnsupportedArgumentError, match=r"custom_generate='.*recipe'.*trust_remote_code=True"):
            model.generate(**CALL, custom_generate=recipe, **refused)
    with pytest.raises(OSError, match="does not contain a `custom_generate`"):  # in transformers' words
        model.generate(**CALL, custom_generate=str(tmp_path), trust_remote_code=True)
    with pytest.raises(InvalidArgumentError, match=r"custom_generate: expected .* pass str\(path\)"):
        model.generate(**CALL, custom_generate=tmp_path / "recipe", trust_remote_code=True)


@pytest.mark.parametrize("arguments", [{}, {"step": -1}, {"step": -1, "trust_remote_code": True}])
def test_a_function_given_to_generate(pair, arguments):
    check_same(*pair, custom_generate=second_best, **arguments)


# --- the hub


@pytest.fixture
def hub(monkeypatch, tmp_path, folder):
    with hub_lookalike.serving() as server:
        point_at(monkeypatch, server.endpoint)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        server.repositories[NAME] = hub_lookalike.Repository(write_recipe(folder, requirements="torch>=2.0"))
        server.repositories[RECIPE_NAME] = hub_lookalike.Repository(write_recipe(tmp_path / "recipe"))
        yield server


def test_a_repositorys_own_generate(hub, folder):
    with serve(NAME) as model:
        check_same(model, eager_of(folder))
    assert not [name for name in hub.fetched() if name.startswith("custom_generate")]
    with serve(NAME, trust_remote_code=True) as model:
        check_same(model, eager_of(folder, trust_remote_code=True), rank=2)
    fetched = [name for name in hub.fetched() if name.startswith("custom_generate")]
    assert sorted(fetched) == [f"custom_generate/{name}" for name in ("choice.py", "generate.py", "requirements.txt")]


def test_a_repository_given_to_generate(hub, pair):
    model, eager = pair
    check_same(model, eager, custom_generate=RECIPE_NAME, trust_remote_code=True, rank=2)
    with pytest.raises(UnsupportedArgumentError, match=f"custom_generate='{RECIPE_NAME}'.*trust_remote_code=True"):
        model.generate(**CALL, custom_generate=RECIPE_NAME)
