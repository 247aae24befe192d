"""What is private or undocumented of PyTorch's compiler, behind names of its own; see ``torch_internals.py``."""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._C._dynamo import eval_frame

from cabs.interrupts import uninterrupted


def is_compiled(module: nn.Module) -> bool:
    """Whether compiled code runs when a module is called. Why: nothing public tells. Since 2.2."""
    own = vars(module)  # asking a module itself for what it does not have takes time
    in_place = own.get("_compiled_call_impl") is not None
    if in_place or "_orig_mod" in own["_modules"]:
        return True
    function = own.get("forward") or type(module).forward
    return hasattr(function, "_torchdynamo_orig_callable")


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` was given. Why: there is no public way to ask. Since 2.0."""
    return getattr(module, "_orig_mod", module)


Caller = Callable[..., Any] | bool | None
"""What compiles the functions that are called; None or False if nothing does."""


def leave_compiled_code() -> Caller:
    """Lets the rest of a compiled call run as plain Python; what ``enter_compiled_code`` takes to undo it.

    Why: it is too late for ``set_stance`` then, and ``torch.compiler.disable`` is for functions. Since 2.6.
    """
    found: Caller = eval_frame.set_eval_frame(None)
    return found


def enter_compiled_code(left: Caller) -> None:
    """Undoes ``leave_compiled_code``. Since 2.6."""
    eval_frame.set_eval_frame(left)


_WANTED: set[int] = set()
"""The ids of those who want plain Python."""
_BEFORE: list[Any] = []
"""The compiler's stance from before anybody did."""


def run_as_python(on: bool, who: object) -> None:
    """Lets compiled code run as plain Python as long as somebody wants that.

    Why: ``torch.compiler.set_stance`` refuses to be called by a hook in compiled code. Since 2.6.
    """
    if on == (id(who) in _WANTED):
        return
    with uninterrupted():
        if on:
            _WANTED.add(id(who))
            if not _BEFORE:
                _BEFORE.append(_set_stance(None))
        else:
            _WANTED.remove(id(who))
            if not _WANTED:
                _set_stance(_BEFORE.pop())


def _set_stance(stance: Any) -> Any:
    """Sets the compiler's stance, that of plain Python if None is given, and returns what it was."""
    # Imported late, since that takes a second.
    from torch._dynamo import eval_frame as stances

    caller = leave_compiled_code()
    before = stances._set_stance(stance or stances.DynamoStance("force_eager"))
    enter_compiled_code(caller)
    return before


@contextmanager
def plain_python(who: object) -> Iterator[None]:
    """Within, nothing is compiled, and compiled code runs as plain Python."""
    caller, alone = leave_compiled_code(), id(who) not in _WANTED
    try:
        run_as_python(True, who)
        yield
    finally:
        if alone:
            run_as_python(False, who)
        enter_compiled_code(caller)


@functools.cache
def keep_out_of_compiled_code(*functions: Callable[..., Any]) -> None:
    """Lets compiled models run functions and this package, but for its hooks, as plain Python. Imported late.

    Why: ``torch.compiler.disable`` wraps every call, which takes time. Since 2.8.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.decorators import skip

    for room in pkgutil.iter_modules(sys.modules[__package__].__path__):
        if room.name != "hooks":
            trace_rules.add(f"{__package__}.{room.name}")
    for function in functions:
        skip(function)
