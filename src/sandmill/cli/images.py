"""`sandmill image ...`: the options of its commands; their bodies are imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sandmill.cli.failures import carried

app = typer.Typer(
    help="Images that sandboxes start from, in this machine's store.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]


@app.command()
def build(
    context: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that COPY reads from.")],
    file: Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="Default: DIR/Dockerfile.")] = None,
    name: Annotated[str | None, typer.Option("--name", "-t", metavar="NAME", help="What the image is called.")] = None,
    build_args: Annotated[list[str] | None, typer.Option("--build-arg", metavar="NAME=VALUE", help="An ARG; may be repeated.")] = None,
    memory: Annotated[str, typer.Option("--memory", metavar="SIZE", help="Memory limit of each step.")] = "2Gi",
    disk: Annotated[str, typer.Option("--disk", metavar="SIZE", help="Limit of what a step writes.")] = "2Gi",
    network: Annotated[str, typer.Option("--network", metavar="none|open", help="What RUN may reach.")] = "none",
    as_json: Json = False,
) -> None:
    """Builds an image from a Dockerfile (FROM, COPY, ENV, WORKDIR, RUN, USER, ARG)."""
    from sandmill.cli import image

    wanted = image.Wanted(context, file or context / "Dockerfile", name, tuple(build_args or ()), memory, disk, network)
    raise typer.Exit(carried(lambda: image.build(wanted, as_json=as_json)))


@app.command(name="import")
def import_(
    reference: Annotated[str, typer.Argument(metavar="oci:PATH|docker-archive:PATH", help="A layout folder or an archive.")],
    name: Annotated[str | None, typer.Option("--name", "-t", metavar="NAME", help="What the image is called.")] = None,
    as_json: Json = False,
) -> None:
    """Unpacks an image that another tool wrote."""
    from sandmill.cli import image

    raise typer.Exit(carried(lambda: image.load(reference, name, as_json=as_json)))


@app.command(name="ls")
def list_(as_json: Json = False) -> None:
    """Lists the images, the one used last first."""
    from sandmill.cli import image

    raise typer.Exit(carried(lambda: image.list_images(as_json=as_json)))


@app.command()
def show(name: Annotated[str, typer.Argument(metavar="NAME|DIGEST", help="Which image.")]) -> None:
    """Shows an image's layers and configuration as JSON."""
    from sandmill.cli import image

    raise typer.Exit(carried(lambda: image.show(name)))


@app.command()
def rm(names: Annotated[list[str], typer.Argument(metavar="NAME|DIGEST...", help="Which images.")], as_json: Json = False) -> None:
    """Removes images, and the layers that no other image needs."""
    from sandmill.cli import image

    raise typer.Exit(carried(lambda: image.remove(names, as_json=as_json)))


@app.command()
def prune(
    keep: Annotated[str, typer.Option("--keep", metavar="SIZE", help="How much may stay, the most recently used first.")] = "0",
    as_json: Json = False,
) -> None:
    """Removes images that nothing uses. What stopped sandboxes left stays."""
    from sandmill.cli import image

    raise typer.Exit(carried(lambda: image.prune(keep, as_json=as_json)))
