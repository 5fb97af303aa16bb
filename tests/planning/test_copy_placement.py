"""Placement of copies: each host has as many as it can, evenly, and as far apart as the racks allow."""

from __future__ import annotations

from collections import Counter

import pytest

from aiockpt.planning.copy_placement import exposed, place_copies, sources_of


@pytest.mark.parametrize("copies", [0, 1, 2, 3])
@pytest.mark.parametrize("count", range(1, 12))
def test_each_host_has_its_copies_on_others_and_holds_as_many(count: int, copies: int) -> None:
    hosts = {f"h{number:02d}": f"h{number:02d}" for number in range(count)}
    holders = place_copies(hosts, copies)
    held = Counter(holder for some in holders.values() for holder in some)
    for host, some in holders.items():
        assert host not in some
        assert len(set(some)) == len(some) == min(copies, count - 1)
        assert held[host] == len(some) == len(sources_of(host, holders))


@pytest.mark.parametrize("racks", [2, 3, 4])
def test_copies_are_in_another_rack_where_no_rack_has_most_hosts(racks: int) -> None:
    hosts = {f"h{number:02d}": f"rack {number % racks}" for number in range(racks * 4)}
    holders = place_copies(hosts, 1)
    assert exposed(holders, hosts) == ()


def test_hosts_without_a_copy_elsewhere_are_exposed() -> None:
    assert exposed(place_copies({"a": "one", "b": "one"}, 1), {"a": "one", "b": "one"}) == ("a", "b")
    assert exposed(place_copies({"a": "a"}, 1), {"a": "a"}) == ("a",)
    three = {"a": "one", "b": "one", "c": "two"}
    assert set(exposed(place_copies(three, 1), three)) <= {"a", "b"}
