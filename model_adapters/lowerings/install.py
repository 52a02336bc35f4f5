"""Lowerings to this project's own ops, and of operators that torchax lacks or lowers badly.

`install` is idempotent and called before anything is traced. Operators that torchax lowers well are left to torchax.
"""

from __future__ import annotations

import torch

from model_adapters import ops
from model_adapters.bridge.views import (
    accept_host_tensors,
    set_in_place,
    set_lowering,
)
from model_adapters.lowerings import (
    aliases,
    argument_checks,
    arguments,
    bags,
    constant_folding,
    custom_ops,
    deferred_checks,
    factorizations,
    host_writes,
    integers,
    linear_algebra,
    masked_writes,
    narrow_floats,
    order_statistics,
    overlaps,
    pooling,
    promotion,
    random_numbers,
    recurrent,
    resize,
    special_cases,
    spectral,
    written_results,
)
from model_adapters.lowerings.convolution import _conv2d, _convolution
from model_adapters.lowerings.indexing import (
    _cat,
    _check_lookups,
    _find_turned_weights,
    _index_add,
    _keep_tables_short,
    _one_hot,
    _pad_by_known_widths,
    _split_at_known_places,
    _understand_stored_lengths,
    _write_items,
)
from model_adapters.lowerings.matmul import _addmm, _attention, _find_squeezed_weights, _grouped_mm, _linear
from model_adapters.lowerings.reductions import _layer_norm, _mean, _softmax, _sum
from model_adapters.lowerings.torchax_fixes import (
    _keep_values_of_new_tensors,
    _mend_copy,
    _mend_type_as,
    _name_unknown_dtypes,
    _order_equal_values,
    _return_named_results,
    _stay_on_device,
    _take_by_host_indices,
    _take_quantiles_of_the_host,
    _tell_missing_at_once,
    _update_running_statistics,
    _view_bits,
)
from model_adapters.once import once


@once
def install() -> None:
    """Registers the lowerings in torchax's table."""
    argument_checks.install()  # the first, so that it is asked last, of what has a lowering
    narrow_floats.install()  # before others, which replace what it wraps
    set_lowering(torch.nn.functional.linear, _linear)
    set_lowering(torch.ops.aten.linear, _linear)
    set_lowering(torch.ops.aten.mm, ops.matmul)
    set_lowering(torch.ops.aten.bmm, ops.bmm)
    set_lowering(torch.ops.aten.addmm, _addmm)
    set_lowering(torch.ops.aten.baddbmm, ops.baddbmm)
    set_lowering(torch.ops.aten._grouped_mm, _grouped_mm)
    set_lowering(torch.ops.aten.silu, ops.silu)
    set_lowering(torch.ops.aten.silu.default, ops.silu)  # torchax has both names and looks for this one first
    set_lowering(torch.ops.aten.gelu, ops.gelu)
    set_lowering(torch.ops.aten.convolution, _convolution)
    set_lowering(torch.ops.aten.conv2d, _conv2d)
    _keep_tables_short()
    set_lowering(torch.nn.functional.one_hot, _one_hot)
    _check_lookups()
    _find_turned_weights()
    _find_squeezed_weights()
    set_lowering(torch.ops.aten.cat, _cat)
    set_lowering(torch.ops.aten.mean, _mean)
    set_lowering(torch.ops.aten.sum, _sum)
    set_lowering(torch.ops.aten.native_layer_norm, _layer_norm)
    for softmax in (torch.ops.aten._softmax, torch.ops.aten.softmax, torch.ops.aten.softmax.int):
        set_lowering(softmax, _softmax)
    set_lowering(torch.nn.functional.scaled_dot_product_attention, _attention)
    set_lowering(torch.ops.aten.scaled_dot_product_attention, _attention)
    accept_host_tensors()
    _write_items()
    _mend_copy()
    _mend_type_as()
    _name_unknown_dtypes()
    _order_equal_values()
    random_numbers.install()
    _update_running_statistics()
    _understand_stored_lengths()
    custom_ops.install()
    deferred_checks.install()
    constant_folding.install()
    resize.install()
    linear_algebra.install()
    factorizations.install()
    masked_writes.install()
    bags.install()
    recurrent.install()
    special_cases.install()
    integers.install()
    order_statistics.install()
    pooling.install()
    arguments.install()
    spectral.install()
    set_lowering(torch.ops.aten.index_add, _index_add)
    set_in_place(torch.ops.aten.index_add_, torch.ops.aten.index_add)
    _pad_by_known_widths()
    _take_by_host_indices()
    _take_quantiles_of_the_host()
    _return_named_results()
    _stay_on_device()
    _view_bits()
    promotion.install()
    written_results.install()
    aliases.install()
    overlaps.install()
    _split_at_known_places()
    _keep_values_of_new_tensors()
    _tell_missing_at_once()
    host_writes.install()
    special_cases.refuse_autocast()  # the last, so that it is asked first
