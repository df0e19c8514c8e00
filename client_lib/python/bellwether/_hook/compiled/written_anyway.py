"""Which tensors the taps of a compiled graph read: those that the graph writes without them.

What inductor compiles of a function of Python need not write its q, its k, its mask or the gradient
of k.  They may be a part of one kernel with what follows.  A tap that reads such a tensor has it
written, and what is left is then made into other kernels, which round apart.

So each tensor is looked for where a matrix product or a kernel of attention reads it: there it may
be laid out in another way, or repeated for more heads.  Else it is followed back to what is
written: inputs of the graph, and what such kernels read and write.  The tap is handed these, and
the operations from them to the tensor are recorded (recorded.py).

This runs on the joint graph, after inductor's own passes and before it decides what is saved.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, fx

from ..calls.kernel_choice import NAMES
from . import recipes, recorded
from .recorded import Recorded

NOT_WRITTEN = "torch.compile writes nothing that tells a tensor of the call: not measured"
MORE = "more tensors of compiled calls are recorded than are kept: not measured"
_STEPS_MAX = 12  # From a tensor of a tap to the kernel that reads it.
_RECORDED_MAX = 256  # Operations that make a tensor, ...
_INPUTS_MAX = 16  # ... and what they are handed.
_aten: Any = torch.ops.aten
_SAME = (_aten.clone.default, _aten.alias.default, _aten.detach.default)
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
_RESHAPES = (
    *_VIEWS, _aten.reshape.default, _aten.unsqueeze.default, _aten.squeeze.dim,
    _aten.squeeze.dims,
)  # fmt: skip
_PERMUTE = _aten.permute.default
_PRODUCTS = ("bmm", "mm", "addmm", "baddbmm", "_scaled_mm")
_KERNELS = ("_attention", "_attention_forward", "_attention_backward")
# Their results lie as inductor decides.
_BY_LAYOUT = ("as_strided", "as_strided_scatter", "as_strided_copy")

_Step = tuple[Any, tuple[Any, ...]]  # An operation on a tensor, and its further arguments.


def _name(node: fx.Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", node.target), "__name__", "")


def _is_kernel(node: fx.Node) -> bool:
    """Whether a kernel that inductor does not make runs it: its tensors all are in memory."""
    if node.op != "call_function":
        return False
    name = _name(node)
    return name in _PRODUCTS or name.endswith(_KERNELS) or "flash" in name


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _fake(node: Any) -> Optional[Tensor]:
    """None where sizes vary, too: these are nodes themselves."""
    fake = _value(node)
    if not isinstance(fake, Tensor) or not all(isinstance(n, int) for n in fake.shape):
        return None
    return fake


def _input(node: fx.Node) -> Any:
    return node.args[0] if node.args else None


def _source(node: fx.Node) -> fx.Node:
    """What a view is a view of."""
    while isinstance(_input(node), fx.Node):
        if node.target not in (*_SAME[1:], *_RESHAPES, _PERMUTE):
            return _input(node) if node.target is operator.getitem else node
        node = _input(node)
    return node


def _is_written(node: fx.Node) -> bool:
    """Whether it is in memory, taps or none."""
    source = _source(node)
    return source.op != "call_function" or _is_kernel(source) or any(map(_is_kernel, node.users))


def _back(before: fx.Node, after: fx.Node) -> Optional[tuple[_Step, ...]]:
    """The steps from `after`, which is made of the numbers of `before` alone, to these."""
    old, new = _fake(before), _fake(after)
    if _input(after) is not before or old is None or new is None:
        return None
    if after.target in _SAME:
        return ()
    if after.target in _RESHAPES:
        return ((_aten.reshape.default, (list(old.shape),)),)
    if after.target is _PERMUTE:
        dims: Any = after.args[1]
        order = [dim % len(dims) for dim in dims]
        return ((_PERMUTE, ([order.index(dim) for dim in range(len(order))],)),)
    if after.target is _aten.expand.default and old.dim() == new.dim():
        repeated = [dim for dim in range(old.dim()) if new.shape[dim] != old.shape[dim]]
        return tuple((_aten.slice.Tensor, (dim, 0, old.shape[dim])) for dim in repeated)
    return None


class _Read(NamedTuple):
    """What a kernel reads."""

    node: fx.Node
    steps: tuple[_Step, ...]  # From it to the tensor that is looked for.
    far: int


def _read_by_kernels(node: fx.Node) -> Iterator[_Read]:
    """What has the numbers of `node`, the nearest first."""
    queue = [_Read(node, (), 0)]
    for found in queue:
        if found.far and any(map(_is_kernel, found.node.users)):
            yield found
        for user in found.node.users if found.far < _STEPS_MAX else ():
            steps = _back(found.node, user)
            if steps is not None:
                queue.append(_Read(user, (*steps, *found.steps), found.far + 1))


class _NotRead(Exception):
    """The reason, for the layer's notes."""


class _Recording:
    """One tensor, from what is written.  Raises _NotRead."""

    def __init__(self, device: Optional[torch.device]) -> None:
        """device  of the call"""
        self._device = device
        self.given: list[fx.Node] = []  # Of the joint graph: tensors and sizes.
        self._graph = fx.Graph()
        self._known: dict[fx.Node, fx.Node] = {}
        self._nodes = 0

    def node(self, of: fx.Node) -> fx.Node:
        """The node of the recorded graph for one of the joint graph."""
        found = self._known.get(of)
        if found is None:
            self._nodes += 1
            if self._nodes > _RECORDED_MAX:
                raise _NotRead(NOT_WRITTEN)
            found = self._known[of] = self._made(of)
        return found

    def _made(self, of: fx.Node) -> fx.Node:
        if not isinstance(_value(of), (Tensor, tuple, list)) or _is_source(of):
            return self._input(of)
        read = next(_read_by_kernels(of), None)
        if read is None:
            return self._operation(of)
        last = self._input(read.node)
        for target, args in read.steps:
            last = self._call(target, (last, *args), {})
        return last

    def _input(self, of: fx.Node) -> fx.Node:
        changed = any(_name(u) == "copy_" and _input(u) is of for u in of.users)
        # (A tensor of a CPU among its inputs keeps a graph from CUDA's graphs.)
        elsewhere = _device(of) not in (None, self._device)
        if changed or elsewhere or len(self.given) >= _INPUTS_MAX:
            raise _NotRead(NOT_WRITTEN)
        self.given.append(of)
        return self._graph.create_node("placeholder", f"given_{len(self.given)}")

    def _operation(self, of: fx.Node) -> fx.Node:
        if not _can_run_again(of) or _between_devices(of):
            raise _NotRead(NOT_WRITTEN)
        target = _aten.reshape.default if of.target in _VIEWS else of.target
        args, kwargs = fx.map_arg((of.args, of.kwargs), self.node)
        return self._call(target, args, kwargs)

    def _call(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        name = f"made_{len(self._graph.nodes)}"  # Alike in graphs that do the same.
        return self._graph.create_node("call_function", target, args, kwargs, name)

    def ends(self, last: fx.Node) -> int:
        self._graph.output(last)
        number = recorded.graph_number(self._graph)
        if number is None:
            raise _NotRead(MORE)
        return number


def _is_source(node: fx.Node) -> bool:
    """Whether it is no view, and in memory."""
    several = node.target is operator.getitem and _is_kernel(node.args[0])  # type: ignore[arg-type]
    written = node.op != "call_function" or any(map(_is_kernel, node.users))
    return written or several or _is_kernel(node)


def _device(node: fx.Node) -> Optional[torch.device]:
    value = _value(node)
    return value.device if isinstance(value, Tensor) else None


def _between_devices(node: fx.Node) -> bool:
    """Whether it copies: while a CUDA graph is captured nothing may wait for a CPU's memory."""
    of = {_device(given) for given in node.all_input_nodes} - {None}
    return bool(of) and _device(node) not in (None, *of)


def _can_run_again(node: fx.Node) -> bool:
    """Whether an operation gives the same from the same, wherever its tensors lie."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    random = torch.Tag.nondeterministic_seeded in node.target.tags or "random" in _name(node)
    return not (random or node.target._schema.is_mutable or _name(node) in _BY_LAYOUT)


def _is_given(node: fx.Node) -> bool:
    """Whether it is an input of the forward.  (Those of the backward are gradients.)"""
    return node.op == "placeholder" and not node.name.startswith("tangents")


class _Handed:
    """What a tap is handed, and how its tensors are made of that.  Raises _NotRead."""

    def __init__(self, tensors: list[fx.Node]) -> None:
        self.tensors: list[fx.Node] = []
        self.sizes: list[fx.Node] = []
        self._device = _device(tensors[0]) if tensors else None
        self._made = [self._of(tensor) for tensor in tensors]

    def _of(self, tensor: fx.Node) -> Recorded:
        if _is_written(tensor):
            return Recorded(None, (self._place(tensor),))
        recording = _Recording(self._device)
        last, given = recording.node(tensor), recording.given
        shared = all(map(_is_given, given))
        return Recorded(recording.ends(last), tuple(map(self._place, given)), shared)

    def _place(self, node: fx.Node) -> int:
        """Of a tensor from 0 up, of a size from -1 down."""
        tensor = isinstance(_value(node), Tensor)
        known = self.tensors if tensor else self.sizes
        if node not in known:
            known.append(node)
        return known.index(node) if tensor else ~known.index(node)

    def number(self) -> int:
        """By which recorded.made_of() gives them."""
        if self._made == [Recorded(None, (place,)) for place in range(len(self.tensors))]:
            return recorded.AS_HANDED
        found = recorded.number_of(tuple(self._made))
        if found is None:
            raise _NotRead(MORE)
        return found


def _tap_of(node: fx.Node) -> Any:
    """Its operator, also where the graph holds it as one that changes its mark."""
    if node.op == "call_function" and "auto_functionalized" in str(node.target):
        return _input(node)
    return node.target


def _mark_before(tap: fx.Node) -> Any:
    """A tap changes its mark: as it was, ..."""
    bases: Any = tap.kwargs.get("_all_bases")
    return bases[0] if bases and len(bases) == 1 else None


def _mark_behind(tap: fx.Node) -> Optional[fx.Node]:
    """... and as it is then, if that is all that comes of the tap."""
    users = [user for user in tap.users if user.target is operator.getitem and user.args[1] == 1]
    return users[0] if len(users) == len(tap.users) == 1 else None


class _Taps:
    """Those of a graph.  Each costs in every step, and a tensor is what it was as long as the graph
    needs it: so a call and all its gradients get one."""

    def __init__(self, graph: fx.Graph) -> None:
        ours = torch.ops.bellwether
        self._graph, self._gradients = graph, ours.observe_gradients.default
        operators = ours.observe.default, self._gradients
        self.all = [n for n in graph.nodes if _tap_of(n) in operators and n.kwargs]
        # By the mark that each leaves: the next tap of the same module takes it.
        self._behind = {m: tap for tap in self.all if (m := _mark_behind(tap)) is not None}

    def are_of_gradients(self, tap: fx.Node) -> bool:
        return bool(_tap_of(tap) is self._gradients)

    def before(self, tap: fx.Node) -> Optional[fx.Node]:
        """The tap of the same call that comes before it, if nothing stands in between."""
        mark = _mark_before(tap)
        found = self._behind.get(mark)
        same = found is not None and found.kwargs["site"] == tap.kwargs["site"]
        return found if same and len(mark.users) == 1 else None

    def take(self, tap: fx.Node, before: fx.Node) -> None:
        """One tap in the place of two."""
        mark = _mark_behind(before)
        assert mark is not None
        tap.kwargs = {**tap.kwargs, "_all_bases": [_mark_before(before)]}
        self.all.remove(before)
        del self._behind[mark]
        self._graph.erase_node(mark)
        self._graph.erase_node(before)

    def join_gradients(self) -> None:
        """Of each call."""
        for tap in list(self.all):
            other = self.before(tap)
            if other is None or not (self.are_of_gradients(tap) and self.are_of_gradients(other)):
                continue
            of: Any = (other.kwargs["of"], tap.kwargs["of"])
            tensors: Any = (other.kwargs["tensors"], tap.kwargs["tensors"])
            if set(of[0]) & set(of[1]) <= {","}:
                tap.kwargs = {**tap.kwargs, "tensors": [*tensors[0], *tensors[1]],
                              "of": ",".join(of)}  # fmt: skip
                self.take(tap, other)


_RAN_MAX = 64  # Operations between a kernel and a gradient.
_SDPA = "_scaled_dot_product_"


def _kernel_behind(gradient: fx.Node) -> str:
    """What has computed it, as Recipe.read() takes it."""
    found, queue = set(), [gradient]
    for node in queue:
        if _is_kernel(node):
            name = _name(node)
            if name in _PRODUCTS:
                found.add(recipes.PRODUCTS)
            else:
                known = name.startswith(_SDPA) and name[len(_SDPA) :].split("_")[0]
                found.add(known if known in NAMES else "")
        elif len(queue) < _RAN_MAX:
            queue.extend(n for n in node.all_input_nodes if n not in queue)
    return found.pop() if len(found) == 1 else recipes.SEVERAL


def _ran(gradients: list[fx.Node]) -> str:
    found = set(map(_kernel_behind, gradients))
    return found.pop() if len(found) == 1 else recipes.SEVERAL


def _is_read(gradient: fx.Node) -> bool:
    try:
        _Handed([gradient])
    except _NotRead:
        return False
    return True


def _hand(tap: fx.Node, of_call: list[fx.Node], gradients: dict[str, fx.Node]) -> None:
    """gradients  by what they are of"""
    told: dict[str, Any] = dict(tap.kwargs)
    given = {of: gradient for of, gradient in gradients.items() if _is_read(gradient)}
    try:
        handed = _Handed([*of_call, *given.values()])
        made = handed.number()
        told.update(tensors=handed.tensors, sizes=handed.sizes, made=made)
    except _NotRead as e:
        given = {}
        told.update(tensors=[])
        if of_call:
            told.update(recipe=recipes.number_of(recipes.Recipe(reason=str(e))))
    if gradients:
        lost = ",".join(of for of in gradients if of not in given)
        told.update(of=",".join(given), lost=lost)
    tap.kwargs = told


def read_what_is_written(module: fx.GraphModule) -> None:
    """Of the joint graph of a forward and its backward."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    taps = _Taps(module.graph)
    if not taps.all:
        return
    try:
        taps.join_gradients()
        for tap in list(taps.all):
            if not taps.are_of_gradients(tap):
                continue
            told: dict[str, Any] = dict(tap.kwargs)
            gradients = dict(zip(told["of"].split(","), told["tensors"]))
            of_call: Any = []
            call = taps.before(tap)
            if call is not None:
                of_call = call.kwargs["tensors"]
                tap.args = (torch.ops.bellwether.observe_call.default, *tap.args[1:])
                tap.kwargs = {**told, "recipe": call.kwargs["recipe"],
                              "ran": _ran(list(gradients.values()))}  # fmt: skip
                taps.take(tap, call)
            taps.all.remove(tap)
            _hand(tap, list(of_call), gradients)
        for tap in taps.all:
            tensors: Any = tap.kwargs["tensors"]
            _hand(tap, list(tensors), {})
    finally:  # What a tap reads may come after it.
        stable_topological_sort(module.graph)
        module.recompile()
