"""A data flow as a list of calls, stage by stage.

What a call reads is known by its place in a list of values, and so is what nobody reads after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_module

from ocnopt.again import BATCH_NORMS, QUICKER, normalised
from ocnopt.games.flow import Draws, Flow, Mode, Overwriting, Value, attribute, filled
from ocnopt.games.schedule import Placement
from ocnopt.trees import is_alone, tensors


class Call(NamedTuple):
    """One node."""

    op: str
    target: Any
    slot: int  # where its value goes
    args: Any  # with values for tensors, whose turns are slots
    kwargs: Any
    flat: bool  # no argument is a container, and no tensor has a name
    entry: int
    mode: Mode | None
    dead: tuple[int, ...]  # slots that nobody reads any more
    spent: int  # the slot of what it overwrites, if nobody else is going to read that; else −1
    beside: tuple[int, ...]  # and then all the others that hold something


class Program:
    """The nodes of a flow in the order of a placement."""

    def __init__(self, flow: Flow, placement: Placement) -> None:
        self.flow, self.entries = flow, flow.entries
        by_stage = placement.nodes(flow)
        order = [node for nodes in by_stage for node in nodes]
        self.slots = {node: i for i, node in enumerate(order)}
        kept = {n for n in order if n in set(flow.outputs) or n.op in ("placeholder", "get_attr")}
        last = {read: i for i, node in enumerate(order) for read in (*node.all_input_nodes, node)}
        dead: list[list[int]] = [[] for _ in order]
        for node, i in last.items():
            if node not in kept:
                dead[i].append(self.slots[node])
        held: set[int] = set()
        calls = []
        for i, node in enumerate(order):
            calls.append(self._call(node, tuple(dead[i]), held))
            held = (held | {i}) - set(dead[i])
        ends = iter(calls)
        self.stages = [[next(ends) for _ in nodes] for nodes in by_stage]
        modes = {call.mode for call in calls if call.mode is not None}
        self.mode = modes.pop() if len(modes) == 1 else None  # of all of them

    def _call(self, node: fx.Node, dead: tuple[int, ...], held: set[int]) -> Call:
        args, kwargs = filled(node.meta.get("spec", ((), {})), lambda n: Value(self.slots[n]))
        target: Any = node.target
        spent = -1
        flat = not any(map(_is_container, args)) and not any(
            isinstance(a, Value) or _is_container(a) for a in kwargs.values()
        )
        if node.op == "call_module":
            target = tuple(str(target).split(".")) if target else ()
        elif isinstance(target, Overwriting) and flat:
            read = [a.turn for a in args if isinstance(a, Value)]
            changed = read[target.place]
            spent = changed if changed in dead and read.count(changed) == 1 else -1
        elif node.op == "call_function":
            target = QUICKER.get(target, target)
        beside = tuple(held - {spent}) if spent >= 0 else ()
        meta = node.meta.get("entry", -1), node.meta.get("mode")
        return Call(node.op, target, self.slots[node], args, kwargs, flat, *meta, dead, spent, beside)


class Run:
    """One pass through a program."""

    def __init__(self, program: Program, model: nn.Module, inputs: Sequence[Tensor], draws: Draws) -> None:
        self.program, self._model, self._draws = program, model, draws
        self.values: list[Any] = [None] * len(program.slots)
        self._inputs = iter(inputs)
        self._settled: bool | None = None  # do all calls run under what is in force?

    def value(self, call: Call) -> Any:
        """What the node of a call is, from the values so far."""
        if call.op == "placeholder":
            value: Any = next(self._inputs)
        elif call.op == "get_attr":
            constants = self.program.flow.constants
            value = constants[call.target] if call.target in constants else attribute(self._model, call.target)
        else:
            value = self._run(call)
        self.values[call.slot] = value
        return value

    def forget(self, call: Call) -> None:
        """What nobody reads after it."""
        for slot in call.dead:
            self.values[slot] = None

    def _run(self, call: Call) -> Any:
        values, kwargs = self.values, call.kwargs
        if call.flat:
            args = [values[a.turn] if type(a) is Value else a for a in call.args]
        else:
            args, kwargs = filled((call.args, kwargs), lambda value: values[value.turn])
        alone = call.spent >= 0 and self._is_alone(call)  # then it may as well overwrite what it is given
        run, rng = call.target.in_place if alone else self._function(call), self._draws.get(call.entry)
        if self._settled is None:
            mode = self.program.mode
            self._settled = mode is not None and mode.holds(self.program.flow.device)
        assert call.mode is not None
        if rng is None and (self._settled or call.mode.holds(self.program.flow.device)):
            out = run(*args, **kwargs)
        else:
            with nullcontext() if rng is None else rng.restored(), call.mode.restored(self.program.flow.device):
                out = run(*args, **kwargs)
        return out if isinstance(out, Tensor) else tensors(out)

    def _function(self, call: Call) -> Callable[..., Any]:
        if call.op == "call_module":
            return _bare(_submodule(self._model, call.target))
        target: Callable[..., Any] = call.target
        return target

    def _is_alone(self, call: Call) -> bool:
        """Does nothing that is still wanted share its memory with what a call overwrites?"""
        return is_alone(self.values[call.spent], (self.values[slot] for slot in call.beside))


def _is_container(part: Any) -> bool:
    return isinstance(part, (tuple, list, dict)) and not isinstance(part, Value)


def _submodule(model: nn.Module, path: tuple[str, ...]) -> nn.Module:
    module: Any = model
    for name in path:
        module = module._modules[name] if name in module._modules else getattr(module, name)
    found: nn.Module = module
    return found


_EVERYWHERE = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks")


def _bare(module: nn.Module) -> Callable[..., Any]:
    """The module, or what it runs, if nobody but the tape has hooks on it: those have nothing to say now."""
    own = len(module._forward_pre_hooks) == len(module._forward_hooks) == 1
    others = module._backward_hooks or module._backward_pre_hooks or module._compiled_call_impl is not None
    if not own or others or type(module).__call__ is not nn.Module.__call__:
        return module
    if any(getattr(torch_module, name) for name in _EVERYWHERE) or torch_module._global_backward_pre_hooks:
        return module
    forward: Callable[..., Any] = module.forward
    plain = type(module) in BATCH_NORMS and "forward" not in vars(module)
    return partial(normalised, module) if plain and module.training else forward
