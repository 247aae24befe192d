"""The autopilot in Lightning: ``Trainer(callbacks=[CABSCallback()])``."""

from cabs.integrations.lightning.callback import CABSCallback

__all__ = ["CABSCallback"]
