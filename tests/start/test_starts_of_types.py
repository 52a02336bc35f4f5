"""The sweep over second starts: a packed type with recurrent layers, others, and a process that crashes."""

import os
import signal

import pytest
from thorough import except_for

from parity_sweep import check_start, starts
from parity_sweep.tiny.models import prompts, tiny_model
from torchax_serve.compilation.xla_cache import enable_compile_cache

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


PACKED = ["qwen3_5_text", "qwen3", "deepseek_v32", "glm_moe_dsa", "deepseek_v4", "qwen4_exp_text"]
PACKED += ["inkling2_text", "inkling2_loop_text", "kimi_linear", "bailing_hybrid", "mamba2", "lfm2", "nemotron_h"]


@pytest.mark.parametrize("name", except_for(["qwen3_5_text"], [*PACKED, "speech:whisper"]))
def test_a_type_starts_a_second_time(name):
    result = check_start.check(name)
    assert result.status == "passed", result
    assert (result.by_record, result.executor) == ((False, "per-sequence") if ":" in name else (True, "packed"))


def test_a_start_that_crashes_is_told_and_the_next_one_runs(tmp_path):
    assert enable_compile_cache() is not None
    inputs = [{"input_ids": prompts()[0]}]
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    with starts.start_processes() as second:
        with pytest.raises(RuntimeError, match=f"status -{int(signal.SIGSEGV)}"):
            second.start(tmp_path / "model", [{"input_ids": _Crash()}], check_start.check_causal.ENGINE)
        answered = second.start(tmp_path / "model", inputs, check_start.check_causal.ENGINE)
    eager = model.generate(prompts()[0], max_new_tokens=16, do_sample=False)[0, -16:]
    assert answered.tokens == [eager.tolist()]


class _Crash:
    """What ends the process that unpickles it."""

    def __reduce__(self):
        return os.kill, (_Own(), signal.SIGSEGV)


class _Own:
    """The id of the process that unpickles it."""

    def __reduce__(self):
        return os.getpid, ()
