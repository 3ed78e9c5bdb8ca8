"""The precision of one cell: its layers cast, its loss scaled, as a strategy hangs them onto the cell's objects.

    read      which dtype, which layers, which scale; refused before anything has changed
    install   casting around the modules, steps that are skipped after an overflow
    remove    every object as it was

A strategy gives `scaling` to whatever runs its backward passes, and uses `objects`, in which the scale is one of the
scalers: so it is made common, kept in checkpoints, and taken over after a death like any other. Knows the parts of
precision and wires them; does not know batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.objects.find import Objects
from openclaw_nb.engine.precision.casting import Casting
from openclaw_nb.engine.precision.layers import choose_layers
from openclaw_nb.engine.precision.scale import NAME, LossScale, copied, keep, scale_for
from openclaw_nb.engine.precision.scaling import Scaled, Unscaled
from openclaw_nb.engine.precision.usable import usable_dtype
from openclaw_nb.strategies.precision import Precision


class Cast:
    """What of some models computes in 16 bits.

    Parameters
    ----------
    precision : Precision
        What is asked for.
    models : mapping of str to nn.Module
        Of what.

    Attributes
    ----------
    dtype : torch.dtype
        What it computes in; float32 when nothing is asked for.
    notes : list of str
        Lines for the person.
    device_type : str
        Where the models are.

    Raises
    ------
    RefusedError
        For layers that are not there, and parameters that are no float32.
    """

    def __init__(self, precision: Precision, models: Mapping[str, nn.Module]) -> None:
        self.notes: list[str] = []
        self.dtype, self.device_type = torch.float32, "cpu"
        self._casting: Casting | None = None
        if precision.name == "fp32":
            return
        device = _check_parameters(models)
        self.device_type = device.type
        self.dtype, reason = usable_dtype(precision.name, device)
        if reason:
            self.notes.append(f"{_word(self.dtype)} is used instead of {precision.name}: {reason}")
        self._of_layers = precision.layers is not None
        modules = dict(models)
        if precision.layers is not None:
            modules, missing = choose_layers(models, precision.layers)
            listed = ", ".join(modules)
            self.notes.append(f"{len(modules)} layers compute in {_word(self.dtype)}: {listed}")
            self.notes += [f"the model has no {word} layers" for word in missing]
        self._casting = Casting(modules, self.dtype, device.type)

    def install(self) -> None:
        """Begin, until `remove`."""
        if self._casting is not None:
            self._casting.install()

    def remove(self) -> None:
        """Leave the modules as they were."""
        if self._casting is not None:
            self._casting.remove()

    def idle(self, is_here: Callable[[nn.Module], bool] | None = None) -> list[str]:
        """Return a line that names the layers that were asked for and never called; none when there are none.

        Parameters
        ----------
        is_here : callable, optional
            Tells of a layer whether this rank would have called it; it would have when not given.
        """
        if self._casting is None or not self._of_layers:
            return []
        names = sorted(
            name for name, layer in self._casting.idle.items() if is_here is None or is_here(layer)
        )
        if not names:
            return []
        return [
            f"these layers were never called as such, so that they computed in float32: {', '.join(names)}"
        ]


class CellPrecision:
    """The precision of a cell's objects.

    Parameters
    ----------
    precision : Precision
        What is asked for.
    objects : Objects
        The cell's.
    is_trial : bool
        Whether the steps are only tried: the scale that the next cell goes on with stays as it is.
    agree : callable, optional
        Returns whether an overflow was on any rank; not needed where ranks have the same gradients.

    Attributes
    ----------
    objects : Objects
        The cell's, with the loss scale, if there is one, among the scalers.
    scaling : Unscaled
        What its backward passes are scaled by.
    dtype : torch.dtype
        What they compute in; float32 when nothing is asked for.
    notes : list of str
        Lines for the person.
    """

    def __init__(
        self,
        precision: Precision,
        objects: Objects,
        *,
        is_trial: bool = False,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self._cast = Cast(precision, objects.models)
        self.notes, self.dtype = self._cast.notes, self._cast.dtype
        scale = self._scale(precision, objects, is_trial=is_trial)
        self.scaling = scaling_of(scale, objects.optimizers, agree)
        self.objects = (
            objects if scale is None else replace(objects, scalers={**objects.scalers, NAME: scale})
        )

    def _scale(self, precision: Precision, objects: Objects, *, is_trial: bool) -> LossScale | None:
        """Return the cell's loss scale; None where it needs none, or has a scaler of its own."""
        given = objects.scalers.get(NAME)
        if isinstance(given, LossScale):  # of a newcomer: it is that of the others
            keep(next(iter(objects.models.values())), given)
            return given
        if not needs_scale(precision, self._cast.dtype):
            return None
        if any(scaler.is_enabled() for scaler in objects.scalers.values()):
            return None
        scale = scale_for(objects.models.values(), precision, self._cast.device_type)
        return copied(scale) if is_trial else scale

    def install(self) -> None:
        """Begin, until `remove`."""
        self._cast.install()
        self.scaling.install()

    def remove(self) -> None:
        """Leave every object as it was."""
        self.scaling.remove()
        self._cast.remove()

    def told(self, is_here: Callable[[nn.Module], bool] | None = None) -> list[str]:
        """Return what is told at the cell's end; see `Cast.idle`."""
        scale = self.scaling.scale
        lines = self._cast.idle(is_here)
        if scale is not None and scale.num_steps:
            lines.append(
                f"{scale.num_skipped} of {scale.num_steps} steps were skipped on all ranks, as a gradient had "
                f"overflowed; the loss scale is {scale.get_scale():g}"
            )
            scale.num_steps = scale.num_skipped = 0
        return lines


def needs_scale(precision: Precision, dtype: torch.dtype) -> bool:
    """Whether the loss is to be scaled."""
    return precision.scaler != "none" and (precision.name == "fp16" or dtype is torch.float16)


def scaling_of(
    scale: LossScale | None,
    optimizers: Mapping[str, Optimizer],
    agree: Callable[[bool], bool] | None = None,
) -> Unscaled:
    """Return what scales by a scale; without one, what does nothing."""
    return Unscaled() if scale is None else Scaled(scale, optimizers.values(), agree or bool)


def _check_parameters(models: Mapping[str, nn.Module]) -> torch.device:
    """Return where the models are; refuse those whose own parameters are no float32."""
    device = torch.device("cpu")
    for key, model in models.items():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.dtype is not torch.float32:
                raise RefusedError(
                    f"{key}.{name} is {_word(parameter.dtype)}: mixed precision keeps float32 parameters and lets the "
                    "operations compute in 16 bits. Build the model in float32, or train it as it is, without "
                    "--precision."
                )
            device = parameter.device
    return device


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
