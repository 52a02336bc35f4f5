"""A model that says the lines of a script: a Llama of one layer whose weights are a table of its last tokens.

As a Falcon-H1 it has a recurrent state as well, whose output has no weight: it says the same.

Head h of its attention reads the token h places back, since rotary positions turn a constant query by h. The rows of
its MLP are the table: each knows some tokens and adds the one that follows them. A line is chosen by the end of the
last message; a line for the empty end is said where no other fits.
"""

import json
import math
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from transformers import AutoTokenizer

import torchax_serve

EMBEDDED = Path(torchax_serve.__file__).parent / "embedded"
TEMPLATE = """{{ bos_token }}{%- if tools %}<start_of_turn>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}
Write <tool_call>{"name": ..., "arguments": ...}</tool_call><end_of_turn>
{% endif %}{%- for message in messages %}
{%- if message.role == 'system' and not loop.first and SYSTEM_FIRST %}
{{- raise_exception('expected a system message as the first') }}{% endif -%}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{% if message.content is string %}{{ message.content }}{% else -%}
{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif -%}
{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% if enable_thinking %}THINKING_PROMPT{% endif %}{% endif %}"""
"""ChatML's form with the special tokens of the package's tokenizer; its calls are Qwen's."""
GENERATION_PROMPT = "<end_of_turn>\n<start_of_turn>model\n"
CODE_DIM = 64
"""Numbers of a token's code, each 1 or -1."""
HEAD_DIM = 32
MIXER = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
"""Sizes of the recurrent layer."""


def call(name, **arguments):
    """The text of a tool call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write_scripted_model(
    folder,
    script,
    *,
    num_back=48,
    max_len=4096,
    is_system_first=False,
    thinking_prompt="",
    continued=(),
    is_hybrid=False,
):
    """Writes a checkpoint whose answer to a message that ends with a key of `script` is that key's text.

    With `enable_thinking` a prompt ends with `thinking_prompt`. The pairs of `continued` are texts and what is written
    behind them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"model_max_length": max_len}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = TEMPLATE.replace("SYSTEM_FIRST", "true" if is_system_first else "false")
    template = template.replace("THINKING_PROMPT", thinking_prompt)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = [(f"{key}{GENERATION_PROMPT}", line) for key, line in script.items()]
    entries = _entries(tokenizer, [*lines, *continued], num_back)
    hidden = num_back * math.ceil(((num_back + 1) * HEAD_DIM + CODE_DIM) / num_back)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": len(entries),
        "num_hidden_layers": 1,
        "num_attention_heads": num_back,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "attention_bias": True,
        "mlp_bias": True,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-9,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<end_of_turn>")],
        "pad_token_id": tokenizer.pad_token_id,
    }
    weights = _weights(entries, len(tokenizer), hidden, num_back)
    if is_hybrid:
        config |= {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", **MIXER}
        weights = _with_mixer(weights, hidden)
    (folder / "config.json").write_text(json.dumps(config))
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, **ids}))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _entries(tokenizer, lines, num_back):
    """The table: the last tokens, newest first, and the token that follows them."""
    found = {}
    for begin, line in lines:
        assert begin[0] in " <", f"{begin!r}: tokens begin with a space, so that a key does, too"
        context = tokenizer.encode(begin, add_special_tokens=False)
        for token in tokenizer.encode(f"{line}<end_of_turn>", add_special_tokens=False):
            last = tuple(reversed(context[-num_back:]))
            assert found.setdefault(last, token) == token, f"{line!r}: the same {num_back} tokens stand twice"
            context.append(token)
    return list(found.items())


def _weights(entries, vocab_size, hidden, num_back):
    rng = np.random.default_rng(0)
    tokens = rng.choice([-1.0, 1.0], (vocab_size, HEAD_DIM))
    codes = rng.choice([-1.0, 1.0], (vocab_size, CODE_DIM))
    embedding = np.zeros((vocab_size, hidden))
    embedding[:, :HEAD_DIM] = tokens
    # Both norms divide by a number that is known: every token's embedding has the same length.
    norm_1, norm_2 = math.sqrt(HEAD_DIM / hidden), math.sqrt((num_back + 1) * HEAD_DIM / hidden)
    slots = slice(HEAD_DIM, HEAD_DIM * (num_back + 1))
    value, out = np.zeros((HEAD_DIM, hidden)), np.zeros((hidden, num_back * HEAD_DIM))
    value[:, :HEAD_DIM] = np.eye(HEAD_DIM) * norm_1
    out[slots] = np.eye(num_back * HEAD_DIM)
    codes_at = slice(slots.stop, slots.stop + CODE_DIM)
    gate, bias = np.zeros((len(entries), hidden)), np.zeros(len(entries))
    down = np.zeros((hidden, len(entries)))
    for row, (last, token) in enumerate(entries):
        gate[row, HEAD_DIM : HEAD_DIM * (len(last) + 1)] = tokens[list(last)].ravel() * norm_2
        bias[row] = HEAD_DIM / 4 - HEAD_DIM * len(last)
        down[codes_at, row] = codes[token] * len(last)
    head = np.zeros((vocab_size, hidden))
    head[:, codes_at] = 10 * codes
    layer = "model.layers.0."
    found = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(hidden),
        "lm_head.weight": head,
        f"{layer}input_layernorm.weight": np.ones(hidden),
        f"{layer}post_attention_layernorm.weight": np.ones(hidden),
        f"{layer}self_attn.q_proj.weight": np.zeros((num_back * HEAD_DIM, hidden)),
        f"{layer}self_attn.q_proj.bias": _queries(num_back),
        f"{layer}self_attn.k_proj.weight": np.zeros((HEAD_DIM, hidden)),
        f"{layer}self_attn.k_proj.bias": np.ones(HEAD_DIM),
        f"{layer}self_attn.v_proj.weight": value,
        f"{layer}self_attn.v_proj.bias": np.zeros(HEAD_DIM),
        f"{layer}self_attn.o_proj.weight": out,
        f"{layer}self_attn.o_proj.bias": np.zeros(hidden),
        f"{layer}mlp.gate_proj.weight": gate,
        f"{layer}mlp.gate_proj.bias": bias,
        f"{layer}mlp.up_proj.weight": np.zeros((len(entries), hidden)),
        f"{layer}mlp.up_proj.bias": np.ones(len(entries)),
        f"{layer}mlp.down_proj.weight": down,
        f"{layer}mlp.down_proj.bias": np.zeros(hidden),
    }
    return {name: np.ascontiguousarray(each, np.float32) for name, each in found.items()}


def _with_mixer(weights, hidden):
    """Weights by the names of Falcon-H1, with a recurrent layer that reads the tokens and adds nothing."""
    rng = np.random.default_rng(1)
    names = {
        "model.norm": "model.final_layernorm",
        ".mlp.": ".feed_forward.",
        "post_attention_layernorm": "pre_ff_layernorm",
    }
    found = {}
    for name, weight in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = weight
    width, num_heads = MIXER["mamba_d_ssm"], MIXER["mamba_n_heads"]
    convolved = width + 2 * MIXER["mamba_n_groups"] * MIXER["mamba_d_state"]
    mixer = {
        "A_log": np.log(np.arange(1, num_heads + 1)),
        "D": np.ones(num_heads),
        "dt_bias": np.ones(num_heads),
        "conv1d.weight": rng.normal(size=(convolved, 1, 4)),
        "conv1d.bias": np.zeros(convolved),
        "in_proj.weight": rng.normal(size=(width + convolved + num_heads, hidden)) / math.sqrt(hidden),
        "out_proj.weight": np.zeros((hidden, width)),
    }
    return found | {f"model.layers.0.mamba.{name}": np.asarray(each, np.float32) for name, each in mixer.items()}


def _queries(num_back):
    """For each head the query that is most like a key so many places back, scaled so that no other counts."""
    half = HEAD_DIM // 2
    frequencies = 10000.0 ** (-np.arange(half) / half)
    found = []
    for places in range(num_back):
        angles = -places * frequencies  # a query at t is turned by t, a key at t - places by less
        cosine, sine = np.cos(angles), np.sin(angles)
        found.append(np.concatenate([cosine - sine, sine + cosine]))
    return 1000.0 * np.concatenate(found)
