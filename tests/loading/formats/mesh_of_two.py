"""Run with two CPU devices: the tokens of a quantized folder on a mesh must be those on one device."""

import sys

import numpy as np

from model_adapters.ops.quantized_weight import QuantizedWeight
from torchax_serve import EngineOptions, SamplingParams, serve

folder, num_stored, axis = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sampling = SamplingParams(temperature=0, max_new_tokens=8, min_new_tokens=8)
options = EngineOptions(max_num_seqs=2, max_model_len=64)


def tokens_of(model):
    return [list(model.iter_tokens(prompt, params=sampling)) for prompt in ([5, 17, 40, 3, 61], [9, 2, 77])]


with serve(folder, dtype="float32", engine=options) as model:
    wanted = tokens_of(model)
with serve(folder, dtype="float32", engine=options, mesh={axis: 2}) as model:
    got = tokens_of(model)
    weights = dict(model._runtimes[0].weights)
stored = {name: weight for name, weight in weights.items() if isinstance(weight, QuantizedWeight)}
divided = [name for name, weight in stored.items() if not weight.values.sharding.is_fully_replicated]
assert got == wanted, (got, wanted)
assert len(np.unique(np.concatenate(wanted))) > 4, wanted
assert len(divided) == len(stored) == num_stored, (len(divided), len(stored))
print("same tokens")
