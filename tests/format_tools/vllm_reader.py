"""Run as a program where vLLM is installed: loads folders and generates, without anything of this project.

``python vllm_reader.py NUM_TOKENS FOLDER ...``, prompts of token ids as JSON on stdin; prints a line of JSON for each
folder: of each prompt the new tokens and the log-probabilities of its tokens after the first, and the classes that
compute its linear layers; or vLLM's error.
"""

import json
import sys

import vllm
from vllm.distributed import cleanup_dist_env_and_memory


def classes_of(model):
    """The classes that compute the linear layers of a model, as vLLM chose them from the configuration."""
    methods = [module for module in model.modules() if getattr(module, "quant_method", None) is not None]
    return sorted({type(getattr(module, "scheme", None) or module.quant_method).__name__ for module in methods})


def read(folder, prompts, num_tokens):
    """What vLLM makes of a folder."""
    llm = vllm.LLM(
        model=folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        dtype="bfloat16",
    )
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, prompt_logprobs=0
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    rows = []
    for ids, output in zip(prompts, outputs, strict=True):
        logprobs = [found[token].logprob for token, found in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        rows.append({"tokens": list(output.outputs[0].token_ids), "prompt_logprobs": logprobs})
    return {"rows": rows, "classes": llm.apply_model(classes_of)[0]}


def main():
    num_tokens, *folders = sys.argv[1:]
    prompts = json.load(sys.stdin)
    for folder in folders:
        try:
            found = read(folder, prompts, int(num_tokens))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), flush=True)
        cleanup_dist_env_and_memory()


if __name__ == "__main__":  # vLLM's own processes import this module again
    main()
