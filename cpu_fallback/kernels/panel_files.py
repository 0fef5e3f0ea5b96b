"""Panels in the cache folder: written behind a file's first load, mapped by later ones.

A mapping needs no packing and is shared by processes. It is used in place if the system maps it in
huge pages. Products are a tenth slower from small pages, so panels are then packed into memory. A
file is [panels][_TRAILER]: panels come first, where huge pages of the file start. Every load
computes the checksum, which also reads the pages.
"""

from __future__ import annotations

import atexit
import hashlib
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import cache
from pathlib import Path

import numpy as np

from mlx_llama.core.files import packed, quantized
from mlx_llama.core.system import cache_folder, machine, progress
from mlx_llama.core.system.files import open_file

from . import filling, layouts, panels
from .panels import Arena, Plan

SUFFIX = ".panels"
LEAST_BYTES = 64 << 20  # less is packed in milliseconds
# magic, key, bytes of panels, their checksum, SHA-256 of these fields
_TRAILER = struct.Struct("<24s32sQ32s32s")
_MAGIC = b"mlx_llama panels 1"
_PIECE = 4 << 20  # bytes checked or written at once
_EXIT_SECONDS = 10.0  # to wait for writers when the process ends

Checksum = Callable[[int, int, int], None]  # filling.checksum, compiled

_writers: set[threading.Thread] = set()
_is_ending = threading.Event()


def find(plans: Iterable[Plan], nbytes: int, checksum: Checksum) -> PanelFile | None:
    """The file for the panels of `plans`, `nbytes` together, which may not exist; None: not cached.

    Raises OptionsError for a malformed MLX_LLAMA_CACHE_SIZE.
    """
    if nbytes < LEAST_BYTES or not cache_folder.size_limit():
        return None
    folder = cache_folder.cache_folder()
    key = folder and _key(plans)
    return key and PanelFile(folder / f"{key.hex()[:32]}{SUFFIX}", key, nbytes, checksum)


def _key(plans: Iterable[Plan]) -> bytes | None:
    """SHA-256 of everything that panels depend on; None if some weights are not in mapped files."""
    hashed = hashlib.sha256(_hash_sources())
    for plan in plans:
        tensor = plan.tensor
        if not tensor.pages:
            return None
        # decoded and GPTQ's matrices follow their order themselves
        order = getattr(tensor, "_order", tensor.order)
        if order is not None:
            order = hashlib.sha256(np.ascontiguousarray(order)).hexdigest()
        pages = [(mapped.stamp, offset, nbytes) for mapped, offset, nbytes in tensor.pages]
        facts = tensor.name, tensor.shape, plan.source, plan.layout, plan.nbytes, order, pages
        facts += (tensor.description,)  # it names the zeros' meaning in GPTQ's files
        hashed.update(repr(facts).encode())
    return hashed.digest()


@cache
def _hash_sources() -> bytes:
    """SHA-256 of the code that decides the contents of panels."""
    modules = (filling, layouts, panels, packed, quantized)
    sources = [Path(module.__file__).read_bytes() for module in modules]
    return hashlib.sha256(b"".join(sources)).digest()


class PanelFile:
    """The file of one model's panels, which may not exist."""

    def __init__(self, path: Path, key: bytes, nbytes: int, checksum: Checksum):
        self.path, self.key, self.nbytes, self._checksum = path, key, nbytes, checksum
        self._is_sound = False  # the file is valid, though its pages may be small

    def open(self, pool: Executor) -> Arena | None:
        """Map the panels; None unless the file is sound, of this key, private and in huge pages."""
        try:
            with open_file(self.path) as file:
                status, size = os.fstat(file.fileno()), self.nbytes + _TRAILER.size
                if not cache_folder.is_private(status) or status.st_size != size:
                    return None
                file.seek(self.nbytes)
                trailer = file.read()
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            os.utime(self.path)  # the least recently used file is removed first
        except (OSError, ValueError):
            return None
        if len(trailer) != _TRAILER.size or trailer != self._trailer(
            checksum := _TRAILER.unpack(trailer)[3]
        ):
            return None
        arena = Arena(np.frombuffer(mapped, np.uint8)[: self.nbytes])
        machine.prefer_huge_pages(mapped)
        if self._check(mapped, arena, pool) != checksum:
            cache_folder.remove(self.path)
            return None
        self._is_sound = True
        return arena if machine.has_huge_pages(arena.address, self.nbytes) else None

    def _trailer(self, checksum: bytes) -> bytes:
        front = struct.pack("<24s32sQ32s", _MAGIC, self.key, self.nbytes, checksum)
        return front + hashlib.sha256(front).digest()

    def _pieces(self) -> list[tuple[int, int]]:
        return [(at, min(_PIECE, self.nbytes - at)) for at in range(0, self.nbytes, _PIECE)]

    def _check(self, mapped: mmap.mmap, arena: Arena, pool: Executor) -> bytes:
        """The checksum of mapped panels, b"" for a file that was truncated.

        Pages are not read ahead, since Linux would read small pages.
        """
        advance, sums = progress.meter(self.nbytes), []

        def check(piece: tuple[int, int]) -> bytes:
            at, nbytes = piece
            return self._sum(arena, at, nbytes) if machine.read_pages(mapped, at, nbytes) else b""

        for (_, nbytes), checksum in zip(self._pieces(), pool.map(check, self._pieces())):
            sums.append(checksum)
            advance(nbytes)
        return hashlib.sha256(b"".join(sums)).digest() if all(sums) else b""

    def _sum(self, arena: Arena, at: int, nbytes: int) -> bytes:
        out = np.empty(filling.CHECKSUM_BYTES, np.uint8)
        self._checksum(arena.address + at, nbytes, out.ctypes.data)
        return out.tobytes()

    def save(self, arena: Arena) -> None:
        """Write the panels in the background. A process that ends waits some seconds."""
        if self._is_sound:
            return
        writer = threading.Thread(target=self._write, args=(arena,), daemon=True)
        _writers.add(writer)
        writer.start()

    def _write(self, arena: Arena) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not machine.maps_huge_files(self.path.parent) or not cache_folder.make_room(
                self.nbytes + _TRAILER.size, SUFFIX
            ):
                return
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=cache_folder.PARTIAL)
            try:
                with open(handle, "wb", buffering=0) as file:
                    sums = []
                    for at, nbytes in self._pieces():
                        if _is_ending.is_set():
                            raise OSError("the process ends")
                        sums.append(self._sum(arena, at, nbytes))
                        if file.write(arena.bytes[at : at + nbytes]) != nbytes:
                            raise OSError("a short write: the disk is full")
                    file.write(self._trailer(hashlib.sha256(b"".join(sums)).digest()))
                os.replace(temporary, self.path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError:
            pass
        finally:
            _writers.discard(threading.current_thread())


@atexit.register
def _end_writers() -> None:
    """Wait for writers; those that take too long remove their files."""
    for writer in list(_writers):
        writer.join(_EXIT_SECONDS)
    _is_ending.set()
    for writer in list(_writers):
        writer.join(1.0)
