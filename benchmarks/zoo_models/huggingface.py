"""The models of ``transformers``, by its own lists of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from zoo_models.case import Batch, Case, ids, noise, ordinary
from zoo_models.inputs import EXTRAS, SHAPES_OF

Maker = Callable[[int, int], dict[str, Any]]

TASKS = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "MULTIPLE_CHOICE",
    "NEXT_SENTENCE_PREDICTION",
    "PRETRAINING",
    "IMAGE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "MASKED_IMAGE_MODELING",
    "DEPTH_ESTIMATION",
    "IMAGE_TO_IMAGE",
    "BACKBONE",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "AUDIO_FRAME_CLASSIFICATION",
    "AUDIO_XVECTOR",
    "CTC",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "TIME_SERIES_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
    "TIME_SERIES_REGRESSION",
    "OBJECT_DETECTION",
    "TEXT_ENCODING",
)

WITH_EXPERTS = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "JambaForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "PhimoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Tried with each way that there is to compute experts; all others with a loop over the experts."""

SINGLE_LABEL = ("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION")
TOKEN_LABELS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT")


def builders() -> dict[str, Callable[[], Case]]:
    try:
        import transformers
    except ImportError:
        return {}
    transformers.logging.set_verbosity_error()
    import_module("transformers.models.llama.modeling_llama")  # with all that every model imports
    import_module("zoo_models.tiny")
    ways: dict[str, Callable[[], Case]] = {}
    for name, entry in classes().items():
        ways[f"transformers/{name}"] = partial(build, *entry, name, "eager")
        if entry[1] == "CAUSAL_LM" and name in WITH_EXPERTS:
            for experts in ("batched_mm", "grouped_mm"):
                ways[f"transformers/{name}[{experts}]"] = partial(build, *entry, name, experts)
    return ways


def classes() -> dict[str, tuple[str, str]]:
    """The kind of a model and what it is for, by the name of its class."""
    auto = import_module("transformers.models.auto.modeling_auto")
    found: dict[str, tuple[str, str]] = {}
    for task in (*TASKS, None):
        mapping = getattr(auto, "MODEL_MAPPING_NAMES" if task is None else f"MODEL_FOR_{task}_MAPPING_NAMES", {})
        for kind, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, (kind, task or "BASE"))
    return found


def build(kind: str, task: str, name: str, experts: str) -> Case:
    import transformers

    from zoo_models.tiny import tiny

    model_class = getattr(transformers, name)
    config_class = getattr(model_class, "config_class", None)
    if config_class is None or config_class is transformers.PreTrainedConfig:
        config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]
    try:
        if experts == "grouped_mm":
            raise TypeError("there is no grouped_mm in float64")
        dtype, config = torch.float64, tiny(config_class)
        model, inputs = built(model_class, config, task, experts)
    except (RuntimeError, TypeError):
        dtype = torch.float32
        torch.set_default_dtype(dtype)
        config = tiny(config_class)
        model, inputs = built(model_class, config, task, experts)
    labelled = partial(with_labels, inputs, config, task)
    masks = "attention_mask" in inspect.signature(model_class.forward).parameters
    padded = partial(with_padding, inputs) if masks else lambda m, length: None
    return Case(model, lambda m, length: ordinary(inputs(m, length), m), labelled, padded, dtype)


def built(model_class: Any, config: Any, task: str, experts: str) -> tuple[Any, Maker]:
    """A model, and what makes inputs for it."""
    if model_class.__name__ == "ReformerModelWithLMHead":
        config.is_decoder = True
    model = model_class(config).to(torch.get_default_dtype())
    if model._can_set_experts_implementation():
        model.set_experts_implementation(experts)
    elif experts != "eager":
        raise ValueError(f"{model_class.__name__} has no other way to compute its experts")
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")
    return model, first_that_runs(model, model_class, task)


def first_that_runs(model: Any, model_class: Any, task: str) -> Maker:
    """The way of making inputs that the model takes; the complaint about the first if it takes none."""
    complaint: Exception | None = None
    for maker in candidates(model, model_class, task):
        try:
            with torch.no_grad():
                model(**maker(2, 8))
        except Exception as error:
            complaint = complaint or error
        else:
            return maker
    raise complaint or ValueError("no way to make inputs")


def candidates(model: Any, model_class: Any, task: str) -> Iterator[Maker]:
    config = model.config
    names = inspect.signature(model_class.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    if main not in names:
        main = next((name for name in ("input_ids", "pixel_values", "input_features") if name in names), main)
    decoder = "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False)
    text = "input_ids" in names and main != "input_ids"
    extras = [name for name in EXTRAS if name in names]
    for shape in SHAPES_OF.get(main, (lambda config, m, length: noise(m, length, 32),)):
        for also in (False, True) if text else (False,):
            yield partial(made, config, main, shape, decoder, also, task, extras)


def made(
    config: Any,
    main: str,
    shape: Callable[..., Tensor],
    decoder: bool,
    text: bool,
    task: str,
    extras: Sequence[str],
    m: int,
    length: int,
) -> dict[str, Any]:
    value = shape(config, m, length)
    if task == "MULTIPLE_CHOICE" and main == "input_ids":
        value = ids(m * 3, length).view(m, 3, length)
    inputs: dict[str, Any] = {main: value}
    if decoder:
        inputs["decoder_input_ids"] = ids(m, length)
    if text:
        inputs["input_ids"] = ids(m, length)
    return inputs | {name: EXTRAS[name](config, m, length) for name in extras}


def with_labels(inputs: Maker, config: Any, task: str, m: int, length: int) -> Batch | None:
    """A batch with labels, where it is plain what they look like."""
    values = inputs(m, length)
    if task in TOKEN_LABELS:
        tokens = values.get("decoder_input_ids", values.get("input_ids"))
        if tokens is None:
            return None
        values["labels"] = torch.randint(10, 60, tokens.shape)
    elif task == "TOKEN_CLASSIFICATION":
        values["labels"] = torch.randint(0, 2, values["input_ids"].shape)
    elif task == "MULTIPLE_CHOICE":
        values["labels"] = torch.randint(0, 3, (m,))
    elif task in SINGLE_LABEL:
        values["labels"] = torch.randint(0, 2, (m,))
        config.problem_type = "single_label_classification"
    elif task == "QUESTION_ANSWERING":
        values["start_positions"] = torch.randint(0, length, (m,))
        values["end_positions"] = torch.randint(0, length, (m,))
    else:
        return None
    return ordinary(values, m)


def with_padding(inputs: Maker, m: int, length: int) -> Batch | None:
    """A batch of texts that end at different places."""
    values = inputs(m, length)
    text = values.get("input_ids")
    if text is None or text.dim() != 2:
        return None
    mask = torch.ones_like(text)
    for i in range(m):
        mask[i, text.shape[1] - i % 3 :] = 0
    return ordinary(values | {"input_ids": text * mask, "attention_mask": mask}, m)
