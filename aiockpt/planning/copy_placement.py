"""Placement of copies: which hosts hold the files of which others. Pure.

Hosts are sorted by their failure domain and name, and every k-th is in one group, so that neighbours, which tend to fail
together, are apart: of four hosts the first and the third, the second and the fourth. No number of hosts is refused: what
is left over makes a group larger. (ByteRobust keeps the backups outside a rank's own groups for the same reason.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def place_copies(domains: Mapping[str, str], copies: int) -> dict[str, tuple[str, ...]]:
    """Return for each host those that hold copies of its files, *copies* of them where there are so many others.

    Args:
        domains: the failure domain of each host, by its name.
    """
    hosts = sorted(domains, key=lambda host: (domains[host], host))
    group_count = max(len(hosts) // (copies + 1), 1)
    holders: dict[str, tuple[str, ...]] = {}
    for number in range(group_count):
        group = hosts[number::group_count]
        for place, host in enumerate(group):
            following = [*group[place + 1 :], *group[:place]]
            holders[host] = tuple(following[:copies])
    return holders


def sources_of(host: str, holders: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the hosts whose files *host* holds copies of."""
    return tuple(other for other, some in holders.items() if host in some)


def exposed(holders: Mapping[str, Sequence[str]], domains: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts all of whose copies are in their own failure domain, or that have no copy."""
    return tuple(host for host, some in holders.items() if all(domains[other] == domains[host] for other in some))
