"""Graph networks of ``torch_geometric``, on batches of graphs that differ in size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from zoo_models.case import Batch, Case, noise

WIDTH = 8

PLAIN = (
    "ARMAConv",
    "ClusterGCNConv",
    "FeaStConv",
    "FiLMConv",
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GENConv",
    "GeneralConv",
    "GraphConv",
    "HypergraphConv",
    "LEConv",
    "MFConv",
    "MixHopConv",
    "ResGatedGraphConv",
    "SAGEConv",
    "SGConv",
    "SuperGATConv",
    "TAGConv",
    "TransformerConv",
)
"""Layers that take the numbers of channels in and out, and nothing else."""

LAYERS: dict[str, Callable[[Any, int], nn.Module]] = {name: lambda layer, width: layer(width, width) for name in PLAIN}
LAYERS |= {
    "ChebConv": lambda layer, width: layer(width, width, K=2),
    "SSGConv": lambda layer, width: layer(width, width, alpha=0.1),
    "EGConv": lambda layer, width: layer(width, width, num_heads=4, num_bases=2),
    "GatedGraphConv": lambda layer, width: layer(width, 2),
    "AntiSymmetricConv": lambda layer, width: layer(width),
    "CGConv": lambda layer, width: layer(width),
    "AGNNConv": lambda layer, width: layer(),
    "GINConv": lambda layer, width: layer(perceptron(width, width), train_eps=True),
    "EdgeConv": lambda layer, width: layer(perceptron(2 * width, width)),
    "FAConv": lambda layer, width: layer(width),
    "GPSConv": lambda layer, width: layer(width, None, heads=2, norm="layer_norm"),
}
MODELS = ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")
POOLINGS = ("global_mean_pool", "global_add_pool", "global_max_pool")
READOUTS = ("AttentionalAggregation", "Set2Set", "SoftmaxAggregation", "GRUAggregation", "MultiAggregation")


def perceptron(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.SiLU(), nn.Linear(WIDTH, outputs))


def builders() -> dict[str, Callable[[], Case]]:
    if find_spec("torch_geometric") is None:
        return {}
    found: dict[str, Callable[[], Case]] = {}
    for name in MODELS:
        for pooling in POOLINGS:
            found[f"torch_geometric/{name}[{pooling}]"] = partial(build, partial(basic, name), pooling)
    for name in LAYERS:
        found[f"torch_geometric/{name}"] = partial(build, partial(stacked, name), "global_mean_pool")
    for name in READOUTS:
        found[f"torch_geometric/{name}"] = partial(build, partial(basic, "GCN"), name)
    found["torch_geometric/RGCNConv"] = partial(build, relational, "global_mean_pool")
    found["torch_geometric/GINEConv"] = partial(build, edged, "global_mean_pool")
    return found


class Graph(nn.Module):
    """Layers, a row for each graph, and a linear layer on that."""

    def __init__(self, layers: nn.ModuleList, pooling: Any, takes: str = "") -> None:
        super().__init__()
        self.layers, self.pooling, self.takes = layers, pooling, takes
        self.edges = nn.Embedding(3, WIDTH)
        self.first, self.last = nn.Linear(5, WIDTH), nn.LazyLinear(3)

    def forward(self, x: Tensor, edge_index: Tensor, kinds: Tensor, batch: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if self.takes == "kinds":
                x = layer(x, edge_index, kinds)
            elif self.takes == "features":
                x = layer(x, edge_index, self.edges(kinds))
            elif self.takes == "start":
                x = layer(x, x, edge_index)
            elif self.takes == "batch":
                x = layer(x, edge_index, batch)
            else:
                x = layer(x, edge_index)
            x = torch.tanh(x)
        return self.last(self.pooling(x, batch))


def basic(name: str) -> tuple[nn.ModuleList, str]:
    import torch_geometric.nn as geometric

    return nn.ModuleList([getattr(geometric, name)(WIDTH, WIDTH, num_layers=2, out_channels=WIDTH)]), ""


def stacked(name: str) -> tuple[nn.ModuleList, str]:
    import torch_geometric.nn as geometric

    takes = {"FAConv": "start", "GPSConv": "batch"}.get(name, "")
    layer = getattr(geometric, name)
    if name == "MixHopConv":
        return nn.ModuleList([layer(WIDTH, WIDTH), layer(3 * WIDTH, WIDTH)]), takes
    return nn.ModuleList([LAYERS[name](layer, WIDTH) for _ in range(2)]), takes


def relational() -> tuple[nn.ModuleList, str]:
    from torch_geometric.nn import RGCNConv

    return nn.ModuleList([RGCNConv(WIDTH, WIDTH, 3, num_bases=bases) for bases in (None, 2)]), "kinds"


def edged() -> tuple[nn.ModuleList, str]:
    from torch_geometric.nn import GINEConv

    return nn.ModuleList([GINEConv(perceptron(WIDTH, WIDTH), train_eps=True) for _ in range(2)]), "features"


def build(make: Callable[[], tuple[nn.ModuleList, str]], pooling: str) -> Case:
    import torch_geometric.nn as geometric

    arguments: dict[str, dict[str, Any]] = {
        "AttentionalAggregation": {"gate_nn": perceptron(WIDTH, 1)},
        "Set2Set": {"in_channels": WIDTH, "processing_steps": 2},
        "SoftmaxAggregation": {"learn": True},
        "GRUAggregation": {"in_channels": WIDTH, "out_channels": WIDTH},
        "MultiAggregation": {"aggrs": ["mean", "max", "std"]},
    }
    pool = getattr(geometric, pooling)
    layers, takes = make()
    model = Graph(layers, pool(**arguments[pooling]) if pooling in arguments else pool, takes).double()
    model(**graphs(2, 4).whole)
    return Case(model, graphs)


def graphs(examples: int, length: int) -> Batch:
    """Graphs of which no two have as many nodes; for an odd number of graphs, the nodes can be shared out evenly."""
    sizes = [length - examples // 2 + i for i in range(examples)]
    singles = []
    for size in sizes:
        ring = torch.stack([torch.arange(size), torch.arange(size).roll(1)])
        index = torch.cat([torch.randint(0, size, (2, 3 * size)), ring], 1)
        kinds, where = torch.randint(0, 3, (index.shape[1],)), torch.zeros(size, dtype=torch.long)
        singles.append({"x": noise(size, 5), "edge_index": index, "kinds": kinds, "batch": where})
    starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    edges = [one["edge_index"] + start for one, start in zip(singles, starts, strict=True)]
    whole = {
        "x": torch.cat([one["x"] for one in singles]),
        "edge_index": torch.cat(edges, 1),
        "kinds": torch.cat([one["kinds"] for one in singles]),
        "batch": torch.cat([one["batch"] + i for i, one in enumerate(singles)]),
    }
    return Batch(whole, singles, {"count_examples": lambda *tensors, **named: examples})
