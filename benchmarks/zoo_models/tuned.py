"""What ``peft`` puts into models: few parameters of their own, the others frozen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from zoo_models.case import Case, ids, ordinary

WAYS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 4, "lora_dropout": 0.0},
    "LoraConfig dora": {"r": 4, "lora_dropout": 0.0, "use_dora": True},
    "LoraConfig rslora, all layers": {"r": 4, "use_rslora": True, "target_modules": "all-linear"},
    "LoraConfig with embeddings": {"r": 4, "target_modules": ["q_proj", "embed_tokens"]},
    "LoraConfig with biases": {"r": 4, "lora_bias": True, "target_modules": "all-linear"},
    "AdaLoraConfig": {"init_r": 4, "target_r": 2, "total_step": 100},
    "LoHaConfig": {"r": 4, "target_modules": "all-linear"},
    "LoKrConfig": {"r": 4, "target_modules": "all-linear"},
    "IA3Config": {},
    "OFTConfig": {"r": 0, "oft_block_size": 4, "target_modules": "all-linear"},
    "BOFTConfig": {"boft_block_size": 4, "target_modules": ["q_proj"]},
    "HRAConfig": {"r": 4, "target_modules": "all-linear"},
    "VeraConfig": {"r": 4, "target_modules": ["q_proj"]},
    "VBLoRAConfig": {"r": 2, "num_vectors": 8, "vector_length": 8, "target_modules": ["q_proj", "v_proj"]},
    "FourierFTConfig": {"n_frequency": 20, "target_modules": ["q_proj", "v_proj"]},
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
    "MissConfig": {"r": 4, "target_modules": "all-linear"},
    "RandLoraConfig": {"r": 4, "target_modules": ["q_proj"]},
    "RoadConfig": {"group_size": 8, "target_modules": ["q_proj"]},
    "C3AConfig": {"block_size": 8, "target_modules": ["q_proj"]},
    "ShiraConfig": {"r": 2, "target_modules": ["q_proj"]},
    "WaveFTConfig": {"n_frequency": 20, "target_modules": ["q_proj"]},
    "DeloraConfig": {"r": 4, "target_modules": ["q_proj"]},
    "GraloraConfig": {"r": 4, "gralora_k": 2, "target_modules": ["q_proj"]},
    "TrainableTokensConfig": {"token_indices": list(range(10, 40)), "target_modules": ["embed_tokens"]},
    "PrefixTuningConfig": {"num_virtual_tokens": 3},
    "PrefixTuningConfig projected": {"num_virtual_tokens": 3, "prefix_projection": True, "encoder_hidden_size": 16},
    "PromptTuningConfig": {"num_virtual_tokens": 3},
    "PromptEncoderConfig": {"num_virtual_tokens": 3, "encoder_hidden_size": 16},
}


def builders() -> dict[str, Callable[[], Case]]:
    if find_spec("peft") is None:
        return {}
    return {f"peft/{name}": partial(build, name) for name in WAYS}


def build(name: str) -> Case:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    from zoo_models.tiny import tiny

    config = getattr(peft, name.split()[0])(task_type="CAUSAL_LM", **WAYS[name])
    model = peft.get_peft_model(LlamaForCausalLM(tiny(LlamaConfig)), config).double()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("nothing is left to train")

    def inputs(m: int, length: int) -> dict[str, Any]:
        return {"input_ids": ids(m, length)}

    def labelled(m: int, length: int) -> Any:
        return ordinary(inputs(m, length) | {"labels": ids(m, length)}, m)

    return Case(model, lambda m, length: ordinary(inputs(m, length), m), labelled)
