"""Train one network and write down how it goes. The loop is :meth:`Trainer.train_epoch`; copy it if you like."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ocnopt import OCNOpt
from ocnopt.baselines import BatchOptimizer
from ocnopt.games import Game
from ocnopt.lab import data, models
from ocnopt.lab.config import RunConfig
from ocnopt.lab.optimizers import AnyOptimizer
from ocnopt.lab.runs import Record
from ocnopt.lab.schema import ConfigError, naming_key
from ocnopt.lab.tasks import CLASSIFICATION, TASKS, Task, loss_of
from ocnopt.lab.world import World
from ocnopt.ode import NeuralODE, SolverError

__all__ = ["Journal", "Trainer", "evaluate", "loss_of", "take_step"]

#: samples per forward pass of an evaluation
_EVALUATION = 1024

#: no run comes back from a loss that is so many times that of guessing, and a solver may take minutes for a step there
_HOPELESS = 1e3


class Journal(Protocol):
    """Where a trainer writes."""

    def write(self, record: Record) -> None: ...

    def save(self, state: dict[str, Any]) -> None: ...


class Trainer:
    """The network, the optimizer and the batches of one run, and the loop over them.

    Args:
        config: what to do.
        dataset: what to learn; it is moved to the device.
        journal: is given every record and every checkpoint.
        device: where the network lives.
        world: the processes that train together.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: data.Dataset,
        journal: Journal,
        *,
        device: torch.device | str = "cpu",
        world: World | None = None,
    ) -> None:
        self.config, self.journal, self.world = config, journal, world or World()
        if self.world.size > 1 and (why := config.optimizer.why_alone()):
            raise ConfigError(f"optimizer: {why}, so it trains in one process and not under torchrun")
        seed = config.training.seed
        torch.manual_seed(seed + self.world.rank)
        self.data, self.task = dataset.to(device), TASKS[dataset.task]
        self.network = _build_network(config, dataset).to(device)
        self.model = self.world.wrap(self.network)  # what is called; the same thing unless under torchrun
        with naming_key(f"optimizer {config.label}: "):
            self.optimizer = config.optimizer.build(self.network)
        if isinstance(self.optimizer, OCNOpt) and self.world.size > 1:
            self.optimizer.attach(self.model)  # this tells which processes train it together
        self.learn_times()
        if isinstance(self.optimizer, BatchOptimizer) and self.task is not CLASSIFICATION:
            raise ConfigError(f"optimizer {config.label} minimises a cross entropy, and {dataset.name} has no classes")
        self.is_adaptive = config.optimizer.options.get("alignment") == "adaptive"
        if self.is_adaptive and self.data.validation is None:
            raise ConfigError(
                "data.validation must be > 0 with optimizer.alignment = 'adaptive': its reward is the accuracy on "
                "samples held out of the training set"
            )
        with naming_key("data."):
            self.batches = data.Batches(
                self.data.train,
                config.data.batch_size,
                seed=seed,
                drop_last=config.data.drop_last,
                rank=self.world.rank,
                world_size=self.world.size,
            )
        self.steps = config.training.epochs * len(self.batches)
        self.step = 0
        self.watch = Stopwatch(torch.device(device))
        self.epoch_loss = MeanLoss(torch.device(device))
        self.last: Record = {}  # the record of the last complete epoch

    def learn_times(self) -> None:
        """Let the final times that are learned follow the steps of the optimizer; OCNOpt has seen to its own."""
        blocks = [m for m in self.network.modules() if isinstance(m, NeuralODE) and m.horizon is not None]
        if not blocks:
            return
        if self.world.size > 1:
            raise ConfigError("network.learn_time: T follows the samples of one process, so not under torchrun")
        if not isinstance(self.optimizer, Optimizer) or isinstance(self.optimizer, BatchOptimizer):
            raise ConfigError(
                f"network.learn_time must be 'off' with {self.config.optimizer.name}: T follows one backward pass and "
                "one step a batch"
            )
        for block in blocks:
            assert block.horizon is not None
            if not block.horizon.followed:
                block.horizon.follow(self.optimizer, list(block.field.parameters()))

    def train(self) -> Record:
        """Do what is left of the training, and return the ``final`` record."""
        while self.batches.epoch < self.config.training.epochs and not self.is_hopeless():
            try:
                self.train_epoch()
                self.finish_epoch()
            except SolverError as error:
                if self.world.size > 1:  # the other processes would wait for ever
                    raise
                self.give_up(error)
        kept = ("test_accuracy", "test_loss", "train_loss", "seconds")
        final = {key: self.last[key] for key in kept if key in self.last}
        final = {"kind": "final", **final, "diverged": self.has_diverged()}
        self.journal.write(final)
        return final

    def train_epoch(self) -> None:
        """Train to the end of the current epoch."""
        self.model.train()
        with self.watch:
            for batch in self.batches:
                self.set_learning_rate()
                loss = take_step(self.model, self.optimizer, batch.x, batch.y, self.task)
                self.step += 1
                if self.is_adaptive and self.step % self.config.training.reward_every == 0:
                    self.reward()
                self.epoch_loss.add(loss, len(batch))
                if self.step % self.config.training.log_every == 0:
                    self.log(loss)
                if self.checkpoint_is_due():
                    self.save()

    def finish_epoch(self) -> None:
        """Evaluate, record, save."""
        self.last = self.evaluate()
        self.journal.write(self.last)
        if layers := self.layers():
            self.journal.write({"kind": "layers", "step": self.step, "layers": layers})
        if self.is_adaptive:
            self.journal.write({"kind": "alignment", "step": self.step, **self.alignment()})
        self.epoch_loss.reset()
        self.save()

    def give_up(self, error: SolverError) -> None:
        """The network has no answers any more, and an answer that is not there is not right."""
        warnings.warn(f"{error}; the run ends here, after {self.step} steps", stacklevel=2)
        parts = ["test", *(["validation"] if self.data.validation is not None else [])]
        record: Record = {"kind": "epoch", "epoch": self.batches.epoch, "step": self.step, "train_loss": math.nan}
        for part in parts:
            record[f"{part}_loss"] = math.nan
            if self.task.hits is not None:
                record[f"{part}_accuracy"] = 0.0
        self.last = {**record, "seconds": self.watch.seconds}
        self.journal.write(self.last)
        self.save()

    def reward(self) -> None:
        """Tell the adaptive alignment what its choice was worth: the accuracy on the next batch of held-out samples."""
        split, size, game = self.data.validation, self.config.data.batch_size, self.game()
        assert split is not None
        first = self.step // self.config.training.reward_every * size  # nothing to remember in a checkpoint
        rows = torch.arange(first, first + min(size, len(split)), device=split.y.device) % len(split)
        accuracy = evaluate(self.network, split.take(rows), task=self.task)[1]
        assert accuracy is not None  # flows have no branches
        game.reward(accuracy)
        self.model.train()

    def game(self) -> Game:
        """The game of an adaptive alignment, once the first step has been taken."""
        assert isinstance(self.optimizer, OCNOpt)
        if not any(bandit.arms > 1 for bandit in self.optimizer.game.bandits.values()):
            raise ConfigError(
                "optimizer.alignment: 'adaptive' has nothing to choose: it needs feedback = 'nonlinear' (or bellman = "
                "'paper') and a network with a branch that can act later"
            )
        return self.optimizer.game

    def set_learning_rate(self) -> None:
        lr = self.config.optimizer.lr
        if self.config.training.schedule == "cosine":
            lr *= (1 + math.cos(math.pi * self.step / self.steps)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def log(self, loss: Tensor) -> None:
        mean = float(self.world.sum(loss)) / self.world.size
        self.journal.write(
            {
                "kind": "step",
                "step": self.step,
                "epoch": (self.step - 1) // len(self.batches),
                "loss": mean,
                "lr": self.optimizer.param_groups[0]["lr"],
                "seconds": self.watch.seconds,
                **self.horizons(),
            }
        )

    def horizons(self) -> Record:
        """T of every Neural ODE that learns it."""
        blocks = {name: m for name, m in self.network.named_modules() if isinstance(m, NeuralODE) and m.horizon}
        return {"horizons": {name: block.t[-1] - block.t[0] for name, block in blocks.items()}} if blocks else {}

    def evaluate(self) -> Record:
        """The ``epoch`` record of the epoch that has just ended."""
        record: Record = {
            "kind": "epoch",
            "epoch": self.batches.epoch,
            "step": self.step,
            "train_loss": self.epoch_loss.mean(self.world),
        }
        self.world.agree_on(self.network.buffers())  # running statistics are those of each process's own samples
        for part, split in (("test", self.data.test), ("validation", self.data.validation)):
            if split is not None:
                record[f"{part}_loss"], accuracy = evaluate(self.network, split, self.world, self.task)
                if accuracy is not None:
                    record[f"{part}_accuracy"] = accuracy
        return {**record, "seconds": self.watch.seconds}

    def layers(self) -> list[Record]:
        """What the feedback did in the last step; empty for other optimizers and with the feedback off."""
        if not isinstance(self.optimizer, OCNOpt):
            return []
        return [asdict(layer) for layer in self.optimizer.diagnostics.layers]

    def alignment(self) -> Record:
        """How many rewards the adaptive alignment has had, and the chance that each choice has now."""
        (bandit,) = self.game().bandits.values()  # a configuration has one rule for all branches
        chances = {f"late by {arm}": chance for arm, chance in enumerate(bandit.probabilities)}
        return {"rounds": bandit.rounds, **chances}

    def is_hopeless(self) -> bool:
        """Whether what the network computes has nothing to do with the data any more."""
        return bool(self.last) and not self.last["test_loss"] <= _HOPELESS * self.task.guessing(self.data)  # also NaN

    def has_diverged(self) -> bool:
        """Whether training ended with a loss that is twice that of guessing, or none at all."""
        guessing = self.task.guessing(self.data)
        return self.is_hopeless() or not self.last["train_loss"] <= 2 * guessing  # not ≤: also when it is NaN

    # --- checkpoints ---

    def checkpoint_is_due(self) -> bool:
        every = self.config.training.checkpoint_every
        ends_epoch = self.batches.position == 0  # finish_epoch saves, once the epoch is on record
        return every > 0 and self.step % every == 0 and not ends_epoch

    def save(self) -> None:
        with self.watch.paused():
            self.journal.save(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        device = self.watch.device
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "batches": self.batches.state_dict(),
            "step": self.step,
            "epoch_loss": self.epoch_loss.sums(self.world),
            "seconds": self.watch.seconds,
            "last": self.last,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.load_state_dict(state["batches"])
        self.step, self.last, self.watch.seconds = state["step"], state["last"], state["seconds"]
        if self.world.is_main:  # the sums are over all processes
            self.epoch_loss.load(state["epoch_loss"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and self.watch.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], self.watch.device)


def take_step(model: nn.Module, optimizer: AnyOptimizer, x: Tensor, y: Tensor, task: Task = CLASSIFICATION) -> Tensor:
    """One step on one batch; returns the loss before it."""
    if isinstance(optimizer, BatchOptimizer):  # E-MSA and DDP run the network themselves
        return optimizer.step(x, y)
    optimizer.zero_grad()
    loss = task.loss(model(x), y, "mean")
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(
    network: nn.Module, split: data.Split, world: World | None = None, task: Task = CLASSIFICATION
) -> tuple[float, float | None]:
    """Mean loss and, where there is one, accuracy over a split (of text: its characters), which the processes share."""
    world = world or World()
    network.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=split.y.device)
    for rows in torch.arange(len(split), device=split.y.device).split(_EVALUATION)[world.rank :: world.size]:
        x, y = split.batch(rows)
        output = network(x)
        sums[0] += task.loss(output, y, "sum")
        if task.hits is not None:
            sums[1] += task.hits(output, y)
    loss, correct = (world.sum(sums) / split.y.numel()).tolist()
    return loss, None if task.hits is None else correct


def _build_network(config: RunConfig, dataset: data.Dataset) -> nn.Module:
    name, options = config.network.name, config.network.options
    with naming_key("network."):
        return models.build(
            name,
            dataset.input_shape,
            len(dataset.classes),
            seed=config.training.seed,
            dataset=dataset.name,
            **options,
        )


class MeanLoss:
    """The mean of the losses of an epoch, added up on the device: nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # of the losses, of the samples

    def add(self, loss: Tensor, samples: int) -> None:
        self._sums[0] += loss.double() * samples
        self._sums[1] += samples

    def sums(self, world: World) -> Tensor:
        return world.sum(self._sums)

    def mean(self, world: World) -> float:
        total, samples = self.sums(world).tolist()
        return float(total / samples)

    def reset(self) -> None:
        self._sums.zero_()

    def load(self, sums: Tensor) -> None:
        self._sums.copy_(sums)


class Stopwatch:
    """Seconds spent inside ``with``, without those inside ``paused()``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else perf_counter() - self._since)

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        self._before = seconds

    def __enter__(self) -> None:
        self._since = perf_counter()

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":  # the work that was asked for is part of the time
            torch.cuda.synchronize(self.device)
        self._before, self._since = self.seconds, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        running = self._since is not None
        if running:
            self.__exit__()
        yield
        if running:
            self.__enter__()
