"""transformers' attention written out: each model's `eager_attention_forward`, which its attention
interface calls by default.

The functions differ in a few parts, which the code of each names: a softcap, a bias of positions,
sinks of the module.  One with a part that is not known here is left out.  sdpa is seen where it
calls PyTorch's function, flash_attention_* where it calls FlashAttention's, and flex_attention in
torch_flex.py.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Optional, Union

from torch import Tensor, nn

from .._hook.calls.call import VIEWS, AttentionCall, CallRead, Ours, Reader, first_of, with_first
from .._hook.calls.kernel_choice import narrowed_dtype
from .._hook.calls.mask_terms import mask_of
from .arguments import Arguments, are_tensors, reader, scale_of

NAME = "transformers"
TRIED = ("transformers 5.17.0", "transformers 5.23.0")

_NAMES = ("eager_attention_forward", "simple_eager_attention_forward",
          "text_eager_attention_forward", "vision_eager_attention_forward")  # fmt: skip
_FIRST = ("module", "query", "key", "value", "attention_mask")
_ALSO = ("module", "query_states", "key_states", "value_states", "attention_mask")
_READ = {*_FIRST, *_ALSO, "scaling", "dropout", "softcap", "position_bias", "sliding_window"}
# What their code may name.  A function that names more computes what is not known here.
_NAMED = {
    "repeat_kv", "num_key_value_groups", "torch", "matmul", "transpose", "shape", "size", "nn",
    "functional", "softmax", "float32", "float", "to", "dtype", "dropout", "training",
    "contiguous", "tanh", "head_dim", "F", "sinks", "reshape", "expand", "cat", "max", "values",
    "type", "device", "view", "logsumexp", "sigmoid", "unsqueeze", "hasattr", "getattr",
    "maybe_autocast", "int", "bool", "Dropout", "is_causal", "config", "warnings", "logger",
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _is_one(code: types.CodeType) -> bool:
    first = code.co_varnames[: code.co_argcount][:5]
    return first in (_FIRST, _ALSO)


def functions() -> Iterator[tuple[Callable[..., Any], Reader]]:
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType):
            continue
        names = object.__getattribute__(module, "__dict__")  # A lazy one is asked for nothing.
        for name in _NAMES:
            function = names.get(name)
            if type(function) is types.FunctionType and _is_one(function.__code__):
                yield function, read


_unknown: weakref.WeakKeyDictionary[types.FunctionType, Optional[str]] = weakref.WeakKeyDictionary()


def _unknown_part(function: types.FunctionType) -> Optional[str]:
    """A name in its code that is not known here."""
    if function not in _unknown:
        others = [name for name in function.__code__.co_names if name not in _NAMED]
        _unknown[function] = others[0] if others else None
    return _unknown[function]


@functools.lru_cache(maxsize=4096)
def _loaded(code: types.CodeType) -> frozenset[str]:
    return frozenset(
        str(i.argval) for i in dis.get_instructions(code) if i.opname.startswith("LOAD_FAST")
    )


def loaded(function: types.FunctionType) -> frozenset[str]:
    """Its parameters that its code uses."""
    return _loaded(function.__code__)


def _scaling(function: types.FunctionType, given: Arguments) -> Any:
    """Where its code names the module's head_dim, that is what scales by default, or always."""
    scaling, head_dim = given.get("scaling"), getattr(given.get("module"), "head_dim", None)
    if head_dim is None or "head_dim" not in function.__code__.co_names:
        return scaling
    return head_dim**-0.5 if scaling is None or "scaling" not in loaded(function) else scaling


def _sinks(function: types.FunctionType, module: Any) -> Optional[Tensor]:
    if "sinks" not in function.__code__.co_names:
        return None
    found = getattr(module, "sinks", None)
    return found.reshape(-1) if isinstance(found, Tensor) else None


def _weights_are_wanted(given: Arguments) -> bool:
    """Whether somebody takes the probabilities, which our attention does not return."""
    config = getattr(given.get("module"), "config", None)
    if given.get("output_attentions") or getattr(config, "output_attentions", False):
        return True
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    collected = None if collector is None else collector.get()
    return any("attentions" in str(name) for name in collected or ())


def _ours(
    given: Arguments, terms: list[Tensor], sinks: Optional[Tensor], scale: float
) -> Union[Ours, str]:
    """The same by bellwether.attention; what it returns has None for the probabilities."""
    if len(terms) > 1:
        return "attention_mask and position_bias are given, and one of them is served"
    if _weights_are_wanted(given):
        return "output_attentions is asked for, and the output alone is served"
    arguments = {
        "mask": terms[0] if terms else None, "sinks": sinks, "scale": scale, "enable_gqa": True,
        "softcap": float(given.get("softcap") or 0.0),
    }  # fmt: skip
    return Ours(arguments, _returned)


def _returned(o: Tensor) -> tuple[Tensor, None]:
    return o.transpose(1, 2).contiguous(), None


@reader
def read(given: Arguments) -> CallRead:
    names = _FIRST if "query" in given else _ALSO
    module, q, k, v, bias = (given.get(name) for name in names)
    function: Any = given.function
    if not are_tensors(4, q, k, v):
        return "q, k and v are not three tensors of four dimensions: not measured"
    uses = loaded(function)
    unread = None
    other = _unknown_part(function) or given.unusual(_READ)
    if other is not None:
        unread = f"{function.__module__} computes its attention with {other}"
    scale, wrong = scale_of(_scaling(function, given), q.shape[-1])
    terms = []
    for name, term in (("attention_mask", bias), ("position_bias", given.get("position_bias"))):
        if term is None or name not in uses:
            continue
        if not isinstance(term, Tensor) or not term.is_floating_point():
            unread = f"{name} is no tensor that is added to the scores"
        elif term.dim() > 4:
            unread = f"{name} of {term.dim()} dimensions"
        else:
            terms.append(term)
    sinks = _sinks(function, module)
    training = isinstance(module, nn.Module) and module.training
    view = VIEWS["bhtd"]

    return AttentionCall(
        q, k, v, view, view, view, VIEWS["bthd"], given.run(*names[1:4]), scale,
        mask_of([term.detach() for term in terms]),
        softcap=float(given.get("softcap") or 0.0),
        sinks=None if sinks is None else sinks.detach(),
        dropout=float(given.get("dropout") or 0.0) if training else 0.0,
        narrowed=narrowed_dtype(q, k, v),
        weights_go_on=_weights_are_wanted(given),
        kernel=functools.partial(str, "eager"),
        module=module if isinstance(module, nn.Module) else None,
        unread=unread or wrong,
        output=first_of,
        with_output=with_first,
        ours=_ours(given, terms, sinks, scale),
    )  # fmt: skip
