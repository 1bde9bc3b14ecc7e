"""Two processes that share each batch learn what one process learns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.lab.small import create, small_run, small_table
from tests.lab.two_processes import normed

from ocnopt.lab import data, toml
from ocnopt.lab.runs import Record, RunFolder
from ocnopt.lab.settings import parse_spec
from ocnopt.lab.trainer import evaluate
from ocnopt.lab.training import train

SCRIPT = Path(__file__).with_name("two_processes.py")
SHARED = ("sgdm", "ocnopt:lr=0.05", "ocnopt:lr=0.05,rank=3,feedback=nonlinear,curvature=kronecker,damping=0.1")
REFUSED = "ekfac"


class Together(NamedTuple):
    """What torchrun left behind."""

    folder: Path
    output: str
    errors: str


class Stop(Exception):
    pass


def stopped_alone(path: Path) -> RunFolder:
    """A run that one process began, and left in the middle of the second epoch."""

    def listen(record: Record) -> None:
        if record.get("step") == 9:
            raise Stop

    folder = create(path, small_run(parse_spec(SHARED[0]), checkpoint_every=2))
    with pytest.raises(Stop):
        train(folder, listen=listen)
    return folder


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    """One start of torchrun for all tests: it takes seconds."""
    folder = tmp_path_factory.mktemp("together")
    config = folder / "run.toml"
    config.write_text(toml.dumps(small_table()))
    commands = [[str(config), "--optimizer", each, "--out", str(folder / each)] for each in (*SHARED, REFUSED)]
    commands.append([str(config), "--batch-size", "33", "--out", str(folder / "uneven")])
    commands.append(["--resume", str(stopped_alone(folder / "resumed").path)])
    commands.append([str(config), "--network", "normed", "--out", str(folder / "normed")])
    (folder / "commands").write_text("".join(f"{json.dumps(command)}\n" for command in commands))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*torchrun, str(SCRIPT), str(folder / "commands")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun then ends its processes
            process.communicate()
    assert process.returncode == 0, errors
    return Together(folder, output, errors)


def assert_same(two: RunFolder, one: RunFolder) -> None:
    """To rounding: sums over a batch are added up in another order."""
    assert len(two.metrics("step")) == 12
    for kind, keys in (
        ("step", ("step", "epoch", "loss", "lr")),
        ("epoch", ("epoch", "step", "train_loss", "test_loss", "test_accuracy")),
        ("final", ("test_accuracy", "train_loss", "diverged")),
    ):
        for ours, theirs in zip(two.metrics(kind), one.metrics(kind), strict=True):
            for key in keys:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4), (kind, key)
    ours, theirs = (folder.load_checkpoint() or {} for folder in (two, one))
    for name, weight in theirs["network"].items():
        torch.testing.assert_close(ours["network"][name], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("optimizer", SHARED)
def test_two_processes_equal_one(optimizer: str, together: Together, tmp_path: Path) -> None:
    two = RunFolder(together.folder / optimizer)
    one = create(tmp_path / "one", small_run(parse_spec(optimizer)))
    train(one)
    assert two.environment()["processes"] == 2
    assert_same(two, one)


def test_two_processes_go_on_with_what_one_has_begun(together: Together, tmp_path: Path) -> None:
    two = RunFolder(together.folder / "resumed")
    assert [each["processes"] for each in two.environment()["resumed"]] == [2]
    one = create(tmp_path / "one", small_run(parse_spec(SHARED[0])))
    train(one)
    assert_same(two, one)


def test_all_processes_evaluate_the_network_of_the_main_process(together: Together) -> None:
    """Running statistics differ between the processes, and it is those of the main one that are saved."""
    folder = RunFolder(together.folder / "normed")
    dataset = data.load("WINE")
    network = normed(dataset.input_shape, 3)
    network.load_state_dict((folder.load_checkpoint() or {})["network"])
    loss, accuracy = evaluate(network, dataset.test)
    assert folder.metrics("epoch")[-1]["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert folder.metrics("epoch")[-1]["test_accuracy"] == pytest.approx(accuracy)


def test_only_the_main_process_prints(together: Together) -> None:
    decoder, text, documents = json.JSONDecoder(), together.output.strip(), list[Any]()
    while text:
        document, end = decoder.raw_decode(text)
        documents.append(document)
        text = text[end:].strip()
    found = [document["config"]["optimizer"]["name"] for document in documents]
    assert found == ["sgdm", "ocnopt", "ocnopt", "sgdm", "sgdm"]


def test_who_looks_at_layers_and_samples_is_refused(together: Together) -> None:
    assert "EKFAC looks at single layers and samples of the batch" in together.errors
    assert together.errors.count("exit 2: ") == 4
    assert not (together.folder / REFUSED).exists()


def test_a_batch_that_cannot_be_shared_is_refused(together: Together) -> None:
    assert together.errors.count("error: data.batch_size 33 must be a multiple of world_size 2") == 2
    assert not (together.folder / "uneven").exists()
