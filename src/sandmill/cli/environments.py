"""`sandmill env ...`: the options of its commands; their bodies are imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sandmill.cli.failures import carried

app = typer.Typer(
    help="Task sets with their graders: one's own, and those of other formats.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Reference = Annotated[str, typer.Argument(metavar="REFERENCE", help="shell@1.0.0, FORMAT/WHAT@VERSION, FILE.py:OBJECT or MODULE:OBJECT.")]
Options = Annotated[list[str] | None, typer.Option("--option", "-o", metavar="KEY=VALUE", help="An option of it; may be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]
Grading = Annotated[
    Path | None, typer.Option("--grading", metavar="FILE", help="A manifest whose spec.grading its graders may use. Default: nothing.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Decides which tasks are held out.")]


@app.command(name="list")
def list_environments(as_json: Json = False) -> None:
    """Lists the formats, the built-in environments and what is installed."""
    from sandmill.cli import environment

    raise typer.Exit(carried(lambda: environment.list_environments(as_json=as_json)))


@app.command()
def add(
    reference: Reference,
    option: Options = None,
    grading: Grading = None,
    name: Annotated[str | None, typer.Option("--as", metavar="NAME@VERSION", help="A name for it with these options, for ever.")] = None,
    as_json: Json = False,
) -> None:
    """Installs an environment, loads it once and says what it is; with --as, manifests can name it."""
    from sandmill.cli import environment

    wanted = environment.Wanted.of(reference, option, grading=grading)
    raise typer.Exit(carried(lambda: environment.show(wanted, examples=0, name=name, as_json=as_json)))


@app.command()
def show(
    reference: Reference,
    option: Options = None,
    grading: Grading = None,
    seed: Seed = 42,
    examples: Annotated[int, typer.Option("--examples", min=0, max=50, metavar="N", help="Prompts to show.")] = 1,
    as_json: Json = False,
) -> None:
    """Says what an environment is, and shows some of its prompts. Installs it if need be."""
    from sandmill.cli import environment

    wanted = environment.Wanted.of(reference, option, grading=grading, seed=seed)
    raise typer.Exit(carried(lambda: environment.show(wanted, examples=examples, as_json=as_json)))


@app.command()
def check(
    reference: Reference,
    option: Options = None,
    grading: Grading = None,
    seed: Seed = 42,
    tasks: Annotated[
        int | None,
        typer.Option("--tasks", min=1, metavar="N", help="Of each split. Default: 8 of packages, all of folders and manifests."),
    ] = None,
    times: Annotated[int, typer.Option("--times", "-k", min=1, metavar="K", help="How often each is tried.")] = 2,
    task: Annotated[list[str] | None, typer.Option("--task", metavar="ID", help="Only this; may be repeated.")] = None,
    cheats: Annotated[bool, typer.Option("--cheats/--no-cheats", help="Tries cheats too.")] = True,
    as_json: Json = False,
) -> None:
    """Tries what must pass and what must not, of a REFERENCE or a manifest's environment: the reference solution, no work at all, and
    cheats; of questions, their own answer, silence and junk. What is found is kept by architecture, and training refuses what failed."""
    from sandmill.cli import env_checking

    asked = env_checking.Asked(
        target=reference,
        per_split=tasks,
        tasks=tuple(task or ()),
        times=times,
        cheats=cheats,
        options=tuple(option or ()),
        grading=grading,
        seed=seed,
    )
    raise typer.Exit(carried(lambda: env_checking.run(asked, as_json=as_json)))


@app.command()
def run(
    reference: Reference,
    answer: Annotated[str | None, typer.Option("--answer", metavar="TEXT", help="The answer to grade; - reads it from stdin.")] = None,
    task: Annotated[str | None, typer.Option("--task", metavar="ID", help="The task. Default: the first of the training split.")] = None,
    expected: Annotated[bool, typer.Option("--expected", help="Grades the environment's own answer.")] = False,
    option: Options = None,
    grading: Grading = None,
    seed: Seed = 42,
    as_json: Json = False,
) -> None:
    """Plays one task with a given answer and prints the verdict; without an answer, prints the prompt."""
    from sandmill.cli import environment

    wanted = environment.Wanted.of(reference, option, grading=grading, seed=seed)
    raise typer.Exit(carried(lambda: environment.run(wanted, task, answer, expected=expected, as_json=as_json)))


@app.command()
def rm(
    names: Annotated[list[str], typer.Argument(metavar="KEY|REFERENCE...", help="What is no longer wanted, as listed.")],
    as_json: Json = False,
) -> None:
    """Removes installed packages and frees their space."""
    from sandmill.cli import environment

    raise typer.Exit(carried(lambda: environment.remove(names, as_json=as_json)))


@app.command()
def prune(as_json: Json = False) -> None:
    """Removes every installed package that no live sandbox uses."""
    from sandmill.cli import environment

    raise typer.Exit(carried(lambda: environment.prune(as_json=as_json)))


@app.command()
def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder to make.")], as_json: Json = False) -> None:
    """Writes a small environment of one's own that works, to change."""
    from sandmill.cli import environment

    raise typer.Exit(carried(lambda: environment.init(folder, as_json=as_json)))


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: Json = False,
) -> None:
    """Lists a run's solved episodes whose commands named anything of the grader's."""
    from sandmill.cli import env_checking

    raise typer.Exit(carried(lambda: env_checking.print_audit(run, as_json=as_json)))
