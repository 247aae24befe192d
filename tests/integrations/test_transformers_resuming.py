"""The Trainer's own checkpoints, exceptions, and training again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from cabs import rules
from cabs.integrations.transformers import CABSCallback, CABSTrainer
from hugging import BOUNDS, arguments, classifier, language_model, same_model, sentences, texts, trainer
from test_transformers import hooks


class Stop(TrainerCallback):
    """Ends training after so many steps, by a raised error or in good order."""

    def __init__(self, step: int, error: BaseException | None = None) -> None:
        self.step, self.error = step, error

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            if self.error is not None:
                raise self.error
            control.should_training_stop = True


@pytest.mark.parametrize(
    ("at", "changes"),
    [
        (1, {}),
        (6, {"lr_scheduler_type": "cosine", "warmup_steps": 5, "gradient_accumulation_steps": 2}),
        (6, {"max_steps": 14}),
        (6, {"dataloader_drop_last": True}),
        (6, {"train_sampling_strategy": "group_by_length"}),
        (6, {"dataloader_num_workers": 1}),
        (6, {"restore_callback_states_from_checkpoint": True}),
    ],
    ids=["first step", "by examples", "steps", "drop_last", "group_by_length", "workers", "callbacks"],
)
def test_a_resumed_training_is_the_one_that_was_not_interrupted(tmp_path: Path, changes: Any, at: int) -> None:
    options = {"num_train_epochs": 2, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": at, **changes}

    def begun(name: str, **more: Any) -> Any:
        args = arguments(tmp_path / name, **options)
        return trainer(classifier(dropout=0.1), args, sentences(60), **more)

    whole, history = begun("whole")
    whole.train()
    first, before = begun("parts", callbacks=[Stop(at)])
    first.train()
    assert len(before.history) == at
    second, after = begun("parts")
    second.train(resume_from_checkpoint=True)
    assert before.history + after.history == history.history
    assert before.epochs + after.epochs == history.epochs
    assert before.rates + after.rates == history.rates
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])
    assert second.state.global_step == whole.state.global_step == len(history.history)


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_checkpoint_of_the_end_of_an_epoch(tmp_path: Path, strategy: str) -> None:
    def begun(name: str, **more: Any) -> Any:
        args = arguments(tmp_path / name, num_train_epochs=3, save_strategy=strategy, save_steps=1)
        return trainer(classifier(dropout=0.1), args, sentences(48), CABSCallback(rules.Constant(16)), **more)

    whole, history = begun("whole")
    whole.train()
    first, before = begun("parts", callbacks=[Stop(3)])
    first.train()
    second, after = begun("parts")
    second.train(resume_from_checkpoint=True)
    assert before.history + after.history == history.history
    assert len(history.history) == 9
    assert second.state.epoch == 3


def test_a_finished_training_resumes_to_nothing_more(tmp_path: Path) -> None:
    def begun(epochs: int) -> Any:
        args = arguments(tmp_path, num_train_epochs=epochs, save_strategy="steps", save_steps=1)
        return trainer(classifier(), args, sentences(48), CABSCallback(rules.Constant(16)))

    begun(1)[0].train()
    again, nothing = begun(1)
    again.train(resume_from_checkpoint=True)
    assert nothing.history == []
    assert again.state.global_step == 3
    longer, recorder = begun(2)
    longer.train(resume_from_checkpoint=True)
    assert [step[0] for step in recorder.history] == [16, 16, 16]
    assert recorder.epochs == pytest.approx([4 / 3, 5 / 3, 2])


def test_the_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, save_strategy="steps", save_steps=2)
    Trainer(classifier(), args, train_dataset=sentences(40)).train()
    one, recorder = trainer(classifier(), args, sentences(40))
    with pytest.raises(ValueError, match="has no state of CABSCallback"):
        one.train(resume_from_checkpoint=True)
    assert recorder.history == []
    assert hooks(one.model) == 0


def test_other_data_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, save_strategy="steps", save_steps=2)
    trainer(classifier(), args, sentences(40))[0].train()
    one, _ = trainer(classifier(), args, sentences(60))
    with pytest.raises(ValueError, match="the state is of a loader with length 40, this one has length 60"):
        one.train(resume_from_checkpoint=True)
    assert hooks(one.model) == 0


def test_another_first_size_is_refused(tmp_path: Path) -> None:
    """A learning-rate schedule counts in it."""
    args = arguments(tmp_path, save_strategy="steps", save_steps=2)
    trainer(classifier(), args, sentences(40))[0].train()
    one, _ = trainer(classifier(), arguments(tmp_path, gradient_accumulation_steps=2), sentences(40))
    with pytest.raises(ValueError, match=r"counts steps of 8 examples, .* and here that is 16: choose"):
        one.train(resume_from_checkpoint=True)
    same_size, _ = trainer(
        classifier(),
        arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2),
        sentences(40),
    )
    same_size.train(resume_from_checkpoint=True)
    assert same_size.state.epoch == 2


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("loss", KeyboardInterrupt()),
        ("backward", RuntimeError("something")),
        ("step end", KeyboardInterrupt()),
        ("collator", RuntimeError("something")),
    ],
    ids=["loss", "backward", "step end", "collator"],
)
def test_after_an_interruption_no_hook_is_left_and_training_works(
    tmp_path: Path, where: str, error: BaseException
) -> None:
    class Failing(CABSTrainer):
        armed = True

        def fail(self, at: str) -> None:
            if self.armed and where == at and self.state.global_step == 3:
                raise error

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self.fail("loss")
            if where == "backward" and self.armed and self.state.global_step == 3:
                loss.register_hook(lambda gradient: self.fail("backward"))
            return loss

    def collate(examples: list[Any]) -> Any:
        one.fail("collator")
        return {name: torch.stack([each[name] for each in examples]) for name in examples[0]}

    fresh, expected = trainer(classifier(), arguments(tmp_path), sentences(80), data_collator=collate)
    one, recorder = fresh, expected
    fresh.fail = lambda at: None  # type: ignore[attr-defined]
    fresh.train()
    stops = [Stop(3, error)] if where == "step end" else []
    one, recorder = trainer(
        classifier(), arguments(tmp_path), sentences(80), kind=Failing, data_collator=collate, callbacks=stops
    )
    with pytest.raises(type(error)):
        one.train()
    assert recorder.history == expected.history[:3]
    assert hooks(one.model) == 0
    assert "backward" not in vars(one.accelerator)
    assert one.args.gradient_accumulation_steps == 1
    assert one.model.training
    one.armed = False  # type: ignore[attr-defined]
    for stop in stops:
        one.remove_callback(stop)
    recorder.history.clear()
    one.model.load_state_dict(classifier().state_dict())
    one.optimizer = None
    one.train()
    assert recorder.history == expected.history


def test_training_again_goes_on_with_the_model(tmp_path: Path) -> None:
    one, recorder = trainer(language_model(), arguments(tmp_path, learning_rate=4e-2), texts(60))
    one.train()
    once = len(recorder.history)
    one.train()
    assert recorder.history[once][0] == 8
    assert recorder.history[once][1] < recorder.history[0][1]
    assert hooks(one.model) == 0


def test_a_batch_too_large_for_memory_becomes_smaller_microbatches(tmp_path: Path) -> None:
    """What auto_find_batch_size does when there is no memory: here nothing changes but the microbatches."""
    tried: list[int] = []

    class Small(CABSTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            tried.append(len(inputs["labels"]))
            if len(inputs["labels"]) > 6:
                raise RuntimeError("CUDA out of memory. Tried to allocate 1 example too many")
            return super().compute_loss(model, inputs, *args, **kwargs)

    expected, history = trainer(classifier(), arguments(tmp_path, gradient_accumulation_steps=2), sentences(80))
    expected.train()
    args = arguments(tmp_path, auto_find_batch_size=True, gradient_accumulation_steps=2)
    one, recorder = trainer(classifier(), args, sentences(80), kind=Small)
    one.train()
    assert tried[:3] == [8, 7, 6]
    assert max(tried[2:]) == 6
    assert [step[0] for step in recorder.history] == [step[0] for step in history.history]
    same_model(one.model, expected.model)
    assert hooks(one.model) == 0


def test_bounds_come_from_the_callback(tmp_path: Path) -> None:
    callback = CABSCallback(**{**BOUNDS, "max_batch_size": 10})
    one, recorder = trainer(classifier(), arguments(tmp_path, learning_rate=3e-2), sentences(), callback)
    one.train()
    assert max(step[0] for step in recorder.history) == 10
