"""Calls of a store that another process makes: they end, whatever becomes of that process."""

import threading

import pytest

from aiockpt.runtime import relay
from aiockpt.runtime.relay import RelayedStore, Reply


def test_a_process_that_is_silent_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "DEADLINE_S", 0.05)
    asked: list[int] = []
    store = RelayedStore(lambda number, question: asked.append(number))
    with pytest.raises(ConnectionError, match=r"sent no reply for 0\.05 s"):
        store.get("key")
    store.receive(asked[0], Reply(b"late"))  # harms nobody


def test_who_waits_hears_at_once_that_nobody_will_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "DEADLINE_S", 600)  # far beyond the test's own timeout: who waited for it would hang
    store = RelayedStore(lambda number, question: threading.Timer(0.05, store.fail_all).start())
    with pytest.raises(ConnectionError, match="gone"):
        store.get("key")
    with pytest.raises(ConnectionError, match="gone"):
        store.get("key")
