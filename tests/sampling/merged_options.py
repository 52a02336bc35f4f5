"""The options of a request as they once came about: merged into a copy of a generation config, then read from it.

What `RequestParams.resolve` gives in one step is compared with it.
"""

import copy
import math

import numpy as np

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.request_params import ENGINE_OPTIONS, unsupported_options, validate_options
from torchax_serve.sampling_params import ENGINE_ONLY, LIMITS, NEVER_A_TOKEN, SAMPLING_ONLY, bias_pairs, invalid

COLUMNS = (
    "temperature", "top_h", "top_p_tail", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "presence_penalty", "frequency_penalty",
)  # fmt: skip


def merged(params, base):
    """A deep copy of a generation config with the caller's options."""
    config = copy.deepcopy(base)
    for name, value in vars(params).items():
        value = params.stop_strings if name == "stop" else value
        if name in {"seed", "stop_token_ids", "ignore_eos", *ENGINE_ONLY} or value is None or value == ():
            continue
        setattr(config, {"n": "num_return_sequences", "stop": "stop_strings"}.get(name, name), as_list(name, value))
    own = config.eos_token_id
    if params.ignore_eos or params.stop_token_ids:
        ids = [] if own is None or params.ignore_eos else [own] if isinstance(own, int) else list(own)
        config.eos_token_id = list(dict.fromkeys([*ids, *(params.stop_token_ids or ())])) or [NEVER_A_TOKEN]
    if params.max_new_tokens is not None:
        config.max_length = None
    sampling = {name for name, off in SAMPLING_ONLY.items() if getattr(params, name) not in (None, off)}
    if params.is_greedy:
        config.do_sample, config.temperature = False, None
        if params.num_beams is None and (config.num_beams or 1) > 1:
            config.num_beams = 1
    elif params.do_sample is None and (params.temperature is not None or sampling):
        config.do_sample = True
    if (config.num_return_sequences or 1) > 1 and not config.do_sample:
        raise InvalidArgumentError("n: expected 1 with greedy decoding")
    return config


def as_list(name, value):
    if name == "bad_words_ids":
        return [list(word) for word in value]
    if name == "sequence_bias":
        return [[list(ids), bias] for ids, bias in bias_pairs(value)]
    if name in LIMITS and not LIMITS[name].is_integer:
        return float(value)
    return list(value) if name in ("suppress_tokens", "stop") or isinstance(value, tuple) else value


def row_of(params, config, vocab_size):
    """The values of a row by the names that `RequestParams` has, with a dense bias."""
    validate_options(config)
    if unsupported := unsupported_options(config, ENGINE_OPTIONS):
        raise UnsupportedArgumentError(", ".join(unsupported))
    eos = [token for token in ids_of(config.eos_token_id) if token != NEVER_A_TOKEN]
    floats = dict.fromkeys(COLUMNS, 0.0) | {"typical_p": 1.0, "repetition_penalty": 1.0}
    if config.repetition_penalty is not None:
        floats["repetition_penalty"] = float(config.repetition_penalty)
    for name in ("presence_penalty", "frequency_penalty"):
        floats[name] = float(getattr(params, name) or 0)
    if config.do_sample:
        floats["temperature"] = 1.0
        for name in ("temperature", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
            if getattr(config, name) is not None:
                floats[name] = float(getattr(config, name))
        floats["temperature"] = max(floats["temperature"], 1e-30)
        if config.top_p is not None:
            floats["top_p_tail"] = 1 - float(config.top_p)
        if floats["temperature"] < 1e-5:
            floats["temperature"] = 0.0
    bias = dense_bias(params, config, eos, vocab_size)
    row = {
        **floats,
        "top_k": min(int(config.top_k or 0), vocab_size) if config.do_sample else 0,
        "min_new_tokens": int(config.min_new_tokens or 0),
        "min_len": int(config.min_length or 0),
        "max_new_tokens": int(config.max_new_tokens or config.max_length or 1),
        "stop_ids": tuple(sorted(eos)),
        "forbidden_first": tuple(ids_of(config.begin_suppress_tokens)),
        "suppressed": tuple(ids_of(config.suppress_tokens)),
        "logprobs": params.logprobs,
        **history_of(config, eos, vocab_size),
    }
    forbidden = np.zeros(vocab_size, np.float32) if bias is None else bias.copy()
    forbidden[[token for token in row["suppressed"] if token < vocab_size]] = -math.inf
    if (bias is not None or row["suppressed"]) and (forbidden == -math.inf).all():
        raise InvalidArgumentError("options that forbid all")
    return row, bias


def dense_bias(params, config, eos, vocab_size):
    sequences = [] if config.sequence_bias is None else bias_pairs(config.sequence_bias)
    words = config.bad_words_ids or []
    check_below([token for ids, _ in sequences for token in ids], vocab_size)
    check_below([token for word in words for token in word], vocab_size)
    check_below(params.logit_bias or {}, vocab_size)
    check_below(params.allowed_token_ids or (), vocab_size)
    bias = np.zeros(vocab_size, np.float32)
    for token, value in [
        *((ids[0], value) for ids, value in sequences if len(ids) == 1),
        *(params.logit_bias or {}).items(),
    ]:
        bias[token] += np.float32(value)
    if params.allowed_token_ids is not None:
        bias[[token for token in range(vocab_size) if token not in params.allowed_token_ids]] = -math.inf
    bias[[word[0] for word in words if len(word) == 1 and word[0] not in eos]] = -math.inf
    return bias if bias.any() else None


def history_of(config, eos, vocab_size):
    sequences = [] if config.sequence_bias is None else bias_pairs(config.sequence_bias)
    sequences += [(tuple(word), -np.inf) for word in dict.fromkeys(map(tuple, config.bad_words_ids or ()))]
    first, decay = config.forced_bos_token_id, config.exponential_decay_length_penalty
    last = ids_of(config.forced_eos_token_id)
    check_below([*last, *([] if first is None else [first])], vocab_size)
    if decay is not None:
        if not eos:
            raise invalid("exponential_decay_length_penalty", "an eos_token_id beside it", decay, "set eos_token_id")
        check_below(eos, vocab_size)
    return {
        "ngram_size": min(int(config.no_repeat_ngram_size or 0), 2**30),
        "sequences": tuple((tuple(ids), float(value)) for ids, value in sequences if len(ids) > 1),
        "forced_first": first,
        "forced_last": tuple(last),
        "decay": None if decay is None else (int(decay[0]), float(decay[1])),
        "remove_invalid_values": config.remove_invalid_values is True,
        "renormalize_logits": config.renormalize_logits is True,
    }


def ids_of(ids):
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def check_below(ids, vocab_size):
    if any(token >= vocab_size for token in ids):
        raise InvalidArgumentError("a token outside the vocabulary")
