"""Cases of torch-geometric: its models, convolutions, norms, readouts, and convolutions of point clouds."""

from __future__ import annotations

import functools

import torch
from torch_geometric import nn

from module_parity.compare import Case

PLAIN = ("GCN", "GAT", "GraphSAGE", "GIN", "EdgeCNN", "PNA")
CONVOLUTIONS = """
GCNConv ChebConv SAGEConv GraphConv ResGatedGraphConv GATConv GATv2Conv TransformerConv TAGConv ARMAConv SGConv SSGConv
APPNP MFConv LEConv ClusterGCNConv GENConv FiLMConv SuperGATConv EGConv GeneralConv FAConv AGNNConv GatedGraphConv
LGConv FeaStConv WLConvContinuous HypergraphConv MixHopConv DirGNNConv AntiSymmetricConv
"""
WITH_OPTIONS = {
    "ChebConv": (8, 16, 2),
    "APPNP": (3, 0.1),
    "SSGConv": (8, 16, 0.1),
    "FAConv": (8,),
    "AGNNConv": (),
    "GatedGraphConv": (8, 2),
    "LGConv": (),
    "WLConvContinuous": (),
    "AntiSymmetricConv": (8,),
    "EGConv": (8, 16),
}


def edges():
    return torch.tensor([[0, 1, 1, 2, 3, 0, 4], [1, 0, 2, 1, 0, 3, 2]])


def graph():
    return torch.randn(5, 8), edges()


def batched():
    return torch.randn(5, 8), torch.tensor([0, 0, 1, 1, 1])


def cloud():
    return torch.randn(5, 3), edges()


def mlp(*sizes):
    return torch.nn.Sequential(torch.nn.Linear(*sizes), torch.nn.ReLU())


def _convolution(name):
    made = getattr(nn, name)
    if name == "DirGNNConv":
        return made(nn.GCNConv(8, 16))
    return made(*WITH_OPTIONS.get(name, (8, 16)))


def _model(name):
    options = {"aggregators": ["sum", "mean"], "scalers": ["identity"], "deg": torch.tensor([1, 3, 1])}
    return getattr(nn, name)(8, 16, 2, 4, **(options if name == "PNA" else {}))


def _norms():
    def plain():
        return (torch.randn(5, 8),)

    return {
        "GraphNorm": Case(lambda: nn.GraphNorm(8), batched),
        "LayerNorm": Case(lambda: nn.LayerNorm(8), plain),
        "PairNorm": Case(nn.PairNorm, plain),
        "InstanceNorm": Case(lambda: nn.InstanceNorm(8, affine=True), plain),
        "BatchNorm": Case(lambda: nn.BatchNorm(8), plain),
        "MessageNorm": Case(lambda: nn.MessageNorm(True), lambda: (torch.randn(5, 8), torch.randn(5, 8))),
        "DiffGroupNorm": Case(lambda: nn.DiffGroupNorm(8, 3), plain),
        "MeanSubtractionNorm": Case(nn.MeanSubtractionNorm, plain),
    }


def _readouts():
    def keep():
        return ((torch.randn(5, 8), torch.tensor([0, 0, 1, 1, 1])), {"dim_size": 2})

    def gate():
        return torch.nn.Linear(8, 1)

    return {
        "SumAggregation": Case(nn.SumAggregation, keep),
        "MeanAggregation": Case(nn.MeanAggregation, keep),
        "MaxAggregation": Case(nn.MaxAggregation, keep),
        "VarAggregation": Case(nn.VarAggregation, keep),
        "SoftmaxAggregation": Case(lambda: nn.SoftmaxAggregation(learn=True), keep),
        "PowerMeanAggregation": Case(nn.PowerMeanAggregation, keep),
        "AttentionalAggregation": Case(lambda: nn.AttentionalAggregation(gate(), mlp(8, 4)), keep),
        "MedianAggregation": Case(nn.MedianAggregation, keep),
        "Set2Set": Case(lambda: nn.Set2Set(8, 2), keep),
        "SetTransformerAggregation": Case(lambda: nn.SetTransformerAggregation(8, heads=2), keep),
        "DenseGCNConv": Case(
            lambda: nn.DenseGCNConv(8, 4), lambda: (torch.randn(2, 5, 8), torch.rand(2, 5, 5).round())
        ),
        "DenseSAGEConv": Case(lambda: nn.DenseSAGEConv(8, 4), lambda: (torch.randn(2, 5, 8), torch.ones(2, 5, 5))),
        "DMoNPooling": Case(lambda: nn.DMoNPooling(8, 3), lambda: (torch.randn(2, 5, 8), torch.rand(2, 5, 5))),
        "TopKPooling": Case(lambda: nn.TopKPooling(8), graph),
        "SAGPooling": Case(lambda: nn.SAGPooling(8), graph),
    }


def _of_points():
    def attributes():
        return (torch.randn(5, 8), edges(), torch.randn(7, 3))

    return {
        "PointNetConv": Case(
            lambda: nn.PointNetConv(mlp(11, 8)), lambda: (torch.randn(5, 8), torch.randn(5, 3), edges())
        ),
        "EdgeConv": Case(lambda: nn.EdgeConv(mlp(16, 8)), graph),
        "PPFConv": Case(
            lambda: nn.PPFConv(mlp(12, 8)), lambda: (torch.randn(5, 8), torch.randn(5, 3), torch.randn(5, 3), edges())
        ),
        "GINEConv": Case(lambda: nn.GINEConv(mlp(8, 8), edge_dim=3), attributes),
        "NNConv": Case(lambda: nn.NNConv(8, 4, mlp(3, 32)), attributes),
        "GMMConv": Case(lambda: nn.GMMConv(8, 4, 3, 2), attributes),
        "CGConv": Case(lambda: nn.CGConv(8, 3), attributes),
        "GATConv, edges": Case(lambda: nn.GATConv(8, 4, edge_dim=3), attributes),
        "RGCNConv": Case(
            lambda: nn.RGCNConv(8, 4, 2, 2), lambda: (torch.randn(5, 8), edges(), torch.tensor([0, 1, 0, 1, 1, 0, 0]))
        ),
        "RGATConv": Case(
            lambda: nn.RGATConv(8, 4, 2), lambda: (torch.randn(5, 8), edges(), torch.tensor([0, 1, 0, 1, 1, 0, 0]))
        ),
        "FastRGCNConv": Case(
            lambda: nn.FastRGCNConv(8, 4, 2), lambda: (torch.randn(5, 8), edges(), torch.tensor([0, 1, 0, 1, 1, 0, 0]))
        ),
        "GPSConv": Case(lambda: nn.GPSConv(8, nn.GCNConv(8, 8), heads=2), graph),
        "JumpingKnowledge": Case(
            lambda: nn.JumpingKnowledge("lstm", 8, 2), lambda: ([torch.randn(5, 8), torch.randn(5, 8)],)
        ),
        "InnerProductDecoder": Case(nn.InnerProductDecoder, graph),
        "LabelPropagation": Case(lambda: nn.LabelPropagation(2, 0.5), lambda: (torch.tensor([0, 1, 2, 1, 0]), edges())),
        "DeepGCNLayer": Case(
            lambda: nn.DeepGCNLayer(nn.GENConv(8, 8), torch.nn.LayerNorm(8), torch.nn.ReLU(), dropout=0.0), graph
        ),
        "LINKX": Case(lambda: nn.LINKX(5, 8, 16, 3, 2), graph),
        "RECT_L": Case(lambda: nn.RECT_L(8, 16), graph),
        "MLP": Case(lambda: nn.MLP([8, 16, 4]), lambda: (torch.randn(5, 8),)),
    }


def cases():
    """Every case by name."""
    found = {name: Case(functools.partial(_model, name), graph) for name in PLAIN}
    for name in CONVOLUTIONS.split():
        inputs = (lambda: (torch.randn(5, 8), *graph())) if name == "FAConv" else graph
        found[name] = Case(functools.partial(_convolution, name), inputs)
    return found | _norms() | _readouts() | _of_points()
