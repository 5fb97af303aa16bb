"""Signals, passed on at once, whatever the main thread does, also to everything that listened before."""

import asyncio
import hashlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from aiockpt.errors import UsageError
from aiockpt.runtime.wakeup import SignalWatch, watch_signals
from tests.run_python import run_python
from tests.watch import until

WAIT_S = 250


class Heard:
    """What was told, and when."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.at_s = 0.0
        self._any = threading.Event()

    def __call__(self, number: int) -> None:
        self.at_s = self.at_s or time.monotonic()
        self.numbers.append(number)
        self._any.set()

    def wait(self) -> None:
        assert self._any.wait(WAIT_S), "nothing was told"


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def watch(heard: Heard) -> Iterator[SignalWatch]:
    watch = watch_signals([signal.SIGUSR1], heard)
    yield watch
    watch.close()


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # a run that has ended in this process may still hold it off
    yield
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def kill_self(number: int = signal.SIGUSR1) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_is_told_while_the_main_thread_is_inside_a_long_call_of_c(heard: Heard, watch: SignalWatch) -> None:
    sent_s = 0.0

    def send() -> None:
        nonlocal sent_s
        time.sleep(0.1)
        sent_s = time.monotonic()
        kill_self()

    threading.Thread(target=send).start()
    hashlib.pbkdf2_hmac("sha256", b"long", b"call", 4_000_000)  # without the interpreter's lock, deaf to signals
    ended_s = time.monotonic()
    heard.wait()
    assert ended_s - sent_s > 0.5, "the call was not long enough to show anything"
    assert heard.at_s - sent_s < 0.3


def test_an_earlier_handler_is_still_called_and_is_back_after_the_close(heard: Heard) -> None:
    called: list[int] = []

    def earlier(number: int, frame: FrameType | None) -> None:
        called.append(number)

    before = signal.signal(signal.SIGUSR1, earlier)
    try:
        watch = watch_signals([signal.SIGUSR1], heard)
        kill_self()
        heard.wait()
        until(lambda: called, "the other handler is called")
        watch.close()
        assert signal.getsignal(signal.SIGUSR1) is earlier
        assert called == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_is_installed_later_is_chained_by_renew_and_may_call_ours(
    heard: Heard, watch: SignalWatch
) -> None:
    called: list[int] = []
    below = signal.getsignal(signal.SIGUSR1)
    assert callable(below)

    def later(number: int, frame: FrameType | None) -> None:
        called.append(number)
        below(number, frame)

    signal.signal(signal.SIGUSR1, later)
    watch.renew()
    kill_self()
    heard.wait()
    until(lambda: called, "the other handler is called")
    assert called == [signal.SIGUSR1]
    watch.close()
    assert signal.getsignal(signal.SIGUSR1) is later
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_asyncio_in_the_main_thread_still_hears_its_signals_before_and_after(heard: Heard) -> None:
    async def main() -> None:
        loop, own, ours = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR2, own.set)
        loop.add_signal_handler(signal.SIGUSR1, ours.set)
        watch = watch_signals([signal.SIGUSR1], heard)
        for number, event in ((signal.SIGUSR2, own), (signal.SIGUSR1, ours)):
            kill_self(number)
            await asyncio.wait_for(event.wait(), WAIT_S)
        await asyncio.to_thread(heard.wait)
        loop.remove_signal_handler(signal.SIGUSR1)
        watch.renew()
        watch.close()
        loop.remove_signal_handler(signal.SIGUSR2)

    before = signal.getsignal(signal.SIGUSR1)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert set(heard.numbers) == {signal.SIGUSR1}


def test_a_byte_is_never_written_to_a_file_that_has_the_number_of_an_earlier_descriptor(
    heard: Heard, tmp_path: Path
) -> None:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    watch = watch_signals([signal.SIGUSR1], heard)
    number = writer.fileno()
    writer.close()
    file = os.open(tmp_path / "data", os.O_CREAT | os.O_RDWR)
    try:
        if file != number:
            os.dup2(file, number)
            os.close(file)
        kill_self()
        heard.wait()
        time.sleep(0.05)
        watch.close()
        assert (tmp_path / "data").read_bytes() == b""
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        os.close(number)
        reader.close()


def test_two_watches_are_both_told_and_the_last_restores(heard: Heard, watch: SignalWatch) -> None:
    other = Heard()
    second = watch_signals([signal.SIGUSR1, signal.SIGUSR2], other)
    kill_self()
    heard.wait()
    other.wait()
    second.close()
    kill_self()
    until(lambda: len(heard.numbers) >= 4, "all four are told")
    assert 1 <= len(other.numbers) <= 2


def test_signals_are_watched_from_the_main_thread_only(heard: Heard) -> None:
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            watch_signals([signal.SIGUSR1], heard)
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


CHILD = """
import os, signal, sys, threading, time, warnings
from aiockpt.runtime.wakeup import watch_signals
warnings.simplefilter("ignore")
told = []
watch = watch_signals([signal.SIGTERM], told.append)
"""


def test_a_mark_that_cannot_be_sent_does_not_stand_before_the_next_one(heard: Heard) -> None:
    watch = watch_signals([signal.SIGUSR1], heard)
    try:
        slot = watch._slot
        sender, slot._sender = slot._sender, socket.socket()  # it is connected to nothing
        watch.flush()
        slot._sender.close()
        slot._sender = sender
        assert not slot._marks
    finally:
        watch.close()


def test_a_forked_child_dies_of_its_signals_and_tells_the_parent_of_none() -> None:
    done = run_python(
        "-c",
        CHILD
        + """
for _ in range(50):
    pid = os.fork()
    if not pid:
        time.sleep(30)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, status
time.sleep(0.1)
assert told == [], told
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
assert told, "the parent is deaf"
print("done")
""",
        status=None,
    )
    assert done.stdout == "done\n", done.stderr


def test_after_a_close_on_another_thread_a_signal_ends_the_process_as_before() -> None:
    run_python(
        "-c",
        CHILD
        + """
thread = threading.Thread(target=watch.close)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(5)
""",
        status=-signal.SIGTERM,
    )


def test_a_process_that_ends_holds_its_signals_off_until_its_very_last_moment() -> None:
    done = run_python(
        "-c",
        "import atexit, signal\n"
        "atexit.register(lambda: print(signal.getsignal(signal.SIGTERM) == signal.SIG_IGN))  # it is called last\n"
        + CHILD
        + """
watch.close(ends_within_s=200)
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(75)
""",
        status=75,
    )
    assert done.stdout == "True\n"


def test_a_handler_of_the_program_is_back_at_once_in_a_process_that_ends(heard: Heard) -> None:
    def earlier(number: int, frame: FrameType | None) -> None: ...

    signal.signal(signal.SIGUSR1, earlier)
    try:
        watch_signals([signal.SIGUSR1], heard).close(ends_within_s=200)
        assert signal.getsignal(signal.SIGUSR1) is earlier
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
