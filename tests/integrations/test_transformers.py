"""The Hugging Face Trainer, against the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from cabs import rules
from cabs.integrations.transformers import CABSCallback, CABSTrainer
from hugging import (
    BOUNDS,
    arguments,
    classifier,
    language_model,
    plain_loop,
    same,
    same_model,
    sentences,
    texts,
    trainer,
)


def hooks(model: nn.Module) -> int:
    """How many hooks the modules of a model have."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def test_a_classifier_gets_the_sizes_of_the_plain_loop(tmp_path: Path) -> None:
    args = arguments(tmp_path, num_train_epochs=2)
    one, recorder = trainer(classifier(), args, sentences())
    one.train()
    model, history = plain_loop(classifier(), sentences(), args)
    same(recorder.history, history)
    same_model(one.model, model)
    assert len({step[0] for step in history}) > 3
    assert any(step[0] > 8 for step in history)  # in several microbatches


def test_a_language_model_gets_the_sizes_of_the_plain_loop(tmp_path: Path) -> None:
    args = arguments(tmp_path, learning_rate=4e-2)
    one, recorder = trainer(language_model(), args, texts())
    one.train()
    model, history = plain_loop(language_model(), texts(), args)
    same(recorder.history, history)
    same_model(one.model, model)
    assert any(step[0] > 8 for step in history)


def test_unequal_numbers_of_tokens_are_divided_by_those_of_the_whole_batch(tmp_path: Path) -> None:
    args, data = arguments(tmp_path, learning_rate=4e-2), texts(unequal=True)
    one, recorder = trainer(language_model(), args, data)
    by_loss = "the loss of one example depends on others"
    by_labels = "from 3 to 7 labels that count, and the Trainer's loss is the mean over"
    with pytest.warns(UserWarning, match=by_loss), pytest.warns(UserWarning, match=by_labels):
        one.train()
    with pytest.warns(UserWarning, match=by_loss):
        model, history = plain_loop(language_model(), data, args, divides=True)
    same(recorder.history, history)
    same_model(one.model, model)
    assert any(step[0] > 8 for step in history)


def test_microbatches_change_nothing(tmp_path: Path) -> None:
    data, histories = texts(unequal=True), []
    for size in (8, 48):
        args = arguments(tmp_path, per_device_train_batch_size=size)
        one, recorder = trainer(language_model(), args, data, CABSCallback(rule=rules.Constant(20)))
        one.train()
        histories.append(recorder.history)
    same(histories[0], histories[1])


def test_a_loss_that_ignores_the_number_of_items_is_a_mean_all_the_same(tmp_path: Path) -> None:
    data = [{**each, "labels": each["labels"].float()} for each in sentences()]
    histories = []
    for size in (8, 48):
        args = arguments(tmp_path, per_device_train_batch_size=size)
        one, recorder = trainer(classifier(num_labels=1), args, data, CABSCallback(rule=rules.Constant(20)))
        one.train()
        assert one.model.config.problem_type == "regression"
        histories.append(recorder.history)
    same(histories[0], histories[1])


def test_accumulation_says_the_first_size(tmp_path: Path) -> None:
    args = arguments(tmp_path, gradient_accumulation_steps=3)
    one, recorder = trainer(classifier(), args, sentences())
    one.train()
    _, history = plain_loop(classifier(), sentences(), args)
    same(recorder.history, history)
    assert history[0][0] == 24
    assert args.gradient_accumulation_steps == 3
    assert not args.ignore_data_skip


def test_a_schedule_puts_no_hook_into_the_model(tmp_path: Path) -> None:
    counts: list[int] = []

    class Counting(CABSTrainer):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            counts.append(hooks(model))
            return super().compute_loss(model, *args, **kwargs)

    for rule, hooked in ((rules.Steps("0:8 40:16 100:32"), False), (None, True)):
        counts.clear()
        callback = CABSCallback(rule, **BOUNDS)
        one, recorder = trainer(classifier(), arguments(tmp_path), sentences(), callback, Counting)
        one.train()
        assert any(counts) == hooked
        assert callback.scheduler is not None
        assert (callback.scheduler.variance is not None) == hooked
        if not hooked:
            assert [step[0] for step in recorder.history] == [8] * 5 + [16] * 4 + [32] * 3


def test_no_callback_is_one_with_defaults(tmp_path: Path) -> None:
    one = CABSTrainer(classifier(), arguments(tmp_path), train_dataset=sentences(60))
    one.train()
    assert one.state.log_history[-1]["train_loss"] > 0
    (callback,) = (each for each in one.callback_handler.callbacks if isinstance(each, CABSCallback))
    assert callback.scheduler is not None
    assert callback.scheduler.last is not None
    assert callback.scheduler.last.examples_total == 60


def test_another_trainer_can_be_mixed_in(tmp_path: Path) -> None:
    class Doubled(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    class Both(CABSTrainer, Doubled):
        pass

    args = arguments(tmp_path, max_steps=1)
    losses = []
    for kind in (CABSTrainer, Both):
        one, recorder = trainer(classifier(), args, sentences(), kind=kind)
        one.train()
        losses.append(recorder.history[0][1])
    assert losses[1] == pytest.approx(2 * losses[0])


def test_evaluation_in_between_does_not_count(tmp_path: Path) -> None:
    histories = []
    for changes in ({}, {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}):
        one, recorder = trainer(
            classifier(), arguments(tmp_path, **changes), sentences(), eval_dataset=sentences(30, labels=2)
        )
        one.train()
        histories.append(recorder.history)
    assert histories[0] == histories[1]
    assert sum("eval_loss" in logs for logs in one.state.log_history) == 1 + -(-len(histories[0]) // 2)


def test_the_log_has_the_numbers(tmp_path: Path) -> None:
    one, recorder = trainer(classifier(), arguments(tmp_path, logging_steps=2, max_grad_norm=0.0), sentences())
    result = one.train()
    logs = [each for each in one.state.log_history if "loss" in each]
    for number, each in enumerate(logs, start=1):
        assert each["step"] == 2 * number
        assert each["cabs/batch_size"] == recorder.history[2 * number - 1][2]
        assert each["cabs/examples"] == sum(step[0] for step in recorder.history[: 2 * number])
        mean = sum(step[1] for step in recorder.history[2 * number - 2 : 2 * number]) / 2
        assert each["loss"] == pytest.approx(mean, rel=1e-5)
    names = ("raw_batch_size", "variance", "noise_share", "noise_scale", "loss_average", "clipped")
    assert all(f"cabs/{name}" in logs[-1] for name in names)
    assert not any(name.startswith("cabs/") for name in one.state.log_history[-1])
    runtime = result.metrics["train_runtime"]
    assert result.metrics["train_samples_per_second"] == pytest.approx(200 / runtime, rel=1e-3)


def test_epochs_and_steps_are_counted_by_examples(tmp_path: Path) -> None:
    one, recorder = trainer(classifier(), arguments(tmp_path, num_train_epochs=2.5), sentences(100))
    one.train()
    seen = torch.tensor([step[0] for step in recorder.history]).cumsum(0)
    assert recorder.epochs == pytest.approx((seen / 100).tolist())
    assert 250 <= seen[-1] < 250 + recorder.history[-1][0]
    assert one.state.global_step == one.state.max_steps == len(recorder.history)
    for steps, (total, (_, _, size)) in enumerate(zip(recorder.max_steps, recorder.history, strict=True), start=1):
        left = max(0, 250 - int(seen[steps - 1]))
        assert total == steps + -(-left // size)


def test_max_steps_are_steps(tmp_path: Path) -> None:
    one, recorder = trainer(classifier(), arguments(tmp_path, max_steps=30, logging_steps=0.2), sentences(100))
    one.train()
    assert len(recorder.history) == one.state.max_steps == 30
    assert sum(step[0] for step in recorder.history) > 200  # more than two epochs
    assert recorder.epochs[-1] == pytest.approx(sum(step[0] for step in recorder.history) / 100)
    assert sum("loss" in logs for logs in one.state.log_history) == 5


def test_drop_last_leaves_the_rest_of_an_epoch_out(tmp_path: Path) -> None:
    rule = CABSCallback(rule=rules.Constant(16))
    args = arguments(tmp_path, dataloader_drop_last=True, num_train_epochs=2)
    one, recorder = trainer(classifier(), args, sentences(50), rule)
    one.train()
    assert [step[0] for step in recorder.history] == [16] * 6
    assert recorder.epochs[2] == 1
    assert recorder.epochs[-1] == 2


@pytest.mark.parametrize("warmup", [0.1, 4], ids=["part", "steps"])
def test_learning_rates_go_by_examples(tmp_path: Path, warmup: float) -> None:
    def rates(rule: rules.Rule) -> tuple[list[int], list[float]]:
        args = arguments(tmp_path, num_train_epochs=2, lr_scheduler_type="linear", warmup_steps=warmup)
        one, recorder = trainer(classifier(), args, sentences(160), CABSCallback(rule))
        one.train()
        return torch.tensor([step[0] for step in recorder.history]).cumsum(0).tolist(), recorder.rates

    examples, rates_of = rates(rules.Steps("0:32 96:16 200:48"))
    fine = dict(zip(*rates(rules.Constant(16)), strict=True))  # steps of 16 pass wherever the others do
    for seen, rate in zip(examples, rates_of, strict=True):
        if seen in fine:
            assert rate == pytest.approx(fine[seen])
    assert max(rates_of) == pytest.approx(3e-3, rel=0.3)
    assert rates_of[-1] == pytest.approx(0.0, abs=1e-9)
    # As the Trainer's own, whose steps are of the first size.
    own = Trainer(
        classifier(),
        arguments(tmp_path, num_train_epochs=2, lr_scheduler_type="linear", warmup_steps=warmup, logging_steps=1),
        train_dataset=sentences(160),
    )
    own.train()
    theirs = [logs["learning_rate"] for logs in own.state.log_history if "learning_rate" in logs]
    constant = CABSCallback(rules.Constant(8), min_batch_size=2)
    args = arguments(tmp_path, num_train_epochs=2, lr_scheduler_type="linear", warmup_steps=warmup, logging_steps=1)
    one, _ = trainer(classifier(), args, sentences(160), constant)
    one.train()
    assert [logs["learning_rate"] for logs in one.state.log_history if "learning_rate" in logs] == theirs


def test_a_constant_size_trains_as_the_trainer_does(tmp_path: Path) -> None:
    """The same order of examples given, every number is the Trainer's own."""

    args = arguments(tmp_path, train_sampling_strategy="sequential", gradient_accumulation_steps=2, logging_steps=1)
    own = Trainer(language_model(), args, train_dataset=texts(64, unequal=True))
    own.train()
    one, _ = trainer(language_model(), args, texts(64, unequal=True), CABSCallback(rules.Constant(16)))
    one.train()
    same_model(one.model, own.model)
    names = ("loss", "grad_norm", "learning_rate", "epoch")
    for ours, theirs in zip(one.state.log_history[:-1], own.state.log_history[:-1], strict=True):
        assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-4)
    assert one.state.total_flos == own.state.total_flos
