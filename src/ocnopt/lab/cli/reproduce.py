"""``ocnopt reproduce``: the experiments of the paper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from ocnopt.lab.cli import shared
from ocnopt.lab.pool import default_workers
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.world import find_device

if TYPE_CHECKING:
    from ocnopt.lab.reproduce.bench import Count, Tell


class Experiment(StrEnum):
    TABLE1 = "table1"
    TABLE2 = "table2"
    SENSITIVITY = "sensitivity"
    HORIZON = "horizon"
    CONVERGENCE = "convergence"
    ROBUST = "robust"
    ABLATION = "ablation"
    COMPLEXITY = "complexity"
    FEEDBACK = "feedback"
    BANDIT = "bandit"
    MULTIPLAYER = "multiplayer"


#: those with a differential equation in them
CONTINUOUS = (Experiment.TABLE2, Experiment.SENSITIVITY, Experiment.HORIZON, Experiment.CONVERGENCE)


class Solver(StrEnum):
    DOPRI5 = "dopri5"
    IMPLICIT_ADAMS = "implicit_adams"


class Scale(StrEnum):
    QUICK = "quick"
    FULL = "full"


HELP = shared.help_text(
    """Repeat an experiment of the paper, with its numbers beside ours.

    table1: test accuracy of all optimizers. robust: learning rates that are too large for SGD. ablation: feedback on
    and off, for every baseline. complexity: run time and memory against batch size. feedback: what the policies of the
    layers look at, as images. bandit: alignment of skip connections. multiplayer: fictitious players.

    Of Neural ODEs: table2: images, time series and densities. sensitivity: learning rates. horizon: final times that
    are learned. convergence: against wall-clock time. They take --solver.

    Writes a folder with a JSON file, a Markdown page and figures. At the quick scale it takes minutes on subsets
    of the data, and for few epochs; the page says which. The convolutional rows of table1 want a GPU even then, or
    fewer epochs and samples. Runs that are in the folder already are not repeated.""",
    "ocnopt reproduce table1 --only fcn-wine --only fcn-digits",
    "ocnopt reproduce table1 --only cnn-svhn --train-limit 2000 --epochs 2",
    "ocnopt reproduce robust --only DIGITS",
    "ocnopt reproduce ablation",
    "ocnopt reproduce complexity",
    "ocnopt reproduce feedback --data-dir /data",
    "ocnopt reproduce table2 --only Circle --solver implicit_adams",
    "ocnopt reproduce bandit",
    "ocnopt reproduce multiplayer",
    "ocnopt reproduce table1 --scale full --device cuda",
)


def register(app: typer.Typer) -> None:
    app.command("reproduce", help=HELP)(command)


def command(
    experiment: Annotated[Experiment, typer.Argument(help="Which one.")],
    scale: Annotated[Scale, typer.Option(help="Minutes, or the paper's.")] = Scale.QUICK,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only this dataset or network-dataset; may be repeated.", show_default="all of the scale"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first of the seeds.")] = 0,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs.", show_default="those of the scale")] = None,
    train_limit: Annotated[
        int | None, typer.Option(min=1, help="Training samples.", show_default="those of the scale")
    ] = None,
    solver: Annotated[
        Solver | None, typer.Option(help="Of Neural ODEs: Runge-Kutta or Adams-Moulton.", show_default="dopri5")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for everything.", show_default="runs/reproduce-EXPERIMENT-SCALE")
    ] = None,
    workers: shared.Workers = None,
    device: shared.Device = "auto",
    data_dir: shared.DataDir = None,
    download: shared.Download = True,
    json_output: shared.Json = False,
) -> None:
    from ocnopt.lab.reproduce import Bench, reproduce

    folder = out or Path("runs") / f"reproduce-{experiment.value}-{scale.value}"
    with shared.plain_errors():
        place = find_device(device)
        if solver is not None and experiment not in CONTINUOUS:
            raise ConfigError(f"--solver is for experiments on Neural ODEs: {', '.join(CONTINUOUS)}")
        bench = Bench(
            folder=folder,
            scale="quick" if scale is Scale.QUICK else "full",
            workers=workers or default_workers(place),
            device=str(place),
            data_dir=None if data_dir is None else str(data_dir),
            download=download,
            seed=seed,
            epochs=epochs,
            train_limit=train_limit,
            solver=(solver or Solver.DOPRI5).value,
            only=tuple(only or ()),
        )
        with _progress(quiet=json_output) as (tell, count):
            finding = reproduce(experiment.value, replace(bench, tell=tell, count=count))
    if json_output:
        shared.print_json({"scale": scale.value, **finding.document(), "folder": str(folder)})
        return
    shared.results_console().print(Markdown(finding.markdown().partition("\n![")[0]))
    for file in (f"{experiment.value}.md", f"{experiment.value}.json", *finding.figures):
        typer.echo(str(folder / file))


@contextmanager
def _progress(*, quiet: bool) -> Iterator[tuple[Tell, Count]]:
    """A line for everything that is done, and below them a bar where there is a terminal to show it."""
    console = shared.progress_console
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        bar = progress.add_task("", total=None)

        def tell(line: str) -> None:
            if not quiet:
                console.print(line, markup=False, highlight=False)

        def count(what: str, done: float, total: int) -> None:
            progress.update(bar, description=f"{what}: {int(done)} of {total}", completed=done, total=total)

        yield tell, count
