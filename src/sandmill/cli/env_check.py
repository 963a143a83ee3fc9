"""`sandmill env check` and `audit`: their options; their bodies are imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sandmill.cli.failures import carried


def check(
    target: Annotated[str, typer.Argument(metavar="ENVIRONMENT|FILE.yaml", help="harbor:PATH, swebench:FILE, ..., or a manifest.")],
    task: Annotated[list[str] | None, typer.Option("--task", metavar="ID", help="Only this task; may be repeated.")] = None,
    times: Annotated[int, typer.Option("--times", min=1, metavar="N", help="How often solution and untouched state are tried.")] = 1,
    cheats: Annotated[bool, typer.Option("--cheats/--no-cheats", help="Tries cheats too.")] = True,
    option: Annotated[list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="An option of the environment.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")] = False,
) -> None:
    """Checks tasks: their reference solution must pass, the untouched state and every cheat must fail."""
    from sandmill.cli import env_checking

    asked = env_checking.Asked(target=target, tasks=tuple(task or ()), times=times, cheats=cheats, options=tuple(option or ()))
    raise typer.Exit(carried(lambda: env_checking.run(asked, as_json=as_json)))


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")] = False,
) -> None:
    """Lists a run's solved episodes whose commands named anything of the grader's."""
    from sandmill.cli import env_checking

    raise typer.Exit(carried(lambda: env_checking.print_audit(run, as_json=as_json)))
