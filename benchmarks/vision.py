"""Image classifiers on real data: OCNOpt as it comes against SGD with momentum, Adam and AdamW over grids.

    python benchmarks/vision.py --data FOLDER --tasks cifar10-cnn,fmnist-fcn --jobs 4 --out vision.jsonl
    python benchmarks/vision.py --report vision.jsonl

cifar10-cnn: the paper's network of four convolutions and two fully-connected layers. fmnist-fcn: four hidden
layers of 256. FOLDER, or OCNOPT_DATA, holds the official archives, whole or in part; nothing is augmented.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from _images import Images, cifar10, fashion_mnist
from _networks import cnn, fcn
from _report import Metric, report
from _runs import (
    Family,
    Record,
    Run,
    add_optimizer_arguments,
    add_run_arguments,
    execute,
    load,
    parse_names,
    plan,
    wanted,
)
from _training import (
    StepClock,
    build_optimizer,
    curve,
    environment,
    lr_factor,
    ocnopt_defaults,
    ocnopt_learning_rates,
    peak_memory_mb,
    set_lr,
)
from torch import Tensor, nn

ACCURACY = Metric("test_accuracy", "test accuracy, %", lower_is_better=False, relative=False, digits=1)
TRAIN_LOSS = Metric("train_loss", "training loss at the end, nats")


class Task(NamedTuple):
    data: Callable[[Path], Images]
    network: Callable[[], nn.Module]


TASKS = {
    "cifar10-cnn": Task(cifar10, lambda: cnn(3, 32)),
    "fmnist-fcn": Task(fashion_mnist, lambda: fcn([28 * 28, 256, 256, 256, 256, 10], nn.ReLU)),
}


@lru_cache(maxsize=len(TASKS))
def images_on(device: str, task: str, root: str, train_size: int | None) -> Images:
    """The data of a task on the device, once for each worker."""
    return TASKS[task].data(Path(root)).first(train_size).to(device)


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy in per cent."""
    model.eval()
    logits = torch.cat([model(part) for part in x.split(1000)])
    return F.cross_entropy(logits, y).item(), 100 * (logits.argmax(1) == y).float().mean().item()


def train(run: Run, root: str) -> Record:
    """Train one network. Seed for seed, every optimizer sees the same initial weights and batches."""
    s = run.settings
    device = torch.device(s["device"])
    data = images_on(s["device"], run.task, root, s["train_size"])
    torch.manual_seed(run.seed)
    model = TASKS[run.task].network().to(device)
    optimizer = build_optimizer(run.optimizer, model, run.lr, run.options)
    order = torch.Generator(device).manual_seed(run.seed)
    batches = len(data.train_x) // s["batch"]
    if batches == 0:
        raise ValueError(f"batch must be at most the {len(data.train_x)} training images, got {s['batch']}")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    losses, clock = [], StepClock(device)
    for step in range(batches * s["epochs"]):
        set_lr(optimizer, run.lr * lr_factor(step, batches * s["epochs"], s["warmup"], s["cosine"]))
        if step % batches == 0:
            shuffled = torch.randperm(len(data.train_x), generator=order, device=device)
        rows = shuffled.narrow(0, step % batches * s["batch"], s["batch"])
        loss = F.cross_entropy(model(data.train_x[rows]), data.train_y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        clock.tick()
    return {
        "train_loss": evaluate(model, data.train_x, data.train_y)[0],
        "test_accuracy": evaluate(model, data.test_x, data.test_y)[1],
        "ms_per_step": clock.median_ms(),
        "train_curve": curve(losses),
        "train_images": len(data.train_x),
        "peak_mb": peak_memory_mb(device),
        **environment(device),
    }


def families(arguments: argparse.Namespace) -> dict[str, Family]:
    adaptive = (3e-4, 1e-3, 3e-3, 1e-2)
    known = {
        "sgd": Family((1e-3, 1e-2, 3e-2, 1e-1, 3e-1), {"momentum": 0.9}),
        "adam": Family(adaptive),
        "adamw": Family(adaptive),
    }
    if "ocnopt" in wanted(arguments):
        known["ocnopt"] = Family(ocnopt_learning_rates(), ocnopt_defaults())
    return known


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=parse_names, default=tuple(TASKS), help=f"of {', '.join(TASKS)}")
    add_optimizer_arguments(parser, "ocnopt,sgd,adam,adamw")
    add_run_arguments(parser, "0,1,2", "vision.jsonl")
    parser.add_argument("--data", default=os.environ.get("OCNOPT_DATA"), help="folder of the data sets")
    parser.add_argument("--train-size", type=int, help="use only the first so many training images")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--warmup", type=int, default=0, help="warm-up steps, all optimizers")
    parser.add_argument("--cosine", action="store_true", help="decay the learning rate to a tenth, all optimizers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.tasks) - set(TASKS):
        parser.error(f"--tasks knows {', '.join(TASKS)}, not {', '.join(sorted(unknown))}")
    if arguments.data is None and arguments.report is None:
        parser.error("the folder of the data sets is missing: give --data or set OCNOPT_DATA")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    unfinished = 0
    if not arguments.report:
        shared = ("train_size", "epochs", "batch", "warmup", "cosine", "device")
        settings = {name: getattr(arguments, name) for name in shared}
        runs = plan(arguments, arguments.tasks, families(arguments), settings)
        training = partial(train, root=arguments.data)
        unfinished = execute(runs, training, arguments.out, arguments.jobs, arguments.budget)
    print(report(load(arguments.report or arguments.out), [ACCURACY, TRAIN_LOSS], ACCURACY))
    return int(unfinished > 0)


if __name__ == "__main__":
    sys.exit(main())
