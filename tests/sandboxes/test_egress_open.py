"""Open egress: every public address and nothing inside; and what bounds any sandbox's network, its end included."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from internet import GOOD, LOOK_UP, RAW, Boxes, Internet, blocked, echo, fetch, http_server, raw, until

from sandmill.errors import SandboxCreateFailed
from sandmill.sandboxes import Egress, Pool, Sandbox, SandboxSpec, block_on
from sandmill.sandboxes.backends.native.node import node
from sandmill.sandboxes.egress import EgressProxy

ALLOW = Egress.allow("pypi.example.org")
NETWORKS = {"open": Egress.open(), "allow": Egress.allow("*.example.org")}
ANSWERED = b"GET / HTTP/1.1\r\nHost: pypi.example.org\r\n\r\n"


def test_open_reaches_every_public_port_by_both_families(world: Internet, boxes: Boxes) -> None:
    world.serve(GOOD, 22, echo)
    world.serve("2606:2800:220:1::1", 8443, echo)
    http_server(world, GOOD, "good")
    box = boxes(Egress.open())
    assert raw(box, b"ssh", GOOD, 22) == b"ssh"
    assert raw(box, b"v6", "2606:2800:220:1::1", 8443) == b"v6"
    assert fetch(box, "http://pypi.example.org/", f"http://{GOOD}/x") == ["good got pypi.example.org /", f"good got {GOOD} /x"]
    assert box.run("python3", "-c", LOOK_UP, "pypi.example.org", "nowhere.org").stdout.decode().split("\n")[:2] == [
        f"['{GOOD}']",
        "gaierror",
    ]
    assert box.blocked == ()


INSIDE = {
    "loopback": "127.0.0.2",
    "loopback through IPv6": "::ffff:127.0.0.2",
    "this network": "0.1.2.3",
    "private": "10.1.2.3",
    "private, 172.16": "172.31.255.255",
    "private, 192.168": "192.168.1.1",
    "carrier": "100.64.0.1",
    "link-local": "169.254.1.1",
    "metadata": "169.254.169.254",
    "metadata of Azure": "168.63.129.16",
    "metadata of Alibaba": "100.100.100.200",
    "multicast": "224.0.0.1",
    "broadcast": "255.255.255.255",
    "unique local": "fd12::1",
    "metadata through IPv6": "fd00:ec2::254",
    "metadata through NAT64": "64:ff9b::a9fe:a9fe",
    "private through 6to4": "2002:0a00:0001::1",
    "Teredo": "2001:0:1234::1",
    "site-local": "fec0::1",
    "IPv4-compatible": "::10.0.0.1",
}


def test_open_reaches_nothing_inside(world: Internet, boxes: Boxes) -> None:
    box = boxes(Egress.open())
    script = """
import socket, sys
for address in sys.argv[1:]:
    try:
        end = socket.create_connection((address, 8080), timeout=3)
        end.sendall(b"x")
        print("through" if end.recv(10) else "closed")
    except OSError as error:
        print(type(error).__name__)
"""
    done = box.run("python3", "-c", script, *INSIDE.values(), timeout=60)
    results = dict(zip(INSIDE, done.stdout.decode().split(), strict=True))
    assert set(results.values()) <= {"ConnectionResetError", "ConnectionRefusedError", "OSError", "PermissionError", "closed"}, results
    assert world.connections == []
    assert len(box.blocked) >= 14
    assert all(entry.port == 8080 for entry in box.blocked)


def test_open_answers_no_name_with_an_address_inside(world: Internet, boxes: Boxes) -> None:
    inside = {f"n{number}.example.org": [[address]] for number, address in enumerate(("10.0.0.1", "169.254.169.254", "::1", "fd00::1"))}
    world.names |= inside | {"mixed.example.org": [["192.168.0.1", GOOD]], "metadata.google.internal": [[GOOD]]}
    box = boxes(Egress.open())
    names = (
        box.run("python3", "-c", LOOK_UP, *inside, "metadata.google.internal", "mixed.example.org", timeout=20).stdout.decode().split("\n")
    )
    assert names[:-1] == ["gaierror"] * 5 + [f"['{GOOD}']"]
    assert {host for host, _, _ in blocked(box)} == {*inside, "metadata.google.internal"}


@pytest.mark.parametrize("network", [ALLOW, Egress.open()], ids=["allow", "open"])
def test_services_of_the_host_and_of_other_sandboxes_are_out_of_reach(network: Egress, world: Internet, boxes: Boxes) -> None:
    seen = []
    with socket.create_server(("0.0.0.0", 0)) as host:
        threading.Thread(target=lambda: seen.append(host.accept()), daemon=True).start()
        port = host.getsockname()[1]
        one, two = boxes(network), boxes(network)
        serve = one.exec(
            "python3",
            "-c",
            f"import socket; s=socket.create_server(('0.0.0.0', {port})); print(1, flush=True); s.accept(); print('taken', flush=True)",
        )
        assert next(iter(serve.stdout)) == "1\n"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((GOOD, 9))  # sends nothing
            own = {route.getsockname()[0], "127.0.0.1"}
        for address in own:
            assert raw(two, b"knock", str(address), port) == b""
        assert (seen, world.connections) == ([], [])
        assert one.run("python3", "-c", RAW, "127.0.0.1", str(port), timeout=10, stdin=b"").exit_code == 0
        assert serve.stdout.read() == "taken\n"
        with socket.create_connection(("127.0.0.1", port)):
            assert until(lambda: len(seen) == 1)
    seen[0][0].close()


def test_its_end_ends_its_connections_and_its_namespace(world: Internet, boxes: Boxes) -> None:
    server = world.serve(GOOD, 22, echo)
    before = set(os.listdir("/proc/self/fd"))
    box = boxes(Egress.open())
    talk = box.exec(
        "python3",
        "-c",
        f"import socket,time; s=socket.create_connection(('{GOOD}',22)); s.send(b'x'); s.recv(1); print(1,flush=True); time.sleep(60)",
    )
    assert next(iter(talk.stdout)) == "1\n"
    assert server.open_connections == 1
    first = box.run("readlink", "/proc/self/ns/net").stdout
    box.terminate()
    assert until(lambda: server.open_connections == 0)
    assert until(lambda: len(set(os.listdir("/proc/self/fd")) - before) <= 2)  # the egress loop's own
    with Sandbox.create(memory="128Mi", disk="16Mi") as plain:
        assert plain.run("readlink", "/proc/self/ns/net").stdout != first
        assert b"unreachable" in plain.run("python3", "-c", f"import socket; socket.create_connection(('{GOOD}', 22))").stderr


def test_a_client_that_does_not_read_stops_the_server(world: Internet, boxes: Boxes) -> None:
    sent = 0

    def pour(connection: socket.socket) -> None:
        nonlocal sent
        while True:
            sent += connection.send(bytes(1 << 16))

    world.serve(GOOD, 22, pour)
    box = boxes(Egress.open())
    box.exec("python3", "-c", f"import socket,time; s=socket.create_connection(('{GOOD}',22)); s.recv(1); time.sleep(60)")
    assert until(lambda: sent > 0)
    seen = [-1]
    assert until(lambda: seen[-1] == sent or bool(seen.append(sent) or time.sleep(0.5)), 20)
    assert sent < 64 << 20


def test_connections_beyond_the_limit_wait(world: Internet, boxes: Boxes) -> None:
    server = world.serve(GOOD, 22, echo)
    box = boxes(Egress.open())
    script = f"""
import socket
ends = []
for number in range(140):
    ends.append(socket.create_connection(('{GOOD}', 22), timeout=5))
    ends[-1].sendall(b"x")
print(sum(1 for end in ends[:128] if end.recv(1) == b"x"), flush=True)
ends[139].settimeout(1)
try:
    ends[139].recv(1)
except TimeoutError:
    print("waits", flush=True)
for end in ends[:64]:
    end.close()
ends[139].settimeout(10)
print(ends[139].recv(1).decode())
"""
    done = box.run("python3", "-c", script, timeout=60)
    assert done.stdout == b"128\nwaits\nx\n", done.stderr
    assert server.open_connections <= 128


def test_a_pool_keeps_sandboxes_with_a_network(world: Internet) -> None:
    with Pool(SandboxSpec.of(memory="128Mi", disk="16Mi", network=Egress.allow("pypi.example.org")), 1) as pool:
        with pool.take() as box:
            assert box.run("python3", "-c", LOOK_UP, "pypi.example.org", "evil.org").stdout == b"['198.18.0.1']\ngaierror\n"


def test_the_tables_of_the_kernel_do_not_fill(world: Internet, boxes: Boxes) -> None:
    """UDP to anywhere, connections to the sandbox's own servers and a flood of new ones leave almost nothing in the connection table."""
    script = """
import socket, threading
def tracked():
    return int(open("/proc/sys/net/netfilter/nf_conntrack_count").read())
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(3000):
    try:
        datagrams.sendto(b"x", (f"9.{number % 250}.0.1", 1000 + number))
    except OSError:
        pass
own = socket.create_server(("0.0.0.0", 9000))
threading.Thread(target=lambda: [own.accept()[0].close() for _ in range(200)], daemon=True).start()
for _ in range(200):
    socket.create_connection(("127.0.0.1", 9000)).close()
print(tracked())
for number in range(3000):
    end = socket.socket()
    end.setblocking(False)
    end.connect_ex(("93.184.216.34", 1000 + number))
    end.close()
print(tracked())
"""
    done = boxes(Egress.open()).run("python3", "-c", script, timeout=30)
    before, after = map(int, done.stdout.split())
    assert (before, 0 < after < 1000) == (0, True), done.stderr


def loopback_listeners() -> list[socket.socket]:
    """What a sandbox would hand over, without one."""
    listeners = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM), *(socket.create_server(("127.0.0.1", 0)) for _ in range(3))]
    listeners[0].bind(("127.0.0.1", 0))
    for listener in listeners:
        listener.setblocking(False)
    return listeners


@pytest.mark.parametrize(("idle_s", "greeting_s", "sent"), [(60.0, 0.3, b""), (60.0, 0.3, b"GET / HTTP/1.1\r\n"), (0.3, 60.0, ANSWERED)])
def test_who_says_nothing_is_let_go(idle_s: float, greeting_s: float, sent: bytes, world: Internet) -> None:
    server = http_server(world, GOOD, "good")
    listeners = loopback_listeners()
    proxy = EgressProxy(listeners, ALLOW, world, idle_s=idle_s, greeting_s=greeting_s)
    block_on(proxy.start())
    with socket.create_connection(listeners[2].getsockname(), timeout=5) as client:
        client.sendall(sent)
        started, answer = time.monotonic(), b""
        while data := client.recv(4096):
            answer += data
        assert 0.2 < time.monotonic() - started < 3
        assert answer.endswith(b"good got pypi.example.org /") == (sent == ANSWERED)
    assert until(lambda: server.open_connections == 0)
    block_on(proxy.close())
    block_on(proxy.close())
    assert all(listener.fileno() == -1 for listener in listeners)


def test_resolvers_that_ask_for_the_machines_own_families_get_answers(world: Internet, boxes: Boxes) -> None:
    """glibc's AI_ADDRCONFIG does not count loopback addresses; a sandbox has others."""
    world.names["both.example.org"] = [[GOOD, "2606:2800:220:1::1"]]
    script = """
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNSPEC):
    try:
        print(sorted({entry[4][0] for entry in socket.getaddrinfo("both.example.org", 80, family, flags=socket.AI_ADDRCONFIG)}))
    except OSError:
        print("none")
"""
    answers = {name: boxes(network).run("python3", "-c", script).stdout.decode().splitlines() for name, network in NETWORKS.items()}
    v4, v6 = f"['{GOOD}']", "['2606:2800:220:1::1']"
    assert answers == {"open": [v4, v6, f"['2606:2800:220:1::1', '{GOOD}']"], "allow": ["['198.18.0.1']", "none", "['198.18.0.1']"]}


def test_who_hangs_up_after_asking_is_listed_all_the_same(world: Internet, boxes: Boxes) -> None:
    box = boxes(ALLOW)
    script = """
import socket, struct
for number in range(20):
    end = socket.create_connection(("198.18.0.1", 80))
    end.sendall(b"GET / HTTP/1.1\\r\\nHost: evil.example.org\\r\\n\\r\\n")
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()
"""
    assert box.run("python3", "-c", script, timeout=20).stderr == b""
    assert until(lambda: sum(entry.count for entry in box.blocked if entry.host == "evil.example.org") >= 15)


OWNER = """
import sys
from sandmill.sandboxes import Egress, Sandbox, SandboxSpec
from internet import GOOD, Internet
world = Internet()
world.servers[(GOOD, 22)] = int(sys.argv[1])
box = Sandbox.from_spec(SandboxSpec.of(memory="128Mi", disk="16Mi", network=Egress.open()), outside=world)
script = "import socket, time; s = socket.create_connection(('%s', 22)); s.send(b'x'); s.recv(1); print(1, flush=True); time.sleep(600)"
process = box.exec("python3", "-c", script % GOOD)
print(next(iter(process.stdout)), flush=True)
process.wait()
"""


def test_when_its_owner_is_killed_its_connections_end(world: Internet) -> None:
    server = world.serve(GOOD, 22, echo)
    here = os.path.dirname(__file__)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(server.port)],
        env=os.environ | {"PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"1\n"
        assert server.open_connections == 1
        owner.kill()
    assert until(lambda: server.open_connections == 0)


def test_an_end_in_the_midst_of_beginnings_leaves_no_socket(world: Internet) -> None:
    """Connections that were accepted and not begun with, end too. An unclosed socket fails the test when it is collected."""
    for patience_s in (0.0, 0.001, 0.002, 0.005, 0.01) * 4:
        listeners = loopback_listeners()
        address = listeners[2].getsockname()
        proxy = EgressProxy(listeners, ALLOW, world)
        clients = [socket.create_connection(address, timeout=5) for _ in range(10)]
        for client in clients:
            client.sendall(ANSWERED)
        block_on(proxy.start())
        time.sleep(patience_s)
        block_on(proxy.close())
        for client in clients:
            with client, contextlib.suppress(ConnectionResetError):
                while client.recv(4096):
                    pass
    gc.collect()


def test_a_network_that_cannot_be_handed_over_fails_the_creation() -> None:
    async def create() -> None:
        owner = await node()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.close()
        with theirs:
            await owner.create(SandboxSpec.of(memory="128Mi", disk="16Mi", network=ALLOW), b"", egress=theirs)

    with pytest.raises(SandboxCreateFailed, match="egress hand-over: Broken pipe"):
        block_on(create())
    with Sandbox.create(memory="128Mi", disk="16Mi") as plain:
        assert plain.run("readlink", "/proc/self/ns/net").stdout.decode().strip() != os.readlink("/proc/self/ns/net")
