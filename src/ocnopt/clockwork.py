"""The side of an optimizer that is Python: counters and decisions that a CUDA graph knows nothing of."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from ocnopt import arguments
from ocnopt.curvature import BY_NAME
from ocnopt.games.flow import Flow, is_due
from ocnopt.optimizer import OCNOpt
from ocnopt.players import Player, resolve


def why_never(model: nn.Module, opt: Optimizer) -> str | None:
    """Why no step of this model can be captured."""
    devices = {p.device for group in opt.param_groups for p in group["params"]}
    if any(device.type != "cuda" for device in devices):
        return f"the parameters are on {' and '.join(sorted(map(str, devices)))}, and graphs are a matter of CUDA"
    if len(devices) > 1:
        return f"the parameters are on {len(devices)} devices"
    if isinstance(model, DistributedDataParallel) or (isinstance(opt, OCNOpt) and not opt._alone):
        return "several processes train the network together"
    return None


def why_not(opt: Optimizer) -> str | None:
    """Why whole steps with the hyper-parameters that the optimizer has now cannot be captured."""
    if opt._optimizer_step_pre_hooks or opt._optimizer_step_post_hooks:
        return "the optimizer has hooks around its step, which a graph does not call"
    return why_not_ours(opt) if isinstance(opt, OCNOpt) else _why_not_theirs(opt)


def _why_not_theirs(opt: Optimizer) -> str | None:
    name = type(opt).__name__
    for group in opt.param_groups:
        if not group.get("capturable", True):
            return f"{name} must be made with capturable=True"
        if isinstance(opt, SGD) and not group["fused"]:
            return f"{name} must be made with fused=True: its other forms read the learning rate on the host"
    return None


def why_not_ours(opt: OCNOpt) -> str | None:
    """The same of a step alone."""
    for group in opt.param_groups:
        curvature = resolve(group["curvature"])
        if curvature is not BY_NAME.get(curvature.name):
            return f"the curvature {curvature.name!r} is none of OCNOpt's own, and may decide in Python what to do"
        if (drawn := arguments.why_drawn(group, "random", "adaptive")) is not None:
            return f"{drawn} chooses anew at each step"
    return None


def must_repeat_random_numbers(opt: Optimizer) -> str | None:
    """What draws random numbers that are needed a second time in a step, if anything does."""
    if not isinstance(opt, OCNOpt) or opt._tape is None:
        return None
    if opt._need().states:
        return "feedback='nonlinear' runs it again"
    return "layers are asked for the gradients of groups of samples" if opt._tape.randomised else None


# --- from step to step ---


def flow_of(opt: Optimizer) -> Flow | None:
    """The data flow of the last step, where it was followed."""
    return opt._tape.flow if isinstance(opt, OCNOpt) and opt._tape is not None else None


def why_eager(opt: Optimizer, flow: Flow | None) -> str | None:
    """Why the coming step cannot be captured, although others can. ``flow``: the data flow that it is going to have."""
    if not isinstance(opt, OCNOpt):
        return None
    if any(p.curvature.refreshes(p.kept(opt.state), p.group, p.inside) for p in _players(opt)):
        return "eigenbases are renewed"
    return "the data flow is verified" if flow is not None and flow.uses and is_due(flow) else None


def catch_up(opt: Optimizer) -> int:
    """What the coming step would begin with, and a graph cannot. Returns how many eigendecompositions failed."""
    players, failed = _players(opt) if isinstance(opt, OCNOpt) else [], 0
    for curvature in {p.curvature for p in players}:
        peers = [p for p in players if p.curvature is curvature]
        old = [p for p in peers if curvature.overdue(p.kept(opt.state), p.group, p.inside)]
        failed += curvature.catch_up(old, [opt.state[p.params[0]] for p in old], peers)
    return failed


def kind(opt: Optimizer) -> Hashable:
    """Steps of the same kind do the same. Other layers may be looked at in each."""
    if not isinstance(opt, OCNOpt):
        return ()
    return tuple(p.curvature.due(p.kept(opt.state), p.group, p.inside) for p in _players(opt))


def _players(opt: OCNOpt) -> list[Player]:
    """Those whose curvature decides from step to step, as they were seated last."""
    return [p for p in opt._seated or opt._players() if p.curvature.needs_model]


class Clockwork:
    """What one step changes in Python. Made before the step is captured; :meth:`stop` comes after.

    Nothing has run on the device in between, so that putting the Python side back undoes the step.
    """

    def __init__(self, opt: Optimizer, flow: Flow | None, whole: bool = True) -> None:
        """``whole``: the optimizer's ``step`` is not called when this one is replayed."""
        self._opt, self._whole = weakref.ref(opt), whole  # which may be what holds this
        self._before = {p: dict(own) for p, own in opt.state.items()}
        self._game = None if not isinstance(opt, OCNOpt) else _Game(opt, flow, whole)
        self._increments: list[tuple[dict[str, Any], str, float]] = []

    @property
    def opt(self) -> Optimizer:
        opt = self._opt()
        assert opt is not None
        return opt

    def undo(self) -> None:
        self.opt.state.clear()
        self.opt.state.update(self._before)
        if self._game is not None:
            self._game.undo()

    def stop(self) -> str | None:
        """The step is captured. Returns why it must not be replayed, if so."""
        for p, own in self.opt.state.items():
            for key, value in own.items():
                if type(value) in (int, float) and (by := value - self._before[p].get(key, 0)):
                    self._increments.append((own, key, by))
        if self._game is None and self._increments:
            return f"{type(self.opt).__name__} counts in Python ({self._increments[0][1]!r} of its state)"
        if self._game is not None:
            self._game.stop()
        self._before = {}
        return None

    def tick(self) -> None:
        """The captured step was replayed."""
        for own, key, increment in self._increments:
            own[key] += increment
        if self._game is not None:
            self._game.tick()
        if self._whole:
            self.opt._opt_called = True  # type: ignore[attr-defined]  # schedulers want to know
        if self._whole and isinstance(self.opt, OCNOpt):
            self.opt._due = None
            self.opt._aligner.after_step(self.opt._now.rules)


class _Game:
    """That of OCNOpt beyond its state."""

    def __init__(self, opt: OCNOpt, flow: Flow | None, whole: bool) -> None:
        self._opt, self.flow, self._whole = weakref.ref(opt), flow, whole
        self._uses = 0 if self.flow is None else self.flow.uses
        self._before = opt._count, opt._aligner._steps, opt._diagnostics
        self._report: list[tuple[Any, dict[str, Any]]] = []

    @property
    def opt(self) -> OCNOpt:
        opt = self._opt()
        assert opt is not None
        return opt

    def undo(self) -> None:
        opt = self.opt
        opt._count, opt._aligner._steps, opt._diagnostics = self._before
        if self.flow is not None:
            self.flow.uses = self._uses

    def stop(self) -> None:
        found = self.opt._diagnostics
        found.passing = not self._whole
        self._report = [(each, dict(vars(each))) for each in (found, found.policy, found.kernels) if each is not None]
        self._uses = 0 if self.flow is None else self.flow.uses - self._uses  # from now on: of one step

    def tick(self) -> None:
        opt = self.opt
        opt._count += 1
        if self.flow is not None:
            self.flow.uses += self._uses
        for each, captured in self._report:  # without what was worked out from the numbers of an earlier step
            vars(each).clear()
            vars(each).update(captured)
        opt._diagnostics = self._report[0][0]


# --- what a graph has frozen ---

#: state that is there between steps, and that no step reads
_COMING_AND_GOING = {key for curvature in BY_NAME.values() for key in curvature.aside}


def tensors_of_state(opt: Optimizer, params: list[Tensor]) -> list[tuple[dict[str, Any], str, Tensor]]:
    """With their places."""
    return [
        (own, key, value)
        for own in (opt.state.get(p, {}) for p in params)
        for key, value in own.items()
        if isinstance(value, Tensor) and key not in _COMING_AND_GOING
    ]


def frozen(opt: Optimizer, modules: list[nn.Module], others: list[Tensor]) -> dict[Any, Any]:
    """Everything that must not change from one replay to the next: hyper-parameters, modes, and where tensors are.

    ``others``: the parameters of the model that the optimizer does not have; their gradients add up.
    """
    found: dict[Any, Any] = {}
    for i, group in enumerate(opt.param_groups):
        for name, value in group.items():
            if isinstance(value, Tensor):
                found["tensor", i, name] = value.data_ptr()
            elif name != "params":
                found[i, name] = value
    params = [p for group in opt.param_groups for p in group["params"]]
    found["parameters"] = [(p.data_ptr(), p.requires_grad) for p in (*params, *others)]
    found["gradients"] = [None if p.grad is None else p.grad.data_ptr() for p in others]
    found["state"] = [(key, t.data_ptr()) for own, key, t in tensors_of_state(opt, params)]
    found["modules"] = [(m.training, *map(id, m._modules.values())) for m in modules]
    found["buffers"] = [None if b is None else b.data_ptr() for m in modules for b in m._buffers.values()]
    found["autocast"] = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    found["precision"] = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return found


def changed_options(before: dict[Any, Any], now: dict[Any, Any]) -> list[str]:
    """The hyper-parameters that were there before and have another value."""
    options = (key for key in before if isinstance(key, tuple) and len(key) == 2)
    changed = [key for key in options if key in now and now[key] != before[key]]
    return [f"{name!r} of parameter group {i}" for i, name in changed]


class Rates:
    """Learning rates as tensors on the device, which a graph reads at each replay and schedulers fill in place."""

    def __init__(self, opt: Optimizer) -> None:
        self.opt = opt
        self._made: dict[int, Tensor] = {}

    def adopt(self) -> None:
        """Somebody may have put a number in the place of a tensor."""
        for i, group in enumerate(self.opt.param_groups):
            lr, p = group.get("lr"), next(iter(group["params"]), None)
            if lr is None or p is None or (isinstance(lr, Tensor) and lr.device == p.device):
                continue
            if i not in self._made:
                # fused optimizers of torch read nothing but float32
                wide = p.dtype == torch.float64 and isinstance(self.opt, OCNOpt)
                self._made[i] = torch.empty((), dtype=torch.float64 if wide else torch.float32, device=p.device)
            group["lr"] = self._made[i].fill_(lr)
