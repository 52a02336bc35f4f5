"""Plans every causal model type of the installed transformers for TPU v5e chips, at tiny sizes: which can be planned.

    python benchmarks/plan_types.py [TYPE...]    # needs the extra plan; results/plan-types.json keeps what was found

The decode step of each type is compiled in bfloat16 by the TPU's own compiler for four chips on the axis `model`.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path

RESULTS = Path(__file__).with_name("results") / "plan-types.json"
TOPOLOGY = "v5e:2x2"


def run(model_type):
    """What planning a type comes to: the compiled step's numbers, or why there is none."""
    import torch
    import transformers

    from model_adapters.loading.architecture import find_class, module_of
    from torchax_serve.parity.tiny_config import tiny_config
    from torchax_serve.planning.plan import PlanRequest, make_plan

    began = time.perf_counter()
    transformers.logging.set_verbosity_error()
    try:
        model_class, config = find_class(tiny_config(model_type), folder=None, trust_remote_code=False)
        module = module_of(model_class, config, torch.bfloat16)
        request = PlanRequest(topology=TOPOLOGY, max_len=64, num_slots=8, page_len=16, prefill_lens=())
        report = make_plan(module, model_type, request).to_json()
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        return {"planned": False, "why": f"{type(error).__name__}: {said}"}
    (decode,) = report["programs"]
    return {
        "planned": True,
        "weights_bytes": report["weights_bytes"],
        "collectives": {kind: number for kind, (number, _) in decode["collectives"].items()},
        "seconds": round(time.perf_counter() - began, 1),
    }


def main():
    os.environ["JAX_PLATFORMS"] = "cpu"
    warnings.simplefilter("ignore")
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kept = json.loads(RESULTS.read_text())["types"] if RESULTS.exists() else {}
    wanted = sys.argv[1:] or [name for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if name not in kept]
    for model_type in wanted:
        kept[model_type] = run(model_type)
        print(model_type, json.dumps(kept[model_type]), flush=True)
        planned = sum(each["planned"] for each in kept.values())
        content = {
            "topology": TOPOLOGY,
            "transformers": transformers.__version__,
            "planned": planned,
            "tried": len(kept),
            "types": dict(sorted(kept.items())),
        }
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
