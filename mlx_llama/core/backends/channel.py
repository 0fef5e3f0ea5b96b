"""Messages between the ranks of a run: JSON and arrays over TCP, a heartbeat every second. All
processes notice when one ends or falls silent, whatever their main threads wait for.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

BEAT = 1.0  # seconds between heartbeats
# seconds without any until a process is lost, less those in which this one was stopped itself
SILENCE = 7
_LENGTH = struct.Struct("!Q")
_LONGEST = 1 << 26  # bytes of a message's JSON

Message = dict[str, Any]
Arrays = Mapping[str, np.ndarray]
Received = tuple[Message, dict[str, np.ndarray]]  # a message and its arrays


class Channel:
    """One connection. receive: called on a thread of the channel with (message, arrays). lose:
    called once with the reason when the other side ends or falls silent."""

    def __init__(
        self,
        connection: socket.socket,
        receive: Callable[[Message, dict[str, np.ndarray]], object],
        lose: Callable[[str], object],
    ):
        self._socket, self._receive, self._lose = connection, receive, lose
        self._sending = threading.Lock()
        self._closed = threading.Event()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 1, 0))
        for run in (self._read, self._beat):
            threading.Thread(target=run, name="mlx_llama ranks", daemon=True).start()

    def send(self, message: Message, arrays: Arrays | None = None) -> None:
        """Send a message. If that fails, drop it: `lose` will be called."""
        arrays = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
        described = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
        head = json.dumps({"message": message, "arrays": described}).encode()
        with contextlib.suppress(OSError), self._sending:
            self._socket.sendall(_LENGTH.pack(len(head)) + head)
            for array in arrays.values():
                self._socket.sendall(array.data.cast("B") if array.size else b"")

    def close(self) -> None:
        """Close the connection without notice."""
        self._closed.set()
        self._socket.close()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT):
            try:
                with self._sending:
                    self._socket.sendall(_LENGTH.pack(0))
            except OSError:
                return

    def _read(self) -> None:
        try:
            while True:
                (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
                if length > _LONGEST:
                    raise ConnectionError("sent an invalid message")
                if length:
                    content = json.loads(self._take(length))
                    arrays = {}
                    for name, kind, shape in content["arrays"]:
                        empty = np.empty(shape, np.dtype(kind))
                        data = np.frombuffer(self._take(empty.nbytes), empty.dtype)
                        arrays[name] = data.reshape(shape)
                    self._receive(content["message"], arrays)
        except TimeoutError:
            reason = f"has been silent for {SILENCE} s"
        except (OSError, ValueError) as error:
            reason = str(error) if type(error) is ConnectionError else "has ended"
        if not self._closed.is_set():
            self._lose(reason)

    def _take(self, count: int) -> bytearray:
        data, silent = bytearray(count), 0
        rest = memoryview(data)
        while rest:
            try:
                got = self._socket.recv_into(rest)
            except BlockingIOError:
                # Count seconds: a process that was stopped itself has not waited meanwhile.
                silent += 1
                if silent == SILENCE:
                    raise TimeoutError from None
                continue
            if not got:
                raise ConnectionResetError
            rest, silent = rest[got:], 0
        return data


def stop_process(text: str) -> NoReturn:
    """Print an error and end the process, which may wait for a device that never answers."""
    try:
        sys.stdout.flush()
        print(f"error: {text}", file=sys.stderr, flush=True)
    finally:
        os._exit(2)
