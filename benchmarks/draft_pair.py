"""Writes a model and a draft model of a fourteenth of its size that mostly agree, with random weights.

    python benchmarks/draft_pair.py OUT [--noise 0.02]

OUT/draft is a random Qwen3 of 13 million parameters. OUT/target is the 184 million parameters of
`shapes/qwen3-184m.json` that compute the same: the draft's weights in the corner of each matrix, zeros around them, and
noise in what its last layers add, so that it agrees as often as the noise lets it. Speed depends on sizes and on how
many drafts are accepted, not on what the text says.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

SHAPE = Path(__file__).parent / "shapes" / "qwen3-184m.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--noise", type=float, default=0.02, help="standard deviation of the last layers' outputs")
    options = parser.parse_args()
    torch.manual_seed(0)
    large = transformers.AutoConfig.from_pretrained(SHAPE)
    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    small = transformers.Qwen3Config(**{**large.to_dict(), **sizes, "intermediate_size": 768, "layer_types": None})
    draft, target = (transformers.AutoModelForCausalLM.from_config(config) for config in (small, large))
    shrink = (small.hidden_size / large.hidden_size) ** 0.5  # a norm divides by the mean over all columns
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.08)  # wide enough that the best token is clear
        theirs = dict(draft.named_parameters())
        for name, parameter in target.named_parameters():
            if parameter.ndim == 2:
                parameter.zero_()
            elif len(parameter) == large.hidden_size:
                parameter.mul_(shrink)
            if name in theirs and theirs[name].ndim == 2:
                rows, columns = theirs[name].shape
                parameter[:rows, :columns] = theirs[name]
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.normal_(std=options.noise)
            elif parameter.ndim == 2:
                parameter.normal_(std=0.02)
    for name, model in (("draft", draft), ("target", target)):
        model.to(torch.bfloat16).save_pretrained(options.out / name)
        print(name, sum(parameter.numel() for parameter in model.parameters()))


if __name__ == "__main__":
    main()
