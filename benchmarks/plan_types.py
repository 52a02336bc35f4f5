"""Plans every causal model type of the installed transformers for TPU v5e chips, at tiny sizes: which can be planned.

    python benchmarks/plan_types.py [TYPE...]    # needs the extra plan; results/plan-types.json keeps what was found
    python benchmarks/plan_types.py --prefill [TYPE...]    # a prefill step as well

The decode step of each type is compiled by the TPU's own compiler for four chips on the axis `model`, in bfloat16; in
float32 where the type's own code mixes the two.
"""

import collections
import json
import os
import sys
import time
import warnings
from pathlib import Path

RESULTS = Path(__file__).with_name("results") / "plan-types.json"
TOPOLOGY = "v5e:2x2"
SIZES = {"max_model_len": 32, "max_num_seqs": 8, "page_size": 16}


def run(model_type, prefill_lens):
    """What planning a type comes to: the compiled steps' numbers, or why there are none."""
    first = run_in(model_type, "bfloat16", prefill_lens)
    if first["planned"]:
        return first
    second = run_in(model_type, "float32", prefill_lens)
    return second if second["planned"] else first


def run_in(model_type, dtype, prefill_lens):
    import torch
    import transformers

    from model_adapters.loading.model_class import module_of
    from parity_sweep.tiny.config import tiny_config
    from parity_sweep.tiny.models import causal_class
    from torchax_serve.parity.result import error_line
    from torchax_serve.planning.plan import PlanRequest, make_plan

    began = time.perf_counter()
    transformers.logging.set_verbosity_error()
    try:
        model_class, config = causal_class(model_type), tiny_config(model_type)
        if not isinstance(config, model_class.config_class):
            config = next(part for part in vars(config).values() if isinstance(part, model_class.config_class))
        module = module_of(model_class, config, getattr(torch, dtype))
        report = make_plan(
            module, model_type, PlanRequest(topology=TOPOLOGY, prefill_lens=prefill_lens, **SIZES)
        ).to_json()
    except Exception as error:
        return {"planned": False, "error": error_line(error)}
    decode = report["programs"][0]
    return {
        "planned": True,
        "executor": report["executor"],
        "dtype": dtype,
        "weights_bytes": report["weights_bytes"],
        "pages_bytes": report["pages_bytes_wanted"],
        "states_bytes": report["states_bytes"],
        "steps": [f"{each['name']} {each['num_tokens']}" for each in report["programs"]],
        "collectives": {kind: number for kind, (number, _) in decode["collectives"].items()},
        "seconds": round(time.perf_counter() - began, 1),
    }


def main():
    os.environ["JAX_PLATFORMS"] = "cpu"
    warnings.simplefilter("ignore")
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kept = json.loads(RESULTS.read_text())["types"] if RESULTS.exists() else {}
    prefill_lens = (16,) if "--prefill" in sys.argv else ()
    wanted = [name for name in sys.argv[1:] if name != "--prefill"]
    wanted = wanted or [name for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if name not in kept]
    for model_type in wanted:
        row = run(model_type, prefill_lens)
        print(model_type, json.dumps(row), flush=True)
        kept = json.loads(RESULTS.read_text())["types"] if RESULTS.exists() else {}  # another run may have added some
        kept[model_type] = row
        planned = [each for each in kept.values() if each["planned"]]
        content = {
            "topology": TOPOLOGY,
            "transformers": transformers.__version__,
            "planned": len(planned),
            "tried": len(kept),
            "executors": dict(collections.Counter(each["executor"] for each in planned)),
            "types": dict(sorted(kept.items())),
        }
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
