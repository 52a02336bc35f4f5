"""Step 7: the same code with another model: a short name, a hub id or a folder of your own.

python examples/step7_another_model.py qwen3-0.6b "What is JAX?"
"""

import sys

from torchax_serve import SamplingParams, serve

name, question = sys.argv[1:] or (None, "What is JAX?")

with serve(name) as model:
    print(f"{model.name}: {type(model.torch_model).__name__}, {model.load_report.weights_bytes / 1e6:.1f} MB")
    print(model.chat(question, SamplingParams(max_new_tokens=64)))
