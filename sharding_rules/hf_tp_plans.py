"""transformers' own parallel plans as rules.

A plan names modules and parameters by their path below the base model, with ``*`` for a number, and says a word about
each (``base_model_tp_plan`` and ``base_model_ep_plan`` of a configuration). The words are those that transformers
registers as parallel styles; what they do to activations is XLA's business here, what counts is where weights are cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sharding_rules.rules import Rule, ShardingRuleError

OUT, IN = -2, -1
"""The dimension of a weight ``[out, in]`` or of stacked ones ``[experts, out, in]`` that is cut."""

# Word -> the dimension that is cut and whether it holds gate and up one after the other; None: no dimension of "model".
WORDS: Mapping[str, tuple[int, bool] | None] = {
    "colwise": (OUT, False),
    "colwise_gather_output": (OUT, False),  # what is gathered after it is found by the partitioner
    "rowwise": (IN, False),
    "rowwise_split_input": (IN, False),
    "packed_colwise": (OUT, True),
    "packed_rowwise": (IN, True),
    "embedding_rowwise": (OUT, False),  # [words, hidden]
    "embedding_colwise": (IN, False),
    "grouped_gemm": None,  # the experts' axis, see below
    "replicate": None,
    "replicated_with_grad_allreduce": None,
    "mla_kv_a_proj": None,  # a latent key for all heads
    "moe_identity_expert": None,
    # About a module's computation, not about a weight:
    "moe_tp_experts": None,
    "ep_dispatch_experts": None,
    "all_reduce": None,
    "local_params": None,
    # Words of earlier releases.
    "colwise_rep": (OUT, False),
    "rowwise_rep": (IN, False),
    "sequence_parallel": None,
    "ep_router": None,
}

ABOUT_COMPUTATION = frozenset({"moe_tp_experts", "ep_dispatch_experts", "all_reduce", "local_params", "ep_router"})
EXPERTS = "grouped_gemm"
# Whose result a norm over all heads reads: zeros or repeated heads would change it.
GATHERED = frozenset({"colwise_gather_output", "rowwise_split_input", "colwise_rep", "rowwise_rep"})

_QUERY = re.compile(r"(q_proj|q_b_proj|kv_b_proj|o_proj)$")
_KEY = re.compile(r"(k_proj|v_proj)$")
_MLP = re.compile(r"(gate_proj|up_proj|down_proj|gate_up_proj|fc1|fc2|w1|w2|w3|c_fc|dense_h_to_4h|dense_4h_to_h)$")


def rules_from_tp_plan(
    tp_plan: Mapping[str, str],
    ep_plan: Mapping[str, str],
    family: str,
    shapes: Mapping[str, tuple[int, ...]],
    part: str = "",
) -> tuple[Rule, ...]:
    """Returns rules for the tensors that a plan names and that exist.

    Args:
        tp_plan, ep_plan: Words by path below the base model.
        family: Name in messages.
        shapes: Shapes by qualified name, of all tensors.
        part: Name of the module whose plan it is; empty: the whole model. An encoder beside it may have layers of the
            same names and other numbers of heads.

    Raises:
        ShardingRuleError: unknown words.
    """
    unknown = sorted({word for word in (*tp_plan.values(), *ep_plan.values()) if word not in WORDS})
    if unknown:
        raise ShardingRuleError(
            f"the parallel plan of {family} has the words {', '.join(map(repr, unknown))}, expected "
            f"{', '.join(sorted(WORDS))}; add a rule table for the type"
        )
    rules: dict[str, Rule] = {}
    for key in dict.fromkeys((*tp_plan, *ep_plan)):
        words = tp_plan.get(key), ep_plan.get(key)
        if all(word is None or word in ABOUT_COMPUTATION for word in words):
            continue
        path = (re.escape(f"{part}.") if part else "") + r"(\w+\.)*" + re.escape(key).replace(r"\*", r"\d+")
        for suffix in ("", r"\.weight", r"\.bias"):
            pattern = re.compile(path + suffix)
            ranks = {len(shape) for name, shape in shapes.items() if pattern.fullmatch(name)}
            if len(ranks) == 1:
                axes = _axes(key, words, ranks.pop(), is_bias=suffix == r"\.bias" or key.endswith("_bias"))
                rules.setdefault(pattern.pattern, Rule(pattern.pattern, axes, True, "plan of the model"))
    return tuple(rules.values())


def _axes(key: str, words: tuple[str | None, str | None], rank: int, *, is_bias: bool) -> tuple[str | None, ...]:
    """Returns the logical axes of a tensor of `rank` dimensions."""
    axes: list[str | None] = [None] * rank
    tp_word, ep_word = words
    cut = WORDS[tp_word] if tp_word is not None else None
    if cut is not None and tp_word is not None and rank:
        dim, is_packed = cut
        # Inkling's plan calls its experts' gate and up, one after the other, "colwise".
        is_packed = is_packed or (rank == 3 and key.endswith("gate_up_proj"))
        axis = "gate_up" if is_packed else ("columns" if tp_word in GATHERED else _axis_of(key))
        if not is_bias and rank >= 2:
            axes[dim] = axis
        elif dim == OUT:
            axes[-1] = axis  # a bias is cut where it is added to what is cut
    if ep_word == EXPERTS and rank and axes[0] is None:
        axes[0] = "experts"
    return tuple(axes)


def _axis_of(key: str) -> str:
    """Returns what a product makes or takes, by the last word of its name."""
    if re.search(r"(embed|lm_head)", key.rpartition(".")[2]):
        return "vocab"
    for pattern, axis in ((_QUERY, "heads"), (_KEY, "kv_heads"), (_MLP, "mlp")):
        if pattern.search(key):
            return axis
    return "columns"
