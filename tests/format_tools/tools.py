"""The libraries under test; what they say of torch while they are imported is not about this project."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import bitsandbytes
    import hqq.core.quantize
    import torchao.quantization

__all__ = ["bitsandbytes", "hqq", "torchao"]
