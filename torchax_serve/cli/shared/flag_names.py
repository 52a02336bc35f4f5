"""Names of flags: in messages about Python arguments, and hints for flags of other programs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping

# Python arguments that a flag stands for under another name.
_RENAMED = {
    "local_files_only": "--offline",
    "join_timeout_s": "--join-timeout",
    "served_model_names": "--served-model-name",
    "watchdog_s": "--watchdog",
    "keep_alive_s": "--keep-alive",
    "pre_stop_s": "--pre-stop",
    "drain_timeout_s": "--drain-timeout",
    "request_timeout_s": "--request-timeout",
    "queue_timeout_s": "--queue-timeout",
    "first_token_timeout_s": "--first-token-timeout",
    "min_replicas": "--replicas",
    "max_replicas": "--replicas",
    "prefill_lens": "--prefill",
    "new_tokens": "--new-tokens",
    "batches": "--batch",
}
# Advice that only makes sense in Python.
_PHRASES = {
    "None leaves it unset": "leave the option out",
    "None draws a fresh one": "without the option a fresh one is drawn",
    "set do_sample=False (in SamplingParams: temperature=0)": "give --greedy",
    "min_replicas and max_replicas: expected 1 <= min <= max": "--replicas: expected 1 <= LEAST <= MOST",
}

_LENGTH = "the cache grows with the conversation; --max-new-tokens bounds an answer, and plan has --max-model-len"
_DEVICE = "JAX chooses the device; the environment variable JAX_PLATFORMS=cpu, cuda or tpu says which"
_MEMORY = "memory is measured; in Python, serve(engine=EngineOptions(...)) bounds that of the cache"
_QUANTIZED = "use --quantization int8 or int4"
_POSITIONAL = "the model is the first argument, without a flag"
_SEQS = "a chat is one request at a time; plan and deploy have --max-num-seqs"
_HTTP = "run answers in the terminal; torchax-serve serve answers over HTTP"
_SAMPLED = "--temperature, --top-k or --top-p turn sampling on, --greedy turns it off"
_IN_PYTHON = "the command line has no flag for it; SamplingParams has it in Python"
_ADAPTERS = "give --adapter NAME=FOLDER, once for each adapter"
_TEMPLATE = "the chat template is the one in the folder of the model; edit it there"
_PARSED = "tool calls and reasoning are always parsed; --response-template of serve names an unknown format"
_GRAMMAR = "requests ask for structured output by response_format or structured_outputs; there is one implementation"
_ATTENTION = "attention is this project's own; torchax-serve ops lists its implementations"
_TASK = "the checkpoint says what a model does: run and serve generate, embed and serve embed"
_ROPE = "config.json of the model says it; edit it there"
_COMPILED = "programs are always compiled"
HINTS: Mapping[str, str] = {
    "--attention-backend": _ATTENTION,
    "--attn-implementation": _ATTENTION,
    "--batch-size": "bench has --batch",
    "--beam-size": "answers are sampled or greedy; generate() in Python has beams",
    "--best-of": "there is one answer to a prompt; generate_batch() in Python has n",
    "--chat-template": _TEMPLATE,
    "--chat-template-content-format": _TEMPLATE,
    "--compilation-config": _COMPILED,
    "--context-length": _LENGTH,
    "--cpu-offload-gb": _MEMORY,
    "--ctx-size": _LENGTH,
    "--data-parallel-size": "give --mesh data=2 and the like",
    "--device": _DEVICE,
    "--device-map": _DEVICE,
    "--disable-log-requests": "lines name no prompt; --no-access-log of serve leaves them out",
    "--do-sample": _SAMPLED,
    "--enable-auto-tool-choice": _PARSED,
    "--enable-chunked-prefill": "long prompts always come in chunks",
    "--enable-expert-parallel": "give --mesh expert=2 and the like",
    "--enable-lora": _ADAPTERS,
    "--enable-prefix-caching": "prefixes are always shared",
    "--enable-reasoning": _PARSED,
    "--enforce-eager": "verify compares with eager PyTorch; there is no eager mode",
    "--expert-parallel-size": "give --mesh expert=2 and the like",
    "--frequency-penalty": _IN_PYTHON,
    "--generation-config": "generation_config.json of the model holds the defaults, and a request its own values",
    "--gpu-memory-utilization": _MEMORY,
    "--grammar-backend": _GRAMMAR,
    "--guided-decoding-backend": _GRAMMAR,
    "--hf-overrides": "the configuration of the checkpoint is used as it is",
    "--host": _HTTP,
    "--ignore-eos": _IN_PYTHON,
    "--kv-cache-dtype": "plan and deploy have --kv-cache-dtype",
    "--kv-transfer-config": "prefill and decode share a process; --kv-offloading-size of serve keeps evicted prefixes",
    "--limit-mm-per-prompt": "a prompt has as many images as --max-model-len of serve has room for",
    "--load-format": "safetensors and GGUF are recognized; --allow-pickle reads .bin and .pt files too",
    "--load-in-4bit": _QUANTIZED,
    "--load-in-8bit": _QUANTIZED,
    "--logprobs": _IN_PYTHON,
    "--lora-modules": _ADAPTERS,
    "--lora-path": _ADAPTERS,
    "--max-context-len": _LENGTH,
    "--max-len": "use --max-model-len, which plan and deploy have",
    "--max-logprobs": "serve has --max-logprobs",
    "--max-model-len": _LENGTH,
    "--max-num-batched-tokens": "the scheduler chooses; in Python, serve(engine=EngineOptions(...)) says",
    "--max-num-seqs": _SEQS,
    "--mem-fraction-static": _MEMORY,
    "--model": _POSITIONAL,
    "--model-name-or-path": _POSITIONAL,
    "--model-path": _POSITIONAL,
    "--n-gpu-layers": _DEVICE,
    "--no-enable-prefix-caching": "in Python, EngineOptions(enable_prefix_caching=False) turns it off",
    "--num-beams": "answers are sampled or greedy; generate() in Python has beams",
    "--num-gpu-blocks-override": _MEMORY,
    "--num-gpus": "--tensor-parallel says how many devices share the model",
    "--page-len": "use --page-size, which plan has",
    "--pipeline-parallel-size": "give --tensor-parallel, or --mesh",
    "--port": _HTTP,
    "--presence-penalty": _IN_PYTHON,
    "--reasoning-parser": _PARSED,
    "--rope-scaling": _ROPE,
    "--rope-theta": _ROPE,
    "--runner": _TASK,
    "--scheduling-policy": "a request has a priority; within one, first come, first served",
    "--seed": "a request to sample has its own seed",
    "--served-model-name": _HTTP,
    "--slots": "use --max-num-seqs, which plan and deploy have",
    "--structured-outputs-config": _GRAMMAR,
    "--swap-space": _MEMORY,
    "--task": _TASK,
    "--threads": "programs use the processors that the process may run on; taskset bounds them",
    "--tokenizer": "the tokenizer is the one that comes with the model",
    "--tokenizer-mode": "the tokenizer is the one that comes with the model",
    "--tool-call-parser": _PARSED,
}
"""Hints for flags of vLLM, SGLang, llama.cpp and transformers that do not exist here."""


def in_flags(message: str, flags: Mapping[str, str]) -> str:
    """Returns `message` with Python arguments replaced by their flags.

    Args:
        message: such as ``dtype: expected ...`` or ``... pass allow_pickle=True``.
        flags: of the command, by the name of the argument (``{"dtype": "--dtype"}``).
    """
    for phrase, ours in _PHRASES.items():
        message = message.replace(phrase, ours)
    known = {name: flag for name, flag in (_RENAMED | dict(flags)).items() if flag in flags.values()}

    def flag_of(found: re.Match[str]) -> str:
        flag, value = known.get(found["name"]), found["value"]
        if flag is None:
            return found[0]
        return flag if value in (None, "", "True", "None") else f"{flag} {value.strip(chr(39))}"

    def flag_at_the_start(found: re.Match[str]) -> str:
        return ", ".join(known.get(name, name) for name in found[0].split(", "))

    message = re.sub(r"^texts\[(\d+)\]", lambda found: f"TEXT {int(found[1]) + 1}", message)
    advised = r"(?<=\b(?:pass|give) )(?P<name>[a-z_]+)(?P<value>)(?=[,;.]|$| one of| with)"
    message = re.sub(advised, flag_of, message)
    message = re.sub(r"^[a-z_]+(, [a-z_]+)*(?=: | is )", flag_at_the_start, message)
    # An argument is distinguished from a word of the sentence by its value, or by the underscore in its name.
    with_value = r"(?<![\w.-])(?P<name>[a-z]\w*)=(?P<value>'[^']*'|[\w.+-]*)"
    by_underscore = r"(?<![\w.-])(?P<name>[a-z]+(?:_[a-z]+)+)(?P<value>)(?![\w=(])"
    return re.sub(by_underscore, flag_of, re.sub(with_value, flag_of, message))


def flags_of(parameters: Iterable[inspect.Parameter]) -> dict[str, str]:
    """Returns the first long flag of each option in `parameters`, by the parameter's name."""
    found = {}
    for parameter in parameters:
        for option in getattr(parameter.annotation, "__metadata__", ()):
            if type(option).__name__ != "OptionInfo":  # an argument is called by no flag
                continue
            # In an annotation the first flag stands where a default would.
            declared = [each for each in (option.default, *(option.param_decls or ())) if isinstance(each, str)]
            flags = [each.split("/")[0] for each in declared if each.startswith("--")]
            found[parameter.name] = flags[0] if flags else "--" + parameter.name.replace("_", "-")
    return found
