"""Tables of wrong arguments: what replaces good ones, which exception it raises, and that nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

Arguments = dict[str, Any]
Maker = Callable[[Arguments], Any]
Error = type[Exception]
Modes = tuple[str, ...] | None
ANYWHERE, CUDA, CPU = ("cpu", "cuda"), ("cuda",), ("cpu",)
# A device that tensors may not be on when the others are on the one named.
ELSEWHERE = {"cpu": "meta", "cuda": "cpu"}


@dataclass(frozen=True)
class Wrong:
    """Arguments that replace good ones, and the refusal: `argument: expected ... `says`..., got ...`got`...`.

    modes: the sets of good arguments that it applies to, by the names that the table's owner gives them.
    """

    label: str
    change: Callable[[Arguments], Arguments]
    error: Error
    argument: str
    says: str
    got: str
    modes: tuple[str, ...]
    devices: tuple[str, ...] = ANYWHERE


@dataclass(frozen=True)
class Table:
    """Makes entries of a table; modes: those of an entry that names none."""

    modes: tuple[str, ...]

    def change(
        self,
        label: str,
        name: str,
        how: Callable[[Tensor], Any],
        error: Error,
        says: str,
        got: str,
        modes: Modes = None,
        devices: tuple[str, ...] = ANYWHERE,
    ) -> Wrong:
        """Returns an entry with one tensor of the good ones replaced by a function of itself."""
        makers = {name: lambda a: how(a[name])}
        return self.several(label, makers, error, name, says, got, modes, devices)

    def several(
        self,
        label: str,
        makers: Mapping[str, Maker],
        error: Error,
        argument: str,
        says: str,
        got: str,
        modes: Modes = None,
        devices: tuple[str, ...] = ANYWHERE,
    ) -> Wrong:
        """Returns an entry with several arguments replaced together, so that only one rule is broken.

        Tensors that a mode lacks are left out; flags are added.
        """

        def change(a: Arguments) -> Arguments:
            found: Arguments = {}
            for n, make in makers.items():
                with suppress(KeyError):  # made of a tensor that is not there
                    value = make(a)
                    if n in a or not isinstance(value, Tensor):
                        found[n] = value
            return found

        return self.entry(label, change, error, argument, says, got, modes, devices)

    def entry(
        self,
        label: str,
        change: Callable[[Arguments], Arguments],
        error: Error,
        argument: str,
        says: str,
        got: str,
        modes: Modes = None,
        devices: tuple[str, ...] = ANYWHERE,
    ) -> Wrong:
        """Returns an entry whose change also adds arguments."""
        return Wrong(label, change, error, argument, says, got, modes or self.modes, devices)

    def values(
        self, argument: str, error: Error, says: str, got: str, modes: Modes = None, **given: Any
    ) -> Wrong:
        """Returns an entry with arguments replaced by these values."""
        label = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return self.entry(label, lambda a: given, error, argument, says, got, modes)

    def value(
        self,
        name: str,
        given: Any,
        error: Error,
        says: str,
        got: str,
        modes: Modes = None,
        devices: tuple[str, ...] = ANYWHERE,
    ) -> Wrong:
        """Returns an entry with one argument replaced by this value."""
        label = f"{name}={given!r}".partition("\n")[0]
        return self.entry(label, lambda a: {name: given}, error, name, says, got, modes, devices)

    def no_tensor(self, name: str, given: object, modes: Modes = None) -> Wrong:
        """Returns an entry with something that is no tensor."""
        return self.value(name, given, TypeError, "a torch.Tensor", type(given).__name__, modes)

    def away(self, name: str, modes: Modes = None) -> Wrong:
        """Returns an entry with a tensor on another device than the others."""
        makers = {name: lambda a: a[name].to(ELSEWHERE[a["q"].device.type])}
        label = f"{name} on another device"
        return self.several(label, makers, ValueError, name, "a tensor on ", "", modes)


def cases(table: list[Wrong], device: str) -> list:
    """Returns the entries for one device as parameters, once for each mode."""
    return [
        pytest.param(wrong, mode, id=f"{mode}-{wrong.label}")
        for wrong in table
        for mode in wrong.modes
        if device in wrong.devices
    ]


def resized(name: str, *dims: tuple[int, int]) -> Maker:
    """Makes zeros like an argument, with other sizes in some dimensions."""

    def make(a: Arguments) -> Tensor:
        shape = list(a[name].shape)
        for dim, size in dims:
            shape[dim] = size
        return a[name].new_zeros(shape)

    return make


def on_device(numbers: list[int], dtype: torch.dtype = torch.int64) -> Maker:
    """Makes a vector where q is."""
    return lambda a: torch.tensor(numbers, dtype=dtype, device=a["q"].device)


def on_cpu(numbers: list[int]) -> Maker:
    """Makes a vector on the CPU."""
    return lambda a: torch.tensor(numbers)


def by_name(a: Arguments, how: Callable[[Tensor], Tensor], *names: str) -> Arguments:
    """Returns the arguments of these names, as far as there are any, each as `how` makes it."""
    return {name: how(a[name]) for name in names if name in a}


def contents(arguments: Arguments) -> dict[str, Tensor]:
    """Returns a copy of every byte behind the tensors, those between the elements of a view included."""
    found = {}
    for name, tensor in arguments.items():
        if isinstance(tensor, Tensor) and tensor.device.type != "meta":
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            found[name] = raw.set_(tensor.detach().untyped_storage()).clone()
    return found


def assert_refused(function: Callable, wrong: Wrong, good: Arguments) -> None:
    """Calls a function with wrong arguments: the error is the expected one, and no byte of any tensor has changed."""
    arguments = good | wrong.change(good)
    before = contents(arguments)
    with pytest.raises(wrong.error) as caught:
        function(**arguments)
    message = str(caught.value)
    assert type(caught.value) is wrong.error
    head, found, tail = message.partition(", got ")
    assert found and head.startswith(f"{wrong.argument}: expected "), message
    assert wrong.says in head and wrong.got in tail, message
    for name, raw in contents(arguments).items():
        assert torch.equal(raw, before[name]), f"{name} has changed"
