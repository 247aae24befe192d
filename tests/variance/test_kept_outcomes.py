"""What a call makes of owners is kept for the next step; what depends on numbers must not be."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cabs import GradientVariance
from cabs.variance.reference import reference

M, T, D = 6, 5, 4


def by_loop(model, losses):
    return reference(lambda i: losses()[i], [list(model.parameters())], M).trace.item()


class Routed(nn.Module):
    """Rows go by their numbers, by a mask, or by indices; the same shapes meet other owners at every step."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.one, self.other = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.one(x).flatten(0, 1)
        if self.way == "sorted":
            order = rows.detach().sum(1).argsort()
            rows = self.other(rows[order])[order.argsort()]
        elif self.way == "gathered":
            order = rows.detach().sum(1).argsort()
            chosen = rows.gather(0, order.unsqueeze(1).expand_as(rows))
            rows = torch.zeros(len(rows), 3, dtype=x.dtype).index_add(0, order, self.other(chosen))
        elif self.way == "masked":
            half = rows.detach().sum(1).argsort() < len(rows) // 2
            rows = torch.zeros(len(rows), 3, dtype=x.dtype).masked_scatter(
                half.unsqueeze(1), self.other(rows[half])
            ) + self.other(rows.masked_fill(half.unsqueeze(1), 0)).masked_fill(half.unsqueeze(1), 0)
        return rows.unflatten(0, (M, T)).mean(1)


@pytest.mark.parametrize("way", ["sorted", "gathered", "masked"])
def test_rows_that_go_another_way_at_the_next_step(way):
    torch.manual_seed(0)
    model = Routed(way).double()
    with GradientVariance(model) as variance:
        for _ in range(4):
            x, y = torch.randn(M, T, D).double(), torch.randint(0, 3, (M,))
            F.cross_entropy(model(x), y).backward()
            trace = variance.trace().item()
            variance.reset()
            variance.pause()
            expected = by_loop(model, lambda x=x, y=y: F.cross_entropy(model(x), y, reduction="none"))
            variance.pause(False)
            assert trace == pytest.approx(expected, rel=1e-9)
            model.zero_grad()


@pytest.mark.parametrize("positional", [False, True])
def test_targets_that_are_left_out_at_a_later_step(positional):
    """A token mean is one over examples if all have equally many targets; if not, that is told."""
    torch.manual_seed(0)
    model = nn.Linear(D, 3)
    with GradientVariance(model) as variance:
        for left_out in (False, False, True):
            x, y = torch.randn(M, T, D), torch.randint(0, 3, (M, T))
            if left_out:
                y[0, :3] = -100
            scores = model(x).flatten(0, 1)
            arguments = (None, None, -100) if positional else ()
            loss = F.cross_entropy(scores, y.flatten(), *arguments)
            if left_out:
                with pytest.warns(UserWarning, match="depends on others"):
                    loss.backward()
            else:
                loss.backward()
            variance.reset()


def test_the_same_shapes_with_other_owners():
    """Two orders of the same rows have the same shapes and strides, and only owners tell them apart."""
    torch.manual_seed(0)
    model = nn.Linear(D, 3).double()
    head = nn.Linear(D, D).double()
    both = nn.ModuleList([head, model])
    with GradientVariance(both) as variance:
        for time_first in (False, True, False, True):
            x, y = torch.randn(M, M, D).double(), torch.randint(0, 3, (M,))
            hidden = head(x)
            if time_first:
                hidden = hidden.transpose(0, 1).contiguous()
            out = F.relu(model(F.gelu(hidden))).mean(0 if time_first else 1)
            F.cross_entropy(out, y).backward()

            def losses(x=x, y=y):
                return F.cross_entropy(F.relu(model(F.gelu(head(x)))).mean(1), y, reduction="none")

            trace = variance.trace().item()
            variance.reset()
            variance.pause()
            expected = by_loop(both, losses)
            variance.pause(False)
            assert trace == pytest.approx(expected, rel=1e-9)
            both.zero_grad()
