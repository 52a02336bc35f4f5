"""Forward hooks of a script on parts of a model: called at every call, with tensors of PyTorch."""

import copy

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from model_adapters.errors import NoTokenLeftError, UnsupportedArgumentError, UnsupportedModelError
from torchax_serve import serve, to_jax

IDS = torch.arange(5, 14)[None]
OPTIONS = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def original():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def models(original):
    """The model in eager PyTorch, and on JAX after a call."""
    served = to_jax(copy.deepcopy(original))
    served(input_ids=IDS)
    return copy.deepcopy(original), served


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def same(eager, served):
    return torch.allclose(logits(served), logits(eager), atol=1e-3)


def test_what_a_hook_returns_or_writes_takes_effect_until_it_is_removed(models):
    eager, served = models
    plain = logits(served)

    def ablated(module, args, output):
        return output * 0

    def steered(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        hidden[:, -1] += module.self_attn.o_proj.weight[0]  # in place, from a weight

    def shifted(module, args, kwargs):
        kwargs["hidden_states"] = kwargs["hidden_states"] + 1
        return args, kwargs

    def written(module, args):
        args[0].mul_(2)  # also seen by the residual connection, as in PyTorch

    for part, hook, kind, options in (
        ("model.layers.1.self_attn.o_proj", ablated, "register_forward_hook", {}),
        ("model.layers.0", steered, "register_forward_hook", {}),
        ("model.layers.1.self_attn", shifted, "register_forward_pre_hook", {"with_kwargs": True}),
        ("model.layers.1.post_attention_layernorm", written, "register_forward_pre_hook", {}),
    ):
        handles = [getattr(model.get_submodule(part), kind)(hook, **options) for model in models]
        assert same(eager, served), hook
        assert not torch.allclose(logits(served), plain, atol=1e-2), hook
        for handle in handles:
            handle.remove()
    assert torch.equal(logits(served), plain)


def test_activations_are_seen_at_every_call_and_without_padding(models):
    seen = []
    for model in models:
        kept = []

        def keep(module, args, output, kept=kept):
            kept.append(output.detach().clone())

        model.model.layers[0].mlp.register_forward_hook(keep)
        logits(model)
        logits(model)
        seen.append(kept)
    assert len(seen[0]) == len(seen[1]) == 2
    for mine, its in zip(*seen, strict=True):
        assert type(its) is torch.Tensor
        assert its.shape == mine.shape
        assert torch.allclose(mine, its, atol=1e-3)


def test_generate_calls_hooks_once_for_each_token(models):
    calls = []
    tokens = []
    for model in models:
        shapes = []

        def count(module, args, output, shapes=shapes):
            shapes.append(tuple(output.shape))
            return output * 0.5

        model.model.layers[1].mlp.register_forward_hook(count)
        tokens.append(model.generate(IDS, **OPTIONS))
        calls.append(shapes)
    assert torch.equal(*tokens)
    assert calls[0] == calls[1] == [(1, 9, 32), (1, 1, 32), (1, 1, 32)]


def test_hooks_of_the_model_itself_act_in_forward_and_generate(models):
    def negated(module, args, output):
        output.logits = -output.logits
        return output

    for model in models:
        model.register_forward_hook(negated)
    eager, served = models
    assert same(eager, served)
    assert torch.equal(served.generate(IDS, **OPTIONS), eager.generate(IDS, **OPTIONS))


def test_an_exception_of_a_hook_is_the_one_that_is_raised(models):
    class StopHere(Exception):
        pass

    def stop(module, args, output):
        raise StopHere

    _, served = models
    handle = served.model.layers[0].register_forward_hook(stop)
    with pytest.raises(StopHere):
        served(input_ids=IDS)
    handle.remove()
    assert torch.isfinite(logits(served)).all()


def test_the_engine_and_hooks_on_everything_are_refused(original):
    with serve(copy.deepcopy(original)) as model:
        model.torch_model.model.layers[0].register_forward_hook(lambda *_: None)
        with pytest.raises(UnsupportedModelError, match=r"forward hook is set on model.layers.0.*call generate\(\)"):
            _ = model.engine
        config = GenerationConfig(max_new_tokens=3, do_sample=False)
        assert len(list(model.iter_tokens([5, 6, 7], config))) == 3
    served = to_jax(copy.deepcopy(original))
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(UnsupportedArgumentError, match="no forward hooks on all modules"):
            served(input_ids=IDS)
    finally:
        handle.remove()


@pytest.mark.parametrize("do_sample", [False, True])
def test_options_that_leave_no_token_are_named_where_generate_chooses(original, do_sample):
    others = [token for token in range(40) if token != 9]
    options = {**OPTIONS, "do_sample": do_sample, "suppress_tokens": others, "bad_words_ids": [[9, 9, 9]]}
    expected = r"after 2 of the answer, got suppress_tokens, bad_words_ids, which forbid all together"
    with serve(copy.deepcopy(original)) as model:
        if do_sample:  # a static batch; greedily transformers takes token 0
            with pytest.raises(NoTokenLeftError, match=expected):
                model.torch_model.generate(IDS, **options)
        model.torch_model.model.layers[0].register_forward_hook(lambda *_: None)  # transformers' own loop
        with pytest.raises(NoTokenLeftError, match=expected):
            list(model.iter_tokens([5, 6, 7], GenerationConfig(**options)))
        everything = GenerationConfig(**OPTIONS | {"do_sample": do_sample, "suppress_tokens": [*range(40)]})
        with pytest.raises(NoTokenLeftError, match=r"after 0 of the answer, got suppress_tokens, which forbid all"):
            list(model.iter_tokens([5, 6, 7], everything))
        assert len(list(model.iter_tokens([5, 6, 7], GenerationConfig(**OPTIONS)))) == 3  # a later one
