"""Starts are recorded of quantized weights too, from wherever they come; the recorded model has the same tokens."""

import functools
import sys
import threading
from pathlib import Path

import pytest
from thorough import thorough

from model_adapters.loading.model_source import EMBEDDED, parse_name
from model_adapters.loading.save_quantized import save_quantized
from torchax_serve import EngineOptions, SamplingParams
from torchax_serve.compilation.xla_cache import enable_compile_cache
from torchax_serve.entrypoints.load import load_served_model
from torchax_serve.entrypoints.served_model import ServedModel
from torchax_serve.start.record import start_folder
from torchax_serve.start.stored_model import stored_model

OPTIONS = EngineOptions(max_num_seqs=2, max_model_len=128)
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)


def gguf_file(folder):
    pytest.importorskip("gguf", reason="the format's own tool is part of the extra dev")
    sys.path.insert(0, str(Path(__file__).parents[1] / "loading" / "formats"))
    from gguf_files import tiny_model, write_gguf

    write_gguf(folder / "model.gguf", tiny_model("llama"), "llama", "Q8_0")
    return folder / "model.gguf"


def quantized_folder(folder):
    save_quantized(EMBEDDED, folder / "quantized", "int8")
    return folder / "quantized"


def not_to_be_called():
    raise AssertionError("the torch side is loaded")


@pytest.fixture(autouse=True)
def compile_cache():
    assert enable_compile_cache() is not None


def recorded_start(path, **loading):
    """Serves a model, waits for the record of its start, and returns it again from that, with what to expect."""
    folder_of = functools.partial(start_folder, arguments={key: repr(value) for key, value in loading.items()})
    with load_served_model(path, OPTIONS, None, None, True, loading, folder_of) as model:
        expected = list(model.iter_tokens([5, 6, 7], params=PARAMS))
        said = model.load_report.quantization, model.generation_config.to_dict()
        for thread in threading.enumerate():
            if thread.name == "record-start":
                thread.join()
        model._runtimes[0].steps.executables.wait_for_writes()
    source = parse_name(path)
    stored = stored_model(source, folder_of(source), not_to_be_called, lambda: True)
    assert stored is not None
    return ServedModel(stored, OPTIONS), expected, said


@pytest.mark.parametrize("make", [thorough(quantized_folder), gguf_file])
def test_a_quantized_checkpoint(make, tmp_path):
    recorded, expected, (quantization, generation_config) = recorded_start(make(tmp_path))
    with recorded:
        assert list(recorded.iter_tokens([5, 6, 7], params=PARAMS)) == expected
        assert recorded.load_report.quantization == quantization != ""
        for name in ("eos_token_id", "bos_token_id", "max_new_tokens", "temperature"):
            assert getattr(recorded.request_defaults, name) == generation_config.get(name)


def test_what_weights_lost_is_told_again(tmp_path, caplog):
    recorded, *_ = recorded_start(quantized_folder(tmp_path), quantization="int4", requantize=True)
    recorded.close()
    first, second = (each.getMessage() for each in caplog.records if "quantized again" in each.getMessage())
    assert first == second
    assert first.endswith(recorded.load_report.requantized)


def test_files_that_are_no_longer_the_latest_are_not_used(tmp_path):
    recorded, *_ = recorded_start(EMBEDDED, quantization="int4")
    recorded.close()
    source = parse_name(EMBEDDED)
    folder = start_folder(source, {"quantization": "'int4'"})
    assert stored_model(source, folder, not_to_be_called, lambda: False) is None
