"""Batch sizes in Lightning are those of a plain loop."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, IterableDataset

from cabs import AdaptiveLoader, rules
from cabs.integrations.lightning import CABSCallback
from lightning_runs import OPTIONS, Manual, Module, Plain, data, fit, loader, plain_loop, trainer, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*logging interval"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader"),
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path"),
    pytest.mark.filterwarnings("ignore:.*was called without a model"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
]


def hooks(module: torch.nn.Module) -> int:
    """How many hooks are in a model and its parameters."""
    of_modules = sum(
        len(part._forward_hooks) + len(part._forward_pre_hooks) + len(part._backward_hooks) for part in module.modules()
    )
    return of_modules + sum(len(parameter._backward_hooks or {}) for parameter in module.parameters())


def same(module: Module, plain: Plain) -> None:
    """The same batches and weights, and sizes that moved."""
    assert module.sizes == plain.parts
    assert torch.equal(weights(module), plain.weights)
    assert len(set(plain.sizes)) > 2
    assert hooks(module) == 0


# -- sizes are those of a plain loop


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("kind", [Module, Manual])
def test_sizes_of_a_plain_loop(kind: type[Module], optimizer: str) -> None:
    module = kind(optimizer)
    fit(module, validates=True)
    same(module, plain_loop(optimizer))


@pytest.mark.parametrize("accumulation", [2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_accumulation(accumulation: int, optimizer: str) -> None:
    module = Module(optimizer)
    callback = fit(module, accumulate_grad_batches=accumulation)
    plain = plain_loop(optimizer, accumulation=accumulation)
    same(module, plain)
    assert callback.scheduler is not None
    assert callback.scheduler.last is not None
    assert callback.scheduler.last.examples_total == 3 * 150
    assert len(plain.parts) < accumulation * len(plain.sizes), "the last step of an epoch has fewer batches"


class Accumulates(Manual):
    """Divides the loss itself, and returns it undivided."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[0]))
        loss, optimizer = self.loss(batch), self.optimizers()
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss


def test_manual_accumulation() -> None:
    module = Accumulates()
    fit(module, CABSCallback(**OPTIONS, accumulation=2), max_steps=12, max_epochs=1)
    plain = plain_loop(accumulation=2, epochs=1, most_steps=12)
    same(module, plain)


CLIPS = {"norm": torch.nn.utils.clip_grad_norm_, "value": torch.nn.utils.clip_grad_value_}


@pytest.mark.parametrize(("kind", "most"), [("norm", 0.3), ("value", 0.05)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_clipping(kind: str, most: float, optimizer: str) -> None:
    module = Module(optimizer)
    fit(module, gradient_clip_val=most, gradient_clip_algorithm=kind)
    plain = plain_loop(optimizer, clip=lambda parameters: CLIPS[kind](parameters, most))
    same(module, plain)
    assert not torch.equal(plain.weights, plain_loop(optimizer).weights), "it clips"


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("bf16-mixed", {"autocast": torch.bfloat16}),
        ("bf16-true", {"dtype": torch.bfloat16}),
        ("64-true", {"dtype": torch.float64}),
    ],
)
def test_precision(precision: Any, options: dict[str, Any]) -> None:
    module = Module()
    fit(module, precision=precision)
    same(module, plain_loop(**options))


def scaler(first: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=first)


def test_a_grad_scaler() -> None:
    module = Module()
    fit(module, plugins=[MixedPrecision("16-mixed", device="cpu", scaler=scaler(2.0**12))])
    same(module, plain_loop(autocast=torch.float16, scaler=scaler(2.0**12)))


def test_a_grad_scaler_in_manual_optimization() -> None:
    module = Manual()
    fit(module, plugins=[MixedPrecision("16-mixed", device="cpu", scaler=scaler(2.0**12))])
    same(module, plain_loop(autocast=torch.float16, scaler=scaler(2.0**12)))


def test_steps_that_a_grad_scaler_skips_do_not_count() -> None:
    module = Module()
    callback = fit(module, plugins=[MixedPrecision("16-mixed", device="cpu", scaler=scaler(2.0**24))], max_steps=12)
    assert callback.scheduler is not None
    assert callback.scheduler.last is not None
    made = callback.scheduler.state_dict()["steps"]
    assert 0 < made < len(module.sizes)
    assert callback.scheduler.last.examples_total == sum(module.sizes[-made:])
    assert module.sizes[:-made] == [8] * (12 - made)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_drop_last(accumulation: int) -> None:
    module = Module()
    fit(module, batches=loader(drop_last=True), validates=True, accumulate_grad_batches=accumulation)
    plain = plain_loop(accumulation=accumulation, batches=loader(drop_last=True))
    same(module, plain)
    assert sum(plain.parts) < 3 * 150
    assert len(module.validated_after) == 3
    assert module.validated_after[-1] == len(module.sizes)


class Counting(IterableDataset[Any]):
    """Nobody knows how many examples it has."""

    def __iter__(self) -> Any:
        return iter(list(data()))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_dataset_of_unknown_length(drop_last: bool) -> None:
    module = Module()
    fit(module, batches=DataLoader(Counting(), batch_size=8, drop_last=drop_last), validates=True)
    plain = plain_loop(batches=AdaptiveLoader(Counting(), batch_size=8, drop_last=drop_last))
    same(module, plain)
    assert len(module.validated_after) == 3
    assert module.validated_after[-1] == len(module.sizes)


def test_workers() -> None:
    module = Module()
    fit(module, batches=loader(num_workers=1, persistent_workers=True), max_epochs=2)
    same(module, plain_loop(epochs=2))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def test_a_plain_dataloader_is_replaced() -> None:
    module = Module()
    callback = fit(module, batches=DataLoader(data(), batch_size=8, shuffle=True, generator=generator()))
    same(module, plain_loop(batches=loader(seed=None, generator=generator())))
    assert isinstance(callback.scheduler and callback.scheduler.loader, AdaptiveLoader)


def test_the_global_seed_counts_as_in_a_plain_loop() -> None:
    module = Module()
    torch.manual_seed(4)
    fit(module, batches=DataLoader(data(), batch_size=8, shuffle=True), validates=True)
    torch.manual_seed(4)
    same(module, plain_loop(batches=loader(seed=None)))


class HasLoader(Module):
    def train_dataloader(self) -> Any:
        return DataLoader(data(), batch_size=8, shuffle=True, generator=generator())


class Data(lightning.LightningDataModule):
    def train_dataloader(self) -> Any:
        return HasLoader.train_dataloader(self)  # type: ignore[arg-type]


@pytest.mark.parametrize("datamodule", [None, Data])
def test_loaders_of_modules(datamodule: Any) -> None:
    module = HasLoader()
    trainer(CABSCallback(**OPTIONS)).fit(module, datamodule=datamodule and datamodule())
    same(module, plain_loop(batches=loader(seed=None, generator=generator())))


def test_a_schedule_only_puts_no_hook_into_the_model() -> None:
    found = []

    class Look(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            found.append(hooks(pl_module))

    rule = rules.Steps("0:5 20:9 50:16")
    module = Module()
    fit(module, CABSCallback(rule=rule, **OPTIONS), callbacks=[Look()])
    same(module, plain_loop(rule=rule))
    assert set(found) == {0}


def test_any_rule() -> None:
    module = Module()
    fit(module, CABSCallback(rule=rules.NormTest(0.8), **OPTIONS))
    same(module, plain_loop(rule=rules.NormTest(0.8)))


def test_learning_rate_schedules_by_step_and_epoch() -> None:
    class Decays(Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}

    for drop_last in (False, True):
        module = Decays()
        fit(module, batches=loader(drop_last=drop_last))
        (group,) = module.optimizers().param_groups  # type: ignore[union-attr]
        assert group["lr"] == 1.5 * 0.5**3


def test_keep_half_lives() -> None:
    module = Module("adamw")
    callback = fit(module, CABSCallback(**OPTIONS, keep_half_lives=16))
    same(module, plain_loop("adamw", keep_half_lives=16))
    assert callback.scheduler is not None
    assert callback.scheduler.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_training_step_that_returns_nothing_skips_its_batch() -> None:
    class Skips(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 3 == 1 else loss

    module = Skips()
    with pytest.warns(UserWarning, match="training_step. returned .None"):
        callback = fit(module, max_steps=9)
    assert callback.scheduler is not None
    assert callback.scheduler.state_dict()["steps"] == 6
    assert hooks(module) == 0


def test_leaving_an_epoch_early() -> None:
    class Leaves(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 3 else None

    module = Leaves()
    callback = fit(module)
    assert len(module.sizes) == 9
    assert callback.state_dict()["loader"]["epoch"] == 3


# -- what Lightning counts


def test_counts_of_epochs_and_steps() -> None:
    module = Module()
    one = trainer(CABSCallback(**OPTIONS), max_epochs=2)
    one.fit(module, loader())
    assert one.current_epoch == 2
    assert one.global_step == len(module.sizes)
    assert one.num_training_batches == float("inf")
    assert sum(module.sizes) == 300


def test_max_steps() -> None:
    module = Module()
    fit(module, max_steps=7, max_epochs=-1)
    assert module.sizes == plain_loop(most_steps=7, epochs=1).parts


def test_limit_train_batches_as_a_number() -> None:
    module = Module()
    fit(module, limit_train_batches=5, validates=True)
    assert len(module.sizes) == 15
    assert module.validated_after == [5, 10, 15]
    module = Module()
    fit(module, limit_train_batches=1000)
    assert module.sizes == plain_loop().parts


def test_limit_train_batches_as_a_part_counts_examples() -> None:
    module, ends = Module(), []

    class Ends(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            ends.append(len(pl_module.sizes))

    fit(module, limit_train_batches=0.5, callbacks=[Ends()], validates=True)
    assert module.validated_after == ends
    for start, end in zip([0, *ends], ends, strict=False):
        assert sum(module.sizes[start : end - 1]) < 75 <= sum(module.sizes[start:end])


def test_validation_by_batches() -> None:
    module = Module()
    fit(module, val_check_interval=4, max_epochs=1, validates=True)
    assert module.validated_after == [4, 8, 12, 16, 20]
    module = Module()
    fit(module, val_check_interval=8, check_val_every_n_epoch=None, max_epochs=2, validates=True)
    assert module.validated_after == list(range(8, len(module.sizes) + 1, 8))


def test_validation_by_parts_counts_examples() -> None:
    module = Module()
    fit(module, val_check_interval=0.25, max_epochs=2, validates=True)
    assert len(module.validated_after) == 8
    seen = [sum(module.sizes[:steps]) for steps in module.validated_after]
    quarters = [part * 37.5 for part in range(1, 9)]
    before = [sum(module.sizes[: steps - 1]) for steps in module.validated_after]
    assert all(b < q <= s for b, q, s in zip(before, quarters, seen, strict=True))
    module = Module()
    fit(module, val_check_interval=0.4, max_epochs=1, validates=True)
    assert len(module.validated_after) == 2  # as Lightning does: after 40% and 80%


def test_validation_of_some_epochs() -> None:
    module = Module()
    fit(module, check_val_every_n_epoch=2, max_epochs=4, validates=True)
    assert len(module.validated_after) == 2
    assert module.validated_after[-1] == len(module.sizes)


def test_a_limit_and_parts_of_it() -> None:
    module = Module()
    fit(module, limit_train_batches=6, val_check_interval=0.5, max_epochs=1, validates=True)
    assert module.validated_after == [3, 6]


def test_fast_dev_run_and_no_training_at_all() -> None:
    module = Module()
    fit(module, fast_dev_run=2, validates=True)
    assert len(module.sizes) == 2
    for nothing in ({"limit_train_batches": 0}, {"max_epochs": 0}):
        module = Module()
        callback = fit(module, **nothing)
        assert module.sizes == []
        assert callback.scheduler is None


def test_early_stopping() -> None:
    class Logs(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("loss", 1.0)

    module = Logs()
    fit(module, max_epochs=9, callbacks=[EarlyStopping("loss", patience=2)], validates=True)
    assert len(module.validated_after) == 3


def test_validation_and_tests_are_not_counted() -> None:
    class Tests(Module):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    module, callback = Tests(), CABSCallback(**OPTIONS)
    one = trainer(callback)
    held_out = DataLoader(data(40), batch_size=20)
    for run in (one.validate, one.test, one.predict):
        run(module, held_out)
        assert callback.scheduler is None
    one.fit(module, loader(), held_out)
    same(module, plain_loop())
    before = callback.state_dict()
    for run in (one.validate, one.test, one.predict):
        run(module, held_out)
    assert callback.state_dict() == before


def test_validation_by_time() -> None:
    module = Module()
    fit(module, val_check_interval="00:01:00:00", validates=True)
    assert module.validated_after == []
    same(module, plain_loop())


def test_nobody_is_told_a_wrong_length() -> None:
    class Asks(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert len(trainer.train_dataloader.dataset) == 150
            with pytest.raises(TypeError, match="number of batches is not known"):
                len(trainer.train_dataloader)

    fit(Module(), callbacks=[Asks()])


def test_the_learning_rate_finder_has_batches_of_the_loaders_size(tmp_path: Path) -> None:
    class Rates(Module):
        lr = 0.1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    module = Rates()
    finder = LearningRateFinder(num_training_steps=12)
    fit(module, callbacks=[finder], max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path)
    assert module.sizes[:12] == [8] * 12
    assert sum(module.sizes[12:]) == 150
    assert len(set(module.sizes[12:])) > 2


def test_the_other_package_of_lightning() -> None:
    other = pytest.importorskip("pytorch_lightning")

    class Other(other.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.sizes = Module().net, []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.sizes.append(len(batch[0]))
            return Module.loss(self, batch)  # type: ignore[arg-type]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.5)

    module = Other()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    other.Trainer(max_epochs=3, callbacks=[CABSCallback(**OPTIONS)], enable_model_summary=False, **quiet).fit(
        module, loader()
    )
    same(module, plain_loop())


# -- interrupts


class Breaks(Module):
    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.at, self.error = at, error

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        if len(self.sizes) == self.at:
            raise self.error
        return loss


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()])
def test_an_error_leaves_nothing_behind(error: BaseException) -> None:
    module, callback = Breaks(5, error), CABSCallback(**OPTIONS)
    one = trainer(callback)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((RuntimeError, SystemExit)):
            one.fit(module, loader())
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it after an interrupt
    assert hooks(module) == 0
    assert "setup_data" not in vars(one.fit_loop)
    fresh = Module()
    fit(fresh, callback)
    same(fresh, plain_loop())


def test_fit_again() -> None:
    module, callback = Module(), CABSCallback(**OPTIONS)
    fit(module, callback, max_epochs=1)
    again = Module()
    fit(again, callback)
    same(again, plain_loop())


# -- checkpoints


RUNS: list[dict[str, Any]] = [
    {},
    {"max_epochs": -1, "max_steps": 30},
    {"limit_train_batches": 5},
    {"limit_train_batches": 0.4, "val_check_interval": 0.5},
    {"val_check_interval": 0.25},
    {"accumulate_grad_batches": 2},
]


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_resuming_from_any_checkpoint_gives_the_same_run(options: dict[str, Any], tmp_path: Path) -> None:
    whole = Module()
    saves = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=3)
    fit(whole, callbacks=[saves], validates=True, enable_checkpointing=True, **options)
    parts = options.get("accumulate_grad_batches", 1)
    paths = sorted(tmp_path.iterdir(), key=lambda path: int(path.stem.removeprefix("step=")))
    assert len(paths) > 3
    for path in [*paths[::3], paths[-1]]:
        state = torch.load(path, weights_only=True)
        done = state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"]
        assert parts > 1 or done == state["global_step"]
        rest = Module()
        fit(rest, ckpt_path=path, validates=True, **options)
        assert rest.sizes == whole.sizes[done:]
        assert [done + steps for steps in rest.validated_after] == [n for n in whole.validated_after if n > done]
        assert torch.equal(weights(rest), weights(whole))


@pytest.mark.parametrize("when", [{"save_on_train_epoch_end": True}, {"save_on_train_epoch_end": False}], ids=str)
@pytest.mark.parametrize("kind", [Module, Manual])
def test_resuming_from_the_end_of_an_epoch(when: dict[str, Any], kind: type[Module], tmp_path: Path) -> None:
    whole = kind("adamw")
    saves = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, **when)
    fit(whole, callbacks=[saves], validates=True, enable_checkpointing=True)
    for epoch in (0, 1):
        path = tmp_path / f"epoch={epoch}.ckpt"
        done = torch.load(path, weights_only=True)["global_step"]
        rest = kind("adamw")
        fit(rest, batches=loader(seed=None), ckpt_path=path, validates=True)  # the checkpoint has the seed
        assert rest.sizes == whole.sizes[done:]
        assert torch.equal(weights(rest), weights(whole))


def test_going_on_after_max_steps(tmp_path: Path) -> None:
    first, path = Module(), tmp_path / "last.ckpt"
    one = trainer(CABSCallback(**OPTIONS), max_epochs=-1, max_steps=10)
    one.fit(first, loader())
    one.save_checkpoint(path)
    rest = Module()
    fit(rest, ckpt_path=path, max_epochs=-1, max_steps=30)
    whole = Module()
    fit(whole, max_epochs=-1, max_steps=30)
    assert first.sizes + rest.sizes == whole.sizes
    assert torch.equal(weights(rest), weights(whole))


def test_a_checkpoint_of_an_interrupted_batch_repeats_the_batch(tmp_path: Path) -> None:
    module = Breaks(9, RuntimeError("mine"))
    with pytest.raises(RuntimeError, match="mine"):
        fit(module, callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
    rest, whole = Module(), Module()
    fit(rest, ckpt_path=tmp_path / "on_exception.ckpt")
    fit(whole)
    assert module.sizes[:8] + rest.sizes == whole.sizes
    assert torch.equal(weights(rest), weights(whole))


def test_a_test_with_a_checkpoint_does_not_touch_the_next_fit(tmp_path: Path) -> None:
    class Tests(Module):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    callback = CABSCallback(**OPTIONS)
    one = trainer(callback)
    one.fit(Tests(), loader())
    one.save_checkpoint(tmp_path / "last.ckpt")
    other = CABSCallback(**OPTIONS)
    trainer(other).test(Tests(), DataLoader(data(40), batch_size=20), ckpt_path=tmp_path / "last.ckpt")
    module = Module()
    fit(module, other)
    same(module, plain_loop())


# -- logs


def test_the_trainers_loggers_get_the_numbers(tmp_path: Path) -> None:
    module = Module()
    csv = CSVLogger(tmp_path)
    fit(module, logger=csv, log_every_n_steps=2, enable_progress_bar=True)
    lines = (Path(csv.log_dir) / "metrics.csv").read_text().splitlines()
    names = lines[0].split(",")
    rows = [dict(zip(names, line.split(","), strict=True)) for line in lines[1:]]
    sizes = [float(row["cabs/batch_size"]) for row in rows if row["cabs/batch_size"]]
    steps = [int(row["step"]) for row in rows if row["cabs/batch_size"]]
    assert steps == list(range(1, len(module.sizes), 2))
    full = [step + 1 for step in steps if step + 1 < len(module.sizes)]
    chosen = dict(zip(steps, sizes, strict=True))
    ends = {21, 35, 46}
    assert all(chosen[step - 1] == module.sizes[step] for step in full if step + 1 not in ends)
    assert {"cabs/noise_share", "cabs/variance", "cabs/examples", "cabs/clipped"} <= set(names)


def test_the_progress_bar_shows_the_size(capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.callbacks import TQDMProgressBar

    seen: list[tuple[Any, Any]] = []

    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *args)
            seen.append((self.train_progress_bar.total, self.get_metrics(trainer, pl_module)))

    module = Module()
    callback = fit(module, callbacks=[Bar()], enable_progress_bar=True, max_epochs=1)
    totals, metrics = zip(*seen, strict=True)
    assert set(totals) == {None}, "nobody knows how many batches there will be"
    assert callback.scheduler is not None
    assert metrics[-1]["cabs/batch_size"] == callback.scheduler.last_batch_size
    shares = [shown["cabs/epoch"] for shown in metrics]
    assert shares == pytest.approx([sum(module.sizes[:steps]) / 150 for steps in range(1, len(metrics) + 1)])
    seen.clear()
    fit(Module(), CABSCallback(**OPTIONS, progress_bar=False), callbacks=[Bar()], enable_progress_bar=True)
    assert all("cabs/batch_size" not in shown for _, shown in seen)


# -- monitoring


@pytest.mark.parametrize("adaptive", [True, False])
def test_monitoring_leaves_the_loader_alone(adaptive: bool) -> None:
    batches: Any = loader() if adaptive else DataLoader(data(), batch_size=8)
    module = Module()
    callback = fit(module, CABSCallback(**OPTIONS, monitor_only=True), batches=batches, validates=True)
    assert module.sizes == ([8] * 18 + [6]) * 3
    assert callback.scheduler is not None
    assert callback.scheduler.last is not None
    assert callback.scheduler.last.examples_total == 450
    assert callback.scheduler.last.noise_share > 0
    if adaptive:
        plain = plain_loop(monitor_only=True)
        assert torch.equal(weights(module), plain.weights)
    assert hooks(module) == 0


# -- what is refused, before training


class TwoOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        first, _, last = self.net
        return torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.AdamW(last.parameters())


class NoOptimizer(Module):
    def configure_optimizers(self) -> Any:
        return None


class AsksForLength(Module):
    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class TakesBatches(Module):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


class LBFGS(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Own(SingleDeviceStrategy):
    """Nobody knows what it does."""


class OwnPrecision(MixedPrecision):
    """Nor this."""

    def __init__(self) -> None:
        super().__init__("bf16-mixed", "cpu")


REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    ("repeats the same batches", Module, {"overfit_batches": 2}),
    ("makes new loaders", Module, {"reload_dataloaders_every_n_epochs": 1}),
    ("GradientAccumulationScheduler", Module, {"callbacks": [GradientAccumulationScheduler({0: 2})]}),
    (r"2 optimizers \(SGD, AdamW\)", TwoOptimizers, {}),
    ("no optimizer", NoOptimizer, {}),
    ("estimated_stepping_batches", AsksForLength, {}),
    ("takes batches itself", TakesBatches, {}),
    ("LBFGS", LBFGS, {}),
    ("one DataLoader", Module, {"batches": [loader(), loader()]}),
    ("max_microbatch_size", Module, {"batches": loader(max_microbatch_size=4)}),
    ("batch_sampler", Module, {"batches": DataLoader(data(), batch_sampler=[[0, 1], [2, 3]])}),
    ("limit_train_batches=0.5 is a part", Module, {"batches": loader(stream=True), "limit_train_batches": 0.5}),
    ("val_check_interval=0.5 is a part", Module, {"batches": loader(stream=True), "val_check_interval": 0.5}),
    ("not with Own:", Module, {"strategy": Own(device="cpu")}),
    ("what OwnPrecision does", Module, {"plugins": [OwnPrecision()]}),
    ("fewer than min_batch_size", Module, {"batches": loader(3)}),
]


@pytest.mark.parametrize(("message", "kind", "options"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None")
@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_what_is_refused(message: str, kind: type[Module], options: dict[str, Any]) -> None:
    module = kind()
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        fit(module, **options)
    assert module.sizes == []
    assert hooks(module) == 0


def test_max_steps_are_an_answer_to_the_number_of_steps() -> None:
    module = AsksForLength()
    fit(module, max_steps=9)
    assert module.steps == 9
    same(module, plain_loop(epochs=1, most_steps=9))


def test_the_batch_size_finder_is_refused() -> None:
    module = HasLoader()
    module.batch_size = 4  # type: ignore[assignment]
    with pytest.raises(ValueError, match="BatchSizeFinder sets the batch size too"):
        trainer(CABSCallback(**OPTIONS), BatchSizeFinder()).fit(module)
    assert module.sizes == []


def test_accumulation_is_said_once() -> None:
    with pytest.raises(ValueError, match="leave accumulation out"):
        fit(Module(), CABSCallback(**OPTIONS, accumulation=3), accumulate_grad_batches=2)


def test_arguments_are_checked_where_they_are_given() -> None:
    with pytest.raises(ValueError, match="min_batch_size 8 is above max_batch_size 4"):
        CABSCallback(min_batch_size=8, max_batch_size=4)
    with pytest.raises(TypeError, match="unknown rule"):
        CABSCallback(rule="cabs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="smaller than min_batch_size"):
        CABSCallback(budget=3)


def test_arguments_of_the_paper_go_with_its_rule() -> None:
    with pytest.raises(ValueError, match=r"rule=rules.CABS\(…\)"):
        CABSCallback(rule=rules.NormTest(0.8), noise_share=0.1)


class Forgets(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(Module.training_step(self, batch, batch_idx))


class StepsTwice(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        super().training_step(batch, batch_idx)


class Hides(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = Module.training_step(self, batch, batch_idx)
        loss.backward()
        self.optimizers().step()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "message"), [(Forgets, "accumulation=K"), (StepsTwice, "2 steps"), (Hides, "0 times")], ids=str
)
def test_manual_optimization_that_cannot_be_followed(kind: type[Module], message: str) -> None:
    module = kind()
    with pytest.raises(RuntimeError, match=message):
        fit(module)
    assert len(module.sizes) <= 2
    assert hooks(module) == 0


# -- the package


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_a_missing_package_says_what_installs_it() -> None:
    code = (
        "import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
        "import cabs, cabs.integrations\n"
        "try: import cabs.integrations.lightning\n"
        "except ImportError as error: print(error)"
    )
    message = run(code)
    assert message.startswith("cabs.integrations.lightning needs lightning")
    assert message.endswith('which is not installed: pip install "torch-cabs[lightning]"\n')
