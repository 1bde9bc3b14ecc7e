"""Hooks on the modules of a model: ours, and those of others.

However often the model runs in a step, the hooks of others are to see it once. But a second forward pass must do what
the first one did. So a hook that changed something in the first pass acts in the second as well, and one that only
looked (a logger, a store of activations, a counter) is not called again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from ocnopt.anatomy import modules_of
from ocnopt.apart import apart, called_by, compiler, disabled
from ocnopt.trees import tensors

#: hooks by their number, which no two of them share
Hooks = OrderedDict[int, Callable[..., Any]]


class Hook:
    """A hook on this very model: in a copy or a pickle of the model (an EMA network, say) it does nothing.

    What it reads changes from call to call: ``torch.compile`` must not look into it.
    """

    def __init__(self, act: Callable[..., Any] | None = None) -> None:
        self.act = act

    @apart
    def __call__(self, *args: Any) -> Any:
        act = self.act
        if act is None:
            return None
        return act(*args) if compiler() is None else disabled(called_by)(act, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Watched:
    """Stands for a hook while a pass runs: does it change anything that the model computes with?"""

    def __init__(self, hook: Callable[..., Any], before: bool) -> None:
        self.hook, self.before = hook, before
        self.changes = self.lends = False

    @apart
    def __call__(self, module: nn.Module, *args: Any) -> Any:
        if compiler() is not None:
            return disabled(Watched._call)(self, module, *args)
        return self._call(module, *args)

    def _call(self, module: nn.Module, *args: Any) -> Any:
        given, own = _seen(tensors(args)), _seen(self._own(module))
        result = self.hook(module, *args)
        returned = result is not None and not any(result is arg for arg in args)
        if returned or not _same(given, _seen(tensors(args))):
            self.changes = True
        if not _same(own, _seen(self._own(module))):
            self.changes = self.lends = True
        return result

    def _own(self, module: nn.Module) -> list[Tensor]:
        """The tensors of a module that is still to run: a hook may lend it its weights."""
        modules = module.modules() if self.before else ()
        places = (place for m in modules for place in (vars(m), m._parameters, m._buffers))
        return [t for place in places for t in place.values() if isinstance(t, Tensor)]


#: tensors, and how often each was written to
Seen = list[tuple[Tensor, int]]


def _seen(found: Iterable[Tensor]) -> Seen:
    return [(t, 0 if t.is_inference() else t._version) for t in found]


def _same(a: Seen, b: Seen) -> bool:
    return len(a) == len(b) and all(t is u and v == w for (t, v), (u, w) in zip(a, b, strict=True))


class Others:
    """The hooks of others on a model, and on all modules there are."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._watched: dict[int, Watched] = {}
        self._replaced: list[tuple[Hooks, int, Any]] = []
        self.absent = False  # had nobody else a hook anywhere when the last pass began?

    def watch(self, modules: Sequence[nn.Module]) -> None:
        """A pass begins. ``modules``: those of the model."""
        self.rest()
        self.absent = _nobody_else(modules)
        known, self._watched = self._watched, {}  # compiled code may have got hold of them
        if self.absent:
            return
        for hooks, before in self._places(modules):
            for number, hook in _of_others(hooks):
                same = known.get(number)
                self._watched[number] = watched = same if same and same.hook is hook else Watched(hook, before)
                watched.changes = False
                self._replace(hooks, number, watched)

    @property
    def there(self) -> bool:
        """Were there any in the last pass?"""
        return bool(self._watched)

    def rest(self) -> frozenset[int]:
        """It has ended, or was interrupted. Returns the hooks that changed nothing in it."""
        self._put_back()
        return frozenset(number for number, watched in self._watched.items() if not watched.changes)

    def keep_places(self, ours: Sequence[tuple[nn.Module, RemovableHandle, RemovableHandle]]) -> None:
        """Let our hooks before and after each module stand next to it, whoever else has registered some since."""
        for module, before, after in ours:
            if len(module._forward_pre_hooks) > 1 or len(module._forward_hooks) > 1:  # somebody else is there
                self._keep_place(module, before.id, after.id)

    def _keep_place(self, module: nn.Module, before: int, after: int) -> None:
        """Only one that lends weights stands nearer: it lends those that a layer has after it acted."""
        pre, post = cast(Hooks, module._forward_pre_hooks), cast(Hooks, module._forward_hooks)
        lending = [number for number in pre if number in self._watched and self._watched[number].lends]
        if lending or not isinstance(pre[next(reversed(pre))], Hook):
            for number in (before, *lending):
                pre.move_to_end(number)
        if not isinstance(post[next(iter(post))], Hook):
            post.move_to_end(after, last=False)

    @contextmanager
    def silent(self, idle: frozenset[int]) -> Iterator[None]:
        """Run a block in which these hooks are not called."""
        try:
            modules = modules_of(self.model)
            for hooks, _ in () if _nobody_else(modules) else self._places(modules):
                for number, _ in _of_others(hooks):
                    if number in idle:
                        self._replace(hooks, number, _nothing)
            yield
        finally:
            self._put_back()

    def _places(self, modules: Sequence[nn.Module]) -> list[tuple[Any, bool]]:
        """The hooks of others, and whether they come before the module. Those before the model itself are being called
        already when a pass begins, and are left alone.
        """
        before: list[Any] = [torch_module._global_forward_pre_hooks]
        after: list[Any] = [torch_module._global_forward_hooks]
        for module in modules:
            pre, post = module._forward_pre_hooks, module._forward_hooks
            if pre and module is not self.model:
                before.append(pre)
            if post:
                after.append(post)
        return [*((hooks, True) for hooks in before if hooks), *((hooks, False) for hooks in after if hooks)]

    def _replace(self, hooks: Hooks, number: int, stand_in: Callable[..., Any]) -> None:
        self._replaced.append((hooks, number, hooks[number]))
        hooks[number] = stand_in

    def _put_back(self) -> None:
        for hooks, number, hook in self._replaced:
            if number in hooks:  # nobody has removed it meanwhile
                hooks[number] = hook
        self._replaced.clear()


@contextmanager
def without_backward_hooks(model: nn.Module) -> Iterator[None]:
    """Run a block, forward and backward, in which no hook on a module is told of gradients."""
    places = [m.__dict__ for m in model.modules()] + [vars(torch_module)]
    names = "_backward_hooks", "_backward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"
    found = [(place, name, place[name]) for place in places for name in names if place.get(name)]
    for place, name, _ in found:
        place[name] = OrderedDict()
    try:
        yield
    finally:
        for place, name, hooks in found:
            place[name] = hooks


def _nobody_else(modules: Sequence[nn.Module]) -> bool:
    """Are there no hooks but ours, as mostly?"""
    if torch_module._global_forward_pre_hooks or torch_module._global_forward_hooks:
        return False
    stores = [hooks for m in modules for hooks in (m._forward_pre_hooks, m._forward_hooks) if hooks]
    return {*map(type, chain.from_iterable([hooks.values() for hooks in stores]))} <= {Hook}


def _of_others(hooks: Hooks) -> list[tuple[int, Callable[..., Any]]]:
    return [(number, hook) for number, hook in hooks.items() if not isinstance(hook, (Hook, Watched))]


def _nothing(*args: Any) -> None:
    return None
