"""``ocnopt train``: one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ocnopt.lab.cli import shared
from ocnopt.lab.config import RunConfig, read_run
from ocnopt.lab.runs import Record, RunFolder
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.settings import Settings
from ocnopt.lab.tables import data_notes
from ocnopt.lab.tasks import show_score
from ocnopt.lab.training import Listener, rehearse, train
from ocnopt.lab.world import World, find_device, join

Config = Annotated[str | None, typer.Argument(help="A TOML file, or the name of a recipe.", show_default=False)]
Dataset = Annotated[str | None, typer.Option(help="See `ocnopt data list`.", show_default=False)]
Network = Annotated[
    str | None, typer.Option(help="fcn, cnn, residual, resnet18, inception, vit or gpt.", show_default="fcn")
]
Epochs = Annotated[int | None, typer.Option(min=1, help="Passes over the training data.", show_default=False)]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples per step, over all processes together.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other key of the configuration; may be repeated."),
]

HELP = shared.help_text(
    """Train one network.

    What to do comes from a configuration, from options, or from both: options win. The run is written to one folder:
    configuration, metrics, checkpoint, environment. A run that was stopped, in whatever way, goes on with --resume as
    if it had not been. Under torchrun the processes share each batch.""",
    "ocnopt train --dataset DIGITS",
    "ocnopt train --dataset WINE --optimizer ocnopt:curvature=kronecker --lr 0.03",
    "ocnopt train --dataset MNIST --network cnn --epochs 5",
    "ocnopt train table1-fcn-wine --seed 3 --set network.width=16",
    "ocnopt train --resume runs/20250101-120000-DIGITS-OCNOpt",
    "torchrun --nproc-per-node 2 -m ocnopt.lab train --dataset DIGITS",
)


def register(app: typer.Typer) -> None:
    app.command("train", help=HELP)(command)


def command(
    config: Config = None,
    dataset: Dataset = None,
    network: Network = None,
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="NAME[:KEY=VALUE,...]", help="The optimizer and its options.", show_default="ocnopt"),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default=False)] = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    overrides: Set = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the initial weights and the order of the samples.", show_default="0")
    ] = None,
    device: shared.Device = "auto",
    data_dir: shared.DataDir = None,
    download: shared.Download = True,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="a new one in runs/")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder.", show_default=False)] = None,
    tensorboard: shared.TensorBoard = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; --resume keeps those of the run.")] = None,
    json_output: shared.Json = False,
) -> None:
    settings = Settings(config, dataset, network, optimizer, lr, epochs, batch_size, seed, tuple(overrides or ()))
    with shared.plain_errors():
        place = find_device(device)
        with join(place) as world:
            folder = _resumed(resume, out, settings) if resume is not None else None
            if folder is None:
                run = settings.run()
                rehearse(run, world=world, data_dir=data_dir, download=download)
                folder = _create(run, out, world)
            _set_threads(threads, folder, resume)
            run = read_run(folder.config_path)
            with _progress(run, shown=world.is_main and not json_output) as listen:
                final = train(
                    folder,
                    device=place,
                    world=world,
                    data_dir=data_dir,
                    download=download,
                    tensorboard=tensorboard,
                    listen=listen,
                )
            if world.is_main:
                _print(folder, run, final, json_output)


def _resumed(path: Path, out: Path | None, settings: Settings) -> RunFolder:
    if settings != Settings() or out is not None:
        raise ConfigError("--resume goes on with the run as it is: leave out what describes another one")
    folder = RunFolder(path)
    folder.config()  # says what is wrong if there is none
    return folder


def _create(run: RunConfig, out: Path | None, world: World) -> RunFolder:
    """The folder of the run, made by the main process alone."""
    path = world.agree(out or shared.default_folder(run.data.name, run.label))
    if world.is_main:
        RunFolder.create(path, run.table())
    world.agree(None)  # the configuration is there before anybody reads it
    return RunFolder(path)


def _set_threads(threads: int | None, folder: RunFolder, resume: Path | None) -> None:
    """Sums depend on the number of threads in their last bits: a run that goes on keeps its number."""
    if threads is None and resume is not None:
        threads = folder.environment().get("threads")
    if threads is not None:
        torch.set_num_threads(threads)


@contextmanager
def _progress(run: RunConfig, shown: bool) -> Iterator[Listener | None]:
    if not shown:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]} {task.fields[score]}"),
        TimeRemainingColumn(),
    )
    console = shared.progress_console
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{run.data.name} {run.label}", total=None, loss="", score="")

        def listen(record: Record) -> None:
            if record["kind"] == "begin":
                progress.update(task, total=record["steps"], completed=record["step"])
            elif record["kind"] == "step":
                progress.update(task, completed=record["step"], loss=f"loss {_number(record['loss'])}")
            elif record["kind"] == "epoch":
                progress.update(task, completed=record["step"], score=show_score(record))

        yield listen


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _print(folder: RunFolder, run: RunConfig, final: Record, json_output: bool) -> None:
    if json_output:
        data = folder.environment().get("data")
        shared.print_json({"run": folder.path, "config": run.table(), "data": data, "final": final})
        return
    typer.echo(
        f"{run.data.name}, {run.network.name}, {run.label}, lr {run.optimizer.lr:g}, seed {run.training.seed}: "
        f"{show_score(final)}, train loss {_number(final['train_loss'])}, "
        f"{final['seconds']:.1f} s of training{' (diverged)' if final['diverged'] else ''}"
    )
    for note in data_notes(folder):
        typer.echo(f"{run.data.name}: {note}")
    typer.echo(f"The run is in {folder.path}")
