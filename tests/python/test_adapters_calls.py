"""Goal: while a thread asks for it, every call of a function of Python comes to its target, by
whatever name and in whatever way, and the function stays what it is.
Method: one function, called from places that CPython has specialised, before, while and after its
calls are diverted.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bellwether._hook.functions import python_call
from bellwether._native.c_api import python_calls

WARM = 100


def plus(a: int, b: int = 2, *more: int, c: int = 3) -> tuple[int, ...]:
    """The function whose calls are diverted."""
    return a, b, *more, c


def other(a: int) -> int:
    return a + 1


class Holder:
    def method(self, a: int, *, b: int = 2) -> tuple[int, int]:
        return a, b


def by_position() -> Any:
    return plus(1, 5)


def by_default() -> Any:
    return plus(1)


def by_name() -> Any:
    return plus(a=1, c=4)


def by_star(*args: Any, **kwargs: Any) -> Any:
    return plus(*args, **kwargs)


def in_a_comprehension() -> Any:
    return [plus(i) for i in range(3)]


def by_generator() -> Any:
    return list(plus(i) for i in range(3))


bound_elsewhere = plus
WAYS: dict[str, Callable[[], Any]] = {
    "position": by_position,
    "default": by_default,
    "name": by_name,
    "star": lambda: by_star(1, 2, 3, c=7),
    "comprehension": in_a_comprehension,
    "generator": by_generator,
    "another name": lambda: bound_elsewhere(8),
    "partial": lambda: functools.partial(plus, 1, c=9)(2),
    "map": lambda: list(map(plus, [1, 2])),
    "by C": lambda: sorted([3, 1], key=plus),
    "dunder": lambda: plus.__call__(4),
    "as a method": lambda: types.MethodType(plus, 6)(),
}  # fmt: skip

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def calls() -> Iterator[Calls]:
    seen: Calls = []

    def target(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append((args, kwargs))
        return function(*args, **kwargs)

    TARGETS[:] = [target]
    python_call.divert(plus, reached)
    yield seen
    python_call.restore(plus)


TARGETS: list[python_call.Target] = []


def reached(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return TARGETS[0](function, args, kwargs)


def seen(call: Callable[[], Any]) -> Any:
    python_call.see()
    try:
        return call()
    finally:
        python_call.leave()


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_calling_reaches_the_target(way: str, calls: Calls) -> None:
    call = WAYS[way]
    for _ in range(WARM):  # From now on its call is a specialised one.
        expected = call()
    assert calls == []
    assert seen(call) == expected
    times = len(calls)
    assert times in (1, 2, 3) and all(isinstance(args, tuple) for args, _ in calls)
    for _ in range(WARM):
        assert call() == expected
    assert len(calls) == times


def test_the_target_gets_arguments_as_given(calls: Calls) -> None:
    seen(lambda: plus(1, 2, 3, c=4))
    seen(lambda: plus(**{"a": 1}))
    assert calls == [((1, 2, 3), {"c": 4}), ((), {"a": 1})]


def test_the_function_stays_what_it_is(calls: Calls) -> None:
    python_call.restore(plus)
    before = facts()
    python_call.divert(plus, reached)
    assert facts() == before and seen(facts) == before
    assert pickle.loads(pickle.dumps(plus)) is plus


def facts() -> list[Any]:
    own = {name: getattr(plus, name) for name in dir(plus) if not callable(getattr(plus, name))}
    return [id(plus), hash(plus), repr(plus), type(plus), inspect.signature(plus),
            inspect.getsource(plus), own]  # fmt: skip


def test_restoring_leaves_the_memory_as_it_was() -> None:
    def function() -> None: ...

    size = types.FunctionType.__basicsize__ - object.__basicsize__

    def memory() -> bytes:
        return ctypes.string_at(id(function) + object.__basicsize__, size)

    before = memory()
    python_call.divert(function, reached)
    assert memory() != before
    python_call.divert(function, reached)
    python_call.restore(function)
    assert memory() != before
    python_call.restore(function)
    # Of specialised calls, which begin anew; with what fills up its word.
    version = 0 if sys.version_info < (3, 12) else 8
    assert memory()[: size - version] == before[: size - version]


def test_a_method_is_a_function_of_its_class() -> None:
    found: list[Any] = []

    def target(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found.append(args[0])
        return function(*args, **kwargs)

    holder = Holder()

    def call() -> Any:
        return holder.method(1, b=3)

    for _ in range(WARM):
        call()
    python_call.divert(Holder.method, target)
    try:
        assert seen(call) == (1, 3) == seen(functools.partial(holder.method, 1, b=3))
    finally:
        python_call.restore(Holder.method)
    assert found == [holder, holder]


def test_calls_from_a_target_are_not_seen(calls: Calls) -> None:
    def target(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append((args, kwargs))
        return plus(5), by_star(6), seen(by_default)

    TARGETS[:] = [target]
    assert seen(by_position) == (plus(5), plus(6), by_default())
    assert len(calls) == 1


def test_a_plain_call_that_never_came_blinds_no_thread(calls: Calls) -> None:
    def target(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append((args, kwargs))
        library = python_calls()
        library.bw_python_plainly(id(function))
        return 0

    TARGETS[:] = [target]
    assert [seen(by_default) for _ in range(3)] == [0] * 3
    assert len(calls) == 3


def test_calls_within_a_plain_call_are_seen() -> None:
    found: list[int] = []

    def down(n: int) -> int:
        return down(n - 1) if n > 0 else 7

    def target(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found.append(args[0])
        return python_call.call_plainly(function, args, kwargs)

    python_call.divert(down, target)
    try:
        assert [seen(lambda: down(3)) for _ in range(2)] == [7, 7]
    finally:
        python_call.restore(down)
    assert found == [3, 2, 1, 0] * 2


class Saying:
    """Of torch.compile, what it says of a code."""

    def __init__(self, *check: Callable[[Any], Any]) -> None:
        if check:
            self.check = check[0]


def refusing(code: Any) -> Any:
    raise LookupError(code)


@pytest.mark.parametrize(
    ("rules", "left"),
    [(Saying(), False), (Saying(refusing), False), (Saying(lambda _: True), True)],
)  # fmt: skip
def test_a_compiler_that_does_not_say_takes_all_functions(
    rules: Any, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo.trace_rules", rules)
    assert python_call._left_to_python(plus) is left  # type: ignore[arg-type]


def test_asking_nests(calls: Calls) -> None:
    seen(lambda: (seen(by_default), by_default()))
    by_default()
    assert len(calls) == 2


def test_an_error_passes_and_calls_are_seen_again(calls: Calls) -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match="missing 1 required"):
            seen(lambda: plus())  # type: ignore[call-arg]
    seen(by_default)
    by_default()
    assert len(calls) == 3


def test_each_thread_asks_for_itself(calls: Calls) -> None:
    turn, done = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    results: list[Any] = []

    def beside() -> None:
        turn.wait()  # The main thread is seen now, and this one is not.
        results.append([by_default() for _ in range(WARM)])
        done.wait()

    thread = threading.Thread(target=beside)
    thread.start()
    python_call.see()
    turn.wait()
    done.wait()
    python_call.leave()
    thread.join()
    assert calls == [] and results == [[(1, 2, 3)] * WARM]


def test_many_threads_at_once(calls: Calls) -> None:
    def many() -> None:
        for _ in range(200):
            seen(by_default)
            by_default()

    threads = [threading.Thread(target=many) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 6 * 200
    by_default()
    assert len(calls) == 6 * 200


def test_frames_run_as_before_afterwards(calls: Calls) -> None:
    if sys.version_info[:2] != (3, 11):
        pytest.skip("this Python does not need another to run its frames")
    get = python_call.asked("_PyInterpreterState_GetEvalFrameFunc", ctypes.c_void_p,
                            ctypes.c_void_p)  # fmt: skip
    interpreter = python_call.asked("PyInterpreterState_Get", ctypes.c_void_p)()
    before = get(interpreter)
    assert seen(lambda: get(interpreter)) != before
    assert get(interpreter) == before


def test_only_plain_functions_are_taken() -> None:
    for thing in (len, Holder(), torch.relu, functools.partial(plus)):
        with pytest.raises(RuntimeError, match="in another way"):
            python_call.divert(thing, reached)  # type: ignore[arg-type]


def test_torch_compile_takes_the_function_itself(calls: Calls) -> None:
    traced: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        traced.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    @torch.compile(backend=backend)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return doubled(x) + 1

    python_call.divert(doubled, reached)
    try:
        assert torch.equal(seen(lambda: compiled(torch.ones(2))), torch.full((2,), 3.0))
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    finally:
        python_call.restore(doubled)
    assert calls == [] and any("mul" in name for name in traced)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_compiling_and_looking_end_in_any_order(inside: bool, calls: Calls) -> None:
    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @torch.compile(backend="eager")
    def around(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + len(uncompiled())

    @torch._dynamo.disable
    def uncompiled() -> Any:
        return seen(by_default)

    x = torch.ones(1)
    for count in (1, 2):
        seen(lambda: (compiled(x), by_default())) if inside else around(x)
        by_default()
        assert len(calls) == count


def test_nothing_is_tried_out_while_torch_compile_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(python_call, "_library", None)
    early: list[bool] = []

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        early.append(python_call.too_early())
        return x + 1

    compiled(torch.ones(1))
    assert early == [True] and not python_call.too_early()
    assert python_call.why_not() is None
