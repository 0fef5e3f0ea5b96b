"""Survive the truncation of a mapped file, on Linux. A page beyond the file's end raises SIGBUS
when it is touched, which kills the process. The handler here, machine code that takes no lock,
replaces the rest of the mapping with zeros, sets a flag and lets the instruction continue. Other
bus errors, and signals that a process sent, go to the handler that was there before.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import signal
import sys

from llvmlite import ir

from . import target
from .emit import Function, Module, Value, Variable, i32, i64, kernel, void

MAPPINGS = 4096  # protected at most; a large model has hundreds of files
_STATE = "mlx_llama_mappings"  # symbol of the handler's state
# The state in words: functions of the C library, the mask of a page's address, the action from
# before, then (start, end, flag) of each mapping, with an end of 0 for none
_MMAP, _SIGACTION, _RAISE, _MASK, _BEFORE, _MAPPINGS, _MAPPING = 0, 1, 2, 3, 4, 32, 3
# struct sigaction of 64-bit glibc, in words: a handler, 16 words of signals, flags
_ACTION, _FLAGS, _SA_SIGINFO, _SA_ONSTACK = 19, 17, 4, 0x08000000
_ADDRESS_ERROR = 2  # siginfo_t's BUS_ADRERR: a page beyond the end, or one that cannot be read
_READ, _PRIVATE_FIXED_ANONYMOUS = 1, 0x32  # mmap's constants


@kernel
def handle(f: Function, number: i32, info, context) -> None:
    """A handler of SIGBUS with SA_SIGINFO."""
    symbol = ir.Function(f.module, ir.FunctionType(void, []), _STATE)
    state = Value(f, f.builder.ptrtoint(symbol, i64))
    code, address = f.load(i32, info, 8), f.load_word(info, 2)
    is_ours, zero = Variable(f, f.constant(i32, 0)), f.constant(i64, 0)
    with f.if_then(code.compare("==", _ADDRESS_ERROR)), f.loop(MAPPINGS) as n:
        mapping = state + n * (8 * _MAPPING) + 8 * _MAPPINGS
        start, end = f.load_word(mapping, 0), f.load_word(mapping, 1)
        with f.if_then(start.compare("<=", address) & address.compare("<", end)):
            page, replace = address & f.load_word(state, _MASK), f.load_word(state, _MMAP)
            read, flags, file = (
                f.constant(i32, word) for word in (_READ, _PRIVATE_FIXED_ANONYMOUS, -1)
            )
            types = [i64, i64, i32, i32, i32, i64]
            at = f.call_address(
                replace, types, page, end - page, read, flags, file, zero, result=i64
            )
            f.store(f.constant(i64, 1), mapping, 16)
            is_ours.set(at.compare("==", page).zero_extend(i32))
    with f.if_then(is_ours.get().compare("==", 0)):
        before, restore = state + 8 * _BEFORE, f.load_word(state, _SIGACTION)
        f.call_address(restore, [i32, i64, i64], number, before, zero)
        with f.loop(_ACTION) as word:  # that handler may restore this one: then SIG_DFL follows
            f.store(zero, before, word * 8)
        with f.if_then(code.compare("<=", 0)):  # sent, and does not come again by itself
            f.call_address(f.load_word(state, _RAISE), [i32], number)


class Guard:
    """Mappings whose truncation this process survives. Threads may share it."""

    def __init__(self, for_target: target.Target) -> None:
        memory = mmap.mmap(-1, 8 * (_MAPPINGS + _MAPPING * MAPPINGS), mmap.MAP_PRIVATE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._words, self._free = memoryview(memory).cast("q"), [*range(MAPPINGS)]
        self._libc = ctypes.CDLL(None)
        for word, name in ((_MMAP, "mmap"), (_SIGACTION, "sigaction"), (_RAISE, "raise")):
            self._words[word] = ctypes.cast(self._libc[name], ctypes.c_void_p).value or 0
        self._words[_MASK] = -mmap.PAGESIZE

        def write() -> Module:
            module = Module()
            handle(module, public=True)
            return module

        name = handle.name()
        self._code = target.compile_module(for_target, name, [name], write, {_STATE: address})
        self._handler = self._code.address[name]

    def install(self) -> None:
        """Handle SIGBUS, also before a handler that was installed since the last call."""
        before, own = ((ctypes.c_int64 * _ACTION)() for _ in range(2))
        self._libc.sigaction(signal.SIGBUS, None, before)
        if before[0] != self._handler:
            for word, value in enumerate(before, _BEFORE):
                self._words[word] = value
            own[0], own[_FLAGS] = self._handler, _SA_SIGINFO | _SA_ONSTACK
            self._libc.sigaction(signal.SIGBUS, own, None)

    def add(self, address: int, nbytes: int) -> int | None:
        """Protect a mapping until `remove`; returns its number, None if there are too many."""
        if not self._free:
            return None
        number = self._free.pop()
        at = _MAPPINGS + _MAPPING * number
        self._words[at], self._words[at + 2] = address, 0
        self._words[at + 1] = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return number

    def flag(self, number: int) -> memoryview:
        """A word that is not 0 once a page of a mapping was missing when it was touched."""
        at = _MAPPINGS + _MAPPING * number + 2
        return self._words[at : at + 1]

    def is_cut(self, number: int) -> bool:
        return self.flag(number)[0] != 0

    def remove(self, number: int) -> None:
        """End the protection of a mapping that is about to be unmapped."""
        self._words[_MAPPINGS + _MAPPING * number + 1] = 0
        self._free.append(number)


@functools.cache
def find_guard() -> Guard | None:
    """The guard of this process; None on a system or processor that the handler does not know."""
    library = os.confstr("CS_GNU_LIBC_VERSION") if sys.platform == "linux" else None
    names = target.available() if library and sys.maxsize > 1 << 32 else []
    return Guard(target.build_target(names[0])) if names else None
