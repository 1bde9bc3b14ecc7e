"""The trainer: the loop one would write by hand, repeatable, and continued as if it had never stopped."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.small import OPTIMIZERS, create, small_run, small_table, without_seconds
from torch import nn
from torch.nn.functional import cross_entropy

from ocnopt.lab import data, models
from ocnopt.lab.config import RunConfig
from ocnopt.lab.runs import Record, RunError, RunFolder
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.tensorboard import TensorBoard
from ocnopt.lab.trainer import Stopwatch, Trainer, evaluate
from ocnopt.lab.training import load_data, train
from ocnopt.lab.world import World, describe_environment


class Memory:
    """A journal that remembers."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.saved = 0

    def write(self, record: Record) -> None:
        self.records.append(record)

    def save(self, state: dict[str, Any]) -> None:
        self.saved += 1

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]


def run(config: RunConfig) -> tuple[Trainer, Memory]:
    memory = Memory()
    trainer = Trainer(config, load_data(config.data), memory)
    trainer.train()
    return trainer, memory


def by_hand(config: RunConfig) -> tuple[nn.Module, list[float]]:
    """Adam, in torch and nothing else; the losses of all steps."""
    dataset = data.load("WINE")
    net = models.build("fcn", (13,), 3, seed=config.training.seed, dataset="WINE", width=6, depth=3)
    adam = torch.optim.Adam(net.parameters(), lr=0.02)
    losses = []
    batches = data.Batches(dataset.train, 26, seed=config.training.seed)
    for _ in range(2):
        for x, y in batches:
            adam.zero_grad()
            loss = cross_entropy(net(x), y)
            loss.backward()
            adam.step()
            losses.append(loss.item())
    return net, losses


def test_the_trainer_does_what_one_would_write_by_hand() -> None:
    config = small_run({"name": "adam", "lr": 0.02}, seed=3)
    trainer, memory = run(config)
    net, losses = by_hand(config)
    for ours, theirs in zip(trainer.network.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    steps = memory.of("step")
    assert [r["loss"] for r in steps] == losses
    assert [r["step"] for r in steps] == list(range(1, 13))
    assert [r["epoch"] for r in steps] == [0] * 6 + [1] * 6
    test = data.load("WINE").test
    with torch.no_grad():
        output = net(test.x)
    last = memory.of("epoch")[-1]
    assert (last["epoch"], last["step"]) == (2, 12)
    assert last["test_accuracy"] == pytest.approx((output.argmax(1) == test.y).double().mean().item())
    assert last["test_loss"] == pytest.approx(cross_entropy(output.double(), test.y).item(), rel=1e-6)
    weights = [26, 26, 26, 26, 26, 12]  # the mean is over samples, not over batches
    mean = sum(w * loss for w, loss in zip(weights, losses[6:], strict=True)) / 142
    assert last["train_loss"] == pytest.approx(mean, rel=1e-6)
    assert memory.records[-1] == {
        "kind": "final",
        "test_accuracy": last["test_accuracy"],
        "test_loss": last["test_loss"],
        "train_loss": last["train_loss"],
        "seconds": last["seconds"],
        "diverged": False,
    }


@pytest.mark.parametrize("key", ["muon", "ocnopt-kronecker"])
def test_the_seed_decides_everything(key: str) -> None:
    torch.manual_seed(1)
    first = run(small_run(OPTIMIZERS[key], seed=5))[1]
    torch.manual_seed(2)
    second = run(small_run(OPTIMIZERS[key], seed=5))[1]
    other = run(small_run(OPTIMIZERS[key], seed=6))[1]
    assert without_seconds(first.records) == without_seconds(second.records)
    assert without_seconds(first.records) != without_seconds(other.records)


def test_seconds_grow() -> None:
    seconds = [record["seconds"] for record in run(small_run())[1].records]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < seconds[-1]


def test_the_cosine_schedule_ends_at_zero() -> None:
    rates = [r["lr"] for r in run(small_run({"name": "sgdm", "lr": 0.5}, schedule="cosine"))[1].of("step")]
    assert rates == pytest.approx([0.25 * (1 + math.cos(math.pi * i / 12)) for i in range(12)])
    constant = [r["lr"] for r in run(small_run({"name": "sgdm", "lr": 0.5}))[1].of("step")]
    assert constant == [0.5] * 12


def test_records_are_written_every_so_many_steps() -> None:
    memory = run(small_run(log_every=5))[1]
    assert [r["step"] for r in memory.of("step")] == [5, 10]


def test_ocnopt_says_what_its_layers_did() -> None:
    memory = run(small_run({"name": "ocnopt"}))[1]
    first, second = memory.of("layers")
    assert (first["step"], second["step"]) == (6, 12)
    keys = {"name", "stage", "trace", "w_min", "w_max", "s", "clamped", "projections"}
    assert all(set(layer) == keys for layer in first["layers"])
    assert [layer["name"] for layer in first["layers"]] == ["1", "3", "5"]
    assert all(0 <= layer["w_min"] <= layer["w_max"] <= 1 for layer in second["layers"])
    assert run(small_run({"name": "ocnopt", "feedback": "off"}))[1].of("layers") == []


def test_a_validation_part_is_evaluated_beside_the_test_part() -> None:
    table = small_run()
    config = replace(table, data=replace(table.data, validation=0.25))
    trainer, memory = run(config)
    assert trainer.data.validation is not None
    assert (len(trainer.data.train), len(trainer.data.validation)) == (106, 36)
    with torch.no_grad():
        right = trainer.network(trainer.data.validation.x).argmax(1) == trainer.data.validation.y
    assert memory.of("epoch")[-1]["validation_accuracy"] == pytest.approx(right.double().mean().item())


def test_processes_share_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, memory = run(small_run())
    monkeypatch.setattr("ocnopt.lab.trainer._EVALUATION", 7)
    monkeypatch.setattr(World, "sum", lambda self, numbers: numbers)
    parts = [evaluate(trainer.network, trainer.data.test, World(rank, 3)) for rank in range(3)]
    assert all(accuracy > 0 for _, accuracy in parts)
    loss, accuracy = (sum(values) for values in zip(*parts, strict=True))
    assert loss == pytest.approx(memory.of("epoch")[-1]["test_loss"])
    assert accuracy == pytest.approx(memory.of("epoch")[-1]["test_accuracy"])


def test_a_network_that_computes_nothing_any_more_ends_the_run() -> None:
    trainer, memory = run(small_run({"name": "sgdm", "lr": 1e38}, epochs=5))
    assert len(memory.of("epoch")) == 1
    assert memory.records[-1]["diverged"] is True
    assert trainer.batches.epoch == 1


def test_worse_than_guessing_counts_as_diverged() -> None:
    trainer, _ = run(small_run())
    for loss, diverged in ((2.1, False), (2.3, True), (float("nan"), True)):  # 2 ln 3 = 2.197
        trainer.last["train_loss"] = loss
        assert trainer.has_diverged() is diverged


def test_a_run_ends_where_its_loss_has_nothing_to_do_with_the_data() -> None:
    trainer, _ = run(small_run())
    for loss, hopeless in ((0.1, False), (1090.0, False), (1110.0, True), (float("nan"), True)):  # 1000 ln 3 = 1098.6
        trainer.last["test_loss"] = loss
        assert trainer.is_hopeless() is hopeless


def test_a_network_that_does_not_fit_is_refused_by_its_key() -> None:
    config = replace(small_run(), network=replace(small_run().network, name="cnn", options={}))
    with pytest.raises(ConfigError, match=r"^network\.input_shape must be"):
        run(config)


def test_who_needs_the_whole_batch_is_refused_among_several_processes() -> None:
    config = small_run({"name": "ekfac"})
    with pytest.raises(ConfigError, match=r"EKFAC .* not under torchrun"):
        Trainer(config, load_data(config.data), Memory(), world=World(0, 2))


def test_the_stopwatch_stands_still_while_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("ocnopt.lab.trainer.perf_counter", lambda: now)
    watch = Stopwatch(torch.device("cpu"))
    watch.seconds = 100.0  # of a run that goes on
    with watch:
        now = 1.0
        assert watch.seconds == 101
        with watch.paused():
            now = 3.0
            assert watch.seconds == 101
        now = 7.0
        assert watch.seconds == 105
    now = 15.0
    with watch.paused():
        now = 31.0
    assert watch.seconds == 105


# --- on disk ---


class Stop(Exception):
    """What happens in the middle of a run."""


def stop_at(step: int, kind: str = "step") -> Any:
    def listen(record: Record) -> None:
        if record["kind"] == kind and record["step"] == step:
            raise Stop

    return listen


@pytest.mark.parametrize("key", OPTIMIZERS)
def test_a_run_goes_on_as_if_it_had_not_stopped(key: str, tmp_path: Path) -> None:
    config = small_run(OPTIMIZERS[key], checkpoint_every=2, schedule="cosine")
    whole, parts = create(tmp_path / "whole", config), create(tmp_path / "parts", config)
    final = train(whole)
    # before the first checkpoint, inside the first epoch, at its end before it is saved, inside the second
    for moment in (stop_at(1), stop_at(5), stop_at(6, "epoch"), stop_at(9)):
        with pytest.raises(Stop):
            train(parts, listen=moment)
    again = train(parts)
    assert without_seconds(parts.metrics()) == without_seconds(whole.metrics())
    assert {**again, "seconds": 0} == {**final, "seconds": 0}
    ours, theirs = parts.load_checkpoint(), whole.load_checkpoint()
    assert ours is not None
    assert theirs is not None
    assert all(torch.equal(ours["network"][name], theirs["network"][name]) for name in theirs["network"])


def noisy(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """A network that draws random numbers and keeps running statistics."""
    n = math.prod(input_shape)
    return nn.Sequential(nn.Linear(n, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, classes))


def test_dropout_and_batch_norm_go_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.NETWORKS, "noisy", noisy)
    table = small_table({"name": "sgdm"}, checkpoint_every=2)
    table["network"] = {"name": "noisy"}
    whole, parts = (RunFolder.create(tmp_path / name, table) for name in ("whole", "parts"))
    torch.manual_seed(1)
    train(whole)
    torch.manual_seed(2)
    with pytest.raises(Stop):
        train(parts, listen=stop_at(5))
    torch.manual_seed(3)
    train(parts)
    assert without_seconds(parts.metrics()) == without_seconds(whole.metrics())

    state = whole.load_checkpoint()
    assert state is not None
    network, test = noisy((13,), 3), data.load("WINE").test
    network.load_state_dict(state["network"])
    with torch.no_grad():
        loss = cross_entropy(network.eval()(test.x), test.y).item()
    assert whole.metrics("epoch")[-1]["test_loss"] == pytest.approx(loss, rel=1e-5)


def test_a_run_is_saved_at_the_end_of_each_epoch_unless_told_otherwise(tmp_path: Path) -> None:
    folder = create(tmp_path / "run", small_run())
    with pytest.raises(Stop):
        train(folder, listen=stop_at(11))
    state = folder.load_checkpoint()
    assert state is not None
    assert state["step"] == 6


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    folder = create(tmp_path / "run", small_run())
    final = train(folder)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    heard: list[Record] = []
    assert train(folder, listen=heard.append) == final
    assert heard == [final]
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


def test_who_listens_hears_what_is_written(tmp_path: Path) -> None:
    folder = create(tmp_path / "run", small_run({"name": "ocnopt"}))
    heard: list[Record] = []
    train(folder, listen=heard.append)
    assert heard[0] == {"kind": "begin", "step": 0, "steps": 12}
    assert heard[1:] == folder.metrics()


def test_losses_that_are_not_finite_are_null(tmp_path: Path) -> None:
    folder = create(tmp_path / "run", small_run({"name": "sgdm", "lr": 1e38}))
    heard: list[Record] = []
    final = train(folder, listen=heard.append)
    assert final["diverged"] is True
    assert final["train_loss"] is None
    assert folder.final() == final == heard[-1]
    assert folder.metrics("epoch")[-1]["test_loss"] is None


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    folder = create(tmp_path / "run", small_run())
    with RunFolder(folder.path).locked(), pytest.raises(RunError, match="another process"):
        train(folder)


def test_the_environment_is_written_down(tmp_path: Path) -> None:
    folder = create(tmp_path / "run", small_run())
    with pytest.raises(Stop):
        train(folder, listen=stop_at(3))
    train(folder)
    environment = json.loads(folder.environment_path.read_text())
    assert environment["torch"] == torch.__version__
    assert (environment["device"], environment["processes"]) == ("cpu", 1)
    assert environment["threads"] == torch.get_num_threads()
    assert len(environment["resumed"]) == 1


@pytest.mark.parametrize(
    ("program", "written"),
    [("bin/ocnopt", ["ocnopt"]), ("a/b/__main__.py", ["python", "-m", "a.b"]), ("script.py", ["script.py"])],
)
def test_the_command_is_written_down(
    program: str, written: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for package in ("a", "a/b"):
        (tmp_path / package / "__init__.py").touch()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / program), "train", "a recipe.toml"])
    assert describe_environment(torch.device("cpu"), World())["command"] == [*written, "train", "a recipe.toml"]


def test_a_run_is_deterministic_and_leaves_cudnn_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(trainer: Trainer) -> Record:
        seen.append((torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic))
        return {}

    monkeypatch.setattr(Trainer, "train", look)
    before = torch.backends.cudnn.deterministic
    train(create(tmp_path / "run", small_run()))
    assert seen == [(True, True)]
    assert torch.backends.cudnn.deterministic == before


def test_tensorboard_on_request(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = create(tmp_path / "run", small_run({"name": "ocnopt"}))
    train(folder, tensorboard=True)
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("step/loss")]
    written = [(record["step"], record["loss"]) for record in folder.metrics("step")]
    assert [step for step, _ in losses] == [step for step, _ in written]
    assert [value for _, value in losses] == pytest.approx([value for _, value in written])
    tags = set(events.Tags()["scalars"])
    assert {"step/lr", "epoch/test_accuracy", "layers/1/trace"} <= tags
    board = TensorBoard(tmp_path / "nulls", 0)  # what is not finite is left out
    board.write({"kind": "layers", "step": 1, "layers": [{"name": "1", "trace": None, "s": 2.0}]})
    board.close()
    nulls = EventAccumulator(str(tmp_path / "nulls"))
    nulls.Reload()
    assert nulls.Tags()["scalars"] == ["layers/1/s"]
    plain = create(tmp_path / "plain", small_run())
    train(plain)
    assert not (plain.path / "tensorboard").exists()


def test_missing_data_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCNOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OCNOPT_DATA", raising=False)
    table = small_table()
    table["data"]["name"] = "MNIST"
    folder = RunFolder.create(tmp_path / "run", table)
    with pytest.raises(data.MissingDataError, match="ocnopt data fetch MNIST"):
        train(folder)
