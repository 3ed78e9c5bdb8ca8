"""Attention whose heads are shared out over the ranks.

`multi_head` is what ``nn.MultiheadAttention`` computes, head by head (Vaswani et al., "Attention Is All You Need",
2017), with the same scaling, masks and dropout as PyTorch's documentation of
``torch.nn.functional.scaled_dot_product_attention`` and ``nn.MultiheadAttention`` tell.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.tensor.layout import Layout
from openclaw_nb.engine.tensor.rules import Call, _kept, _local, _sources, column_linear, row_linear
from openclaw_nb.engine.tensor.split import Split, like, make, whole


def scaled_dot_product(call: Call) -> Any:
    """Attention of heads that are here; other dims of the batch may be shared out as well."""
    query, key, value, mask, p, is_causal, scale, grouped = call.bind(
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    )
    heads = (query, key, value)
    if grouped or not all(isinstance(each, Split) for each in heads) or isinstance(mask, Split):
        return NotImplemented
    layout = query._layout
    alike = all(each._layout.shares(layout) and each._layout.dim == layout.dim for each in heads)
    if not alike or layout.dim >= query.dim() - 2 or len({each.dim() for each in heads}) > 1:
        return NotImplemented
    own = None if mask is None else _local(mask, query.dim() - layout.dim, layout, call.axis)
    q, k, v = (each._part for each in heads)
    if p:
        weights = _weights(q, k, _with_causal(own, is_causal, q, k), scale)
        part = (weights * _kept((*query.shape[:-1], key.shape[-2]), layout, query, p)) @ v
    else:
        part = F.scaled_dot_product_attention(q, k, v, own, 0.0, is_causal, scale=scale)
    return make(part, layout, call.axis, _sources(heads))


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return softmax(q k^T scale + mask), shape [..., L, S]; a mask of truth values tells what may be seen."""
    root = math.sqrt(1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    logits = (q * root) @ (k * root).transpose(-2, -1)
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -math.inf)
    return torch.softmax(logits if mask is None else logits + mask, dim=-1)


def _with_causal(mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    if not is_causal:
        return mask
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()


_MULTI_HEAD = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k"),
    *(
        "bias_v",
        "add_zero_attn",
        "dropout_p",
        "out_proj_weight",
        "out_proj_bias",
        "training",
        "key_padding_mask",
    ),
    *(
        "need_weights",
        "attn_mask",
        "use_separate_proj_weight",
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
    ),
    *("static_k", "static_v", "average_attn_weights", "is_causal"),
)
_DEFAULTS: dict[str, Any] = {
    "training": True,
    "key_padding_mask": None,
    "need_weights": True,
    "attn_mask": None,
    "use_separate_proj_weight": False,
    "q_proj_weight": None,
    "k_proj_weight": None,
    "v_proj_weight": None,
    "static_k": None,
    "static_v": None,
    "average_attn_weights": True,
    "is_causal": False,
}


def multi_head(call: Call) -> Any:
    """``F.multi_head_attention_forward`` whose projections are shared out by heads."""
    given = dict(zip(_MULTI_HEAD, call.bind(*_MULTI_HEAD, **_DEFAULTS), strict=True))
    if not isinstance(given["out_proj_weight"], Split):
        return NotImplemented
    if any(given[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v")):
        raise RefusedError("Attention with bias_k, bias_v or static keys cannot be shared out.")
    query, key, value = (whole(given[name]) for name in ("query", "key", "value"))
    is_batched = query.dim() == 3
    if not is_batched:
        query, key, value = (each.unsqueeze(1) for each in (query, key, value))
    heads = [_heads(each, given["num_heads"]) for each in _projections(query, key, value, given)]
    mask = _mask(given, query, key, is_batched)
    out, weights = _attend(heads, mask, given, call)
    result = row_linear(out, given["out_proj_weight"], given["out_proj_bias"])
    if not is_batched:
        result, weights = result.squeeze(1), None if weights is None else weights.squeeze(0)
    return result, weights


def _projections(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> list[Split]:
    """Return queries, keys and values, shape [L, N, E], features shared out."""
    bias = given["in_proj_bias"]
    biases = [None] * 3 if bias is None else _pieces(bias)
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    elif query is key is value:
        return _pieces(column_linear(query, given["in_proj_weight"], bias))
    else:
        weights = _pieces(given["in_proj_weight"])
    return [column_linear(*each) for each in zip((query, key, value), weights, biases, strict=True)]


def _pieces(split: Split) -> list[Split]:
    """Return the three blocks of a split tensor."""
    layout = split._layout
    single = Layout(layout.dim, layout.bounds)
    return [like(split, part, single) for part in split._part.chunk(3, layout.dim)]


def _heads(projected: Split, num_heads: int) -> Split:
    """Return shape [N, H, L, E / H], heads shared out."""
    size = projected.shape[-1] // num_heads
    part = projected._part.unflatten(-1, (-1, size)).permute(1, 2, 0, 3)
    bounds = tuple((low // size, high // size) for low, high in projected._layout.bounds)
    return like(projected, part, Layout(1, bounds))


def _mask(given: dict[str, Any], query: Tensor, key: Tensor, is_batched: bool) -> Tensor | None:
    """Return what is added to the weights' logarithms, of shape [N or 1, H or 1, L or 1, S], or None."""
    mask, padding = _additive(given["attn_mask"], query), _additive(given["key_padding_mask"], query)
    if mask is not None:
        mask = mask.unflatten(0, (query.shape[1], -1)) if mask.dim() == 3 else mask[None, None]
    if padding is not None:
        padding = padding if is_batched else padding.unsqueeze(0)
        padding = padding[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask


def _additive(mask: Any, like_: Tensor) -> Tensor | None:
    """Return a mask of truth values, which tell what may not be seen, as one that is added."""
    mask = whole(mask)
    if mask is None or mask.dtype is not torch.bool:
        return mask  # type: ignore[no-any-return]
    return torch.zeros(mask.shape, dtype=like_.dtype, device=mask.device).masked_fill(mask, -math.inf)


def _attend(
    heads: list[Split], mask: Tensor | None, given: dict[str, Any], call: Call
) -> tuple[Split, Tensor | None]:
    """Return the heads' outputs, shape [L, N, E] with features shared out, and the weights if they are asked for."""
    query, key, value = heads
    p = given["dropout_p"] if given["training"] else 0.0
    layout, axis = query._layout, call.axis
    weights = None
    if given["need_weights"]:
        own = None if mask is None else _local(mask, 3, layout, axis)
        part = _weights(query._part, key._part, own, None)
        if p:
            part = part * _kept((*query.shape[:-1], key.shape[-2]), layout, query, p)
        out = part @ value._part
        weights = whole(make(part, layout, axis))
        weights = weights.mean(dim=1) if given["average_attn_weights"] else weights
    else:
        attended = scaled_dot_product(
            Call(F.scaled_dot_product_attention, (query, key, value, mask, p), {}, axis)
        )
        out = attended._part
    size = query.shape[-1]
    bounds = tuple((low * size, high * size) for low, high in layout.bounds)
    features = out.permute(2, 0, 1, 3).flatten(2)
    return make(features, Layout(2, bounds), axis), weights


RULES = {
    "scaled_dot_product_attention": scaled_dot_product,
    "multi_head_attention_forward": multi_head,
}
