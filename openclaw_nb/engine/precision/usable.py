"""Which 16-bit type a device computes in: float16 where it is of use, bfloat16 elsewhere.

A CPU without float16 units emulates them: a step took 29 times as long as in float32 where this was measured, while
bfloat16 took half of it. Knows torch's devices; does not know layers.
"""

from __future__ import annotations

import torch

_SLOW = "float16 is emulated on this CPU, which is tens of times slower than float32"


def usable_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Return what to compute in, and why it is not what was asked for.

    Parameters
    ----------
    name : {"bf16", "fp16"}
        What was asked for.
    device : torch.device
        Where the model is.

    Returns
    -------
    dtype : torch.dtype
    reason : str
        "" when it is what was asked for.
    """
    if name == "fp16" and not has_float16(device):
        return torch.bfloat16, _SLOW
    if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return torch.float16, "this GPU has no bfloat16"
    return (torch.float16 if name == "fp16" else torch.bfloat16), ""


def has_float16(device: torch.device) -> bool:
    """Whether a device multiplies matrices of float16 by itself."""
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
