"""Which addresses no sandbox may reach, whatever its policy. In: an address about to be connected to. Out: the reason why not, or None.

The lists are written out rather than left to `ipaddress`, whose idea of "global" differs between Python versions and lets addresses
through that carry another one inside (NAT64, 6to4, IPv4-mapped).
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

Address = IPv4Address | IPv6Address

_METADATA: Final = frozenset(
    map(
        ip_address,
        (
            "169.254.169.254",  # AWS, Azure, Google, Oracle, IBM, DigitalOcean, OpenStack, Hetzner, Vultr
            "169.254.169.253",  # AWS, resolver
            "169.254.169.123",  # AWS, time
            "169.254.170.2",  # AWS, container credentials
            "169.254.170.23",  # AWS, pod credentials
            "169.254.0.23",  # Tencent
            "169.254.42.42",  # Scaleway
            "100.100.100.200",  # Alibaba
            "168.63.129.16",  # Azure, the host itself: a public address
            "192.0.0.192",  # Oracle, old
            "192.80.8.124",  # Equinix Metal: a public address
            "fd00:ec2::254",  # AWS
            "fd00:ec2::253",
            "fd00:ec2::23",
            "fd20:ce::254",  # Google
            "fd00:c1::a9fe:a9fe",  # Oracle
            "fd00:42::42",  # Scaleway
        ),
    )
)
METADATA_NAMES: Final = frozenset(
    {
        "instance-data.ec2.internal",
        "metadata.azure.com",
        "metadata.azure.internal",
        "metadata.goog",
        "metadata.google.internal",
        "metadata.hetzner.cloud",
        "metadata.oraclecloud.com",
        "metadata.packet.net",
        "metadata.platformequinix.com",
        "metadata.tencentyun.com",
    }
)
"""Names under which clouds offer metadata. Another name that leads to the same addresses is caught by the address."""

_V4: Final = tuple(
    (IPv4Network(network), reason)
    for network, reason in (
        ("0.0.0.0/8", "this machine"),
        ("10.0.0.0/8", "a private address"),
        ("100.64.0.0/10", "a carrier's private address"),
        ("127.0.0.0/8", "this machine's loopback"),
        ("169.254.0.0/16", "a link-local address"),
        ("172.16.0.0/12", "a private address"),
        ("192.0.0.0/24", "a reserved address"),
        ("192.0.2.0/24", "a reserved address"),
        ("192.88.99.0/24", "a reserved address"),
        ("192.168.0.0/16", "a private address"),
        ("198.18.0.0/15", "a private address"),
        ("198.51.100.0/24", "a reserved address"),
        ("203.0.113.0/24", "a reserved address"),
        ("224.0.0.0/4", "a multicast address"),
        ("240.0.0.0/4", "a reserved address"),
    )
)
_V6_GLOBAL: Final = IPv6Network("2000::/3")
_V6_CLOSED: Final = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20", "2620:4f:8000::/48")))
_V6_EMBEDDING: Final = (
    # network, how far the IPv4 address inside is from the right
    (IPv6Network("::ffff:0:0/96"), 0),
    (IPv6Network("64:ff9b::/96"), 0),
    (IPv6Network("2002::/16"), 80),
)


def refusal(address: Address) -> str | None:
    """Why nobody may connect to `address`, or None. Pure; `is_own` is the other half."""
    if address in _METADATA:
        return f"{address} is a cloud metadata address"
    if isinstance(address, IPv4Address):
        reason = next((reason for network, reason in _V4 if address in network), None)
        return None if reason is None else f"{address} is {reason}"
    for network, shift in _V6_EMBEDDING:
        if address in network:
            inner = refusal(IPv4Address(int(address) >> shift & 0xFFFFFFFF))
            return None if inner is None else f"{address} stands for an IPv4 address: {inner}"
    if address not in _V6_GLOBAL or any(address in network for network in _V6_CLOSED):
        return f"{address} is no public address"
    return None


def is_own(address: Address) -> bool:
    """Whether it is one of this machine's own addresses: what listens there may trust whoever comes from the machine."""
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind((str(address), 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def plain(address: Address) -> Address:
    """The IPv4 address inside an IPv4-mapped one, else the address itself."""
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address


def permitted(addresses: Iterable[Address]) -> tuple[list[Address], str]:
    """Those that may be connected to, and why the last other one may not ("" when there is none)."""
    good, reason = [], ""
    for address in map(plain, addresses):
        found = refusal(address) or (f"{address} is this machine" if is_own(address) else None)
        if found is None:
            good.append(address)
        else:
            reason = found
    return good, reason
