"""A call that is like an earlier one does what the function itself would do, and no other call takes its way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cpu

from cula_core import shortcuts
from cula_core.shortcuts import Launcher, shortcut


@pytest.fixture(autouse=True)
def cpu_counts(monkeypatch):
    monkeypatch.setattr(shortcuts, "_first_device", -1)
    monkeypatch.setattr(shortcuts, "_current_device", lambda: -1)
    monkeypatch.setattr(shortcuts, "_alignment", 64)  # as fresh memory of the CPU has it
    monkeypatch.setattr(shortcuts, "_empty_strided", _empty_strided_cpu)


class Counted:
    """A function, how often it went the long way, and its shortcut."""

    def __init__(self, function: Callable) -> None:
        self.long = 0

        def counting(*arguments, **named):
            self.long += 1
            return function(*arguments, **named)

        self.call = shortcut(counting)


def add(x: Tensor, y: Tensor, out: Tensor, scale: float) -> None:
    out.copy_(x + scale * y)


KERNEL = Launcher(add)


def body(x, y, scale=2.0, out=None):
    if out is None:
        out = torch.empty_like(x)
    KERNEL(x, y, out, scale)
    return out


def test_the_third_call_is_short_and_has_its_own_tensors():
    counted = Counted(body)
    results = []
    for i in range(5):
        x, y = torch.full((3,), float(i)), torch.full((3,), 10.0 * i)
        results.append(counted.call(x, y))
        assert torch.equal(results[-1], x + 2 * y)
    assert counted.long == 2
    assert len({r.data_ptr() for r in results}) == 5


def test_memory_is_given_back_as_soon_as_by_the_function():
    seen: list[weakref.ref] = []
    alive: list[int] = []

    @Launcher
    def see(piece):
        alive.append(sum(earlier() is not None for earlier in seen))
        seen.append(weakref.ref(piece))

    def in_pieces(x):
        total = torch.zeros_like(x)
        for _ in range(3):
            piece = x + 1
            see(piece)
            total += piece
        return total

    counted = Counted(in_pieces)
    for i in range(3):
        seen.clear()
        alive.clear()
        assert counted.call(torch.full((2,), float(i))).tolist() == [3.0 * (i + 1)] * 2
    assert counted.long == 2 and alive == [0, 0, 0]


def test_memory_of_the_callers():
    counted = Counted(body)
    for i in range(4):
        x, y, out = torch.full((3,), float(i)), torch.ones(3), torch.zeros(3)
        assert counted.call(x, y, out=out) is out and torch.equal(out, x + 2)
    assert counted.long == 2


def pieces(state, x, flag=True):
    """Allocations, views, conversions, torch functions, writes, and nested results."""
    memory = x.new_empty(8, dtype=torch.float64)
    first, second = memory.split((6, 2))
    table = first.view(2, 3)[1:, :2]
    wide = x.float() if flag else x
    KERNEL(wide, torch.ones_like(x), table[0], 3.0)
    second.zero_()
    state[:1].add_(table.sum())
    state.mul_(2)
    same = wide.float()
    return state, (table, None), same is wide


def test_every_kind_of_step():
    counted = Counted(pieces)
    for i in range(4):
        state, x = torch.ones(2), torch.full((2,), float(i))
        found, (table, none), flag = counted.call(state, x)
        assert found is state and none is None and flag is True
        assert table.dtype == torch.float64 and table.tolist() == [[i + 3.0] * 2]
        assert state.tolist() == [2 * (1 + 2 * (i + 3)), 2.0]
    assert counted.long == 2


def test_the_fourth_call_asks_for_no_facts(monkeypatch):
    counted = Counted(body)
    x, y, out = torch.zeros(3), torch.ones(3), torch.zeros(3)
    for _ in range(3):
        counted.call(x, y, out=out)
    asked = []
    monkeypatch.setattr(shortcuts, "_facts", lambda *call: asked.append(call) or shortcuts._UNKNOWN)
    assert counted.call(y, x, out=out) is out and out.tolist() == [1.0] * 3
    assert asked == []
    shortcuts.forget()
    counted.call(x, y, out=out)
    assert len(asked) == 1 and counted.long == 3


def without_torch_compile(monkeypatch):
    monkeypatch.setattr(shortcuts, "TensorGuards", None)


@pytest.mark.parametrize("torch_has", [lambda monkeypatch: None, without_torch_compile])
def test_what_differs_goes_the_long_way(monkeypatch, torch_has):
    torch_has(monkeypatch)
    counted = Counted(body)
    x, y = torch.zeros(128), torch.ones(128)
    for _ in range(3):
        counted.call(x, y)
    others = [
        (torch.zeros(64), torch.ones(64)),  # shape
        (x.double(), y),  # dtype
        (torch.zeros(256)[::2], y),  # stride
        (torch.zeros(129)[1:], y),  # address
        (torch.zeros(132)[4:], y),  # an address that is a multiple of 16 bytes
        (x, y, 3.0),
        (x, y, 2),
        (x, y, True),
        (x, y, 1),
    ]
    for number, given in enumerate(others):
        assert torch.equal(counted.call(*given), body(*given))
        assert counted.long == 3 + number
    for _ in range(3):
        counted.call(x, y=y)  # another way to say the same
    assert counted.long == 4 + len(others)
    assert torch.equal(counted.call(y=x, x=y), body(y, x))
    assert counted.long == 5 + len(others)


@Launcher
def particular(x: Tensor, out: Tensor) -> None:
    """A kernel that was compiled for addresses of 16 bytes, and says so as a compiled one does."""
    with torch._C.DisableTorchFunction():
        if x.data_ptr() % 16:
            raise ValueError("misaligned")
        out.copy_(x + 1)


def one_kernel(x, y):
    """What takes x at any address, and looks at that of y."""
    out = torch.empty_like(x)
    try:
        particular(x, out)
    except ValueError:
        particular(x.clone(), out)
    return out if y.data_ptr() % 64 else -out


def test_addresses_that_only_the_kernel_asks_for(monkeypatch):
    counted = Counted(one_kernel)
    x, y = torch.zeros(8), torch.zeros(17)
    calls = [(x, y[4:12])] * 3 + [(torch.zeros(9)[1:], y[4:12]), (x, y[:8]), (x, y[4:12])]
    for given in calls[:3]:
        assert counted.call(*given).tolist() == [1.0] * 8
    assert counted.long == 2
    # The kernel refuses; then the function, which has caught that, is written down for such addresses as well.
    for times in (3, 4, 4):
        assert counted.call(*calls[3]).tolist() == [1.0] * 8
        assert counted.long == times
    for times in (5, 6, 6):
        assert counted.call(*calls[4]).tolist() == [-1.0] * 8
        assert counted.long == times
    assert counted.call(*calls[5]).tolist() == [1.0] * 8 and counted.long == 6
    asked = []
    monkeypatch.setattr(shortcuts, "_facts", lambda *call: asked.append(call) or shortcuts._UNKNOWN)
    assert counted.call(x[:], y[4:12]).tolist() == [1.0] * 8
    assert asked == []


@pytest.mark.parametrize("earlier", [lambda x: x.add_(1), lambda x: particular(x, x)])
def test_what_may_have_changed_something_refuses_no_address(earlier):
    """A call of several steps must not be made again after some of them: its list compares all addresses."""

    def function(x, y):
        earlier(x)
        particular(y if y.data_ptr() % 16 == 0 else y.clone(), y)
        return y

    counted = Counted(function)
    for _ in range(3):
        counted.call(torch.zeros(8), torch.zeros(8))
    x, y = torch.zeros(8), torch.zeros(9)[1:]
    assert counted.call(x, y).tolist() == [1.0] * 8
    assert x.tolist() == [1.0] * 8


def test_gradients_go_the_long_way():
    counted = Counted(lambda x: x * 2)
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        for _ in range(3):
            assert not counted.call(x).requires_grad
    assert counted.long == 2
    for _ in range(3):
        assert counted.call(x).requires_grad
    assert counted.long == 5
    assert not counted.call(x.detach()).requires_grad


def test_parameters_are_tensors():
    counted = Counted(body)
    weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    for i in range(3):
        assert counted.call(torch.full((3,), float(i)), weight).tolist() == [i + 2.0] * 3
    assert counted.long == 2


def reads(x):
    return x * x.sum().item()


def branches(x):
    return x + 1 if x[0] > 0 else x - 1


def sets(x):
    y = torch.zeros(3)
    y[0] = x[0]
    return y


def foreign(x, kept=torch.zeros(3)):  # noqa: B008
    kept += x
    return kept + 0


class Pair(NamedTuple):
    first: Tensor
    second: int


def named(x):
    return Pair(x + 1, 2)


@pytest.mark.parametrize("function", [reads, branches, sets, foreign, named])
def test_what_cannot_be_written_down(function):
    counted = Counted(function)
    for i in (1.0, 1.0, -2.0, 3.0):
        x = torch.full((3,), i)
        expected = function(x)
        found = counted.call(x)
        if function is foreign:
            expected += x
        if function is named:
            expected, found = expected.first, found.first
        assert torch.equal(found, expected)
    assert counted.long == 4


def test_a_tensor_that_is_passed_twice_is_not_taken_for_one():
    counted = Counted(body)
    x, y = torch.ones(3), torch.full((3,), 5.0)
    for _ in range(3):
        assert counted.call(x, x).tolist() == [3.0] * 3
    for _ in range(3):
        assert counted.call(x, y).tolist() == [11.0] * 3
    assert counted.call(x, x).tolist() == [3.0] * 3


def test_tuples_are_looked_into():
    def total(pair, scale):
        return torch.stack(pair[0]) * scale + pair[1]

    counted = Counted(total)
    for i in range(4):
        a, b = torch.full((2,), float(i)), torch.ones(2)
        assert counted.call(((a, b), 3), 2.0).tolist() == [[2.0 * i + 3] * 2, [5.0] * 2]
    assert counted.long == 2
    assert counted.call(((a, b), 4), 2.0).tolist() == [[2.0 * i + 4] * 2, [6.0] * 2]


@pytest.mark.parametrize("argument", [[1], {}, torch.nn.Linear(1, 1).weight.data.to_sparse()])
def test_arguments_that_have_no_facts(argument):
    counted = Counted(lambda x, other: x + 1)
    for _ in range(3):
        assert counted.call(torch.ones(1), argument).item() == 2.0
    assert counted.long == 3


def test_errors_come_through_and_are_not_kept():
    def refuses(x, flag):
        if flag:
            raise ValueError("flag: expected False")
        return x + 1

    counted = Counted(refuses)
    for _ in range(3):
        with pytest.raises(ValueError, match="expected False"):
            counted.call(torch.ones(1), True)
        assert counted.call(torch.ones(1), False).item() == 2.0


def test_a_call_inside_another():
    inner = shortcut(body)
    counted = Counted(lambda x, y: inner(inner(x, y), y))
    for i in range(4):
        x, y = torch.full((3,), float(i)), torch.ones(3)
        assert counted.call(x, y).tolist() == [i + 4.0] * 3
        assert inner(x, y).tolist() == [i + 2.0] * 3
    assert counted.long == 2


def test_the_device_of_the_tensors_is_the_current_one_during_a_call(monkeypatch):
    current = [1]

    @contextmanager
    def on_device(device: int):
        before, current[0] = current[0], device
        yield
        current[0] = before

    monkeypatch.setattr(shortcuts, "_current_device", lambda: current[0])
    monkeypatch.setattr(shortcuts, "_on_device", on_device)
    seen = []
    counted = Counted(lambda x, y: seen.append(current[0]) or y + 1)
    for i in range(4):
        assert counted.call(torch.ones(1), torch.full((1,), float(i))).item() == i + 1
        assert current == [1]
    assert counted.long == 2 and seen == [-1, -1]
    x = torch.ones(1, requires_grad=True)
    assert counted.call(x, x).requires_grad and seen == [-1] * 3


def test_tensors_of_the_cpu_go_the_long_way(monkeypatch):
    counted = Counted(lambda x, y: y + 1)
    monkeypatch.setattr(shortcuts, "_first_device", 0)
    monkeypatch.setattr(shortcuts, "_current_device", None)  # is not even asked for
    for _ in range(3):
        counted.call(torch.ones(1), torch.ones(1))
    assert counted.long == 3


def test_the_oldest_make_room(monkeypatch):
    monkeypatch.setattr(shortcuts, "LIMIT", 3)
    counted = Counted(lambda x: x + 1)
    for size in (1, 2, 3):
        for _ in range(3):
            counted.call(torch.ones(size))
    assert counted.long == 6
    counted.call(torch.ones(4))  # in the place of size 1
    counted.call(torch.ones(2))
    assert counted.long == 7
    counted.call(torch.ones(1))
    assert counted.long == 8


def test_threads():
    """Each thread writes down its own launches."""
    counted = Counted(body)
    start = threading.Barrier(4)

    def work(number: int) -> bool:
        good = True
        for i in range(200):
            if i % 50 == 0:
                start.wait()
            size = 1 + i // 50
            x, y = torch.full((size,), float(number)), torch.full((size,), float(i))
            good &= counted.call(x, y).tolist() == [number + 2.0 * i] * size
        return good

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert counted.long < 100


def test_compiled_code_takes_the_function_itself(fresh_compiler):
    counted = Counted(lambda x: x * 2 + 1)
    run = torch.compile(counted.call, backend="eager")
    for i in range(3):
        assert run(torch.full((2,), float(i))).tolist() == [2 * i + 1.0] * 2


def test_a_function_keeps_its_name():
    found = shortcut(body)
    assert found.__name__ == "body" and found.__wrapped__ is body
