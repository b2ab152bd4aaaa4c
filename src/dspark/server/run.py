"""The server's process: a socket, uvicorn, and a shutdown that lets running answers finish."""

import asyncio
import signal
import socket
from types import FrameType

import uvicorn

from dspark.core.errors import ConfigError
from dspark.server.app import build_app
from dspark.server.logs import log
from dspark.server.protocol import PatientProtocol
from dspark.server.serving import Serving

_EXTRA = 5.0
"""Seconds after the drain for the last bytes to leave."""
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""A silent connection is asked after a minute, and closed after another without an answer."""


def open_socket(host: str, port: int) -> socket.socket:
    """Bound but not listening yet. ConfigError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_STREAM)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit these: a client whose machine is gone says no goodbye.
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        own.bind((host, port))
    except (OSError, OverflowError) as error:
        own.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error}; choose another --host or --port"
        ) from None
    return own


class Server(uvicorn.Server):
    """SIGTERM drains: no new requests, running ones get `drain_timeout` seconds, then exit 0.

    Ctrl-C does the same and ends with 130; a second signal ends at once.
    """

    def __init__(self, serving: Serving) -> None:
        config = uvicorn.Config(
            build_app(serving),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            http=PatientProtocol,
            timeout_keep_alive=max(1, round(serving.config.receive_timeout)),
            timeout_graceful_shutdown=int(serving.config.drain_timeout + _EXTRA),
        )
        super().__init__(config)
        self._serving = serving

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        elif sig == signal.SIGTERM:
            self.should_exit = True  # without uvicorn's own note: it would die of the signal later
        else:
            super().handle_exit(sig, frame)
        self._serving.draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, which waits for open connections, beside a drain of the engine."""
        serving = self._serving
        serving.draining = True
        open_choices = serving.engine.open_choices
        log("draining", open=open_choices, seconds=serving.config.drain_timeout)
        draining = asyncio.create_task(self._drain())
        await super().shutdown(sockets)
        await draining
        log("stopped")

    async def _drain(self) -> None:
        """Whatever is still open after `drain_timeout` is cancelled, and its client told so."""
        engine = self._serving.engine
        waiting = asyncio.create_task(
            asyncio.to_thread(engine.drain, self._serving.config.drain_timeout)
        )
        while not waiting.done() and not self.force_exit:
            await asyncio.wait([waiting], timeout=0.1)
        await asyncio.to_thread(engine.close)


def run(serving: Serving, sockets: list[socket.socket]) -> None:
    """Serves until a signal. Raises KeyboardInterrupt after Ctrl-C."""
    Server(serving).run(sockets=sockets)
