"""Which tensors the taps of a compiled graph read: those that the graph writes without them.

What inductor compiles of a function of Python need not write its q, its k or the gradient of k.
They may be a part of one kernel with what follows.  A tap that reads such a tensor has it written,
and the rest of the graph then reads rounded numbers.

So each tensor is looked for where a matrix product or a kernel of attention reads or writes it.
There it may be laid out in another way, or repeated for more heads.  Gradients of repeated keys are
found before they are added.  The tap reads a view of that.

This runs on the joint graph, after inductor's own passes and before it decides what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, fx

_STEPS_MAX = 12  # From a tensor of a tap to the one that is written.
_aten: Any = torch.ops.aten
_SAME = (_aten.clone.default, _aten.alias.default, _aten.detach.default)
_RESHAPES = (
    _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default,
    _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims,
)  # fmt: skip
_PERMUTE = _aten.permute.default
_PRODUCTS = ("bmm", "mm", "addmm", "baddbmm", "_scaled_mm")
_KERNELS = ("_attention", "_attention_forward", "_attention_backward")

# Makes a node from another: a view of it; None, if that would be a copy.
_Step = Callable[[fx.Graph, fx.Node], Optional[fx.Node]]


def _is_kernel(node: fx.Node) -> bool:
    """Whether a kernel that inductor does not make runs it: its tensors all are in memory."""
    if node.op != "call_function":
        return False
    name = getattr(getattr(node.target, "overloadpacket", node.target), "__name__", "")
    return name in _PRODUCTS or name.endswith(_KERNELS) or "flash" in name


def _fake(node: Any) -> Optional[Tensor]:
    fake = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(fake, Tensor) or not all(isinstance(n, int) for n in fake.shape):
        return None  # Sizes that vary are nodes themselves.
    return fake


def _input(node: fx.Node) -> Any:
    return node.args[0] if node.args else None


def _source(node: fx.Node) -> fx.Node:
    """What a view is a view of."""
    while isinstance(_input(node), fx.Node):
        if node.target not in (*_SAME[1:], *_RESHAPES, _PERMUTE):
            several = getattr(node.target, "__name__", "") == "getitem"
            return _input(node) if several else node
        node = _input(node)
    return node


def _is_written(node: fx.Node) -> bool:
    """Whether it is in memory, taps or none."""
    source = _source(node)
    return source.op == "placeholder" or _is_kernel(source) or any(map(_is_kernel, node.users))


def _view(graph: fx.Graph, target: Any, source: fx.Node, *args: Any) -> Optional[fx.Node]:
    from torch._guards import detect_fake_mode

    fake = source.meta["val"]
    mode = detect_fake_mode([fake])
    if mode is None:
        return None
    try:
        with mode:
            value = target(fake, *args)
    except RuntimeError:  # The sizes cannot be had without a copy.
        return None
    node = graph.call_function(target, (source, *args))
    node.meta["val"] = value
    return node


def _same(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return node


def _reshaped(like: Tensor) -> _Step:
    return lambda graph, node: _view(graph, _aten.view.default, node, list(like.shape))


def _permuted(order: list[int]) -> _Step:
    return lambda graph, node: _view(graph, _PERMUTE, node, order)


def _one_of_each(like: Tensor) -> _Step:
    """Of those that were repeated."""

    def step(graph: fx.Graph, node: fx.Node) -> Optional[fx.Node]:
        made: Optional[fx.Node] = node
        for dim, size in enumerate(like.shape):
            if made is not None and made.meta["val"].shape[dim] != size:
                made = _view(graph, _aten.slice.Tensor, made, dim, 0, size)
        return made

    return step


def _order(permute: fx.Node) -> list[int]:
    dims: Any = permute.args[1]
    return [dim % len(dims) for dim in dims]


def _again(node: fx.Node) -> Optional[_Step]:
    """The step from its input to `node`, without a copy."""
    fake = _fake(node)
    if fake is None:
        return None
    if node.target in _SAME:
        return _same
    if node.target in _RESHAPES:
        return _reshaped(fake)
    return _permuted(_order(node)) if node.target is _PERMUTE else None


def _back(before: fx.Node, after: fx.Node) -> Optional[_Step]:
    """The step from `after`, which is made of the numbers of `before` alone, to these."""
    old, new = _fake(before), _fake(after)
    if _input(after) is not before or old is None or new is None:
        return None
    if after.target in _SAME:
        return _same
    if after.target in _RESHAPES:
        return _reshaped(old)
    if after.target is _PERMUTE:
        order = _order(after)
        return _permuted([order.index(dim) for dim in range(len(order))])
    if after.target is _aten.expand.default and old.dim() == new.dim():
        return _one_of_each(old)
    return None


class _Found(NamedTuple):
    node: fx.Node
    steps: tuple[_Step, ...]  # From it to the tensor that is looked for.


def _made_of(node: fx.Node) -> Iterator[_Found]:
    """What `node` is a copy of."""
    found = _Found(node, ())
    while len(found.steps) < _STEPS_MAX:
        step = _again(found.node)
        if step is None or _fake(_input(found.node)) is None:
            return
        found = _Found(_input(found.node), (step, *found.steps))
        if _is_written(found.node):
            yield found


def _made_from(node: fx.Node) -> Iterator[_Found]:
    """What a kernel reads that has the numbers of `node`, the nearest first."""
    queue = [_Found(node, ())]
    for found in queue:
        if found.steps and any(map(_is_kernel, found.node.users)):
            yield found
        for user in found.node.users if len(found.steps) < _STEPS_MAX else ():
            step = _back(found.node, user)
            if step is not None:
                queue.append(_Found(user, (step, *found.steps)))


def _built(graph: fx.Graph, found: _Found) -> Optional[fx.Node]:
    last = found.node
    for step in found.steps:
        made = step(graph, last)
        if made is None:
            while last is not found.node:
                gone, last = last, _input(last)
                graph.erase_node(gone)
            return None
        last = made
    return last


def _elsewhere(graph: fx.Graph, tensor: Any) -> Any:
    """A view with the numbers of `tensor` of what is written without us, if there is one."""
    if _fake(tensor) is None or _is_written(tensor):
        return tensor
    for search in (_made_from, _made_of):  # What a product reads is saved for its backward.
        for found in search(tensor):
            made = _built(graph, found)
            if made is not None:
                return made
    return tensor


def _terms(gradient: Any) -> Optional[tuple[fx.Node, list[int], list[int]]]:
    """(what it is the sum of, over which dimensions, its shape); None: it is no sum."""
    fake = _fake(gradient)
    if fake is None or _is_written(gradient):
        return None
    for _ in range(_STEPS_MAX):
        before = _input(gradient)
        if gradient.target is _aten.sum.dim_IntList and "dtype" not in gradient.kwargs:
            known = _fake(before) is not None and _is_written(before)
            return (before, list(gradient.args[1]), list(fake.shape)) if known else None
        if gradient.target not in (*_RESHAPES, *_SAME):
            return None
        gradient = before
    return None


def _tap_of(node: fx.Node) -> Any:
    """Its operator, also where the graph holds it as one that changes its mark."""
    if node.op == "call_function" and "auto_functionalized" in str(node.target):
        return _input(node)
    return node.target


def _read_of(graph: fx.Graph, tap: fx.Node) -> None:
    told: dict[str, Any] = dict(tap.kwargs)
    with graph.inserting_before(tap):
        terms = _terms(told.get("d_k"))
        if terms is not None:
            told["d_k"], told["sum"], told["size"] = terms
        for name in ("o", "d_o", "d_k"):
            if name in told:
                told[name] = _elsewhere(graph, told[name])
        if "tensors" in told:
            told["tensors"] = [_elsewhere(graph, tensor) for tensor in told["tensors"]]
    tap.kwargs = told


def read_what_is_written(module: fx.GraphModule) -> None:
    """Of the joint graph of a forward and its backward."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    ours = torch.ops.bellwether
    operators = ours.observe.default, ours.observe_keys.default
    taps = [node for node in module.graph.nodes if _tap_of(node) in operators and node.kwargs]
    if not taps:
        return
    try:
        for tap in taps:
            _read_of(module.graph, tap)
    finally:  # What a tap reads may come after it.
        stable_topological_sort(module.graph)
        module.recompile()
