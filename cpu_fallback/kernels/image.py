"""Load x86-64 object files without LLVM.

LLVM's library would add 0.08 s and 57 MB to each start, which takes 0.90 s and 72 MB with the
packaged model (docs/figures.md, CPU: start). Code for LLVM's large code model uses little of ELF-64
(System V gABI, chapters 4 and 5; x86-64 psABI, 4.4): its only relocation is a 64-bit address.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Mapping

_IDENTITY, _RELOCATABLE, _X86_64 = b"\x7fELF\x02\x01\x01", 1, 62
_SECTION, _SYMBOL, _RELOCATION = map(struct.Struct, ("<IIQQQQIIQQ", "<IBBHQQ", "<QQq"))
_SYMTAB, _RELA, _NOBITS, _ALLOC, _ADDRESS_64, _FUNCTION = 2, 4, 8, 2, 1, 2
_READ_EXECUTE = 5  # PROT_READ | PROT_EXEC


class Image:
    """Machine code in executable memory."""

    def __init__(self, code: bytes, externals: Mapping[str, int]):
        """code: an object file. externals: addresses of the functions that it calls, by name.

        Raises:
            ValueError: for another kind of file.
            OSError: the system refuses executable memory.
        """
        sections, symbols = _read(code)
        starts, size = {}, 0
        for number, (_, kind, flags, _, _, length, _, _, align, _) in enumerate(sections):
            if flags & _ALLOC and kind != _NOBITS:
                starts[number] = size = -(-size // max(align, 1)) * max(align, 1)
                size += length
        self._memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = (ctypes.c_char * len(self._memory)).from_buffer(self._memory)
        base = ctypes.addressof(view)
        for number, start in starts.items():
            at, length = sections[number][4:6]
            self._memory[start : start + length] = code[at : at + length]
        addresses = [
            base + starts[section] + value if section in starts else externals.get(name)
            for name, _, section, value in symbols
        ]
        for _, kind, _, _, at, length, _, target, _, _ in sections:
            if kind != _RELA or target not in starts:
                continue
            for offset, info, addend in _RELOCATION.iter_unpack(code[at : at + length]):
                address = addresses[info >> 32]
                if info & 0xFFFFFFFF != _ADDRESS_64 or address is None:
                    raise ValueError("a relocation that is not a 64-bit address")
                struct.pack_into("<Q", self._memory, starts[target] + offset, address + addend)
        self.address = {
            name: address
            for (name, kind, _, _), address in zip(symbols, addresses)
            if kind & 15 == _FUNCTION and address
        }  # each function's, by name
        del view
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(len(self._memory)), _READ_EXECUTE):
            raise OSError(ctypes.get_errno(), "no executable memory")


def _read(code: bytes) -> tuple[list[tuple], list[tuple[str, int, int, int]]]:
    """Section headers, and (name, kind, section, value) of the symbols. Raises ValueError."""
    kind = _RELOCATABLE, _X86_64
    if not code.startswith(_IDENTITY) or struct.unpack_from("<HH", code, 16) != kind:
        raise ValueError("not an x86-64 object file")
    at, count = struct.unpack_from("<Q", code, 40)[0], struct.unpack_from("<H", code, 60)[0]
    sections = list(_SECTION.iter_unpack(code[at : at + count * _SECTION.size]))
    (table,) = [section for section in sections if section[1] == _SYMTAB]
    texts = sections[table[6]][4]
    symbols = []
    stored = code[table[4] : table[4] + table[5]]
    for name, kind, _, section, value, _ in _SYMBOL.iter_unpack(stored):
        start = texts + name
        symbols.append((code[start : code.index(b"\0", start)].decode(), kind, section, value))
    return sections, symbols
