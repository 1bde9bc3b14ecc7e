"""The examples run as the README says, from their own command line."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINERS = {  # the example, and the package it is about
    "plain_loop": "torch",
    "with_lightning": "lightning",
    "with_accelerate": "accelerate",
    "with_transformers": "transformers",
}
IN_THE_LAB = """
import torch
from ocnopt import OCNOpt
from ocnopt.lab.world import join

def train(world):
    model = world.wrap(torch.nn.Linear(3, 2))
    opt = OCNOpt(model.parameters(), model=model, curvature="kronecker")
    for _ in range(2):
        opt.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        opt.step()

with join(torch.device("cpu")) as world:
    train(world)
"""
CONTENDERS = ("SGD", "RMSprop", "Adam", "OCNOpt identity", "OCNOpt adaptive", "OCNOpt kronecker")


def digits(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_digits_prints_a_table_and_saves_a_plot(tmp_path: Path) -> None:
    plot = tmp_path / "folder" / "plot.png"
    run = digits("--rates", "1", "0.003", "--epochs", "1", "--seeds", "1", "--out", str(plot))
    assert run.returncode == 0, run.stderr

    table = run.stdout[run.stdout.index("learning rate ") :]
    assert table.splitlines()[0].split()[2:] == ["0.003", "1"]
    for name in CONTENDERS:
        row = re.search(rf"^{name} +(\d.*)$", table, flags=re.MULTILINE)
        assert row, f"no row for {name} in:\n{table}"
        cells = row[1].split()
        accuracies = [float(cell.rstrip("*")) for cell in cells]
        assert len(accuracies) == 2
        assert [float(cell.rstrip("*")) for cell in cells if cell.endswith("*")] == [max(accuracies)]
        assert max(accuracies) > 25, f"{name} is near chance at every learning rate"
    assert str(plot) in run.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--epochs", "0"), "--epochs must be at least 1, not 0"),
        (("--rates", "0.1", "-1"), "--rates must be positive, not -1"),
    ],
)
def test_digits_refuses_what_it_cannot_do(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    run = digits(*arguments, "--out", str(tmp_path / "plot.png"))
    assert run.returncode == 2
    assert message in run.stderr


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_train_and_resume(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(TRAINERS[name]) is None:
        pytest.skip(f"{TRAINERS[name]} is not installed: it comes with ocnopt[trainers]")
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"(?<!_)\bloss\W+(\d\.\d+)", run.stdout)]
    assert len(losses) == 3, run.stdout
    assert losses[0] > 1.2 * losses[1] > 1.2**2 * losses[2], "started afresh, the third would be like the first"
    accuracies = re.findall(r"accuracy\W+([\d.]+)(%?)", run.stdout)
    assert float(accuracies[-1][0]) > (50 if accuracies[-1][1] else 0.5), "of four books, the largest is 32 %"
    before, _, after = run.stdout.partition("resumed")
    assert "loss" in before
    assert "loss" in after
    assert not list(tmp_path.iterdir()), "an example leaves nothing in the folder it is run from"


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_are_short_and_change_one_line(name: str) -> None:
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    ours, theirs = r"OCNOpt\((\w+)\.parameters\(\)\)", r"torch\.optim\.AdamW\(\1\.parameters\(\), lr=1e-3\)"
    assert len(re.findall(f"{ours}  # was: {theirs}$", text, flags=re.MULTILINE)) == 1


def test_ddp_on_one_process_and_on_two() -> None:
    """One process and two print the same, but for how many they are."""
    script, quick = str(ROOT / "examples" / "ddp.py"), ("--epochs", "1")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    found = []
    for arguments in ((script, *quick), (*torchrun, script, *quick)):
        run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        lines = re.findall(r"epoch 1: loss (\S+), accuracy (\S+) % \((\d) processes\)", run.stdout)
        assert len(lines) == 1, run.stdout
        found.append([float(number) for number in lines[0]])
    assert [each[2] for each in found] == [1, 2]
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-2)
    assert found[0][1] > 90


def test_scripts_for_several_processes_let_go_of_their_group(tmp_path: Path) -> None:
    """Threads of a group that outlives ``destroy_process_group`` may abort a process that ends, now and then."""
    in_the_lab = tmp_path / "in_the_lab.py"
    in_the_lab.write_text(IN_THE_LAB, encoding="utf-8")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for script in ((str(ROOT / "examples" / "ddp.py"), "--epochs", "1"), (str(in_the_lab),)):
        command = [sys.executable, *torchrun, str(Path(__file__).with_name("lets_go.py")), *script]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
