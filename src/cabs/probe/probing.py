"""``probe``: what batch size is useful for a model, its data and its optimizer, found out before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from cabs import rules
from cabs.couplings import Coupling, unwrapped
from cabs.probe import noise, requirements, timing, warming
from cabs.probe.report import Report
from cabs.probe.restoring import as_before, copied
from cabs.probe.task import Task
from cabs.scheduler.requirements import coupled, integer


def probe(
    model: nn.Module,
    dataset: Any,
    loss: Callable[[Any], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    batch_size: int | None = None,
    min_batch_size: int = 16,
    max_batch_size: int = 2048,
    after: int = 0,
    examples: int = 1024,
    seconds: float = 10.0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loss_floor: float = 0.0,
    estimator: str = "exact",
    coupling: Coupling | None = None,
    assume_sgd: bool = False,
    seed: int = 0,
    tell: Callable[[str], None] | None = None,
) -> Report:
    """Finds out what batch size is useful, by trying: what fits, what a step costs, and how noisy gradients are.

    ::

        report = probe(model, dataset, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), optimizer)
        print(report)
        report.picture("probe.png")

    Everything is as it was afterwards, also after an error or Ctrl-C: weights, buffers and other attributes of the
    model, gradients, the optimizer, random numbers. A copy of the optimizer makes whatever steps there are to make.

    Args:
        model: the module that is trained, in the mode that it is trained in.
        dataset: map-style: examples are drawn from it at random.
        loss: the mean loss of a batch as the loop computes it, or a vector with the losses of its examples. It calls
            the model itself, and moves the batch to its device if that is another.
        optimizer: with the learning rate that training is going to have.
        batch_size: the size that training has at present; 32 if left out.
        min_batch_size: the smallest size to recommend, as in ``CABS``; smaller ones are tried and timed all the same.
        max_batch_size: the largest size to try, and to recommend.
        after: train on this many examples first, in steps of ``batch_size``: gradients change fast in the beginning.
        examples: how many examples to measure gradients on, about.
        seconds: about how long to try what fits, and how long to time steps; sizes that take longer are left out.
        collate_fn: makes a batch of a list of examples, as in a ``DataLoader``.
        loss_floor: F_*, a lower bound of the loss that training cannot get below.
        estimator: ``"exact"``, from the gradients of single examples, or ``"microbatch"``, from how the gradients of
            batches differ, which any model can be measured with; its intervals are wider.
        coupling: what a step of the optimizer does with a gradient, where its class does not tell.
        assume_sgd: take any optimizer for plain SGD: α is its learning rate.
        seed: decides which examples are drawn.
        tell: called with what is being done, for a display.

    Returns:
        The report: numbers as attributes, a table with ``print``, a picture with ``picture(path)``.

    Raises:
        TypeError, ValueError: something is not what it should be; the message says what to do.
        RuntimeError, NotImplementedError: the model cannot be measured, as the message says.
        MemoryError: not even two examples fit into memory.
    """
    optimizer = unwrapped(optimizer)
    requirements.check_kinds(model, dataset, loss, optimizer)
    requirements.check_model(model, optimizer)
    present, least, most = requirements.check_sizes(batch_size, min_batch_size, max_batch_size, len(dataset))
    requirements.check_numbers(seconds, loss_floor, estimator)
    after, examples = integer("after", after, 0), integer("examples", examples, 2 * noise.FEWEST)
    rule = rules.CABS(loss_floor)
    # Also of an optimizer that cannot be coupled, and of a learning rate of 0, before anything is computed.
    requirements.check_alphas(coupled(optimizer, rule, coupling, assume_sgd, monitor_only=False).alphas())
    task = Task(model, dataset, loss, collate_fn or default_collate)
    say = tell or (lambda what: None)
    with as_before(model, optimizer), torch.enable_grad():
        torch.manual_seed(seed)
        say("what fits into memory")
        requirements.check_gradients(task, optimizer)
        requirements.check_mean(task)
        stand_in = copied(optimizer)
        with warming.standing_still(stand_in):
            fits = timing.largest(task, stand_in, most=most, seconds=seconds)
        requirements.check_fits(present, fits)
        del stand_in
        torch.manual_seed(seed)  # how many examples were drawn so far depends on how fast the machine is
        trained = copied(optimizer)
        coupling_at_work = coupled(trained, rule, coupling, assume_sgd, monitor_only=False)
        has_p = warming.has_p(coupling_at_work, trained)
        say(f"training on {after:,} examples, on a copy" if after else "the noise of gradients")
        steps = warming.train(task, trained, after, present)
        filled = 0 if has_p else warming.fill(task, trained, present, steps)
        say("the noise of gradients")
        found = noise.measure(
            task,
            coupling_at_work,
            [list(group["params"]) for group in trained.param_groups],
            examples=examples,
            # Single gradients take more memory than a plain pass.
            size=max(
                2, min(noise.USUAL, fits.size // 4 if fits.bound == "memory" else fits.size, examples // noise.FEWEST)
            ),
            estimator=estimator,
            loss_floor=loss_floor,
            weighed=warming.has_p(coupling_at_work, trained),
        )
        say("the time of a step")
        with warming.standing_still(trained):
            times = timing.time_steps(task, trained, timing.timed_sizes(present, fits.size), seconds)
    return Report(
        optimizer=type(optimizer).__name__,
        learning_rates=tuple(float(group["lr"]) for group in optimizer.param_groups),
        batch_size=present,
        min_batch_size=least,
        max_batch_size=most,
        dataset_size=len(dataset),
        after=steps * present,
        filled=filled,
        fits=fits,
        times=times,
        noise=found,
        loss_floor=loss_floor,
        estimator=estimator,
        training=model.training,
    )
