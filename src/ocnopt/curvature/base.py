"""What a curvature is to the engine: something that learns from each step and applies C^{-1}.

C_k is the paper's approximation of Q_θθ (Table I). The step size is not part of it: the engine works with M = C/η.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from ocnopt.bucket import Bucket
    from ocnopt.players import Player


class Metric(ABC):
    """C of one bucket at one step."""

    #: C = I
    is_identity: bool = False
    #: does :meth:`solve` return tensors that nobody else holds, and that may be overwritten?
    is_new: bool = False

    @abstractmethod
    def solve(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """C^{-1} v. One tensor for each parameter of the bucket, each with the same leading dimensions, if any."""


class Curvature(ABC):
    """A rule that turns the statistics of a step into a :class:`Metric`.

    Subclass it for a curvature of your own and pass an instance as ``curvature=``. Keep what must survive a
    checkpoint in ``bucket.states`` (tensors and plain Python, by parameter), hyper-parameters in the object itself or
    in ``bucket.group``.
    """

    #: what a checkpoint calls it
    name: str
    #: whether :meth:`measure` reads the inputs and adjoints of the layers (``bucket.calls``), which needs the model
    needs_model: bool = False
    #: whether it can do with a :class:`~ocnopt.curvature.tally.Tally` (``bucket.tallies``) instead of calls: those of a
    #: layer that is used often are then not kept
    takes_tallies: bool = False
    #: whether :meth:`measure` adds up over ``bucket.world`` what it reads there, so that processes which train one
    #: network on a batch each come to the same metric
    adds_up: bool = False
    #: keys of state that comes and goes between steps, in :meth:`catch_up`, and that no step reads
    aside: tuple[str, ...] = ()

    def due(self, state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> bool:
        """Does :meth:`measure` want the calls of a layer at this step? ``inside`` an ODE solve they are costly to get.

        ``state`` is that of the player's first parameter. Where it does not, ``bucket.calls`` may have none; another
        process may have some nevertheless (``bucket.seen``).
        """
        return self.needs_model

    def refreshes(self, state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> bool:
        """Does :meth:`measure` do something at this step that it does now and then only, and wait for the device?"""
        return False

    def overdue(self, state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> bool:
        """Is there something to do before the coming step that needs nothing of it? :meth:`measure` begins with it; so
        that a captured step need not, :meth:`catch_up` does it beforehand.
        """
        return False

    def untouched(self, state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> Set[str]:
        """Keys of state whose tensors :meth:`measure` does not overwrite in the coming step, whatever it puts in their
        places. They need not be copied, to be put back if the step fails.
        """
        return frozenset()

    def catch_up(self, players: Sequence[Player], states: Sequence[dict[str, Any]], peers: Sequence[Player]) -> int:
        """Do what is overdue for these players, whose states are those of their first parameters; ``peers``: all that
        have this curvature. Returns how many decompositions failed.
        """
        return 0

    def ready(self, state: Mapping[str, Any]) -> bool:
        """Is there something to go on with, should the calls of a layer not be known at this step?"""
        return False

    def fits(self, state: Mapping[str, Any], params: Sequence[Tensor]) -> bool:
        """Is the state of use for a player with these parameters? A block may lose or gain one, frozen or thawed."""
        return True

    @abstractmethod
    def measure(self, bucket: Bucket, a: Tensor | None) -> Metric:
        """Update the statistics and give the metric of this step.

        ``a`` is ``None`` in consistent mode. In paper mode it is a_{k+1}, ``[r]``: statistics are those of Q_θ and
        V^h, i.e. of gradients and adjoints re-weighted by it. Updates of state are multiplied by ``bucket.ok``: a bad
        step must leave no trace.
        """
