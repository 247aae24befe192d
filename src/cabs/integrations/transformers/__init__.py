"""The autopilot in the Trainer of Hugging Face's ``transformers``."""

from cabs.integrations import missing

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise missing("transformers", error) from error

from cabs.integrations.transformers.callback import CABSCallback
from cabs.integrations.transformers.trainer import CABSTrainer

__all__ = ["CABSCallback", "CABSTrainer"]
