"""The endpoint over real HTTP: whether a rank is well, and only that."""

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import prometheus_client
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.monitor import Endpoint, Metrics
from tests.gates import Gate
from tests.small_run import small_checkpointer
from tests.watch import until

STATE: dict[str, Any] = {"x": torch.arange(1000)}


def get(endpoint: Endpoint, path: str, method: str = "GET") -> tuple[int, str, Any]:
    """Return the status, the type and the body of an answer."""
    until(lambda: endpoint.port, "it listens")
    request = urllib.request.Request(f"http://127.0.0.1:{endpoint.port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=250) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read()


def health(endpoint: Endpoint) -> tuple[int, dict[str, Any]]:
    status, kind, body = get(endpoint, "/health")
    assert kind.startswith("application/json")
    return status, json.loads(body)


class Filled(LocalBackend):
    """A place that may be full."""

    full = False

    async def create(self, key: str, size: int) -> Any:
        if self.full:
            raise aiockpt.StorageError("no space left", key=key)
        return await super().create(key, size)


@pytest.mark.parametrize("then", ["load", "save"])
def test_a_load_that_failed_is_no_health_until_one_does_not_or_a_save_is_durable(tmp_path: Path, then: str) -> None:
    endpoint = Endpoint(0)
    with small_checkpointer(tmp_path, observers=[endpoint]) as ckpt:
        ckpt.save(7, STATE).result()
        with pytest.raises(aiockpt.StepNotFoundError):
            ckpt.load(STATE, 8).result()
        status, said = health(endpoint)
        (problem,) = said["problems"]
        assert status == 503
        assert problem.startswith("the load of step 8 failed: StepNotFoundError")
        if then == "load":
            ckpt.load(STATE).result()
        else:
            ckpt.save(9, STATE).result()
        assert health(endpoint)[0] == 200


def test_a_load_that_its_program_cancels_is_neither_pending_nor_a_problem(tmp_path: Path) -> None:
    endpoint = Endpoint(0, overdue_s=1e-6)
    gate = Gate(LocalBackend(tmp_path), "put", "*/lease-*")  # between two stages of the load
    with small_checkpointer(gate, observers=[endpoint]) as ckpt:
        ckpt.save(7, STATE).result()
        load = ckpt.load(STATE)
        assert gate.reached.wait(250)
        assert health(endpoint)[1]["pending"]
        load.cancel()
        gate.open_up()
        with pytest.raises(aiockpt.SaveCancelledError):
            load.result()
        until(lambda: health(endpoint)[0] == 200, "it is well again", 20)


def test_a_save_that_failed_is_a_problem_until_one_is_durable_though_a_load_succeeds(tmp_path: Path) -> None:
    place, endpoint = Filled(tmp_path), Endpoint(0)
    with small_checkpointer(place, observers=[endpoint], on_error="warn") as ckpt:
        ckpt.save(7, STATE).result()
        place.full = True
        with pytest.raises(aiockpt.StorageError):
            ckpt.save(8, STATE).result()
        ckpt.load(STATE).result()
        assert health(endpoint)[0] == 503
        place.full = False
        ckpt.save(9, STATE).result()
        assert health(endpoint)[0] == 200


def test_it_says_what_is_durable_what_hangs_and_what_failed(tmp_path: Path) -> None:
    place, endpoint = Filled(tmp_path), Endpoint(0, overdue_s=0.05)
    gate = Gate(place)
    with small_checkpointer(gate, observers=[endpoint], on_error="warn") as ckpt:
        status, said = health(endpoint)
        assert (status, said["well"], said["durable_step"], said["world_size"]) == (200, True, None, 1)
        save = ckpt.save(7, STATE)
        until(lambda: "in write" in str(health(endpoint)[1]["problems"]), "it is overdue where it waits")
        status, said = health(endpoint)
        (problem,) = said["problems"]
        assert status == 503
        assert problem.startswith("overdue: save of step 7: in write")
        gate.open_up()
        save.result()
        status, said = health(endpoint)
        assert (status, said["durable_step"], said["pending"], said["problems"]) == (200, 7, [], [])
        place.full = True
        with pytest.raises(aiockpt.StorageError):
            ckpt.save(8, STATE).result()
        status, said = health(endpoint)
        assert (status, said["durable_step"]) == (503, 7)
        assert "the save of step 8 failed: StorageError" in said["problems"][0]
        place.full = False
        ckpt.save(9, STATE).result()
        assert health(endpoint)[0] == 200
    with pytest.raises(urllib.error.URLError):
        get(endpoint, "/health")


def test_metrics_are_those_of_prometheus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = prometheus_client.CollectorRegistry()
    endpoint = Endpoint(0, registry=registry)
    with small_checkpointer(tmp_path, observers=[Metrics(registry), endpoint]) as ckpt:
        ckpt.save(3, STATE).result()
        status, kind, body = get(endpoint, "/metrics")
        assert status == 200
        assert kind.startswith("text/plain; version=")
        assert b"aiockpt_durable_step 3.0" in body
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        status, _, body = get(endpoint, "/metrics")
        assert status == 404
        assert b"pip install" in body


def test_it_only_answers_questions(tmp_path: Path) -> None:
    endpoint = Endpoint(0)
    with small_checkpointer(tmp_path, observers=[endpoint]):
        assert get(endpoint, "/health", "POST")[0] == 405
        assert get(endpoint, "/metrics", "DELETE")[0] == 405
        assert get(endpoint, "/", "GET")[0] == 404
        assert f"127.0.0.1:{endpoint.port}" in repr(endpoint), "nobody else is listened to"


def test_a_port_that_is_taken_harms_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Endpoint(0)
    with small_checkpointer(tmp_path / "1", observers=[first]):
        until(lambda: first.port, "it listens")
        with small_checkpointer(tmp_path / "2", observers=[Endpoint(first.port)]) as ckpt:
            ckpt.save(1, STATE).result()
            until(lambda: "stopped working" in caplog.text, "it is told")
    (told,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "address already in use. Each rank of a host needs a port of its own" in told.getMessage()
    assert not told.exc_info


def test_the_log_says_where_it_listens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    endpoint = Endpoint(0)
    with caplog.at_level("INFO", "aiockpt"), small_checkpointer(tmp_path, observers=[endpoint]):
        until(lambda: "health and metrics of this rank" in caplog.text, "it listens")
    assert f"http://127.0.0.1:{endpoint.port}" in caplog.text


@pytest.mark.parametrize("given", [{"port": -1}, {"port": "http"}, {"overdue_s": 0}])
def test_what_cannot_be_meant_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(aiockpt.UsageError, match=next(iter(given))):
        Endpoint(**given)


def test_without_aiohttp_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(aiockpt.UsageError, match="pip install aiohttp"):
        Endpoint()


async def test_it_may_be_closed_before_it_began() -> None:
    endpoint = Endpoint(0)
    with anyio.fail_after(250):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(endpoint.run)
            await endpoint.aclose()
