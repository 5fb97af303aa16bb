"""Does a call of a store that another process makes end, whatever becomes of that process?"""

from __future__ import annotations

import threading
import time

import pytest

from aiockpt.runtime import relay
from aiockpt.runtime.relay import RelayedStore, Reply


def test_a_process_that_is_silent_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "DEADLINE_S", 0.05)
    asked: list[int] = []
    store = RelayedStore(lambda number, question: asked.append(number))
    begun_s = time.monotonic()
    with pytest.raises(ConnectionError, match="said nothing"):
        store.get("key")
    assert time.monotonic() - begun_s < 4
    store.hear(asked[0], Reply(b"late"))  # harms nobody


def test_who_waits_hears_at_once_that_nobody_will_reply() -> None:
    store = RelayedStore(lambda number, question: threading.Timer(0.05, store.lose).start())
    begun_s = time.monotonic()
    with pytest.raises(ConnectionError, match="gone"):
        store.get("key")
    assert time.monotonic() - begun_s < relay.DEADLINE_S / 2
    with pytest.raises(ConnectionError, match="gone"):
        store.get("key")
