"""What changes on a model after `to_jax` takes effect at the next call, or that call raises: never is it ignored."""

import copy
import sys
import time
import types

import pytest
import torch
from thorough import pairs
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from model_adapters.errors import InvalidArgumentError, TorchaxServeError, UnsupportedModelError
from model_adapters.program.module_watch import Structure
from torchax_serve import serve, to_jax

IDS = torch.arange(5, 14)[None]
OPTIONS = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def llama(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.3, **changes)
    return LlamaForCausalLM(config).eval()


class Adapter(torch.nn.Module):
    """As adapters are put in by hand: a linear layer in the place of another one."""

    def __init__(self, base):
        super().__init__()
        self.base, self.scale = base, 1.0
        torch.manual_seed(3)
        self.down = torch.nn.Parameter(torch.randn(4, base.in_features))
        self.up = torch.nn.Parameter(torch.randn(base.out_features, 4))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.down.T) @ self.up.T


def put_adapter_in(model):
    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapter(attention.q_proj)


def exchange_head(model):
    torch.manual_seed(5)
    model.lm_head = torch.nn.Linear(32, 40, bias=False)


def exchange_embeddings(model):
    torch.manual_seed(5)
    model.set_input_embeddings(torch.nn.Embedding(40, 32))


def edit_in_place(model):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-2)


def edit_through_data(model):
    model.model.norm.weight.data.copy_(torch.linspace(-1, 2, 32))


def exchange_data(model):
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0)


def exchange_parameter(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))


def load_others(model):
    torch.manual_seed(9)
    model.load_state_dict({name: torch.randn_like(value) * 0.3 for name, value in model.state_dict().items()})


def remove_layer(model):
    del model.model.layers[1]
    model.config.num_hidden_layers = 1


def patch_part(model):
    norm = model.model.norm
    norm.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 2, norm)


def change_attribute(model):
    model.model.layers[1].self_attn.scaling = 0.01


def change_epsilon(model):
    model.model.norm.variance_epsilon = 10.0


def change_activation(model):
    model.model.layers[0].mlp.act_fn = torch.nn.Identity()


def change_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def halve(model):
    model.to(torch.bfloat16)


def resize(model):
    model.resize_token_embeddings(48, mean_resizing=False)


CHANGES = [
    put_adapter_in,
    exchange_head,
    exchange_embeddings,
    edit_in_place,
    edit_through_data,
    exchange_data,
    exchange_parameter,
    load_others,
    remove_layer,
    patch_part,
    change_attribute,
    change_epsilon,
    change_activation,
    change_buffer,
    halve,
    resize,
]


@pytest.fixture(scope="module")
def unchanged():
    with torch.no_grad():
        return llama()(input_ids=IDS).logits


def name_of(value):
    return getattr(value, "__name__", value)


@pytest.mark.parametrize(("change", "when"), pairs(CHANGES, ["before", "after"], one_in=2), ids=name_of)
def test_a_change_takes_effect_before_and_after_the_first_call(change, when, unchanged):
    expected = llama()
    change(expected)
    with torch.no_grad():
        logits = expected(input_ids=IDS).logits
    is_half = logits.dtype == torch.bfloat16
    served = to_jax(llama())
    if when == "after":
        assert torch.allclose(served(input_ids=IDS).logits, unchanged, atol=1e-3)
    change(served)
    got = served(input_ids=IDS).logits
    assert got.dtype == logits.dtype
    if is_half:  # within twice of what PyTorch itself is off in 16 bits
        assert 0 < (got - unchanged).abs().max() < 2 * (logits - unchanged).abs().max()
    else:
        assert logits.shape != unchanged.shape or not torch.allclose(logits, unchanged, atol=1e-2)
        assert torch.allclose(got, logits, atol=1e-3)


@pytest.mark.parametrize("change", [put_adapter_in, edit_through_data], ids=lambda change: change.__name__)
def test_generate_follows_a_change_too(change):
    expected, served = llama(), to_jax(llama())
    assert torch.equal(served.generate(IDS, **OPTIONS), expected.generate(IDS, **OPTIONS))
    change(expected)
    change(served)
    assert torch.equal(served.generate(IDS, **OPTIONS), expected.generate(IDS, **OPTIONS))


def test_nothing_is_compiled_anew_where_nothing_or_a_value_alone_has_changed():
    served = to_jax(llama())
    served.generate(IDS, **OPTIONS)
    served(input_ids=IDS)
    traces = dict(served._jax_runtime.steps.num_traces)
    for _ in range(2):
        served.generate(IDS, **OPTIONS)
        served(input_ids=IDS)
        edit_in_place(served)
        served.generation_config.max_new_tokens = 5
        served.requires_grad_(False).to("cpu").float().eval()
    assert dict(served._jax_runtime.steps.num_traces) == traces


def test_an_adapter_switched_on_and_off_finds_its_programs_again():
    served = to_jax(llama())
    adapter = Adapter(served.model.layers[0].self_attn.q_proj)
    served.model.layers[0].self_attn.q_proj = adapter
    on = served(input_ids=IDS).logits
    adapter.scale = 0.0
    off = served(input_ids=IDS).logits
    assert not torch.allclose(on, off, atol=1e-2)
    runtimes = {id(served._jax_runtime.steps)}
    for scale, expected in ((1.0, on), (0.0, off), (1.0, on)):
        adapter.scale = scale
        assert torch.equal(served(input_ids=IDS).logits, expected)
        runtimes.add(id(served._jax_runtime.steps))
    assert len(runtimes) == 2


def test_a_forward_patched_before_is_compiled_and_one_patched_after_calls_it():
    def doubled(model):
        forward = model.forward

        def patched(*args, **kwargs):
            output = forward(*args, **kwargs)
            output.logits = -output.logits
            return output

        model.forward = patched

    expected = llama()
    doubled(expected)
    tokens = expected.generate(IDS, **OPTIONS)
    before, after = llama(), to_jax(llama())
    doubled(before)
    doubled(after)
    for served in (to_jax(before), after):
        assert torch.allclose(served(input_ids=IDS).logits, expected(input_ids=IDS).logits, atol=1e-3)
        assert torch.equal(served.generate(IDS, **OPTIONS), tokens)


def test_what_cannot_run_any_more_raises_at_every_call_until_it_is_mended():
    served = to_jax(llama(attention_dropout=0.5))
    served.train()
    for call in (lambda: served(input_ids=IDS), lambda: served.generate(IDS, **OPTIONS)):
        with pytest.raises(InvalidArgumentError, match=r"training mode; call model.eval\(\)"):
            call()
    served.eval()
    served.model.layers[1].self_attn.train()
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"layers\.1\.self_attn: expected a part in evaluation mode"):
            served(input_ids=IDS)
    served.eval().double()
    with pytest.raises(UnsupportedModelError, match=r"got float64; call model.float\(\)"):
        served.generate(IDS, **OPTIONS)
    assert torch.isfinite(served.float()(input_ids=IDS).logits).all()


def test_weights_that_only_the_device_has_cannot_be_edited_from_pytorch():
    with serve() as model:
        served = model.torch_model
        before = served(input_ids=IDS).logits
        with torch.no_grad():
            served.model.norm.weight.mul_(2)
        with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight: its values lie on the device alone"):
            served(input_ids=IDS)
    with serve() as model:
        width = model.config.hidden_size
        model.torch_model.model.norm = torch.nn.Identity()  # a part without weights, or one with values, is fine
        assert not torch.allclose(model(input_ids=IDS).logits, before, atol=1e-2)
        model.torch_model.model.norm = torch.nn.LayerNorm(width)
        assert torch.isfinite(model(input_ids=IDS).logits).all()


def test_the_engine_refuses_a_changed_model_until_it_is_refreshed():
    prompt, config = IDS[0].tolist(), GenerationConfig(max_new_tokens=4, do_sample=False)
    with serve(llama()) as model:
        assert list(model.iter_tokens(prompt, config))
        for change in (edit_in_place, edit_through_data, put_adapter_in):
            change(model.torch_model)
            for _ in range(2):
                with pytest.raises(TorchaxServeError, match=r"since the engine was made.*model.refresh\(\)"):
                    model.iter_tokens(prompt, config)
            model.refresh()
            expected = model.torch_model.generate(IDS, **OPTIONS)[0, IDS.shape[1] :]
            assert list(model.iter_tokens(prompt, config)) == expected.tolist()


def test_what_libraries_store_in_the_namespaces_of_modeling_files_is_no_change(monkeypatch):
    """Python notes warnings in the module that warns; transformers caches what it finds out on the class."""
    space = vars(sys.modules[LlamaForCausalLM.__module__])
    monkeypatch.delitem(space, "__warningregistry__", raising=False)
    model = to_jax(llama())
    watch = model._jax_runtime.watch
    monkeypatch.setitem(space, "__warningregistry__", {"version": 1})
    monkeypatch.setattr(LlamaForCausalLM, "_found_out_cached_value", False, raising=False)
    assert watch.change() is None
    monkeypatch.setattr(LlamaForCausalLM, "_found_out", lambda self: 1, raising=False)
    assert watch.change().what == "the class LlamaForCausalLM._found_out"


def test_looking_for_changes_takes_as_long_as_naming_all_parameters_a_few_times():
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=34, num_attention_heads=4
    )
    watch = to_jax(LlamaForCausalLM(config))._jax_runtime.watch
    assert len(list(watch.module.parameters())) > 300
    took, named = [], []
    for _ in range(50):  # in turns, on whatever machine
        start = time.perf_counter()
        assert watch.change() is None
        took.append(time.perf_counter() - start)
        dict(watch.module.named_parameters())
        named.append(time.perf_counter() - start - took[-1])
    assert min(took) < 5 * min(named)


def test_globals_that_code_reads_need_a_refresh():
    served = to_jax(llama())
    norm = served.model.norm
    norm.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * SCALE["norm"], norm)
    one = served(input_ids=IDS).logits
    SCALE["norm"] = 2.0
    try:
        served.refresh()
        assert torch.allclose(served(input_ids=IDS).logits, one * 2, rtol=1e-4, atol=1e-4)
    finally:
        SCALE["norm"] = 1.0


SCALE = {"norm": 1.0}


def test_copies_are_independent_of_the_model():
    served = to_jax(llama())
    expected = served(input_ids=IDS).logits
    other = copy.deepcopy(served)
    edit_in_place(served)
    assert torch.equal(other(input_ids=IDS).logits, expected)
    assert not torch.allclose(served(input_ids=IDS).logits, expected, atol=1e-2)


def test_a_model_that_nobody_has_is_not_searched_for_changes(monkeypatch):
    config = GenerationConfig(max_new_tokens=4, do_sample=False)
    with serve() as model:
        before = list(model.iter_tokens([5, 6, 7], config))
        searches = []
        difference = Structure.difference
        monkeypatch.setattr(Structure, "difference", lambda self: searches.append(self) or difference(self))
        assert list(model.iter_tokens([5, 6, 7], config)) == before and not searches
        held = model.torch_model
        assert list(model.iter_tokens([5, 6, 7], config)) == before and searches
        held.model.norm = torch.nn.Identity()
        with pytest.raises(TorchaxServeError, match=r"since the engine was made.*model.refresh\(\)"):
            model.iter_tokens([5, 6, 7], config)


@pytest.mark.parametrize("part", ["config", "custom_generate", "class"])
def test_parts_that_change_a_model_which_nobody_has(monkeypatch, part):
    """Whoever has the configuration can change the module; its class is anybody's."""
    config = GenerationConfig(max_new_tokens=4, do_sample=False)
    with serve() as model:
        assert list(model.iter_tokens([5, 6, 7], config))
        if part == "config":
            model.config.rms_norm_eps = 0.5
        elif part == "class":
            layer = type(model._module.model.norm)
            forward = layer.forward
            monkeypatch.setattr(layer, "forward", lambda self, x: -forward(self, x))
        else:

            def keeps(model, *args, **kwargs):
                model.model.norm = torch.nn.Identity()
                return torch.zeros((1, 1), dtype=torch.long)

            model.generate(torch.tensor([[5, 6, 7]]), custom_generate=keeps, max_new_tokens=2)
        with pytest.raises(TorchaxServeError, match=r"since the engine was made.*model.refresh\(\)"):
            model.iter_tokens([5, 6, 7], config)
