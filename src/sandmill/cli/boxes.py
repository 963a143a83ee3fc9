"""`sandmill sandbox ...`: the options of its four commands; their bodies are imported when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from sandmill.cli.failures import carried

app = typer.Typer(
    help="Runs commands in isolated sandboxes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Cpu = Annotated[str, typer.Option("--cpu", metavar="CORES", help='Cores, such as "1" or "500m".')]
Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Memory limit.")]
Disk = Annotated[str, typer.Option("--disk", metavar="SIZE", help="Limit of everything it writes.")]
Env = Annotated[list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="An environment variable; may be repeated.")]
Workdir = Annotated[str | None, typer.Option("--workdir", metavar="PATH", help="Where the command starts. Default: /workspace.")]
Image = Annotated[str | None, typer.Option("--image", metavar="IMAGE", help="A name, a digest, oci:PATH or docker-archive:PATH.")]
Files = Annotated[list[str] | None, typer.Option("--file", metavar="HOST:BOX", help="Copies a file in; may be repeated.")]
Network = Annotated[str | None, typer.Option("--network", metavar="none|open", help="What it may reach. Default: none.")]
Allow = Annotated[list[str] | None, typer.Option("--allow", metavar="HOST", help='A host it may reach, or "*.suffix"; may be repeated.')]
Presets = Annotated[
    list[str] | None, typer.Option("--preset", metavar="NAME", help="A named list of hosts, such as pypi; may be repeated.")
]
Save = Annotated[str | None, typer.Option("--save", metavar="NAME", help="Keeps its files as an image once the command has ended.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]
User = Annotated[str | None, typer.Option("--user", metavar="NAME", help="Who runs it: user (default) or root of the sandbox.")]


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="The command and its arguments.")],
    cpu: Cpu = "1",
    memory: Memory = "2Gi",
    disk: Disk = "1Gi",
    timeout: Annotated[str | None, typer.Option("--timeout", metavar="TIME", help="Kills the command after so long.")] = None,
    env: Env = None,
    workdir: Workdir = None,
    image: Image = None,
    network: Network = None,
    allow: Allow = None,
    preset: Presets = None,
    file: Files = None,
    user: User = None,
    stdin: Annotated[bool, typer.Option("-i", "--stdin", help="Passes standard input on; by default the command has none.")] = False,
    save: Save = None,
    as_json: Annotated[bool, typer.Option("--json", help="How it ended and what it wrote, as JSON once it has ended.")] = False,
) -> None:
    """Runs one command in a fresh sandbox; its output and exit code are this command's."""
    from sandmill.cli import box

    wanted = box.Wanted.of(
        cpu=cpu,
        memory=memory,
        disk=disk,
        env=env or [],
        workdir=workdir,
        image=image,
        network=network,
        allow=allow or [],
        presets=preset or [],
        files=file or [],
        user=user,
    )
    raise typer.Exit(carried(lambda: box.run(command, wanted, timeout=timeout, interactive=stdin, save=save, as_json=as_json)))


@app.command()
def shell(
    cpu: Cpu = "1",
    memory: Memory = "2Gi",
    disk: Disk = "1Gi",
    env: Env = None,
    workdir: Workdir = None,
    image: Image = None,
    network: Network = None,
    allow: Allow = None,
    preset: Presets = None,
    file: Files = None,
    user: User = None,
    save: Save = None,
) -> None:
    """Opens an interactive shell in a fresh sandbox."""
    from sandmill.cli import box_shell
    from sandmill.cli.box import Wanted

    wanted = Wanted.of(
        cpu=cpu,
        memory=memory,
        disk=disk,
        env=env or [],
        workdir=workdir,
        image=image,
        network=network,
        allow=allow or [],
        presets=preset or [],
        files=file or [],
        user=user,
    )
    raise typer.Exit(carried(lambda: box_shell.shell(wanted, save=save)))


@app.command(name="ls")
def list_(as_json: Json = False) -> None:
    """Lists live sandboxes: this machine's, or those of the server at SANDMILL_API_URL."""
    from sandmill.cli import box

    raise typer.Exit(carried(lambda: box.list_boxes(as_json=as_json)))


@app.command()
def stop(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Which sandboxes.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    as_json: Json = False,
) -> None:
    """Stops sandboxes."""
    from sandmill.cli import box

    raise typer.Exit(carried(lambda: box.stop(names or [], every=every, as_json=as_json)))
