"""`sandmill node ...`: the options of its commands; their bodies are imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from sandmill.cli.failures import carried
from sandmill.errors import ConfigError

app = typer.Typer(
    help="Machines that a server's sandboxes run on.", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)
_SHORTEST_LEASE_S: Final = 3.0
_LONGEST_S: Final = 3600.0

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]
Server = Annotated[
    str | None, typer.Option("--server", metavar="URL", help="The server. Default: SANDMILL_API_URL, or http://127.0.0.1:8420.")
]
KeyFile = Annotated[Path | None, typer.Option("--key-file", metavar="FILE", help="Holds the key; without it, SANDMILL_API_KEY does.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The node.")]


def lease_of(text: str) -> float:
    """A lease in seconds. Raises ConfigError."""
    return _within(text, "--node-lease", _SHORTEST_LEASE_S, "3s")


def wait_of(text: str) -> float:
    """How long to wait for room, in seconds. Raises ConfigError."""
    return _within(text, "--room-wait", 0.0, "0s")


def _within(text: str, option: str, least_s: float, least: str) -> float:
    from sandmill.config.quantities import parse_duration

    seconds = parse_duration(text, field=option)
    if not least_s <= seconds <= _LONGEST_S:
        raise ConfigError(f"must be from {least} to 1h, not {text!a}", field=option)
    return seconds


@app.command()
def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server to join, such as http://10.0.0.1:8420.")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="What the node is called. Default: this machine's name.")
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where this node listens for its server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, metavar="N", help="The port; 0 takes a free one.")] = 0,
    advertise: Annotated[
        str | None, typer.Option("--advertise", metavar="URL", help="Where the server finds this node. Default: where it listens.")
    ] = None,
    most: Annotated[int, typer.Option("--max-sandboxes", min=1, metavar="N", help="Sandboxes it may hold.")] = 4096,
    labels: Annotated[list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label; may be repeated.")] = None,
    key_file: KeyFile = None,
    state: Annotated[Path | None, typer.Option("--state", metavar="DIR", help="This node's state folder.")] = None,
    certificate: Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE.pem", help="Serves https with this certificate.")] = None,
    certificate_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE.pem", help="The certificate's key.")] = None,
    as_json: Json = False,
) -> None:
    """Makes this machine a node of a server, until it is stopped. Needs a key of the server made with `key new NAME --role node`."""
    from sandmill.cli import node

    asked = node.Asked(url, name, host, port, advertise, most, tuple(labels or ()), key_file, state, certificate, certificate_key)
    raise typer.Exit(carried(lambda: node.join(asked, as_json=as_json)))


@app.command(name="ls")
def list_(server: Server = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Lists the nodes of a server."""
    from sandmill.cli import node

    raise typer.Exit(carried(lambda: node.list_nodes(server, key_file, as_json=as_json)))


@app.command()
def drain(
    name: Name,
    deadline: Annotated[str, typer.Option("--deadline", metavar="TIME", help="How long sandboxes that cannot be saved may go on.")] = "10m",
    wait: Annotated[bool, typer.Option("--wait", help="Returns once the node is empty.")] = False,
    server: Server = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Gives a node no more sandboxes; stops those it has, files saved, and Ephemeral ones at the deadline."""
    from sandmill.cli import node

    raise typer.Exit(carried(lambda: node.drain(name, deadline, server, key_file, wait=wait, as_json=as_json)))


@app.command()
def resume(name: Name, server: Server = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Gives a drained node sandboxes again."""
    from sandmill.cli import node

    raise typer.Exit(carried(lambda: node.resume(name, server, key_file, as_json=as_json)))


@app.command()
def remove(name: Name, server: Server = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Forgets a node that holds nothing; should it still run, it ends."""
    from sandmill.cli import node

    raise typer.Exit(carried(lambda: node.remove(name, server, key_file, as_json=as_json)))
