"""Tensors of other ranks say their shape, and nothing of their values."""

from __future__ import annotations

import pytest
import torch

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.stages.absent import absent, origin_of, present, receive_into

CPU = torch.device("cpu")


def made() -> torch.Tensor:
    return absent((2, 3), torch.float32, CPU, "embed")


def test_code_between_layers_goes_on_with_shapes() -> None:
    x = made()
    assert (x.shape, x.dtype, x.device, x.is_cpu, x.is_meta) == ((2, 3), torch.float32, CPU, True, False)
    y = torch.cat([x.flatten(1) @ torch.ones(3, 4), torch.zeros(2, 1, device=x.device)], dim=1)
    assert y.shape == (2, 5)
    assert origin_of(y) == "embed"
    assert origin_of(y.softmax(-1).argmax(1)) == "embed"
    assert "embed" in repr(y)


def test_shapes_are_those_of_each_call() -> None:
    """Though a call that was seen is not looked at again: what it depends on tells calls apart."""
    x, table = made(), torch.ones(3, 4)
    for _ in range(2):
        assert (x @ table).shape == (2, 4)
        assert (x @ table[:, :2]).shape == (2, 2)
        assert x.sum(0).shape == (3,)
        assert x.sum(1, keepdim=True).shape == (2, 1)
        assert (x + 1).dtype == torch.float32
        assert (x + torch.ones(3, dtype=torch.float64)).dtype == torch.float64
        assert torch.stack([x, x]).shape == (2, 2, 3)


def test_what_is_received_stands_for_it() -> None:
    x = made()
    receive_into(x, torch.ones(2, 3))
    assert torch.equal(x + 1, torch.full((2, 3), 2.0))
    assert origin_of(x) == ""
    assert type(present(x)) is torch.Tensor
    assert origin_of(x + made()) == "embed"


@pytest.mark.parametrize(
    "use",
    [lambda x: x.sum().item(), lambda x: bool(x[0, 0] > 0), lambda x: x.tolist(), lambda x: x.nonzero()],
)
def test_values_are_refused(use: object) -> None:
    with pytest.raises(RefusedError, match="embed, which is on another rank"):
        use(made())  # type: ignore[operator]


def test_nothing_absent_is_written_into_what_is_here() -> None:
    here = torch.zeros(2, 3)
    with pytest.raises(RefusedError, match="writes a value of embed"):
        here[0] = made()[0]
    with pytest.raises(RefusedError, match="writes a value of embed"):
        here.add_(made())
    assert not here.any()


def test_autocast_chooses_types_here_as_on_the_other_rank() -> None:
    x, weight = made().to(torch.bfloat16), torch.nn.Parameter(torch.ones(4, 3))
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.nn.functional.linear(x, weight)
        assert (y.shape, y.dtype, y.device) == ((2, 4), torch.bfloat16, CPU)
        assert (y + torch.ones(4)).dtype == torch.float32
        assert torch.nn.functional.layer_norm(y + torch.ones(4), (4,)).dtype == torch.float32
    with torch.autocast("cpu", torch.float16):  # the same call is looked at anew
        assert torch.nn.functional.linear(x, weight).dtype == torch.float16
