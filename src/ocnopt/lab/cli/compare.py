"""``ocnopt compare``: several optimizers, seeds and learning rates side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ocnopt.lab.cli import shared
from ocnopt.lab.cli.train import BatchSize, Config, Dataset, Epochs, Network, Set
from ocnopt.lab.comparison import DEFAULT_OPTIMIZERS, contenders, create_runs, rehearse_all, vary
from ocnopt.lab.config import RunConfig
from ocnopt.lab.live import train_and_show
from ocnopt.lab.optimizers import OptimizerConfig
from ocnopt.lab.pool import Outcome, Setup, default_workers
from ocnopt.lab.recipes import read_recipe
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.settings import Settings, parse_optimizer
from ocnopt.lab.tables import draw, summarise
from ocnopt.lab.world import find_device, refuse_torchrun

HELP = shared.help_text(
    """Train the same network with several optimizers, learning rates and seeds, side by side.

    All start from the same weights and see the same batches, seed by seed. A table grows while they run; at the end it
    is printed, and written as an HTML report beside the runs. A recipe brings its own optimizers: that of its run and
    one for each of its grids, with what the grid fixes (to search the grids, see `ocnopt sweep`). Where several
    learning rates are compared, a tenth of the training samples is held out, and the report chooses by it.""",
    "ocnopt compare --dataset DIGITS --epochs 10 --seeds 3",
    "ocnopt compare --dataset WINE --optimizer ocnopt --optimizer adam --lr 1",
    "ocnopt compare --dataset WINE --optimizer ocnopt:rank=4 --lr 0.1 --lr 1",
    "ocnopt compare table1-fcn-wine --epochs 5 --seeds 2",
    "ocnopt compare --resume runs/20250101-120000-compare-WINE",
)


def register(app: typer.Typer) -> None:
    app.command("compare", help=HELP)(command)


def command(
    config: Config = None,
    dataset: Dataset = None,
    network: Network = None,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="An optimizer and its options; may be repeated.",
            show_default=f"those of the recipe, or {', '.join(DEFAULT_OPTIMIZERS)}",
        ),
    ] = None,
    lr: Annotated[
        list[float] | None, typer.Option(help="Learning rate; may be repeated.", show_default="each optimizer's own")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs for each optimizer and learning rate.")] = 3,
    seed: Annotated[int | None, typer.Option(min=0, help="The first of the seeds.", show_default="0")] = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    overrides: Set = None,
    device: shared.Device = "auto",
    data_dir: shared.DataDir = None,
    download: shared.Download = True,
    workers: shared.Workers = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs.", show_default="a new one in runs/")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the comparison in this folder.", show_default=False)
    ] = None,
    tensorboard: shared.TensorBoard = False,
    json_output: shared.Json = False,
) -> None:
    settings = Settings(config, dataset, network, None, None, epochs, batch_size, seed, tuple(overrides or ()))
    with shared.plain_errors():
        refuse_torchrun("compare")
        place = find_device(device)
        if resume is None:
            base, rates = settings.run(), lr or []
            configs = vary(base, _optimizers(base, settings, optimizer, rates), rates, seeds)
            rehearse_all(configs, data_dir, download)
            out = out or shared.default_folder("compare", configs[0].data.name)
            folders = create_runs(out, configs)
        elif settings == Settings() and out is None and not optimizer and not lr:
            out, folders = resume, shared.require_runs([resume])
        else:
            raise ConfigError("--resume goes on with the runs as they are: leave out what describes others")
        setup = Setup(str(place), data_dir, download, tensorboard)
        console = None if json_output else shared.progress_console
        outcomes = train_and_show(folders, setup, workers or default_workers(place), console)
        finish(out, outcomes, json_output)


def _optimizers(
    base: RunConfig, settings: Settings, named: list[str] | None, rates: list[float]
) -> list[OptimizerConfig]:
    if not named:
        return contenders(base, None if settings.config is None else read_recipe(settings.config), rates)
    if any(text.startswith("optimizer.") for text in settings.overrides):
        raise ConfigError("--set optimizer.KEY is for the optimizer of the recipe: write --optimizer NAME:KEY=VALUE")
    return [parse_optimizer(spec) for spec in named]


def finish(folder: Path, outcomes: list[Outcome], json_output: bool) -> None:
    """Print what came out, write the report, and exit with 1 if a run failed."""
    from ocnopt.lab.report import write_report

    folders = [outcome.folder for outcome in outcomes]
    failed = {str(outcome.folder.path): outcome.error for outcome in outcomes if outcome.error is not None}
    rows = summarise(folders)
    report = write_report(folders, folder / "report.html") if len(failed) < len(outcomes) else None
    if json_output:
        paths = [folder.path for folder in folders]
        document = {"rows": [row.as_json() for row in rows], "runs": paths, "failed": failed, "report": report}
        shared.print_json(document)
    else:
        shared.results_console().print(draw(rows))
        typer.echo(f"The runs are in {folder}")
        if report is not None:
            typer.echo(f"Report: {report}")
    for path, error in failed.items():
        shared.progress_console.print(f"{path} failed: {error}", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)
