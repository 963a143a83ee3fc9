"""The commands and their options. Each command's body lives in its own module and is imported when the command runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from sandmill.cli import boxes, environments, images, nodes
from sandmill.cli.failures import carried, report_failure
from sandmill.errors import ConfigError

app = typer.Typer(
    name="sandmill",
    help="Agent reinforcement learning on your own machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(boxes.app, name="sandbox")
app.add_typer(images.app, name="image")
app.add_typer(environments.app, name="env")
app.add_typer(nodes.app, name="node")

RunFolder = Annotated[Path | None, typer.Option("--run", metavar="DIR", help="The run folder. Default: a new one under runs/.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Overrides a key, such as spec.parameters.steps=10.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"sandmill {version('sandmill')}")
        except PackageNotFoundError:
            typer.echo("sandmill, not installed (running from its source folder)")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Shows the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Shows the traceback of an error.")] = False,
) -> None:
    del version, debug


@app.command()
def train(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The manifest.")],
    resume: Annotated[bool, typer.Option("--resume", help="Goes on from the run folder's last checkpoint.")] = False,
    run: RunFolder = None,
    overrides: Set = None,
    as_json: Json = False,
    preview: Annotated[bool, typer.Option("--preview", help="Shows the resolved manifest and what would stop it; starts nothing.")] = False,
) -> None:
    """Trains as a manifest says, and writes a run folder with a report."""
    from sandmill.cli import train as command

    asked = command.Asked(file=file, resume=resume, folder=run, overrides=tuple(overrides or ()))
    raise typer.Exit(carried(lambda: command.preview(asked, as_json=as_json) if preview else command.run(asked, as_json=as_json)))


@app.command(name="eval")
def evaluate(
    target: Annotated[Path, typer.Argument(metavar="FILE.yaml|RUN", help="A manifest, or a run folder whose trained adapter is meant.")],
    split: Annotated[list[str] | None, typer.Option("--split", help="A split; may be repeated. Default: those of the manifest.")] = None,
    adapter: Annotated[Path | None, typer.Option("--adapter", metavar="DIR", help="A LoRA adapter to evaluate.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, metavar="N", help="Attempts per task.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Only greedy decoding, one attempt per task.")] = False,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Evaluates a model, or a run's trained adapter, on held-out tasks."""
    from sandmill.cli import evaluate as command

    splits, changes = tuple(split or ()), tuple(overrides or ())
    asked = command.Asked(target=target, splits=splits, adapter=adapter, samples=samples, greedy=greedy, overrides=changes)
    raise typer.Exit(carried(lambda: command.run(asked, as_json=as_json)))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, finished or not.")],
    show: Annotated[bool, typer.Option("--open", help="Opens the page in a browser.")] = False,
    as_json: Json = False,
) -> None:
    """Recomputes a run's report.html and its summary from the folder."""
    from sandmill.cli import report as command

    raise typer.Exit(carried(lambda: command.run(run, show=show, as_json=as_json)))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Says what this machine can do, and how to mend what it cannot."""
    from sandmill.cli import doctor as command

    raise typer.Exit(carried(lambda: command.run(as_json=as_json)))


keys = typer.Typer(help="Keys of a server on this machine.", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(keys, name="key")
State = Annotated[Path | None, typer.Option("--state", metavar="DIR", help="The server's state folder.")]


@app.command()
def serve(
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Where to listen. Elsewhere than loopback, only with a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, metavar="N", help="The port; 0 takes a free one.")] = 8420,
    state: State = None,
    database: Annotated[
        str | None, typer.Option("--database", metavar="URL", help="PostgreSQL instead of SQLite in the state folder.")
    ] = None,
    prices: Annotated[Path | None, typer.Option("--prices", metavar="FILE.yaml", help="A price book.")] = None,
    certificate: Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE.pem", help="Serves https with this certificate.")] = None,
    certificate_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE.pem", help="The certificate's key.")] = None,
    max_running: Annotated[
        int, typer.Option("--max-running", min=1, metavar="N", help="Sandboxes of a project that may be up at once.")
    ] = 4096,
    max_local: Annotated[
        int, typer.Option("--max-local", min=0, metavar="N", help="Sandboxes that this machine itself may hold; the others go to nodes.")
    ] = 10_000,
    no_local: Annotated[bool, typer.Option("--no-local", help="No sandbox on this machine, only on nodes: --max-local 0.")] = False,
    lease: Annotated[
        str, typer.Option("--node-lease", metavar="TIME", help="A node that cannot reach this server for so long ends its sandboxes.")
    ] = "20s",
    room_wait: Annotated[str, typer.Option("--room-wait", metavar="TIME", help="How long a sandbox may wait for a place.")] = "30s",
    as_json: Json = False,
) -> None:
    """Serves sandboxes over HTTP, until it is stopped."""
    from sandmill.cli import serving

    def start() -> int:
        lease_s, wait_s = nodes.lease_of(lease), nodes.wait_of(room_wait)
        local = 0 if no_local else max_local
        asked = serving.Asked(host, port, state, database, prices, certificate, certificate_key, max_running, local, lease_s, wait_s)
        return serving.serve(asked, as_json=as_json)

    raise typer.Exit(carried(start))


@keys.command(name="new")
def new_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is; an earlier one of that name ends.")],
    project: Annotated[list[str] | None, typer.Option("--project", metavar="NAME", help="Only this project; may be repeated.")] = None,
    role: Annotated[str, typer.Option("--role", metavar="user|node", help="node: for `sandmill node join`, and nothing else.")] = "user",
    state: State = None,
    as_json: Json = False,
) -> None:
    """Makes a key and shows it once."""
    from sandmill.cli import serving

    raise typer.Exit(carried(lambda: serving.new_key(name, tuple(project or ()), role, state, as_json=as_json)))


@keys.command(name="ls")
def list_keys(state: State = None, as_json: Json = False) -> None:
    """Lists the keys' names and projects, never the keys."""
    from sandmill.cli import serving

    raise typer.Exit(carried(lambda: serving.list_keys(state, as_json=as_json)))


@keys.command(name="rm")
def remove_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key ends.")], state: State = None, as_json: Json = False
) -> None:
    """Ends a key, at once."""
    from sandmill.cli import serving

    raise typer.Exit(carried(lambda: serving.remove_key(name, state, as_json=as_json)))


def run(arguments: list[str] | None = None) -> int:
    """Runs one command line and returns its exit code. Every failure ends as one sentence on stderr."""
    words = sys.argv[1:] if arguments is None else arguments
    own = words[: words.index("--")] if "--" in words else words
    debug, as_json = "--debug" in own, "--json" in own
    own = [word for word in own if word != "--debug"]
    if not debug:
        _quiet_libraries()
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)
        result: Any = app(own + words[len(own) + debug :] if debug else words, prog_name="sandmill", standalone_mode=False)
        sys.stdout.flush()
    except typer.Abort:
        return report_failure(KeyboardInterrupt(), debug=debug, as_json=as_json)
    except BaseException as error:  # noqa: BLE001 - this is the one place that turns exceptions into sentences
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            return error.code if isinstance(error.code, int) else 1
        if isinstance(error, SystemExit) and error.__context__ is not None:  # the command-line library turns EPIPE into an exit of 1
            error = error.__context__
        if hasattr(error, "format_message"):
            return _usage(error, debug=debug, as_json=as_json)
        return report_failure(error, debug=debug, as_json=as_json)
    return result if isinstance(result, int) else 0


def _quiet_libraries() -> None:
    """Progress bars and deprecation notes of libraries would tear the live display and mix into logs; `--debug` keeps them."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")


def _usage(error: BaseException, *, debug: bool, as_json: bool) -> int:
    """A command line that makes no sense is a ConfigError like any other, with the way to the help."""
    said = getattr(error, "format_message", lambda: str(error))().rstrip()
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(said + "\n")
        return 2
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "sandmill"
    return report_failure(ConfigError(f"{said.rstrip('.')}; see {path} --help"), debug=debug, as_json=as_json)
