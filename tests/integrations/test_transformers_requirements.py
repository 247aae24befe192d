"""What the Trainer cannot do with moving sizes is said before it trains; what it can do, it does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import DistributedType
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    DataCollatorWithFlattening,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    default_data_collator,
)

from cabs import AdaptiveLoader, rules
from cabs.clocks import ByExamples
from cabs.integrations.transformers import CABSCallback, CABSTrainer
from hugging import BOUNDS, arguments, classifier, language_model, same, same_model, sentences, texts, trainer
from test_transformers import hooks

Sizes = list[int]


def sizes(tmp_path: Path, model: Any, data: Any, callback: CABSCallback | None = None, **options: Any) -> Sizes:
    """The sizes of a training."""
    given = {name: options.pop(name) for name in list(options) if name in ("data_collator", "optimizers", "kind")}
    one, recorder = trainer(model, arguments(tmp_path, **options), data, callback, **given)
    one.train()
    return [step[0] for step in recorder.history]


def refused(tmp_path: Path, error: type[Exception], message: str, *parts: Any, **options: Any) -> None:
    """Nothing was trained, and the model is as it was."""
    model = classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one, recorder = trainer(model, arguments(tmp_path, **options), sentences(40), *parts)
    with pytest.raises(error, match=message):
        one.train()
    assert recorder.history == []
    assert hooks(model) == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_plain_trainer_is_told_what_it_lacks(tmp_path: Path) -> None:
    one = Trainer(classifier(), arguments(tmp_path), train_dataset=sentences(40), callbacks=[CABSCallback()])
    with pytest.raises(TypeError, match=r"cannot change its batch size, .* use cabs.integrations.*CABSTrainer"):
        one.train()
    assert one.state.global_step == 0


def test_two_callbacks(tmp_path: Path) -> None:
    one, _ = trainer(classifier(), arguments(tmp_path), sentences(40), callbacks=[CABSCallback()])
    with pytest.raises(ValueError, match="has 2 CABSCallbacks"):
        one.train()


@pytest.mark.parametrize("name", ["accumulation", "grad_scaler", "trial"])
def test_what_the_trainer_says_nobody_else_may(name: str) -> None:
    with pytest.raises(TypeError, match=f"CABSCallback takes no {name}: it is known from the framework"):
        CABSCallback(**{name: 2})


def test_options_that_do_not_exist() -> None:
    with pytest.raises(
        TypeError, match=r"CABSCallback takes no batch_size, but rule and what cabs.CABS takes: assume_sgd"
    ):
        CABSCallback(batch_size=8)
    with pytest.raises(TypeError, match="budget is about the rule CABS, and rule is Constant"):
        CABSCallback(rules.Constant(16), budget=100)
    with pytest.raises(TypeError, match=r"rule is 16: it must be one of cabs.rules"):
        CABSCallback(16)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"logging_steps": 0.1},
        {"save_strategy": "steps", "save_steps": 0.5},
        {"eval_strategy": "steps", "eval_steps": 0.25},
    ],
)
def test_parts_of_a_number_of_steps_that_nobody_knows(tmp_path: Path, options: Any) -> None:
    one, recorder = trainer(classifier(), arguments(tmp_path, **options), sentences(40), eval_dataset=sentences(8))
    with pytest.raises(ValueError, match=r"_steps=0\.\d+ is a part of all steps, .* give a whole number"):
        one.train()
    assert recorder.history == []


def test_batches_of_a_fixed_number(tmp_path: Path) -> None:
    message = "BatchRebalanceSampler, says which examples come together"
    refused(tmp_path, ValueError, message, train_sampling_strategy="batch_rebalance")


def test_optimizers_without_a_coupling(tmp_path: Path) -> None:
    refused(tmp_path, ValueError, "Adafactor is not known to make such", optim="adafactor")
    refused(tmp_path, NotImplementedError, "optim='lomo' steps inside of its own backward", optim="lomo")
    assert sizes(tmp_path, classifier(), sentences(40), CABSCallback(rules.Constant(20)), optim="adafactor") == [20, 20]


def test_processes_that_cannot_be_steered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = trainer(classifier(), arguments(tmp_path), sentences(40))
    one.args._n_gpu = 2
    with pytest.raises(NotImplementedError, match="DataParallel over 2 GPUs"):
        one.train()
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        monkeypatch.setattr(one.accelerator.state, "distributed_type", kind)
        with pytest.raises(NotImplementedError, match=f"with DistributedDataParallel, not with {kind.name}"):
            one.train()


def test_a_batch_flattened_into_one_row(tmp_path: Path) -> None:
    data = [{"input_ids": each["input_ids"].tolist()} for each in texts(40)]
    one, recorder = trainer(language_model(), arguments(tmp_path), data, data_collator=DataCollatorWithFlattening())
    with pytest.raises(RuntimeError, match="there are 8 examples, and the model was called with inputs of shapes"):
        one.train()
    assert recorder.history == []


def mixture() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    more = {"num_key_value_heads": 2, "num_local_experts": 2, "max_position_embeddings": 16}
    tokens = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**sizes, **more, **tokens))


def test_a_loss_of_which_only_a_part_is_divided(tmp_path: Path) -> None:
    callback = CABSCallback(rules.Constant(20))
    one, recorder = trainer(mixture(), arguments(tmp_path), texts(40), callback)
    with pytest.raises(NotImplementedError, match="MixtralForCausalLM divides one part of itself"):
        one.train()
    assert recorder.history == []
    assert sizes(tmp_path, mixture(), texts(40), callback, per_device_train_batch_size=20) == [20, 20]


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    class Diverged(CABSTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * (float("nan") if self.state.global_step == 2 else 1.0)

    one, recorder = trainer(classifier(), arguments(tmp_path), sentences(60), kind=Diverged)
    with pytest.raises(ValueError, match=r"not finite|the loss is nan"):
        one.train()
    assert len(recorder.history) == 2
    assert hooks(one.model) == 0


def test_a_step_of_ones_own_that_does_without_the_accelerator(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = self.compute_loss(model, inputs)
            loss.backward()
            return loss.detach()

    class Both(CABSTrainer, Own):
        pass

    one, recorder = trainer(classifier(), arguments(tmp_path), sentences(60), kind=Both)
    with pytest.raises(RuntimeError, match=r"goes with scheduler\.backward\(loss\) for every microbatch"):
        one.train()
    assert recorder.history == []


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing_factor": 0.1},
        {"compute_loss_func": lambda outputs, labels, num_items_in_batch=None: F.cross_entropy(outputs.logits, labels)},
        {
            "compute_loss_func": lambda outputs, labels, num_items_in_batch=None: (
                F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch
            )
        },
    ],
    ids=["label smoothing", "own mean", "own sum"],
)
def test_losses_of_all_kinds_in_microbatches(tmp_path: Path, options: dict[str, Any]) -> None:
    given = {name: options[name] for name in options if name == "compute_loss_func"}
    changes = {name: options[name] for name in options if name not in given}
    results = []
    for size in (4, 48):
        args = arguments(tmp_path, per_device_train_batch_size=size, include_num_input_tokens_seen="all", **changes)
        args.gradient_accumulation_steps = 48 // size
        ramp = CABSCallback(rules.Ramp(9, 30, 80), min_batch_size=9)
        one, recorder = trainer(classifier(), args, sentences(80), ramp, **given)
        one.train()
        assert one.state.num_input_tokens_seen == 80 * 8
        results.append((one.model, recorder.history))
    same(results[0][1], results[1][1])
    same_model(results[0][0], results[1][0])


class Sentences(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(sentences(50))


def test_iterable_data(tmp_path: Path) -> None:
    got = sizes(tmp_path, classifier(), Sentences(), CABSCallback(rules.Constant(16)), max_steps=7)
    assert got == [16, 16, 16, 2, 16, 16, 16]


def test_a_loader_of_ones_own(tmp_path: Path) -> None:
    """Whoever makes it, and prepared or not; its size is that of microbatches."""

    class Prepared(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader(self.train_dataset))

    class Both(CABSTrainer, Prepared):
        pass

    class Overridden(CABSTrainer):
        def get_train_dataloader(self) -> Any:
            return loader(self.train_dataset)

    class Adaptive(CABSTrainer):
        def get_train_dataloader(self) -> Any:
            return AdaptiveLoader.from_dataloader(loader(self.train_dataset), batch_size=10)

    def loader(data: Any) -> Any:
        sampler = torch.utils.data.WeightedRandomSampler([1.0] * 60, 45)
        return DataLoader(data, batch_size=5, sampler=sampler, collate_fn=default_data_collator)

    for kind, first in ((Both, 10), (Overridden, 10), (Adaptive, 10)):
        parts: list[int] = []
        kind.compute_loss = lambda self, model, inputs, *args, parts=parts, **kwargs: (  # type: ignore[method-assign]
            parts.append(len(inputs["labels"])) or Trainer.compute_loss(self, model, inputs, *args, **kwargs)
        )
        one, recorder = trainer(
            classifier(), arguments(tmp_path, gradient_accumulation_steps=2), sentences(60), kind=kind
        )
        one.train()
        assert recorder.history[0][0] == first
        assert sum(step[0] for step in recorder.history) == 45
        assert recorder.epochs[-1] == 1
        assert max(parts) == (8 if kind is Adaptive else 5)
        assert not isinstance(one.get_train_dataloader(), AdaptiveLoader) or kind is Adaptive


def test_options_of_the_scheduler(tmp_path: Path) -> None:
    data, both = sentences(60), {"num_train_epochs": 2}
    assert sum(sizes(tmp_path, classifier(), data, CABSCallback(budget=120, **BOUNDS), **both)) == 120
    assert set(sizes(tmp_path, classifier(), data, CABSCallback(monitor_only=True))) == {8, 4}
    assert min(sizes(tmp_path, classifier(), data, CABSCallback(estimator="microbatch", **BOUNDS))) >= 4
    even = sizes(tmp_path, classifier(), data, CABSCallback(multiple_of=4, **BOUNDS))
    assert all(size % 4 == 0 for size in even)


def test_mixed_precision_and_checkpointing(tmp_path: Path) -> None:
    plain = sizes(tmp_path, classifier(), sentences(60))
    assert sizes(tmp_path, classifier(), sentences(60), activation_checkpointing=True) == plain
    halved = sizes(tmp_path, classifier(), sentences(60), bf16=True)
    assert halved[2] == pytest.approx(plain[2], rel=0.1)


def test_a_schedule_of_ones_own(tmp_path: Path) -> None:
    """By examples if it says so, else by steps."""
    for by_examples, expected in ((True, [0.1, 0.05, 0.05, 0.025]), (False, [0.05, 0.025, 0.0125, 0.00625])):
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule: Any = StepLR(optimizer, 1, 0.5)
        schedule = ByExamples(schedule, every=30) if by_examples else schedule
        callback = CABSCallback(rules.Constant(16))
        args = arguments(tmp_path)
        one, recorder = trainer(model, args, sentences(64), callback, optimizers=(optimizer, schedule))
        one.train()
        assert recorder.rates == pytest.approx(expected)
        assert one.lr_scheduler is schedule


def test_without_the_packages() -> None:
    program = (
        "import sys\n"
        "import cabs, cabs.integrations\n"
        "assert not {'transformers', 'accelerate'} & set(sys.modules)\n"
        "for name in ('transformers', 'accelerate'):\n"
        "    sys.modules[name] = None\n"
        "    try:\n"
        "        __import__(f'cabs.integrations.{name}')\n"
        "    except ModuleNotFoundError as error:\n"
        "        print(error)\n"
        "    del sys.modules[name]\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for line, name in zip(done.stdout.splitlines(), ("transformers", "accelerate"), strict=True):
        assert line.endswith(f'which is not installed: pip install "torch-cabs[{name}]"')
