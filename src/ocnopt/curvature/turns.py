"""When a layer gets a new eigenbasis: counters of its state, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ocnopt.distributed import share_out


def interval(state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> int:
    """Steps from the last refresh to the next. Where looks are rare, the first ones follow each other quickly, at steps
    1, 2, 3, 4, 6, 9, …: what the first mini-batch says of an untrained layer is soon out of date.
    """
    every, soon = period(group, inside), max(1, state.get("refreshed_at", 0) // 2)
    if inside or 1 < group["factor_every"] >= soon:
        every = min(every, soon)
    elif group["factor_every"] > 1:
        every = min(every, _whole(soon, group["factor_every"]))
    early: int = state.get("early", 0)
    return max(1, every - max(0, early))


def period(group: Mapping[str, Any], inside: bool) -> int:
    """Steps between refreshes once all is under way: as many as were asked for, and on to the next look. The looks at
    all layers thus stay together; inside a solve there are none in between.
    """
    every: int = group["refresh_every"]
    return every if inside else _whole(every, group["factor_every"])


def _whole(steps: int, unit: int) -> int:
    """Rounded up to a multiple."""
    return -(-steps // unit) * unit


def caught_up(state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> dict[str, int]:
    """What a refresh makes of the counters, if it is due: only the device knows how many steps have counted."""
    every = interval(state, group, inside)
    counted = int(state["statistics"])
    age: int = counted - state.get("refreshed_at", -every)
    return {"since_refresh": age} if age < every else {"since_refresh": 0, "refreshed_at": counted, "early": 0}


def at_once(state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> bool:
    """Does a refresh wait for what its step sees? The first one must, inside a solve looks are there for nothing else,
    and at every step no basis may be old. All others take what the steps before have left, so that a step as such is
    always the same, and one in a CUDA graph too.
    """
    return inside or group["refresh_every"] == 1 or state.get("refreshed_at", 0) <= 0


# --- a basis that takes its time ---


def takes_time(group: Mapping[str, Any]) -> bool:
    """Does a basis serve some steps after its statistics, so that it can be made beside them? Where bases are renewed
    often, it serves from the next step on.
    """
    return bool(group["refresh_every"] >= 10)


def is_made(state: Mapping[str, Any]) -> bool:
    """Is there a basis to come? ``basis_at``: how many statistics are in the one that serves."""
    last = state.get("refreshed_at")
    return bool(state.get("basis_at", last) != last)


def serves(state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> bool:
    """Is it time for it? After a tenth of the interval, on whatever device, however long it takes."""
    return is_made(state) and bool(state["since_refresh"] >= max(1, interval(state, group, inside) // 10))


# --- turns ---


def stagger(costs: Sequence[float], every: int, unit: int) -> list[int]:
    """After how many steps, 1 to ``every``, in multiples of ``unit``, each piece of work is done: at evenly spaced
    times, as much at each as can be, and what takes longest far apart.
    """
    slots = every // unit
    times = min(slots, len(costs))
    if times < 2:
        return [every] * len(costs)
    places = _far_apart(times)
    return [(places[turn] + 1) * slots // times * unit for turn in share_out(costs, times)]


def _far_apart(count: int) -> list[int]:
    """The numbers up to there such that neighbours in the list are none: 0, 4, 2, 6, 1, 5, 3, 7."""
    digits = (count - 1).bit_length()
    return sorted(range(count), key=lambda n: f"{n:0{digits}b}"[::-1])
