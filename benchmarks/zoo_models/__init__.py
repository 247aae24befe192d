"""Public models with tiny random weights, for ``benchmarks/zoo.py``."""

from __future__ import annotations

from collections.abc import Callable

from zoo_models import case, diffusion, graphs, huggingface, small, stacks, tables, tuned, vision

Builder = Callable[[], case.Case]


def catalogue() -> dict[str, Builder]:
    """Every model there is a way to build here, by a name like ``transformers/LlamaForCausalLM``."""
    builders: dict[str, Builder] = {}
    for source in (huggingface, tuned, graphs, vision, diffusion, stacks, tables, small):
        builders.update(source.builders())
    return builders
