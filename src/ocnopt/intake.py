"""What a step reads of its tape: how it is made up, and tensor by tensor.

Steps of the same make-up do the same with the same tensors in the same order, so one of them that was captured in a
graph can be replayed for the others, once their tensors are where it reads them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from ocnopt.capture import Tape
from ocnopt.readings import Products, Reading
from ocnopt.records import Pass, Record, versions_of
from ocnopt.trees import mapped, tensors


class Intake(NamedTuple):
    """Of one step."""

    kind: Hashable
    tensors: list[Tensor]


def why_not(tape: Tape) -> str | None:
    """Why a step of this tape is not one of those that are made up alike."""
    if tape.folded is not None or len(tape.passes) > 1:
        return "the step is made of several passes"
    for this in tape.passes:
        if (why := _why_not(tape, this)) is not None:
            return why
    for record in tape.records:
        if record.inner is not None or record.tallies:
            return f"calls of {record.name!r} were added up in the backward pass"
        if record.rng is not None:
            return f"{record.name!r} draws random numbers, which layers are asked for again"
        if record.overwritten() or any(reading.overwritten for reading in record.readings.values()):
            return f"the input of {record.name!r} was overwritten in place"
    return None


def _why_not(tape: Tape, this: Pass) -> str | None:
    if this.inputs_changed():
        return "the input of the model was overwritten in place"
    if any(reading.overwritten for reading in (*this.D.values(), *this.readings.values())):
        return "a tensor between the layers was overwritten in place"
    if this.environment is None:
        return None
    # what a second pass does must be known from what the first one did
    if this.draws or tape.follower.draws:
        return "the model draws random numbers, and feedback='nonlinear' runs it again"
    if this.flow is None or this.flow.unknown is not None:
        return "the data flow of the model is not known" if this.flow is None else this.flow.unknown
    if not this.compared:
        return "the data flow of this pass was not foreseen"
    if tape.hooked_by_others:
        return "others have hooks on the model"
    return None


def taken_in(tape: Tape) -> Intake:
    """What the step is going to read. Nothing is left out that it depends on: see also :func:`why_not`."""
    # who acts when, of which some steps want to know nothing else
    kinds: list[Hashable] = [(tuple(tape.order), tape.flow, tape.flow and tape.flow.version)]
    found: list[Tensor] = []
    shared: dict[Products, int] = {}
    for this in tape.passes:
        kinds.append(_make_up(this))
        found += tensors((this.args, this.kwargs))
        if this.environment is not None:
            found += this.environment.buffers.values
        if this.flow is not None:
            found += this.flow.constants.values()
        for readings in (this.D, this.readings):
            kinds.append((*readings, _arrived(readings.values(), found, shared)))
    for record in tape.records:
        kinds.append(_of_call(record, found, shared))
    found += [products.numbers for products in shared]
    for pair in tape.scaling.pairs:
        found += pair
    return Intake(tuple(kinds), found)


def _of_call(record: Record, found: list[Tensor], shared: dict[Products, int]) -> Hashable:
    args, kwargs, outline = record.args, record.kwargs, None
    if args or kwargs:
        found += tensors(args)
        if kwargs:
            found += tensors(kwargs)
        flow = record.origin.flow
        if flow is None or flow.unknown is not None:  # else that tells, and it is part of the kind
            outline = _outline((args, kwargs))
    for store in (record.h, record.columns, record.outputs):
        found += store.values()
    arrived = _arrived(record.readings.values(), found, shared)
    how = record.name, record.occurrence, record.training, record.autocast, record.opaque
    return how, outline, tuple(record.readings), arrived, tuple(record.h), tuple(record.columns), tuple(record.outputs)


def put_back(tape: Tape, others: Iterable[Tensor]) -> None:
    """Let the step read other tensors, in the order of :func:`taken_in`."""
    them, shared = iter(others), dict[Products, None]()

    def following(_: Tensor) -> Tensor:
        return next(them)

    for this in tape.passes:
        this.args, this.kwargs = mapped(following, (this.args, this.kwargs))
        this.versions = versions_of((this.args, this.kwargs))
        if this.environment is not None:
            this.environment.buffers.values = [next(them) for _ in this.environment.buffers.values]
        if this.flow is not None:
            this.flow.constants = {name: next(them) for name in this.flow.constants}
        for readings in (this.D, this.readings):
            _replace(readings.values(), them, shared)
    for record in tape.records:
        _put_back(record, them, shared)
    for products in shared:
        products.numbers = next(them)
    tape.scaling.pairs = [(next(them), next(them)) for _ in tape.scaling.pairs]


def _put_back(record: Record, them: Iterator[Tensor], shared: dict[Products, None]) -> None:
    record.args, record.kwargs = mapped(lambda _: next(them), (record.args, record.kwargs))
    record.versions = versions_of((record.args, record.kwargs)) if record.versions else []
    record.h = {i: next(them) for i in record.h}
    record.columns = {name: next(them) for name in record.columns}
    record.outputs = {i: next(them) for i in record.outputs}
    _replace(record.readings.values(), them, shared)


@contextmanager
def unharmed(tape: Tape) -> Iterator[None]:
    """Run a block that uses up what is on the tape; afterwards it is there again, be it in other tensors."""
    found = [(each, dict(vars(each))) for each in (*tape.passes, *tape.records)]
    flows = {this.flow: (this.flow.constants, this.flow.fixed) for this in tape.passes if this.flow is not None}
    try:
        yield
    finally:
        for each, before in found:
            vars(each).update(before)
        for flow, (constants, fixed) in flows.items():
            flow.constants, flow.fixed = constants, fixed


def _make_up(this: Pass) -> Hashable:
    flow, environment = this.flow, this.environment
    version = None if flow is None else flow.version
    modes = () if environment is None else environment.modes
    how = this.chain, this.whole, this.foreseen, this.split, this.opaque, this.groups is None
    given = this.given or tuple([t.shape for t in tensors((this.args, this.kwargs))])
    return this.batch, given, tuple(this.order), flow, version, modes, this.autocast, how


def _outline(tree: Any) -> Hashable:
    """Arguments without the numbers that are in their tensors."""
    if isinstance(tree, Tensor):
        return tree.shape
    if isinstance(tree, (tuple, list)):
        return type(tree), *map(_outline, tree)
    if isinstance(tree, Mapping):
        return tuple([(key, _outline(part)) for key, part in tree.items()])
    return type(tree), tree if isinstance(tree, Hashable) else id(tree)


def _arrived(readings: Iterable[Reading], found: list[Tensor], shared: dict[Products, int]) -> Hashable:
    """Which readings have something to say, and where their products are among others.

    ``shared``: of several readings, in the order in which they are come across.
    """
    there: list[Hashable] = []
    for reading in readings:
        if not reading.there:
            there.append(None)
            continue
        assert reading.adjoint is not None
        found.append(reading.adjoint)
        if reading.among is None:
            found += tensors(reading.before)
            there.append(-1)
        else:
            products, first = reading.among
            there.append((shared.setdefault(products, len(shared)), first))
    return tuple(there)


def _replace(readings: Iterable[Reading], them: Iterator[Tensor], shared: dict[Products, None]) -> None:
    for reading in readings:
        if reading.there:
            reading.adjoint = next(them)
            if reading.among is None:
                reading.before = next(them)
            else:
                shared[reading.among[0]] = None
