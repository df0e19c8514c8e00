"""A TCP link that can be bad: between a client and a server, a proxy of our own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Link:
    """Listens on a port and passes bytes on to `target`, as it is told to.

    bytes_per_second   0 = as fast as it goes, else each direction's rate
    delay_s            each piece of data waits so long
    cut                nothing passes and nothing is closed: a cable that was pulled
    """

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self.bytes_per_second = 0
        self.delay_s = 0.0
        self._open = threading.Event()
        self._open.set()
        self._ended = False
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def cut(self) -> bool:
        return not self._open.is_set()

    @cut.setter
    def cut(self, value: bool) -> None:
        (self._open.clear if value else self._open.set)()

    def reset(self) -> None:
        """Breaks every connection."""
        while self._sockets:
            with contextlib.suppress(OSError):
                self._sockets.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._ended = True
        self._open.set()
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        while not self._ended:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._open.wait()
            try:
                far = socket.create_connection(self._target, timeout=5)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            # Little is held in the link itself.
            for end in (near, far):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(16 << 10):
                if self.delay_s:
                    time.sleep(self.delay_s)
                if self.bytes_per_second:
                    time.sleep(len(data) / self.bytes_per_second)
                self._open.wait()
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
