"""One forward pass of a model whose layers are on different ranks, and its way back.

    rank 0                                     rank 1
    model.forward(x)                           model.forward(x)        the same code on each rank
      embed(x)        runs here                  embed(x)                waits for rank 0, and is absent here
      blocks[0](h)    runs here                  blocks[0](h)            absent
      blocks[1](h) ── h, shapes so far ────────►  blocks[1](h)           runs here, on what was received
      Left: the rest is another rank's            head(h)                runs here; what is returned is the output

What lies between the layers runs where its values are. Each layer must be called once, in order: then all that
crosses to the next rank are the arguments of its first layer. Gradients go back the same way.

Knows layers, their owners and messages; does not know batches, losses or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from openclaw_nb.core.errors import MismatchError, RefusedError
from openclaw_nb.engine.group.exchange import Exchange, Expected
from openclaw_nb.engine.group.packing import Message
from openclaw_nb.engine.loss.record import map_tensors
from openclaw_nb.engine.stages.absent import absent, origin_of, present, receive_into
from openclaw_nb.engine.stages.layout import Layout
from openclaw_nb.plan import stages

Waiting = Callable[[], Any]


class Left(BaseException):
    """The rest of the model's code is another rank's; code that catches every Exception does not catch it."""


@dataclass(frozen=True)
class Form:
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Run:
    """Consecutive layers of this rank: from ``start`` to before ``end``; who has those before and after them."""

    start: int
    end: int
    before: int | None
    after: int | None


@dataclass
class Crossed:
    """What has crossed the borders of one run of layers in a pass, as far as it needs a gradient."""

    run: Run
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


class _Enter(torch.autograd.Function):
    """The identity: a received tensor that may be written to in place, as no leaf of the graph may."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Route:
    """The way of a model's forward passes through its ranks, as this rank sees it.

    Parameters
    ----------
    layout : Layout
        Which rank has which layer.
    rank : int
        This rank.
    exchange : Exchange or None
        To the other ranks; None when there are none.
    waiting : callable
        Gives the context in which this rank waits for another.

    Attributes
    ----------
    current : Pass or None
        The pass that runs.
    returning : Pass or None
        The pass whose gradients are computed.
    num_bytes : int
        How much was sent.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        exchange: Exchange | None,
        waiting: Waiting,
        backward: Callable[..., None],
    ) -> None:
        self.layout, self.rank, self.exchange, self._waiting = layout, rank, exchange, waiting
        self.backward = backward
        self.owners = layout.owners
        runs = stages.segments(self.owners)
        self.runs = [
            Run(
                start,
                end,
                runs[at - 1][0] if at else None,
                runs[at + 1][0] if at + 1 < len(runs) else None,
            )
            for at, (owner, start, end) in enumerate(runs)
            if owner == rank
        ]
        self.last = self.owners[-1]
        self.current: Pass | None = None
        self.returning: Pass | None = None
        self.num_bytes = 0
        own = [part.module for part in layout.parts if part.owner == rank]
        first = next((t for module in own for t in (*module.parameters(), *module.buffers())), None)
        self.device = first.device if first is not None else torch.device("cpu")
        self._replaced: list[tuple[nn.Module, Any]] = []

    def install(self) -> None:
        """Let each layer ask here whether it runs on this rank."""
        for at, part in enumerate(self.layout.parts):
            self._replaced.append((part.module, part.module.__dict__.get("forward")))
            part.module.forward = self._forward_of(at, part.module.forward)

    def remove(self) -> None:
        """Give the layers their own code back."""
        while self._replaced:
            module, own = self._replaced.pop()
            if own is None:
                del module.forward
            else:
                module.forward = own

    def _forward_of(self, at: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.current is not None:
                return self.current.call(at, plain, args, kwargs)
            if self.returning is not None:  # activation checkpointing computes it again
                return self.returning.call_again(at, plain, args, kwargs)
            raise RefusedError(
                f"{self.layout.parts[at].name} was called by itself. Its layers are on different workers: "
                "call the whole "
                "model, whose output all workers get."
            )

        return forward

    def next_run(self, at: int) -> Run | None:
        """Return this rank's first run of layers after one that is another's."""
        return next((run for run in self.runs if run.start > at), None)

    def send(self, peer: int, header: Any, tensors: Sequence[Tensor]) -> None:
        """Begin to send to another rank."""
        assert self.exchange is not None
        self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        self.exchange.send(peer, header, tensors)

    def take(self, expected: Expected, key: Any) -> Message:
        """Wait for a message, and see that it is the one that is due.

        Raises
        ------
        MismatchError
            When it is another: the ranks do not run the same code.
        """
        with self._waiting():
            message = expected.wait()
        if message.header[0] != key:
            raise MismatchError(
                f"Rank {self.rank} is at {key} of its model calls, and was sent {message.header[0]}. Every "
                "rank must call the "
                "model alike and run backward() alike."
            )
        return message

    def receive(self, peer: int, key: Any) -> Message:
        """Wait for the next message of another rank."""
        assert self.exchange is not None
        return self.take(self.exchange.expect(peer), key)


class Pass:
    """One pass through the model.

    Parameters
    ----------
    route : Route
        The way.
    number : tuple of int
        The model call, and the part of its batch.
    keeps_random : bool
        Let the ranks draw from one stream of random numbers, in the order of the layers.
    expected : Expected, optional
        The message for this rank's first run of layers, if it is on its way already.
    """

    def __init__(
        self, route: Route, number: tuple[int, int], *, keeps_random: bool, expected: Expected | None = None
    ) -> None:
        self._route, self._number, self._keeps_random = route, number, keeps_random
        self._expected = expected
        self._wants_gradient = torch.is_grad_enabled()
        self._next = 0
        self._forms: list[Any] = []
        self._message: Message | None = None
        self._crossed: list[Crossed] = []
        self._random: dict[int, Tensor] = {}

    # --------------------------------------------------------------------------------------- forward

    def call(self, at: int, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Do what this rank does of a layer: run it, wait for what it has computed elsewhere, or leave."""
        route = self._route
        self._check_order(at)
        owner, before = route.owners[at], route.owners[at - 1] if at else None
        if before is not None and before != owner:
            if before == route.rank:
                self._hand_on(at, owner, args, kwargs)
            elif owner == route.rank:
                args, kwargs = self._take_up(at, args, kwargs)
        if owner != route.rank:
            run = route.next_run(at)
            if run is None:
                raise Left
            return self._absent(at, self._await(run))
        if not at:
            self._crossed.append(Crossed(route.runs[0]))
        self._check_here(route.layout.parts[at].name, (args, kwargs))
        args, kwargs = map_tensors(present, (args, kwargs))
        output = plain(*args, **kwargs)
        self._forms.append(map_tensors(lambda t: Form(tuple(t.shape), t.dtype), output))
        return output

    def _check_order(self, at: int) -> None:
        parts = self._route.layout.parts
        if at != self._next:
            due = parts[self._next].name if self._next < len(parts) else "none"
            raise RefusedError(
                f"The model calls {parts[at].name} where {due} is due. Layers on different workers must each be called "
                "once, in the order in which they are listed: list them so (--stages), and parts that are called in "
                "another way as one layer."
            )
        self._next += 1

    def _check_here(self, name: str, tree: Any) -> None:
        def check(leaf: Tensor) -> Tensor:
            origin = origin_of(leaf)
            if origin:
                raise RefusedError(
                    f"{name} on rank {self._route.rank} needs a value of {origin}, which is on another rank and was no "
                    "argument of this rank's first layer (a skip connection?). Put both layers onto one worker "
                    "(--stages), or make one layer of what lies between them."
                )
            return leaf

        map_tensors(check, tree)

    def _hand_on(self, at: int, owner: int, args: Any, kwargs: Any) -> None:
        """Send a layer's arguments to the rank that has it."""
        self._check_here(self._route.layout.parts[at].name, (args, kwargs))
        leaves = [present(leaf) for leaf in _leaves((args, kwargs))]
        flags = [leaf.requires_grad and self._wants_gradient for leaf in leaves]
        self._crossed[-1].outputs = [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]
        random = [torch.get_rng_state()] if self._keeps_random else []
        header = ((*self._number, at), flags, self._forms)
        self._route.send(owner, header, [*leaves, *random])

    def _await(self, run: Run) -> list[Any]:
        """Return the forms of all layers before a run of this rank, when the rank before it is there."""
        if self._message is None:
            key = (*self._number, run.start)
            assert run.before is not None
            if self._expected is not None:
                self._message, self._expected = self._route.take(self._expected, key), None
            else:
                self._message = self._route.receive(run.before, key)
        forms: list[Any] = self._message.header[2]
        return forms

    def _absent(self, at: int, forms: list[Any]) -> Any:
        route = self._route
        name = route.layout.parts[at].name
        if at == len(self._forms):
            self._forms.append(forms[at])
        return map_tensors(lambda form: absent(form.shape, form.dtype, route.device, name), forms[at], Form)

    def _take_up(self, at: int, args: Any, kwargs: Any) -> Any:
        """Return a layer's arguments with what was received in the places of the tensors."""
        run = next(run for run in self._route.runs if run.start == at)
        self._forms = list(self._await(run))
        assert self._message is not None
        message, self._message = self._message, None
        tensors = list(message.tensors)
        if self._keeps_random:
            self._random[at] = tensors.pop()
            torch.set_rng_state(self._random[at])
        leaves = _leaves((args, kwargs))
        if len(leaves) != len(tensors):
            raise RefusedError(
                f"{self._route.layout.parts[at].name} is called with {len(leaves)} tensors on rank "
                f"{self._route.rank}, and with "
                f"{len(tensors)} on rank {run.before}. What is passed to it must not depend on the rank."
            )
        crossed = Crossed(run)
        self._crossed.append(crossed)
        values: dict[int, Tensor] = {}
        for place, (leaf, tensor, flag) in enumerate(zip(leaves, tensors, message.header[1], strict=True)):
            value = tensor.to(self._route.device)
            if flag:
                crossed.inputs.append(value.requires_grad_())
                value = _Enter.apply(value)  # type: ignore[no-untyped-call]
            receive_into(leaf, value)
            values[place] = value
        places = iter(range(len(leaves)))
        return map_tensors(lambda _: values[next(places)], (args, kwargs))

    def finish(self, output: Any) -> Any:
        """Return what the model has returned on the rank that has the last layer, with every value here.

        Raises
        ------
        RefusedError
            When it has not called every layer.
        """
        parts = self._route.layout.parts
        if self._next < len(parts):
            raise RefusedError(
                f"The model has not called {', '.join(part.name for part in parts[self._next :])}. Layers on "
                "different workers "
                "must each be called once."
            )
        self._check_here("the model's output", output)
        output = map_tensors(present, output)
        self._crossed[-1].outputs = [t for t in _leaves(output) if t.requires_grad and self._wants_gradient]
        return output

    # -------------------------------------------------------------------------------------- backward

    def call_again(self, at: int, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a layer again for its gradient, on what it has been run before."""
        if at in self._random:
            torch.set_rng_state(self._random[at])
        args, kwargs = map_tensors(present, (args, kwargs))
        return plain(*args, **kwargs)

    def go_back(self, gradients: Sequence[Tensor | None]) -> None:
        """Compute this rank's gradients.

        Parameters
        ----------
        gradients : sequence of Tensor or None
            Of the outputs that need one; used on the rank that has the last layer.
        """
        route = self._route
        route.returning = self
        try:
            for crossed in reversed(self._crossed):
                self._go_back_through(crossed, gradients)
        finally:
            route.returning = None
            self._crossed = []

    def _go_back_through(self, crossed: Crossed, gradients: Sequence[Tensor | None]) -> None:
        route, run = self._route, crossed.run
        if run.after is not None and crossed.outputs:
            message = route.receive(run.after, (*self._number, -run.end))
            tensors = iter(message.tensors)
            gradients = [next(tensors).to(route.device) if flag else None for flag in message.header[1]]
        pairs = [
            (out, grad) for out, grad in zip(crossed.outputs, gradients, strict=False) if grad is not None
        ]
        if pairs:
            outputs, given = zip(*pairs, strict=True)
            route.backward(outputs, given)
        if run.before is not None and crossed.inputs:
            found = [value.grad for value in crossed.inputs]
            header = ((*self._number, -run.start), [gradient is not None for gradient in found])
            route.send(run.before, header, [gradient for gradient in found if gradient is not None])


def _leaves(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found
