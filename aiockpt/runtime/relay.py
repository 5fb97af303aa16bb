"""Relay of a store to a process that cannot reach it: another process makes each call for it.

A writer process (`aiockpt.worker`) has no client of the job's c10d store: that would need torch, an address, and a second
client for each rank. Its trainer has one. Both ends of a call are here; the transport of messages is not.

Guarantees:

- A call returns what the store returned, or raises `ConnectionError`: the store does not answer, or cannot be reached.
- When the other process is gone, every call raises at once, waiting ones included; when it is silent, after `DEADLINE_S`.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from itertools import count
from typing import Literal

import msgspec

from aiockpt.runtime.incarnation import Store

Verb = Literal["set", "get", "check", "add", "delete_key"]
Value = bytes | bool | int | None
DEADLINE_S = 30.0
"""For a reply: a process that is stopped, or busy in one long call, neither answers nor ends."""
GONE = "the process that relays the store is gone"


class Question(msgspec.Struct, frozen=True):
    """One call of a store: its verb, the keys, and its argument."""

    verb: Verb
    keys: list[str]
    data: bytes = b""
    amount: int = 0


class Reply(msgspec.Struct, frozen=True):
    """What the store returned, or why it did not."""

    value: Value = None
    failure: str | None = None


def ask(store: Store, question: Question) -> Reply:
    """Make the call at the store itself. Blocks as long as the store does."""
    try:
        return Reply(_call(store, question))
    except Exception as error:  # noqa: BLE001  c10d raises what it likes; the asking side makes one error of it
        return Reply(failure=f"{type(error).__name__}: {error}")


def _call(store: Store, question: Question) -> Value:
    key = question.keys[0]
    match question.verb:
        case "set":
            store.set(key, question.data)
            return None
        case "get":
            return bytes(store.get(key))
        case "check":
            return bool(store.check(question.keys))
        case "add":
            return int(store.add(key, question.amount))
        case "delete_key":
            return bool(store.delete_key(key))


class RelayedStore:
    """The store, relayed by another process. Blocking; any thread but the one that receives the replies.

    Args:
        send: sends a question with its number, soon; any thread.
    """

    def __init__(self, send: Callable[[int, Question], object]) -> None:
        self._send = send
        self._numbers = count()
        self._waiting: dict[int, concurrent.futures.Future[Reply]] = {}
        self._lost = False

    def set(self, key: str, value: bytes, /) -> None:
        self._ask(Question("set", [key], data=bytes(value)))

    def get(self, key: str, /) -> bytes:
        value = self._ask(Question("get", [key]))
        assert isinstance(value, bytes)
        return value

    def check(self, keys: list[str], /) -> bool:
        return bool(self._ask(Question("check", list(keys))))

    def add(self, key: str, amount: int, /) -> int:
        value = self._ask(Question("add", [key], amount=amount))
        assert isinstance(value, int)
        return value

    def delete_key(self, key: str, /) -> bool:
        return bool(self._ask(Question("delete_key", [key])))

    def receive(self, number: int, reply: Reply) -> None:
        """Accept the reply to a question."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def fail_all(self) -> None:
        """Note that no reply will come any more. On the thread that receives the replies."""
        self._lost = True
        for number in list(self._waiting):
            self.receive(number, Reply(failure=GONE))

    def _ask(self, question: Question) -> Value:
        number = next(self._numbers)
        waiting = self._waiting[number] = concurrent.futures.Future()
        try:
            # Checked after the registration: either `fail_all` finds this call, or this check finds the loss.
            if self._lost:
                raise ConnectionError(GONE)
            self._send(number, question)
            reply = waiting.result(DEADLINE_S)
        except TimeoutError:
            raise ConnectionError(f"the process that relays the store sent no reply for {DEADLINE_S:g} s") from None
        finally:
            del self._waiting[number]
        if reply.failure is not None:
            raise ConnectionError(reply.failure)
        return reply.value
