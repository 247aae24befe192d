"""Models of tables: columns of categories beside columns of numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from zoo_models.case import Case, noise, of, of_installed, simple

CTR = ("WDL", "DeepFM", "NFM", "DCN", "AutoInt", "AFM", "PNN", "FiBiNET", "IFM", "DIFM", "MLR", "AFN")


class Columns(nn.Module):
    """A model of the deepctr package, which takes a table whose columns its layers find by number."""

    def __init__(self, name: str) -> None:
        super().__init__()
        inputs = import_module("deepctr_torch.inputs")
        columns = [inputs.SparseFeat(f"c{i}", 8, embedding_dim=4) for i in range(4)]
        columns += [inputs.DenseFeat(f"d{i}", 1) for i in range(2)]
        model = getattr(import_module("deepctr_torch.models"), name)
        arguments = {} if name == "MLR" else {"dnn_feature_columns": columns, "linear_feature_columns": columns}
        if name == "MLR":
            arguments = {"region_feature_columns": columns}
        if name == "PNN":
            arguments = {"dnn_feature_columns": columns}
        if name == "AFM":
            columns = columns[:4]
            arguments = {"linear_feature_columns": columns, "dnn_feature_columns": columns}
        self.columns, self.inner = len(columns), model(**arguments)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def clicks(name: str) -> Case:
    model = Columns(name)

    def table(m: int, length: int) -> Tensor:
        categories = torch.randint(0, 8, (m, 4)).double()
        return torch.cat([categories, noise(m, 2)], 1)[:, : model.columns]

    return simple(model, x=table)


def tabular(module: str, name: str, whole: str, real: str, **arguments: Any) -> Case:
    model = of(module, name, **arguments)
    makers = {whole: lambda m, length: torch.randint(0, 3, (m, 3)), real: lambda m, length: noise(m, 4)}
    return simple(model, **makers)


PACKAGES: dict[str, dict[str, Callable[[], Case]]] = {
    "deepctr_torch": {name: partial(clicks, name) for name in CTR},
    "tab_transformer_pytorch": {
        "FTTransformer": partial(
            tabular,
            "tab_transformer_pytorch",
            "FTTransformer",
            "x_categ",
            "x_numer",
            categories=(3, 3, 3),
            num_continuous=4,
            dim=16,
            dim_out=1,
            depth=2,
            heads=2,
        )
    },
    "rtdl_revisiting_models": {
        "FTTransformer": partial(
            tabular,
            "rtdl_revisiting_models",
            "FTTransformer",
            "x_cat",
            "x_cont",
            n_cont_features=4,
            cat_cardinalities=[3, 3, 3],
            d_out=2,
            n_blocks=2,
            d_block=16,
            attention_n_heads=2,
            attention_dropout=0.0,
            ffn_d_hidden_multiplier=2,
            ffn_dropout=0.0,
            residual_dropout=0.0,
        )
    },
}


def builders() -> dict[str, Callable[[], Case]]:
    return of_installed(PACKAGES)
