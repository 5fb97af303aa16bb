"""Methods of a Trainer or an Accelerator that a subclass has overridden, with aiockpt's methods inserted below them.

``super()`` in an override leads to aiockpt's method: a class is put between the subclass and the library's. So an override
still writes and reads its own files beside a checkpoint. An override that does not call ``super()``, and a function that is
set on the object, write or read in place of the library. If that would be all of the weights, or files that do not exist,
they are not called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

logger = logging.getLogger("aiockpt")

_ORIGINAL = "_aiockpt_original"


class Overrides:
    """The overridden methods of one object.

    Args:
        owner: the object.
        base: the library's class.
        names: of the methods.
        always: those of them that are called even if they may not lead to ``super()``.

    Attributes:
        called: names of those that are called for checkpoints of aiockpt.
        passed_over: those that are not, by name; they are called only for checkpoints of the Trainer itself.
    """

    def __init__(self, owner: Any, base: Any, names: Iterable[str], always: Iterable[str] = ()) -> None:
        cls = vars(type(owner)).get(_ORIGINAL, type(owner))
        self.called: set[str] = set()
        self.passed_over: dict[str, Callable[..., Any]] = {}
        for name in names:
            above = [one for one in cls.__mro__[: cls.__mro__.index(base)] if name in vars(one)]
            given = vars(owner).get(name)  # set on the object itself
            if given is None and not above:
                continue
            if name in always or (given is None and all(_calls_super(vars(one)[name]) for one in above)):
                self.called.add(name)
            else:
                self.passed_over[name] = given or getattr(owner, name)
        self._cls, self._base = cls, base

    def put_below(self, owner: Any, methods: Mapping[str, Callable[..., Any]]) -> None:
        """Make ``super()`` of each override lead to one of *methods*, which are called without the object."""
        below = type(
            f"Aiockpt{self._base.__name__}", (self._base,), {name: _without_self(one) for name, one in methods.items()}
        )
        bases = (below,) if self._cls is self._base else (self._cls, below)
        said = {"__module__": self._cls.__module__, "__qualname__": self._cls.__qualname__, _ORIGINAL: self._cls}
        owner.__class__ = type(self._cls.__name__, bases, said)

    def log_passed_over(self) -> None:
        """Log the overrides that are not called."""
        if self.passed_over:
            logger.warning(
                "attach(): %s: overridden without super(), or set on the object, so aiockpt's take their place for its own "
                "checkpoints; call super() in them to have both, or set them after attach()",
                ", ".join(f"{self._cls.__name__}.{name}" for name in self.passed_over),
            )


def _calls_super(function: Any) -> bool:
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    # A function from outside a class has the name alone; one whose inner function calls super() the variable alone.
    return code is not None and ("super" in code.co_names or "__class__" in code.co_freevars)


def _without_self(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args, **named: method(*args, **named)
