"""The autopilot in the frameworks people train with. Each module needs its package, and none is imported unless used.

- ``cabs.integrations.lightning``: ``Trainer(callbacks=[CABSCallback()])``
- ``cabs.integrations.transformers``: the Hugging Face ``Trainer``
- ``cabs.integrations.accelerate``: loops with an ``Accelerator``
- ``cabs.integrations.loggers``: TensorBoard, and any logger that takes a dict
"""

from __future__ import annotations


def missing(extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error for a package that an integration needs and that is not installed, with what installs it."""
    return ModuleNotFoundError(
        f'cabs.integrations.{extra} needs {error.name}, which is not installed: pip install "torch-cabs[{extra}]"',
        name=error.name,
    )
