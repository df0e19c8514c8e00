"""Attention that a module writes out in its own forward: two products, and a softmax between them.

No function is called that could be met.  So while such a module runs, each call of torch that it
makes is looked at, and made as it is.  The product of queries and keys is followed through scales,
terms, masks, casts and other shapes to its softmax, and to the product with the values.  What
passes anything else is not followed: of that call nothing is measured, and the layer says what it
was.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._util.guard import harmless
from ..calls.call import VIEWS, AttentionCall, View, same
from ..calls.call_sites import Forward
from ..calls.mask_terms import mask_of
from ..calls.sdpa_call import NOT_TOLD
from ..hosts import PatchedLayer
from ..model.softmax_code import shows_heads, shows_one_head, writes_softmax
from ..running import running
from . import einsum_orders
from .einsum_orders import USUAL, Order

NAME = "written out"
_NOT = "not measured"
_HIDES = -9984.0  # A score from here down is that of a hidden key: -10,000 as bfloat16 has it.
_KEEPS = -1e30  # What no score reaches; the larger of both is the score.
_PRODUCTS = {  # Of two tensors; how they are called where they are given by name.
    "matmul": ("input", "other"), "__matmul__": ("input", "other"), "bmm": ("input", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
}  # fmt: skip
_SAME = {
    "contiguous", "clone", "to", "type", "type_as", "float", "half", "bfloat16", "double",
}  # fmt: skip
_SHAPES = {"view", "reshape", "flatten", "unflatten"}
_TURNS = {"transpose", "permute", "swapaxes", "__get__"}
_PAIRS = {"transpose", "swapaxes"}  # Of two dimensions.
_TIMES = {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"}
_BY = {"div", "div_", "__truediv__", "__itruediv__", "true_divide", "divide"}
_PLUS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
_MINUS = {"sub", "sub_", "__sub__", "__isub__", "subtract"}
_FILLS = {"masked_fill", "masked_fill_"}
# Of the second tensor only type or shape is taken.
_AS_THE_SECOND = {"type_as", "reshape_as", "view_as", "expand_as"}
_CAPS = {"tanh", "tanh_"}
_JOINS = {"cat", "concat", "concatenate"}
_LARGEST = {"max", "maximum", "clamp", "clamp_min"}


@dataclasses.dataclass(frozen=True)
class _Scores:
    """A product of queries and keys, and what it has become."""

    # [batch, heads, rows, dim], or with batch and heads as one dimension; k as the product has it,
    # the dimension before the keys.  Of einsum in any order, as `orders` says.
    q: Tensor
    k: Tensor
    tapped: list[Any]
    number: int  # Which product of the forward it is.
    split: Optional[tuple[int, int]]  # Batch and heads, once they are known.
    orders: Optional[tuple[Order, Order]] = None  # Of q and k.
    order: Optional[Order] = None  # Of the scores, where they do not lie as usual.
    others: frozenset[int] = frozenset()  # Products that its terms are made of.
    scale: float = 1.0
    terms: tuple[Tensor, ...] = ()
    softcap: float = 0.0
    sinks: Optional[Tensor] = None  # [heads]; `wide`: they stand behind the keys of each row.
    wide: bool = False
    soft: bool = False
    dropout: float = 0.0
    # What else they went into that has a gradient; all that they become share it.
    elsewhere: list[str] = dataclasses.field(default_factory=list)

    def scaled(self, by: float) -> _Scores:
        terms = tuple(t if t.dtype == torch.bool else t * by for t in self.terms)
        scale, softcap = self.scale * by, self.softcap * by
        return dataclasses.replace(self, scale=scale, softcap=softcap, terms=terms)

    def capped(self) -> Optional[_Scores]:
        """Behind tanh, which is a cap of 1 until it is scaled."""
        if self.terms or self.softcap or self.wide:
            return None
        return dataclasses.replace(self, softcap=1.0)

    def with_term(self, term: Tensor, scores: Tensor) -> Optional[_Scores]:
        """`term` broadcasts to the scores as they lie now."""
        term = term.detach()
        if self.order is not None:
            term = self.order.view_of_term(term, scores.shape)
        elif term.dim() == self.q.dim() == 3 and term.shape[0] != 1:
            if term.shape[0] != self.q.shape[0]:
                return None
            # Without a split only one head is read.
            term = term.reshape(*(self.split or (term.shape[0], 1)), *term.shape[1:])
        return dataclasses.replace(self, terms=(*self.terms, term))


@dataclasses.dataclass(frozen=True)
class _Made:
    """What is known of one tensor of the forward that runs."""

    of: weakref.ref[Tensor]
    scores: Optional[_Scores] = None
    split: Optional[tuple[int, int]] = None  # Batch and heads in its first dimension.
    number: Optional[float] = None
    products: frozenset[int] = frozenset()  # That it is made of.


_NOTHING = _Made(lambda: None)  # type: ignore[arg-type]


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _in_order(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call, its operands by position."""
    rest = names[len(args) :]
    if not rest or not all(name in kwargs for name in rest):
        return args, kwargs
    others = {name: value for name, value in kwargs.items() if name not in rest}
    return (*args, *(kwargs[name] for name in rest)), others


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function changes its first argument, or one that is given for its result."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_") or kwargs.get("out") is not None


def _split_view(split: Optional[tuple[int, int]]) -> View:
    return VIEWS["bhtd"] if split is None else lambda x: x.reshape(*split, *x.shape[1:])


def _turned(view: View) -> View:
    return lambda x: view(x).mT


def _may_be_scores(a: Tensor, b: Tensor) -> bool:
    """Whether it is a product of what is trained, and no projection by a parameter."""
    if not torch.is_grad_enabled() or not (a.requires_grad or b.requires_grad):
        return False
    return not any(t.is_leaf and t.requires_grad for t in (a, b))


def _turn(
    scores: _Scores, name: str, rest: list[Any], kwargs: dict[str, Any], count: int
) -> Optional[_Scores]:
    """Scores whose dimensions are put into another order; count  of them"""
    flat = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    if count < 4 or kwargs or not all(type(d) is int for d in flat):
        return None
    dims = [d % count for d in flat]
    if name in _PAIRS and len(dims) == 2:
        dims = [dims[1] if d == dims[0] else dims[0] if d == dims[1] else d for d in range(count)]
    if sorted(dims) != list(range(count)):
        return None
    order = (scores.order or USUAL).turned(dims)
    return dataclasses.replace(scores, order=None if order == USUAL else order)


class WrittenOut(TorchFunctionMode):
    """In force while one module runs forward."""

    def __init__(self, layer: PatchedLayer, forward: Optional[Forward]) -> None:
        super().__init__()
        self._layer, self._forward = layer, forward
        self._made: dict[int, _Made] = {}
        self._products = 0
        self._met: set[int] = set()  # Products of the calls that were met.
        self._soft: set[int] = set()  # Products that a softmax was made of.
        self._lost: dict[int, str] = {}  # What their scores passed that is not followed.

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not self._looks():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        finish: Optional[Callable[[Tensor], Tensor]] = None
        started: Optional[_Scores] = None
        if name == "einsum":
            args, started, finish = self._einsum(args, kwargs)
        elif name in _PRODUCTS:
            args, kwargs = _in_order(_PRODUCTS[name], args, kwargs)
            args, started, finish = self._product(name, args, kwargs)
        result = func(*args, **kwargs)
        if finish is not None and isinstance(result, Tensor):
            return finish(result)
        self._follow(name, args, kwargs, result, started)
        return result

    def _looks(self) -> bool:
        """Whether the module itself runs, and no function that is met already."""
        return not running.inside and bool(running.stack) and running.stack[-1].layer is self._layer

    @harmless("attention that is written out")
    def ended(self) -> None:
        if not torch.is_grad_enabled():
            return
        lost = {n: what for n, what in self._lost.items() if n not in self._met}
        if self._layer.calls and not self._met:  # Its attention is a function's.
            lost.pop(0, None)
        if not self._met and lost:
            self._layer.note(f"its softmax is written out, {next(iter(lost.values()))}: {_NOT}")
            return
        for what in dict.fromkeys(lost[n] for n in sorted(lost) if n in self._soft):
            self._layer.note(f"one more softmax is written out, {what}: {_NOT}")

    # ---- products ----

    @harmless("attention that is written out", lambda self, name, args, kwargs: (args, None, None))
    def _product(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Optional[_Scores], Optional[Callable[[Tensor], Tensor]]]:
        """(its arguments, the scores that it begins, what the output of an attention passes)"""
        first = 1 if name == "baddbmm" else 0
        pair = args[first : first + 2]
        if len(pair) < 2 or kwargs.get("out") is not None or len(args) > first + 2:
            return args, None, None
        if not all(type(t) in (Tensor, nn.Parameter) and t.dim() in (3, 4) for t in pair):
            return args, None, None
        a, b = pair
        if a.dim() != b.dim() or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
            return args, None, None
        scores = self._of(a).scores
        if scores is not None and scores.soft and not first:
            if scores.order is not None or scores.wide:
                return args, None, None
            dims = VIEWS["bhtd"]
            if a.dim() == 3:
                dims = _split_view(scores.split) if scores.split is not None else VIEWS["btd"]
            v, finish = self._values(scores, a, b, dims, dims)
            return (a, v), None, finish
        if not _may_be_scores(a, b):
            return args, None, None
        split = self._of(a).split or self._of(b).split if a.dim() == 3 else None
        args = tuple(self._as_cast(t) if isinstance(t, Tensor) else t for t in args)
        a, b = args[first : first + 2]
        queries, keys, calls = self._layer.tap_early(a, b)
        self._products += 1
        started: Optional[_Scores] = _Scores(a, b, calls, self._products, split)
        if first:
            started = self._added(started, args[0], kwargs)  # type: ignore[arg-type]
        return (*args[:first], queries, keys), started, None

    @harmless("attention that is written out", lambda self, args, kwargs: (args, None, None))
    def _einsum(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Optional[_Scores], Optional[Callable[[Tensor], Tensor]]]:
        """The same of an equation and its operands."""
        equation, operands = (args[0], args[1:]) if args else ("", ())
        if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
            operands = tuple(operands[0])
        if kwargs or len(operands) != 2 or not isinstance(equation, str):
            return args, None, None
        if not all(type(t) in (Tensor, nn.Parameter) for t in operands):
            return args, None, None
        for place, weights in enumerate(operands):
            scores = self._of(weights).scores
            if scores is None or not scores.soft or scores.wide or weights.dim() < 4:
                continue
            found = einsum_orders.of_values(equation, *operands, place == 0, scores.order or USUAL)
            if found is None:
                return args, None, None
            v, finish = self._values(
                scores, weights, operands[1 - place], found[0].view, found[1].view
            )
            return (equation, *((weights, v) if place == 0 else (v, weights))), None, finish
        a, b = operands
        orders = einsum_orders.of_scores(equation, a, b) if _may_be_scores(a, b) else None
        if orders is None:
            return args, None, None
        a, b = self._as_cast(a), self._as_cast(b)
        q, k = (b, a) if orders.keys_first else (a, b)
        queries, keys, calls = self._layer.tap_early(q, k)
        self._products += 1
        order = None if orders.scores == USUAL else orders.scores
        started = _Scores(q, k, calls, self._products, None, (orders.q, orders.k), order)
        pair = (keys, queries) if orders.keys_first else (queries, keys)
        return (equation, *pair), started, None

    def _as_cast(self, t: Tensor) -> Tensor:
        """What autocast would do inside the product, done before it."""
        device = t.device.type
        if t.dtype != torch.float32 or not torch.is_autocast_enabled(device):
            return t
        cast = t.to(torch.get_autocast_dtype(device))
        known = self._of(t)
        if known is not _NOTHING:
            self._keep(cast, known)
        return cast

    def _added(self, scores: _Scores, term: Tensor, kwargs: dict[str, Any]) -> Optional[_Scores]:
        """baddbmm: beta * term + alpha * product"""
        alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
        if not all(isinstance(x, (int, float)) for x in (alpha, beta)):
            return None
        scores = dataclasses.replace(scores, scale=float(alpha))
        if beta == 0:
            return scores
        return scores.with_term(term * beta if beta != 1 else term, term)

    def _values(
        self, scores: _Scores, weights: Tensor, v: Tensor, v_view: View, o_view: View
    ) -> tuple[Tensor, Optional[Callable[[Tensor], Tensor]]]:
        """(the values behind their tap, what the output passes)"""
        own = {scores.number, *scores.others}
        if self._of(v).products:  # As an inverse of other weights is, which goes round about.
            self._lost.update(dict.fromkeys(own, "of values that are made of scores"))
            return v, None
        self._met |= own
        met = self._layer.begin(
            lambda: self._read(scores, weights, v, v_view, o_view), self._forward
        )
        return (v, same) if met is None else (met[0][2], met[1])

    def _read(
        self, scores: _Scores, weights: Tensor, v: Tensor, v_view: View, o_view: View
    ) -> Union[AttentionCall, str]:
        order = scores.order or USUAL
        merged = weights.dim() == 3
        module, alone = self._layer.module(), merged and scores.split is None
        if module is None:
            return _NOT
        if alone and not shows_one_head(module, int(scores.q.shape[-1])):
            return f"3 dimensions: {NOT_TOLD}"
        heads = scores.split[1] if scores.split else 1 if alone else int(weights.shape[order.heads])
        dim = scores.q.shape[scores.orders[0].last if scores.orders is not None else -1]
        if not alone and not shows_heads(module, heads, int(dim)):
            return f"its softmax is written out, for {heads} heads that it does not name: " + (
                "not measured"
            )
        if not 0 < scores.scale < math.inf:
            return "the scale is no number above 0: not measured"
        of_q = of_k = (
            VIEWS["btd"] if alone else _split_view(scores.split if scores.q.dim() == 3 else None)
        )
        if scores.orders is not None:
            of_q, of_k = scores.orders[0].view, scores.orders[1].view
        else:
            of_k = _turned(of_k)
        device = v.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return AttentionCall(
            scores.q, scores.k, v, of_q, of_k, v_view, o_view,
            lambda *_: None,  # The product is made by the module.
            scores.scale, mask_of(scores.terms), scores.softcap, scores.sinks, scores.dropout,
            cast=cast if v.dtype == torch.float32 else None, tapped=scores.tapped,
            weights_go_on=True, others=scores.elsewhere, kernel=functools.partial(str, NAME),
        )  # fmt: skip

    # ---- what happens to scores ----

    def _of(self, x: Any) -> _Made:
        known = self._made.get(id(x)) if isinstance(x, Tensor) else None
        return known if known is not None and known.of() is x else _NOTHING

    def _keep(self, x: Tensor, made: _Made) -> None:
        self._made[id(x)] = dataclasses.replace(made, of=weakref.ref(x))

    def _forget_storage(self, x: Any) -> None:
        """What is written there is no longer what was followed."""
        if not isinstance(x, Tensor):
            return
        where = x.untyped_storage().data_ptr()
        for key, known in list(self._made.items()):
            other = known.of()
            if other is None or other.untyped_storage().data_ptr() == where:
                del self._made[key]

    @harmless("attention that is written out")
    def _follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any,
        started: Optional[_Scores],
    ) -> None:  # fmt: skip
        if started is not None:
            made = _Made(_NOTHING.of, started, None, None, frozenset({started.number}))
            self._keep(result, made)
            return
        number = self._number(name, args, kwargs, result)
        if number is not None:
            self._keep(result, _Made(_NOTHING.of, number=number))
            return
        given = list(_tensors((*args, *kwargs.values())))
        if name in _AS_THE_SECOND:
            given = given[:1]
        known = [made for made in map(self._of, given) if made is not _NOTHING]
        if name == "softmax" and not known and result.requires_grad:
            self._soft.add(0)
            self._lost.setdefault(0, "of no product that is known")
        if not known and not (name in _SHAPES and isinstance(result, Tensor)):
            return
        scores = self._next(name, args, kwargs, result) if isinstance(result, Tensor) else None
        split = self._split(name, args, result) if isinstance(result, Tensor) else None
        products = frozenset[int]().union(*(made.products for made in known))
        if name == "softmax":
            self._soft |= products
        if _writes(name, kwargs):
            self._forget_storage(kwargs.get("out", args[0] if args else None))
        of_scores = any(made.scores is not None for made in known)
        if of_scores and scores is None and next(_tensors((result, *args[:1])), None) is not None:
            plain = name.strip("_")
            if any(x.requires_grad for x in _tensors((result,))):
                for made in known:
                    if made.scores is not None:
                        made.scores.elsewhere.append(f"into {plain}")
            if plain != "get" and (_writes(name, kwargs) or isinstance(result, (Tensor, tuple))):
                for number in products:
                    self._lost.setdefault(number, f"with {plain} between its products")
        if scores is not None or split is not None or products:
            of = _Made(_NOTHING.of, scores, split, None, products)
            for x in _tensors((result,)):
                self._keep(x, of)

    def _number(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Optional[float]:
        """Of a tensor that is made of one."""
        if not isinstance(result, Tensor) or result.dim() or result.requires_grad:
            return None
        place = {"tensor": 0, "full": 1}.get(name, len(args))
        if place < len(args) and isinstance(args[place], (int, float)):
            return float(args[place])
        return self._of(args[0]).number if name in _SAME and args else None

    def _value(self, x: Any) -> Optional[float]:
        """A number, or a tensor of one that can be read without a wait for a GPU."""
        if isinstance(x, (int, float)):
            return float(x)
        if not isinstance(x, Tensor) or x.numel() != 1 or x.dim() > 1:
            return None
        if self._of(x).number is not None:
            return self._of(x).number
        return float(x.detach()) if x.device.type == "cpu" else None

    def _split(self, name: str, args: tuple[Any, ...], result: Tensor) -> Optional[tuple[int, int]]:
        """Batch and heads of a tensor whose first dimension is both."""
        x = args[0] if args else None
        if result.dim() != 3 or not isinstance(x, Tensor):
            return None
        if name in _SHAPES and x.dim() == 4 and result.shape[1:] == x.shape[2:]:
            return (x.shape[0], x.shape[1]) if result.shape[0] == x.shape[0] * x.shape[1] else None
        follows = name in _SAME or name in _TURNS or name in _TIMES or name in _BY
        split = self._of(x).split
        return split if follows and split and result.shape[0] == x.shape[0] else None

    def _next(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> Optional[_Scores]:
        """What scores that are given have become; None where that is not followed."""
        x, *rest = args if args else (None,)
        scores = self._of(x).scores
        if name in _JOINS:
            return self._with_sinks(args, kwargs)
        if name == "where":
            return self._chosen(*args) if len(args) == 3 and not kwargs else None
        if scores is None and name in _TIMES | _PLUS and len(args) == 2:
            x, rest = args[1], [args[0]]
            scores = self._of(x).scores
        if scores is None or not isinstance(x, Tensor):
            return None
        if name in _SHAPES:
            return self._reshaped(scores, x, result)
        if name == "__getitem__":
            return self._without_sinks(scores, x, result, rest)
        if name in _TURNS:
            return _turn(scores, name, rest, kwargs, x.dim())
        if result.shape != x.shape:
            return None
        if name in _SAME:
            return scores if result.is_floating_point() else None
        if name == "dropout":
            return self._dropped(scores, rest, kwargs)
        if scores.soft:
            return None
        if name == "softmax":
            dim = kwargs.get("dim", rest[0] if rest else None)
            keys = scores.order.last if scores.order is not None else x.dim() - 1
            last = dim in (keys, keys - x.dim())
            return dataclasses.replace(scores, soft=True) if last else None
        return self._changed(scores, name, x, rest, kwargs)

    def _changed(
        self, scores: _Scores, name: str, x: Tensor, rest: list[Any], kwargs: dict[str, Any]
    ) -> Optional[_Scores]:
        other = rest[0] if rest else None
        number = self._value(other)
        if name in _FILLS and len(rest) == 2 and isinstance(other, Tensor):
            return self._hidden(scores, x, other, rest[1], False)
        if name in _LARGEST:
            least = kwargs.get("min", number)
            return scores if least is not None and least <= _KEEPS and len(kwargs) < 2 else None
        if name in _CAPS and not rest and not kwargs:
            return scores.capped()
        if len(rest) != 1 or kwargs or scores.wide:
            return None
        if name in _TIMES:
            return scores.scaled(number) if number is not None else None
        if name in _BY:
            return scores.scaled(1 / number) if number else None
        if name in _PLUS | _MINUS and number == 0:
            return scores
        if name in _PLUS | _MINUS and isinstance(other, Tensor):
            of_other = self._of(other).products
            if not other.is_floating_point() or scores.number in of_other:
                return None
            scores = dataclasses.replace(scores, others=scores.others | of_other)
            return scores.with_term(-other if name in _MINUS else other, x)
        return None

    def _hidden(
        self, scores: _Scores, x: Tensor, where: Tensor, value: Any, sees: bool
    ) -> Optional[_Scores]:
        """`where` is bool: the keys that are seen, or those that are not."""
        number = self._value(value)
        if number is None or number > _HIDES or where.dtype != torch.bool:
            return None
        return scores.with_term(where if sees else ~where, x)

    def _chosen(self, where: Any, a: Any, b: Any) -> Optional[_Scores]:
        if not isinstance(where, Tensor):
            return None
        for x, other, sees in ((a, b, True), (b, a, False)):
            scores = self._of(x).scores
            if scores is not None and not scores.soft:
                return self._hidden(scores, x, where, other, sees)
        return None

    def _with_sinks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optional[_Scores]:
        """[batch, heads, rows, keys + 1]: behind each row one more logit, the same for all rows of
        a head."""
        parts = args[0] if args else kwargs.get("tensors")
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if not isinstance(parts, (tuple, list)) or len(parts) != 2:
            return None
        x, sinks = parts
        scores = self._of(x).scores
        if scores is None or scores.soft or scores.wide or scores.order is not None:
            return None
        if x.dim() != 4 or dim not in (3, -1) or type(sinks) not in (Tensor, nn.Parameter):
            return None
        if sinks.shape != (*x.shape[:-1], 1):
            return None
        alike = all(sinks.shape[i] == 1 or sinks.stride(i) == 0 for i in (0, 2))
        if (
            not alike
            and (  # A GPU would be waited for.
                sinks.device.type != "cpu"
                or not torch.equal(sinks, sinks[:1, :, :1].expand_as(sinks))
            )
        ):
            return None
        return dataclasses.replace(scores, sinks=sinks.detach()[0, :, 0, 0], wide=True)

    def _without_sinks(
        self, scores: _Scores, x: Tensor, result: Tensor, rest: list[Any]
    ) -> Optional[_Scores]:
        """The weights of the keys alone."""
        if not (scores.soft and scores.wide) or result.shape != (*x.shape[:-1], x.shape[-1] - 1):
            return None
        where = rest[0] if rest and isinstance(rest[0], tuple) else ()
        parts = [part for part in where if type(part) is slice]
        if len(where) > len(parts) + sum(part is Ellipsis for part in where):
            return None
        first = parts and parts[-1] in (slice(None, -1), slice(0, -1))
        whole = all(part == slice(None) for part in parts[:-1])
        return dataclasses.replace(scores, wide=False) if first and whole else None

    def _reshaped(self, scores: _Scores, x: Tensor, result: Tensor) -> Optional[_Scores]:
        """[batch, heads, rows, keys], or with batch and heads as one."""
        if result.shape == x.shape:
            return scores
        if scores.order is not None or scores.wide:
            return None
        if scores.split is None and any(t.dim() == 4 and t.shape[0] != 1 for t in scores.terms):
            return None  # They were read as those of one head.
        apart, together = (x, result) if x.dim() == 4 else (result, x)
        if (apart.dim(), together.dim()) != (4, 3) or apart.shape[2:] != together.shape[1:]:
            return None
        split = int(apart.shape[0]), int(apart.shape[1])
        if split[0] * split[1] != together.shape[0] or scores.split not in (None, split):
            return None
        return dataclasses.replace(scores, split=split)

    def _dropped(
        self, scores: _Scores, rest: list[Any], kwargs: dict[str, Any]
    ) -> Optional[_Scores]:
        given = {**dict(zip(("p", "training"), rest)), **kwargs}
        p = given.get("p", 0.5) if given.get("training", given.get("train", True)) else 0.0
        if not scores.soft or not isinstance(p, (int, float)):
            return scores if p == 0 else None
        return dataclasses.replace(scores, dropout=max(scores.dropout, float(p)))


def watching(
    module: nn.Module, layer: PatchedLayer, forward: Optional[Forward]
) -> Optional[WrittenOut]:
    """What sees the calls of torch that the module's forward makes, if it computes a softmax."""
    return WrittenOut(layer, forward) if writes_softmax(module) else None
