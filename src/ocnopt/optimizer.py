"""OCNOpt as a :class:`torch.optim.Optimizer`: arguments, parameter groups, state; it calls the other rooms in order."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from ocnopt import arguments, checks, shards, whole_step
from ocnopt.arrangement import Arrangement, passes_of
from ocnopt.capture import Tape
from ocnopt.checkpoints import Loading, complete
from ocnopt.curvature import Curvature
from ocnopt.diagnostics import Diagnostics
from ocnopt.distributed import World, unwrapped
from ocnopt.fallbacks import Fallbacks
from ocnopt.folding import fold, samples_of
from ocnopt.games.alignment import Aligner, Rules, rules_of
from ocnopt.games.game import Game
from ocnopt.hosts import Host, is_continuous
from ocnopt.layers import Adapter
from ocnopt.linalg import without_autocast
from ocnopt.memory import usage
from ocnopt.play import Snapshot, play
from ocnopt.players import Player, find_uses
from ocnopt.problem import Problem, pose
from ocnopt.records import Folded, Need, Told
from ocnopt.rehearsal import is_rehearsal, rehearse
from ocnopt.remeasure import Remeasure
from ocnopt.rng import AllRNG
from ocnopt.roster import Roster, read_in_sums
from ocnopt.skips import Skips
from ocnopt.stock import Stock
from ocnopt.summary import summarise
from ocnopt.terms import Terms

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class OCNOpt(Optimizer):
    """Optimal Control Theoretic Neural Optimizer: every layer gets a feedback policy from dynamic programming.

    With nothing but parameters it is meant as a first choice without learning-rate search or warm-up. Letters in
    brackets are the paper's.

    Args:
        params: tensors, named pairs or groups, as for every optimizer of torch. Groups may set any of the arguments
            below, except those of the whole game: ``feedback``, ``rank``, ``gauss_newton``, ``bellman``, ``clamp``,
            ``maximize``, ``game``, ``alignment``, ``state``, ``accumulate``.
        lr: step size (η). Part of the problem that the Bellman equation solves, hence forgiving.
        model: the network that holds the parameters. Needed for ``rank`` > 1, ``feedback="nonlinear"`` and Kronecker
            curvature.
        process_group: the processes that train this network together, each on its part of the batch, with gradients
            averaged. Known if ``model`` is a ``DistributedDataParallel``; ``False``: a network for each process.
        curvature: metric of the parameters (Q_θθ): ``"identity"``, ``"adaptive"``, ``"kronecker"`` or a
            :class:`~ocnopt.curvature.Curvature`. With the feedback off these are SGD, RMSprop or Adam, and K-FAC.
        feedback: how the policy learns what the layers before have changed: ``"linear"`` predicts it, at no cost;
            ``"nonlinear"`` measures it by a second forward pass, the paper's way; ``"off"`` plays no game; ``"auto"``
            is ``"linear"``, or ``"off"`` if this ``model`` has a Neural ODE in it, as in the paper's Algorithm 2, and
            no argument of the game is given that would be without effect. A model attached later changes nothing.
        rank: number of groups of samples (r) that are weighed against each other; ``"full"`` is one group a sample.
        gauss_newton: Gauss-Newton factor (β). Larger is more cautious: no step is planned to lower the loss by more
            than 1/β².
        bellman: ``"consistent"`` keeps the Gauss-Newton term in Q_θθ; ``"paper"`` replaces Q_θθ by the curvature, as
            printed.
        clamp: keep the weights of the groups in [0, 1].
        game: do the players of a stage, layers that act on the same state, plan together (``"cooperative"``), or does
            each take the others for frozen (``"noncooperative"``)?
        alignment: when a branch that has time to spare acts, such as a skip connection with parameters: ``"first"``,
            ``"last"``, by how many stages it is late, ``"random"``, ``"adaptive"``, an
            :class:`~ocnopt.games.Alignment`, or a dict of these by names of modules. See :attr:`game`.
        state: how ``"nonlinear"`` measures what has changed upstream in a network that is no chain: ``"live"``, over
            all that is still to be read; ``"accumulated"``, layer by layer, which needs no data flow.
        players: fictitious players of each parameter (N), which share its step.
        accumulate: how many forward and backward passes a step is made of. They may be any number at any time; said
            beforehand, ``rank`` > 1 keeps r gradients of them instead of all that the layers saw.
        momentum, ema, nesterov: momentum (μ), inside the recursion. ``ema=True`` averages as Adam does, ``ema=False``
            is torch's SGD.
        weight_decay, decoupled_weight_decay: γ; decoupled is AdamW's.
        maximize: climb instead of descending.
        decay, eps, bias_correction: of the adaptive curvature. ``bias_correction`` also corrects an averaged momentum.
        damping, factor_decay, factor_every, refresh_every, ekfac: of the Kronecker curvature: λ, memory of the factors
            from one look at the layers to the next, steps between two looks, steps between two eigendecompositions
            (outside a Neural ODE rounded up to a multiple of ``factor_every``), and whether eigenvalues are measured in
            the eigenbasis (EKFAC). Layers inside a Neural ODE are looked at for a refresh only. Layers take turns: all
            get a basis at the first step, and the next within ``refresh_every`` steps. Where looks are rare the first
            ones follow each other quickly, at steps 1, 2, 3, 4, 6, 9, …
        fused: whole steps in a few kernels of our own, where they can be had: CUDA and Triton, or float32 on a CPU and
            a C compiler; rank up to 8, identity or adaptive curvature. ``False``: operations of torch alone; ``True``:
            kernels, or an error that says why.
        graphed: on CUDA, steps that repeat themselves are replayed from a CUDA graph, which takes memory for a copy of
            what the hooks keep of a pass. ``False``: never; ``True``: however large that is, and a warning says why,
            where it cannot be.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        *,
        model: nn.Module | None = None,
        process_group: ProcessGroup | Literal[False] | None = None,
        curvature: str | Curvature = "adaptive",
        feedback: str = "auto",
        rank: int | str = 1,
        gauss_newton: float = 1.0,
        bellman: str = "consistent",
        clamp: bool = True,
        game: str = "cooperative",
        alignment: Rules = "first",
        state: str = "live",
        players: int = 1,
        accumulate: int = 1,
        momentum: float = 0.9,
        ema: bool = True,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        decay: float = 0.95,
        eps: float = 1e-8,
        bias_correction: bool = True,
        damping: float = 1e-3,
        factor_decay: float = 0.95,
        factor_every: int = 1,
        refresh_every: int = 100,
        ekfac: bool = True,
        fused: bool | None = None,
        graphed: bool | None = None,
    ) -> None:
        if feedback == "auto":
            quiet = model is not None and is_continuous(model) and not arguments.asks_for_a_game(locals())
            feedback = "off" if quiet else "linear"
            del quiet  # the locals are the defaults
        of_this_process = ("self", "params", "model", "process_group", "__class__")
        defaults = {k: v for k, v in locals().items() if k not in (*of_this_process, "of_this_process")}
        arguments.check(defaults)
        self._reset()
        self._join(process_group)
        super().__init__(params, defaults)
        if self._now.rules != rules_of("first") and not arguments.alignment_matters(defaults):
            warnings.warn(
                f"alignment={alignment!r} has no effect with feedback={feedback!r} in a cooperative game, where all "
                f"layers get the same weight",
                stacklevel=2,
            )
        if model is not None:
            self.attach(model)
        elif (why := self._now.why_model) is not None:
            raise ValueError(f"{why} needs the network: pass model=... as well")

    def _reset(self) -> None:
        """What is not state: a copy or an unpickled optimizer starts from here, attached to no model."""
        self._model: nn.Module | None = None
        self._wrapper: Callable[[], nn.Module | None] = lambda: None  # a DistributedDataParallel around it, if alive
        self._world: World | None = None  # None: nobody has said
        self._loading: Loading | None = None
        self._tape: Tape | None = None
        self._unhook: weakref.finalize[..., OCNOpt] | None = None  # takes the hooks off, at the latest when this dies
        self._terms = Terms([])
        self._roster = Roster()
        self._stock = Stock()  # memory that is used in every step
        self._looked_at: tuple[Any, ...] = ()  # whose parameters were last found to be of a kind that will do
        self._aligner = Aligner()
        self._arrangement = Arrangement(aligner=self._aligner)
        self._fallbacks = Fallbacks()
        self._seated: list[Player] = []  # the players of the last step
        self._due: bool | None = None  # does any player want to see the calls of its layer? Not known after a change
        self._count = 0
        self._diagnostics = Diagnostics()
        self._skips = Skips()
        from ocnopt.replays import Replays  # which knows this class

        self._replays = Replays()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_learned": self._aligner.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        learned = None
        if "_model" not in vars(self):  # a copy; load_state_dict comes here too, and keeps the model
            self._reset()
            learned = state.pop("_learned", {})
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it to all optimizers, and this one is not
        if learned:
            self._aligner.load_state_dict(learned, self._now.rules)
        self.defaults = {**arguments.defaults_of(type(self)), **self.defaults}
        for group in self.param_groups:  # of an older version, which did not know all the arguments
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        if self._loading is not None:
            self._loading.finish()
            self._roster, self._due = Roster(), None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            arguments.check(self.param_groups[-1])
            arguments.check_agreement(self.param_groups)
        except ValueError:
            del self.param_groups[before:]
            raise
        self._roster, self._due = Roster(), None
        self._hook_if_needed()

    # --- the model ---

    def attach(self, model: nn.Module, process_group: ProcessGroup | Literal[False] | None = None) -> None:
        """Watch this model. Do it before ``torch.compile`` and before the forward pass of the step that needs it.

        ``process_group``: as that of :class:`OCNOpt`; by default what has been said before.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        wrapper, (model, found) = weakref.ref(model), unwrapped(model)
        mine = {id(p) for p in self._parameters}
        if not any(id(p) in mine for p in model.parameters()):
            raise ValueError("model holds none of the parameters of this optimizer")
        shards.check(self._parameters, model, self._now.why_model)
        self.detach()
        self._join(process_group if process_group is not None else found)
        self._model, self._wrapper, self._arrangement = model, wrapper, Arrangement(model, self._aligner)
        for name, module in model.named_modules():
            if isinstance(module, Host):
                module.attached(self, name)
        self._hook_if_needed()

    def _join(self, process_group: ProcessGroup | Literal[False] | None) -> None:
        if process_group is not None:
            self._world = World(process_group or None)
            self._aligner.world = self._world

    def detach(self) -> None:
        """Take the hooks off the model and forget it."""
        for module in self._model.modules() if self._model is not None else ():
            if isinstance(module, Host):
                module.detached(self)
        if self._unhook is not None:
            self._unhook()
        self._unhook = None
        self._model, self._tape, self._roster, self._stock = None, None, Roster(), Stock()
        self._arrangement = Arrangement(aligner=self._aligner)
        self._fallbacks, self._seated = Fallbacks(), []
        self._replays.clear()

    def _hook_if_needed(self) -> None:
        if self._model is None or self._tape is not None or not self._need():
            return
        uses = [use for each in find_uses(self._model).values() for use in each]
        me = weakref.ref(self)  # the hooks live on the model: they must not keep a forgotten optimizer alive
        modules = {use.module_name: use.called for use in uses}
        self._tape = Tape(
            self._model, modules, lambda: optimizer._need() if (optimizer := me()) else Need(), self._stock
        )
        self._tape.before_pass = lambda: optimizer._fold() if (optimizer := me()) else None
        self._tape.trained = lambda: {id(p) for p in optimizer._parameters} if (optimizer := me()) else set()
        self._tape.summed = lambda: optimizer._summed() if (optimizer := me()) else {}
        self._unhook = weakref.finalize(self, self._tape.remove)
        random = (u for u in uses if u.adapter is not None and u.host is None and u.adapter.needs_rng(u.module))
        self._tape.randomised = {u.module_name for u in random}
        self._tape.once.adapters = {u.module_name: u.adapter for u in uses if u.adapter is not None and u.host is None}

    @property
    def _now(self) -> Terms:
        """The hyper-parameters as they are."""
        if not self._terms.hold(self.param_groups):
            self._terms = Terms(self.param_groups)
        return self._terms

    def _need(self) -> Need:
        terms = self._now
        due = terms.reads_layers and (terms.always_looks or self._wants_calls())
        accumulated = self._arrangement.game.why_accumulated is not None
        alone = self._world is None or self._world.size == 1
        # a graph splits gradients in no time, while a backward pass that does it launches kernel after kernel
        return terms.need(due, alone and not self._replays.are_usual, accumulated)

    def _summed(self) -> dict[str, Adapter]:
        """The modules of whose calls the coming step reads nothing but sums, with their adapters.

        They are formed in the backward pass, which has a thread for each device, with the precision of all set higher.
        """
        if self._now.rank != 1 or len({p.device for p in self._parameters}) > 1:
            return {}
        return read_in_sums(self._players())

    def _wants_calls(self) -> bool:
        """Does any curvature look at the layers in the coming step?"""
        if self._due is None:
            self._due = any(p.curvature.due(p.kept(self.state), p.group, p.inside) for p in self._players())
        return self._due

    # --- a step ---

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step. The closure, if any, is called once, with gradients enabled, and its loss returned."""
        loss, rng = None, None
        if closure is not None:
            rng = AllRNG.capture({p.device for p in self._parameters})
            with torch.enable_grad():
                loss = closure()
        terms = self._now
        terms.check()
        everybody = self._players()
        self._check(terms, need := self._need(), everybody)
        try:
            players = self._roster.acting(everybody, self._fallbacks)
            unseen = self._tape is None or not self._tape.passes
            if players and unseen and is_rehearsal(self.param_groups, self.state):
                rehearse(players, self.param_groups[0], self.state)
            elif players:
                with without_autocast():
                    if closure is None:
                        self._replays.step(self, terms, everybody, players, lambda: self._step(terms, need, players))
                    else:
                        self._step(terms, need, players, loss, closure, rng)
        finally:
            self._due = None
            if self._tape is not None:
                self._tape.clear()
            self._stock.tidy()
        self._aligner.after_step(terms.rules)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._tape is not None:
            self._tape.clear()

    def _check(self, terms: Terms, need: Need, players: list[Player]) -> None:
        """Everything that can be wrong is found here, before anything is touched."""
        checks.gradients(self._parameters)
        if self._looked_at != (terms, players):
            shards.check(self._parameters, None, terms.why_model)
            self._looked_at = terms, players
        checks.processes(terms, self._world, self._wrapper)
        why = terms.why_model
        checks.weights(self._tape, need, why)
        if need and self._tape is None:
            if self._model is not None:  # the groups were changed since the last forward pass
                self._hook_if_needed()
                late = why or "bellman='paper' with a model"
                raise RuntimeError(f"{late} was asked for after the forward pass: run forward and backward again")
            if why is not None:
                raise RuntimeError(f"{why} needs the network: call attach(model) before the forward pass")

    @property
    def world(self) -> World | None:
        """The processes that train the same network, as far as it was said."""
        return self._world

    def _talking_to(self, loss: Any) -> World:
        """The processes to exchange something with in this step: nobody if all that counts is ``p.grad``."""
        if self._world is None or not (loss is not None or self._now.together or self._need().flow):
            return World()
        return self._world

    @property
    def _alone(self) -> bool:
        return (self._world is None or self._world.size == 1) and not any(map(shards.is_sharded, self._parameters))

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _players(self) -> list[Player]:
        return self._roster.players(self.param_groups, self._model)

    def _step(
        self,
        terms: Terms,
        need: Need,
        players: list[Player],
        loss: Any = None,
        closure: Callable[[], float] | None = None,
        rng: AllRNG | None = None,
    ) -> Problem:
        group = self.param_groups[0]
        world = self._talking_to(loss)
        passes = [] if self._tape is None else passes_of(self._tape, group)
        folded = None if self._tape is None else self._tape.folded
        samples = samples_of(folded, passes, terms.rank, group["accumulate"], world)
        if self._tape is not None:
            self._tape.rescale(world)
            players = self._fallbacks.players(self._tape, players, samples.groups.rank > 1, self.state, world)
        self._seated = players
        stages, live = self._arrangement.arrange(players, passes, samples, group, need, self._tape, world)
        if need.flow or need.states:
            world.must_agree(f"{stages.modules} {stages.stage_of}", "do not run the same layers in the same order")
        if need.flow and self._tape is not None and not self._tape.order:
            self._fallbacks.say("the model", "none of its forward passes was seen", "layers act as they are defined")
        if group["feedback"] == "nonlinear":
            self._fallbacks.uncalled(p for p in players if stages.of(p) in stages.uncalled)
        records = self._tape.records if self._tape is not None else []
        before = loss.detach() if isinstance(loss, Tensor) else loss
        if before is not None and not isinstance(before, Tensor):
            before = torch.tensor(before, dtype=torch.float64)
        guarded = terms.runs_code_of_others and not whole_step.underway()
        seen, shelves = self._fallbacks.seen, self._roster.shelves
        with Snapshot(players, self.state, self._stock) if guarded else nullcontext() as snapshot:
            told = Told(passes, records, folded)
            problem = pose(players, stages, told, self.state, samples, before, group, world, seen, shelves)
            if snapshot is not None:
                # a second pass is over before state that is settled last goes on
                snapshot.take(problem.settled_last if group["feedback"] == "nonlinear" else {"step"})
            self._diagnostics = play(problem, group, self._tape, passes, samples, live, world)
        problem.tick()
        self._count += 1
        self._skips.count(problem)
        if closure is not None and before is not None and rng is not None:
            self._diagnostics.actual = Remeasure(self, closure, before, rng)
        return problem

    @torch.no_grad()
    def _fold(self) -> None:
        """A pass begins while the tape holds another: where group gradients are all that the step needs of that one,
        and it was said how many are to come, they take its place.
        """
        group, tape = self.param_groups[0], self._tape
        if tape is None or group["accumulate"] == 1 or self._now.reads_layers or self._need().states:
            return
        if not self._need().calls:
            return
        passes = passes_of(tape, group)
        tape.folded = tape.folded or Folded.after(passes[0])
        with without_autocast():
            world = self._world or World()
            samples = samples_of(tape.folded, passes, self._now.rank, group["accumulate"], world, over=False)
            players = [p for p in self._players() if all(q.grad is not None for q in p.params)]
            players = self._fallbacks.players(tape, players, True, self.state, World())
            fold(tape.folded, players, tape.records, samples)
        tape.forget()

    # --- the game ---

    @property
    def game(self) -> Game:
        """The layers as players: stages, branches that can move, alignment, a drawing."""
        game = self._arrangement.game
        game.rules, game.tape = self._now.rules, self._tape
        return game

    # --- looking at it ---

    @property
    def diagnostics(self) -> Diagnostics:
        """The last step, layer by layer. Warns if steps were skipped since it was last asked for."""
        self._skips.report(self._alone)
        self._diagnostics.skipped = None if self._skips.total is None else self._skips.total.clone()
        return deepcopy(self._diagnostics) if self._diagnostics.passing else self._diagnostics

    def summary(self) -> str:
        """Print and return one table: layer, adapter, curvature, stage, parameters, what falls back and why."""
        group = self.param_groups[0]
        split = group["feedback"] != "off" and group["rank"] != 1
        seated = {id(p.params[0]): p for p in self._seated}
        players = [seated.get(id(p.params[0]), p) for p in self._players()]
        text = summarise(players, self._arrangement.stages, split, self._fallbacks.reasons)
        if (why := self.game.why_accumulated) is not None:
            what = "state: accumulated" if group["feedback"] == "nonlinear" else "stages:"
            text += f"\n{what} layer by layer, since {why}"
        print(text)
        return text

    def memory_usage(self) -> dict[str, int]:
        """Bytes held now, by category. ``"tape"`` is what the hooks have kept since the last step, inputs and adjoints
        of layers, and is gone after the next one; ``"to be used again"``: memory that nobody needs between steps, kept
        on a CPU because new memory is slow; all else is state.
        """
        return usage(self.state, self._tape, self._stock)

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and which version wrote it; a curvature of your own is saved by its name."""
        mine = self.register_state_dict_post_hook(lambda _, saved: complete(self, saved), prepend=True)  # others see it
        try:
            return super().state_dict()
        finally:
            mine.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, except that state keeps its precision: float32 averages of bfloat16 weights stay float32."""
        self._loading = Loading(self)
        mine = self.register_load_state_dict_pre_hook(self._loading.begin)  # after those of others, who may change it
        try:
            super().load_state_dict(state_dict)
        finally:
            mine.remove()
            self._loading = None
        self._hook_if_needed()
