"""N + M steps are N, save, load in a new process, M: bit for bit, for every curvature, rank and rollout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tests.toys import CURVATURES, FEEDBACKS, RANKS, assert_identical, batches, mlp, state_of, train, values
from torch import nn

from ocnopt import OCNOpt

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.01, "refresh_every": 2}
NAMES = [
    f"{c}-{f}-{r}-{d}" for c in CURVATURES for f in (*FEEDBACKS, "off") for r in RANKS for d in ("float32", "bfloat16")
]


def start(name: str) -> tuple[nn.Module, OCNOpt, torch.dtype]:
    curvature, feedback, rank, kind = name.split("-")
    dtype: torch.dtype = getattr(torch, kind)
    model = mlp(dtype=dtype)
    game = {"curvature": curvature, "feedback": feedback, "rank": int(rank) if rank.isdigit() else rank}
    model[0].requires_grad_(False)
    return model, OCNOpt(model.parameters(), model=model, **OPTIONS, **game), dtype


def first_half(name: str) -> tuple[nn.Module, OCNOpt]:
    model, opt, dtype = start(name)
    train(model, opt, batches(3, dtype=dtype))
    return model, opt


def second_half(model: nn.Module, opt: OCNOpt) -> tuple[list[float], Any, Any]:
    """A layer that was frozen until now joins in on the way."""
    dtype = next(model.parameters()).dtype
    losses = train(model, opt, batches(2, dtype=dtype, seed=8))
    model.requires_grad_(True)
    losses += train(model, opt, batches(2, dtype=dtype, seed=9))
    return losses, values(model), state_of(opt)


def resume(folder: Path) -> None:
    """What the new process does."""
    saved = torch.load(folder / "saved.pt", weights_only=True)
    ends = {}
    for name, (weights, state) in saved.items():
        model, opt, _ = start(name)
        model.load_state_dict(weights)
        opt.load_state_dict(state)
        ends[name] = second_half(model, opt)
    torch.save(ends, folder / "ends.pt")


def test_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """One process for all configurations: it takes seconds to start."""
    halves = {name: first_half(name) for name in NAMES}
    torch.save({name: (m.state_dict(), o.state_dict()) for name, (m, o) in halves.items()}, tmp_path / "saved.pt")
    code = f"from pathlib import Path; from tests.needs.test_new_process import resume; resume(Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True, timeout=300)
    ends = torch.load(tmp_path / "ends.pt", weights_only=True)
    different = [name for name in NAMES if not same(ends[name], second_half(*halves[name]))]
    assert not different
    for name in NAMES:
        dtypes = {t.dtype for state in ends[name][2] for t in state.values() if isinstance(t, torch.Tensor)}
        assert dtypes == {torch.float32}, "also under bfloat16 weights"


def same(ours: Any, theirs: Any) -> bool:
    try:
        assert_identical(ours, theirs)
    except AssertionError:
        return False
    return True
