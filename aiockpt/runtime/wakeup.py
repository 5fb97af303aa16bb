"""Notification of signals at once, also while the main thread is inside a long call of C, where no Python handler runs.

Python writes the number of each signal into the one *wakeup descriptor* of the process at once; a thread waits at the
other end. (Python's own handlers run when the main thread returns to the interpreter: after a collective of a minute, a
minute later.) Guarantees:

- Earlier handlers are still called, and the earlier wakeup descriptor, asyncio's for one, still receives every byte. Those
  that other code installs later replace ours, and are chained by `SignalWatch.renew`.
- A byte is forwarded only to the earlier pipe or socket itself, never to a file that has reused its number.
- A forked child has the earlier handlers and descriptor: its signals are its own, and never reported in the parent.
- What torch's handler raises when a watched signal has ended a worker of a ``DataLoader`` does not interrupt what a watch
  says must not be interrupted, a step that has begun; the next batch raises all the same.
- The last watch that is closed restores the earlier ones. Where it cannot (off the main thread), a signal that would have
  ended the process still does.
- In a process that ends already, with a status of its own, a signal that would end it at once may be held off for a while.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from aiockpt.errors import UsageError
from aiockpt.runtime.loop import join_wholly

logger = logging.getLogger("aiockpt")

FLUSH_S = 2.0
"""For the thread that reports signals to report those that have arrived."""
JOIN_S = 5.0
"""For that thread to end."""
_MARK = 0
"""A byte that is the number of no signal."""

OnSignal = Callable[[int], object]
"""Called with the number of a signal, on the thread that waits for it and later on the main thread: twice for one signal."""


def on_main_thread() -> bool:
    """Return whether this is the main thread, where Python's signal handlers run."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def children_end_quietly() -> Iterator[None]:
    """Disable the handler of SIGCHLD in the block: torch's raises, anywhere on the main thread, when a worker was killed."""
    if not on_main_thread() or not callable(earlier := signal.getsignal(signal.SIGCHLD)):
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, earlier)


def watch_signals(
    numbers: Iterable[int], notified: OnSignal, is_busy: Callable[[], bool] = lambda: False
) -> SignalWatch:
    """Call *notified* for each signal of these *numbers*, until the watch is closed.

    Args:
        is_busy: called on the main thread; whether it does what the end of a worker must not interrupt.

    Raises:
        UsageError: this is not the main thread, the only one on which handlers can be installed.
    """
    global _slot
    if not on_main_thread():
        raise UsageError("signals can be watched from the main thread only: make the Checkpointer there")
    with _changing:
        _slot = _slot or _WakeupSlot()
        watch = SignalWatch(_slot, frozenset(numbers), notified, is_busy)
        _slot.add(watch)
    return watch


class SignalWatch:
    """One subscription to signals."""

    def __init__(
        self, slot: _WakeupSlot, numbers: Collection[int], notified: OnSignal, is_busy: Callable[[], bool]
    ) -> None:
        self.numbers = numbers
        self.notified = notified
        self.is_busy = is_busy
        self._slot = slot

    def renew(self) -> None:
        """Stay subscribed after the descriptor or a handler was replaced: chain the new one. Main thread; 10 µs."""
        self._slot.renew()

    def flush(self) -> None:
        """Return when the signals that came before this call have been reported, or the thread that reports them is gone."""
        self._slot.flush()

    def close(self, ends_within_s: float = 0.0) -> None:
        """End the subscription. Any thread; idempotent. Earlier handlers are restored from the main thread only.

        Args:
            ends_within_s: for how long, and in its last moments, the process ignores signals whose default would end it.
        """
        global _slot
        with _changing:
            if ends_within_s > 0:
                self._slot.hold_off(self.numbers, ends_within_s)
            if self._slot.remove(self) and self._slot is _slot:
                _slot = None


class _WakeupSlot:
    """The wakeup descriptor of this process, and the handlers without which Python writes nothing there."""

    def __init__(self) -> None:
        self.watches: tuple[SignalWatch, ...] = ()
        self._handlers: dict[int, _Handler] = {}
        self._receiver, self._sender = socket.socketpair()
        # `set_wakeup_fd` refuses a blocking descriptor: a handler of signals must not wait.
        self._sender.setblocking(False)
        self._earlier: tuple[int, os.stat_result] | None = None
        self._marks: deque[threading.Event] = deque()
        self._thread = threading.Thread(target=self._listen, name="aiockpt-signals", daemon=True)
        self._thread.start()
        _register_fork_hooks()

    @property
    def numbers(self) -> set[int]:
        return {number for watch in self.watches for number in watch.numbers}

    def add(self, watch: SignalWatch) -> None:
        self.watches = (*self.watches, watch)
        self.renew()

    def renew(self) -> None:
        """Install the descriptor and the handlers, and chain what is found there. On the main thread."""
        for number in {*self.numbers, signal.SIGCHLD}:
            there = signal.getsignal(number)
            if there is not self._handlers.get(number) and (number != signal.SIGCHLD or callable(there)):
                self._handlers[number] = _Handler(self, there)
                signal.signal(number, self._handlers[number])
        earlier = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        if earlier != self._sender.fileno():
            self._earlier = None
            with suppress(OSError):  # none, or one that is closed
                self._earlier = earlier, os.fstat(earlier)

    def remove(self, watch: SignalWatch) -> bool:
        """Remove *watch*; after the last one call `restore`, and return whether that was done."""
        self.watches = tuple(other for other in self.watches if other is not watch)
        if self.watches or not on_main_thread():
            return False
        self.restore()
        # Not by closing it alone: a child that was forked otherwise than by Python may hold it, too.
        with suppress(OSError):
            self._sender.shutdown(socket.SHUT_RDWR)
        self._sender.close()
        if join_wholly(self._thread, JOIN_S):
            self._receiver.close()
        else:
            logger.warning("the thread %s still runs a callback after %g s, and is left", self._thread.name, JOIN_S)
        return True

    def hold_off(self, numbers: Iterable[int], seconds: float) -> None:
        """Do not let these signals end the process at once, where nothing else handles them."""
        for number in numbers:
            if (own := self._handlers.get(number)) is not None and own.earlier is signal.SIG_DFL:
                own.held_until_s = time.monotonic() + seconds

    def close_sockets(self) -> None:
        """Close both ends: in a child, whose parent waits for the end of what it sends."""
        self._sender.close()
        self._receiver.close()

    def restore(self) -> None:
        """Restore the earlier handlers and descriptor, except where ours have been replaced."""
        for number, own in self._handlers.items():
            earlier = signal.SIG_DFL if own.earlier is None else own.earlier
            is_ours = signal.getsignal(number) is own
            if is_ours and own.is_held:
                atexit.register(own.ignore, number)
            elif is_ours:
                signal.signal(number, earlier)
        self._handlers.clear()
        taken = signal.set_wakeup_fd(-1)
        if taken != self._sender.fileno():  # another owner's by now
            with suppress(ValueError, OSError):
                signal.set_wakeup_fd(taken)
        elif self._earlier is not None and _is_still_there(self._earlier):
            signal.set_wakeup_fd(self._earlier[0])

    def notify(self, number: int) -> bool:
        """Notify all watches of a signal; return whether there is one."""
        watches = [watch for watch in self.watches if number in watch.numbers]
        for watch in watches:
            watch.notified(number)
        return bool(watches)

    def delays(self, error: RuntimeError) -> bool:
        """Return whether *error* is torch's of a worker that a watched signal has ended, and comes while a watch is busy."""
        killed = any(f"killed by signal: {signal.strsignal(number)}" in str(error) for number in self.numbers)
        return killed and any(watch.is_busy() for watch in self.watches)

    def flush(self) -> None:
        """Wait until the thread has reported what is in the pipe by now."""
        mark = threading.Event()
        # Before its byte is sent: the thread takes one mark for each byte that it reads.
        self._marks.append(mark)
        try:
            self._sender.send(bytes([_MARK]))
        except OSError:  # full, or closed
            # Else each later byte would release the mark before its own.
            with suppress(ValueError):
                self._marks.remove(mark)
            return
        mark.wait(FLUSH_S)

    def _listen(self) -> None:
        while received := self._receiver.recv(4096):
            numbers = bytes(number for number in received if number != _MARK)
            for number in numbers:
                try:
                    self.notify(number)
                except Exception:
                    logger.exception("signal %d: a callback failed", number)
            for _ in range(len(received) - len(numbers)):
                self._marks.popleft().set()
            if (earlier := self._earlier) is not None and _is_still_there(earlier):
                with suppress(OSError):
                    os.write(earlier[0], numbers)


class _Handler:
    """Python's handler of one signal: notifies too, for the descriptor may be another's, and calls the *earlier* handler."""

    def __init__(self, slot: _WakeupSlot, earlier: Any) -> None:
        self.earlier = earlier
        self.held_until_s = 0.0
        self._slot = slot

    @property
    def is_held(self) -> bool:
        """Whether the signal is not to end the process yet."""
        return time.monotonic() < self.held_until_s

    def ignore(self, number: int) -> None:
        """Ignore the signal while the interpreter ends, which takes Python's handlers away before it is done."""
        if self.is_held and signal.getsignal(number) is self:
            signal.signal(number, signal.SIG_IGN)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            watched = self._slot.notify(number)
        finally:  # also when the handler of another signal, which came meanwhile, has raised
            if callable(self.earlier):
                try:
                    self.earlier(number, frame)
                except RuntimeError as error:
                    if number != signal.SIGCHLD or not self._slot.delays(error):
                        raise
        if self.earlier is signal.SIG_DFL and not (watched or self.is_held) and signal.getsignal(number) is self:
            signal.signal(number, signal.SIG_DFL)  # it was not restored where the last watch was closed
            signal.raise_signal(number)


def _is_still_there(earlier: tuple[int, os.stat_result]) -> bool:
    """Return whether a descriptor is still that of the same pipe or socket."""
    number, before = earlier
    try:
        now = os.fstat(number)
    except OSError:
        return False
    is_stream = stat.S_ISSOCK(now.st_mode) or stat.S_ISFIFO(now.st_mode)
    return is_stream and (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino)


# ---------------------------------------------------------------------- one for each process

_slot: _WakeupSlot | None = None
_changing = threading.RLock()
_hooked = False
_blocked = threading.local()


def _register_fork_hooks() -> None:
    """Make forked children start as if nothing had been installed here."""
    global _hooked
    if not _hooked:
        _hooked = True
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_reset_in_child)


def _block() -> None:
    """Block the watched signals until the child has its own handlers: before that they would be reported in the parent."""
    _blocked.before = None if _slot is None else signal.pthread_sigmask(signal.SIG_BLOCK, _slot.numbers)


def _unblock() -> None:
    if (before := getattr(_blocked, "before", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reset_in_child() -> None:
    global _slot, _changing
    slot, _slot = _slot, None
    _changing = threading.RLock()  # another thread may have held it
    if slot is not None:
        slot.watches = ()
        with suppress(ValueError, OSError):
            slot.restore()
            # Closed only where Python no longer writes there: the number may be another file's next.
            slot.close_sockets()
    _unblock()
