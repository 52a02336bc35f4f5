"""Adapters of requests: tokens are those of eager peft, unmerged; rows without one are those of the model alone."""

import json
import threading

import numpy as np
import pytest
import safetensors.torch
import torch
from adapter_models import ATTENTION, PeftModels, ranks
from engine_models import VOCAB_SIZE, tiny_model
from safetensors.numpy import load_file, save_file

from model_adapters.errors import CheckpointError, InvalidArgumentError, TorchaxServeError, UnsupportedModelError
from torchax_serve import EngineOptions, SamplingParams, serve

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

OPTIONS = EngineOptions(max_model_len=96, max_num_seqs=16, page_size=8, max_num_batched_tokens=32)
NUM_NEW = 10
LONG = [int(token) for token in np.random.default_rng(0).integers(3, VOCAB_SIZE, 40)]  # two chunks, five pages
SHORT = LONG[5:12]


def greedy(adapter=None, **options):
    return SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, adapter=adapter, **options)


def ids_of(answers):
    return [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def peft(tmp_path_factory):
    return PeftModels(tiny_model("llama"), tmp_path_factory.mktemp("adapters"), ranks(9))


@pytest.fixture(scope="module")
def served(peft):
    names = peft.names[:8]
    with serve(tiny_model("llama"), engine=OPTIONS, adapters=peft.folders(*names), max_lora_rank=9) as model:
        model.engine.check_integrity = True
        yield model


@pytest.fixture
def without(served, peft):
    """The same with the last of its adapters replaced by none."""
    served.unload_adapter("a7")
    yield served
    for name in set(served.adapters) - set(peft.names):
        served.unload_adapter(name)
    if "a7" not in served.adapters:
        served.load_adapter("a7", peft.folder("a7"))


def test_eight_adapters_in_eight_rows_beside_the_model_itself(served, peft):
    names = [*peft.names[:8], None]
    prompts = [LONG if index % 2 else SHORT[: 3 + index % 4] for index in range(len(names))]
    wanted = [peft.tokens(name, prompt, NUM_NEW) for name, prompt in zip(names, prompts, strict=True)]
    assert len({tuple(tokens) for tokens in wanted}) > 6
    params = [greedy(name) for name in names]
    assert ids_of(served.generate_batch(prompts, params)) == wanted
    hits = served.stats().scheduler.num_hit_tokens
    assert ids_of(served.generate_batch(prompts, params)) == wanted  # from the cache
    assert served.stats().scheduler.num_hit_tokens > hits
    alone = [served.generate_batch([prompt], [each])[0].token_ids for prompt, each in zip(prompts, params, strict=True)]
    assert alone == wanted


def test_prefixes_are_not_shared_with_other_adapters(served, peft):
    prompt = LONG[::-1]
    served.generate_batch([prompt], [greedy("a1")])
    hits = served.stats().scheduler.num_hit_tokens
    for name in ("a2", None):
        assert served.generate_batch([prompt], [greedy(name)])[0].token_ids == peft.tokens(name, prompt, NUM_NEW)
        assert served.stats().scheduler.num_hit_tokens == hits
    served.generate_batch([prompt], [greedy("a1", cache_salt="x")])
    assert served.stats().scheduler.num_hit_tokens == hits
    served.generate_batch([prompt], [greedy("a1")])
    assert served.stats().scheduler.num_hit_tokens > hits


def test_rows_without_an_adapter_are_bit_equal_to_those_of_a_model_without_any(served):
    prompts, params = [LONG[:20], SHORT], [greedy(logprobs=3), greedy(logprobs=3, prompt_logprobs=0)]
    with serve(tiny_model("llama"), engine=OPTIONS) as plain:
        wanted = plain.generate_batch(prompts, params)
    others = [greedy("a3"), greedy("a5")]
    got = served.generate_batch([*prompts, LONG[3:30], SHORT], [*params, *others])[:2]
    for answer, expected in zip(got, wanted, strict=True):
        assert answer.token_ids == expected.token_ids
        assert answer.logprobs == expected.logprobs
        assert answer.prompt_logprobs == expected.prompt_logprobs


def test_seeds_draw_the_same_tokens_whatever_else_runs(served):
    drawn = SamplingParams(max_new_tokens=NUM_NEW, temperature=1.0, seed=5, adapter="a4", logprobs=0)
    alone = served.generate_batch([SHORT], [drawn])[0]
    beside = served.generate_batch([SHORT, LONG, SHORT], [drawn, greedy("a2"), greedy()])[0]
    assert (beside.token_ids, beside.logprobs) == (alone.token_ids, alone.logprobs)
    other = SamplingParams(max_new_tokens=NUM_NEW, temperature=1.0, seed=5, adapter="a6")
    assert served.generate_batch([SHORT], [other])[0].token_ids != alone.token_ids


def test_adapters_come_and_go_while_requests_run_and_nothing_is_compiled(served, peft):
    served.generate_batch([LONG, SHORT], [greedy("a0"), greedy()])
    served.engine._runner._background.wait()  # for programs that are compiled ahead
    programs = served.stats().num_programs
    long = SamplingParams(max_new_tokens=48, temperature=0.0, adapter="a1")
    stream = served.iter_tokens(SHORT, params=long)
    tokens = [next(stream)]
    for name in ("a7", "a6"):
        served.unload_adapter(name)
        with pytest.raises(InvalidArgumentError, match=f"got {name!r}, which is not loaded"):
            served.generate_batch([SHORT], [greedy(name)])
    served.load_adapter("new", peft.folder("a8"))
    assert served.generate_batch([SHORT], [greedy("new")])[0].token_ids == peft.tokens("a8", SHORT, NUM_NEW)
    served.unload_adapter("new")
    served.load_adapter("new", peft.folder("a7"))  # of the same name and prompt, and other pages
    assert served.generate_batch([SHORT], [greedy("new")])[0].token_ids == peft.tokens("a7", SHORT, NUM_NEW)
    served.unload_adapter("new")
    for name in ("a6", "a7"):
        served.load_adapter(name, peft.folder(name))
    assert [*tokens, *stream] == peft.tokens("a1", SHORT, 48)
    assert served.stats().num_programs == programs


def test_unloading_waits_for_requests_and_refuses_new_ones(without, peft):
    without.load_adapter("busy", peft.folder("a7"))
    stream = without.iter_tokens(SHORT, params=SamplingParams(max_new_tokens=60, temperature=0.0, adapter="busy"))
    tokens = [next(stream)]
    with pytest.raises(TorchaxServeError, match="expected 'busy' without requests after 0 s, got 1 that run or wait"):
        without.unload_adapter("busy", timeout_s=0)
    assert without.adapters["busy"] == str(peft.folder("a7"))
    thread = threading.Thread(target=without.unload_adapter, args=("busy",))
    thread.start()
    while "busy" in without.adapters:
        thread.join(0.01)
    with pytest.raises(InvalidArgumentError, match="got 'busy', which is"):
        without.generate_batch([SHORT], [greedy("busy")])
    tokens += stream
    thread.join(60)
    assert not thread.is_alive() and tokens == peft.tokens("a7", SHORT, 60)


def test_a_request_that_is_dropped_or_refused_holds_no_adapter(without, peft):
    without.load_adapter("held", peft.folder("a7"))
    without.iter_tokens(SHORT, params=SamplingParams(max_new_tokens=60, adapter="held")).close()
    with pytest.raises(InvalidArgumentError, match="expected a prompt of at most 95 tokens"):
        without.iter_tokens(LONG * 3, params=greedy("held"))
    without.unload_adapter("held", timeout_s=60)


def changed(peft, tmp_path, name="a2", **fields):
    """A copy of an adapter with another configuration."""
    folder = tmp_path / name
    folder.mkdir()
    for file in peft.folder(name).iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported here; merge it with peft"),
        ({"bias": "lora_only"}, "bias='lora_only' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        ({"peft_type": "IA3"}, "expected peft_type LORA, got IA3"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the weights of its base"),
        ({"use_rslora": "no"}, "expected true or false for use_rslora in .*, got 'no'"),
    ],
)
def test_other_kinds_of_adapters_are_refused_by_name(without, peft, tmp_path, fields, message):
    with pytest.raises((UnsupportedModelError, InvalidArgumentError), match=message):
        without.load_adapter("x", changed(peft, tmp_path, **fields))


def test_numbers_that_are_not_finite_and_ranks_that_are_not_stated(without, peft, tmp_path):
    folder = changed(peft, tmp_path, r=7)
    with pytest.raises(CheckpointError, match=r"expected a rank of 7 .* \(r, rank_pattern\), got matrices of rank 3"):
        without.load_adapter("x", folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = np.nan
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="expected finite numbers, got NaN"):
        without.load_adapter("x", folder)


def test_adapters_that_do_not_fit_are_refused_and_nothing_in_flight_is_lost(without, peft, tmp_path):
    def refused(error, message, config, base="llama", name="x"):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        PeftModels(tiny_model(base), folder, {"x": config})
        with pytest.raises(error, match=message) as caught:
            without.load_adapter(name, folder / "x")
        assert "\n" not in str(caught.value)

    stream = without.iter_tokens(SHORT, params=SamplingParams(max_new_tokens=60, temperature=0.0, adapter="a1"))
    tokens = [next(stream)]
    with pytest.raises(InvalidArgumentError, match="expected a new name, got 'a1', which is loaded"):
        without.load_adapter("a1", peft.folder("a2"))
    refused(InvalidArgumentError, r"expected a rank of at most 9 \(max_lora_rank\), got 12", {"r": 12})
    refused(InvalidArgumentError, "mlp.down_proj: expected layers k_proj, o_proj", {"target_modules": ["down_proj"]})
    refused(UnsupportedModelError, "of linear layers, got base_model.model.lm_head", {"target_modules": ["lm_head"]})
    refused(UnsupportedModelError, "lora_A and lora_B of linear layers, got", {"target_modules": ["embed_tokens"]})
    refused(InvalidArgumentError, "out_proj, which is no linear layer", {"target_modules": ["out_proj"]}, "opt")
    with pytest.raises(InvalidArgumentError, match=r"expected a folder with adapter_config\.json"):
        without.load_adapter("x", tmp_path / "nowhere")
    with pytest.raises(InvalidArgumentError, match="expected the path of a folder, got None"):
        without.load_adapter("x", None)
    other = changed(peft, tmp_path, "a3")
    tensors = load_file(other / "adapter_model.safetensors")
    save_file({name: tensor.astype(np.int8) for name, tensor in tensors.items()}, other / "adapter_model.safetensors")
    with pytest.raises(
        UnsupportedModelError, match=r"expected a matrix in float32, bfloat16, float16, got int8\[4, 32\]"
    ):
        without.load_adapter("x", other)
    eight_bits = {name: torch.from_numpy(tensor).to(torch.float8_e4m3fn) for name, tensor in tensors.items()}
    safetensors.torch.save_file(eight_bits, other / "adapter_model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"float32, bfloat16, float16 in .*, got another type \(.*float8"):
        without.load_adapter("x", other)
    broken = changed(peft, tmp_path)
    (broken / "adapter_model.safetensors").write_bytes(b"x" * 64)
    with pytest.raises(CheckpointError, match="got none that is readable"):
        without.load_adapter("x", broken)
    without.load_adapter("a7", peft.folder("a7"))
    with pytest.raises(InvalidArgumentError, match=r"expected at most 8 adapters \(max_loras\)"):
        without.load_adapter("one-more", peft.folder("a8"))
    with pytest.raises(InvalidArgumentError, match="expected one that is loaded"):
        without.unload_adapter("nobody")
    with pytest.raises(InvalidArgumentError, match=r"expected one that is loaded .*, got \['a1'\]"):
        without.unload_adapter(["a1"])
    with pytest.raises(InvalidArgumentError, match="timeout_s: expected seconds >= 0 or None, got '3'"):
        without.unload_adapter("a1", timeout_s="3")
    assert [*tokens, *stream] == peft.tokens("a1", SHORT, 60)


def test_a_model_without_adapters_says_how_to_have_some(tmp_path):
    with serve(tiny_model("llama"), engine=OPTIONS) as plain:
        with pytest.raises(UnsupportedModelError, match="served with room for adapters, this one is not"):
            plain.load_adapter("x", tmp_path)
        with pytest.raises(InvalidArgumentError, match="got 'x': the model was served without adapters"):
            plain.generate_batch([SHORT], [greedy("x")])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adapters": "folder"}, "adapters: expected folders by name"),
        ({"max_loras": 0}, "max_loras: expected"),
        ({"max_lora_rank": 1000}, "max_lora_rank: expected at most 512, got 1000"),
        ({"lora_target_modules": "q_proj"}, "lora_target_modules: expected a list of names"),
        ({"lora_target_modules": ["nope"]}, r"expected names of linear layers \(down_proj, .*\), got 'nope'"),
    ],
)
def test_options_out_of_range(given, message):
    with pytest.raises(InvalidArgumentError, match=message):
        serve(tiny_model("llama"), **given)


def test_room_without_first_adapters_and_layers_by_name(peft):
    with serve(tiny_model("llama"), engine=OPTIONS, max_loras=2, lora_target_modules=ATTENTION) as model:
        model.load_adapter("sql", peft.folder("a3"))
        assert model.generate_batch([SHORT], [greedy("sql")])[0].token_ids == peft.tokens("a3", SHORT, NUM_NEW)
        assert model.generate(torch.tensor([SHORT]), max_new_tokens=NUM_NEW)[0, len(SHORT) :].tolist() == peft.tokens(
            None, SHORT, NUM_NEW
        )
        with pytest.raises(UnsupportedModelError, match="export: expected a model without adapters of requests"):
            model.export("bundle")
