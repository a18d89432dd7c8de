"""posenc explore: serve the explorer on 127.0.0.1 and open it in the browser."""

from __future__ import annotations

import argparse
import logging
import socket
import threading
import webbrowser

from ..core.errors import OptionError

HOST = "127.0.0.1"
PORT = 7860


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="posenc explore",
        description="Explore positional encodings in the browser. The server listens on 127.0.0.1 only and needs no network.",
    )
    parser.add_argument(
        "--port", type=int, help=f"port; an error if it is taken (default: {PORT}, or the next free one; 0: any)"
    )
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    given = parser.parse_args(arguments)
    if given.port is not None and not 0 <= given.port < 65536:
        raise OptionError(f"--port must be from 1 to 65535, or 0 for any free port, got {given.port}")
    bound = listen(PORT, 20) if given.port is None else listen(given.port)
    address = f"http://{HOST}:{bound.getsockname()[1]}/"
    print("starting the explorer ...", flush=True)
    serve(bound, None if given.no_open else address, address)
    return 0


def listen(port: int, tries: int = 1) -> socket.socket:
    """A listening socket on the port, or on the first free one of the next `tries`. It listens at once because two sockets
    may be bound to one port until either listens; a second explorer would then fail only after its start.
    """
    last = min(port + tries - 1, 65535)
    for candidate in range(port, last + 1):
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((HOST, candidate))
            bound.listen()
            return bound
        except OSError as error:
            bound.close()
            why = error.strerror or str(error)
    if tries == 1:
        raise OptionError(f"--port {port} cannot be used: {why}; give another, or 0 for any free port")
    raise OptionError(f"no port from {port} to {last} is free; give one with --port, or 0 for any free port")


def serve(bound: socket.socket, opened: str | None, address: str) -> None:
    import torch
    import uvicorn

    from .server import create_app

    # figures are small, and the browser needs the other cores to draw them
    torch.set_num_threads(1)

    class Server(uvicorn.Server):
        async def startup(self, sockets=None) -> None:
            await super().startup(sockets)
            print(f"the explorer is at {address} (stop with Ctrl-C)", flush=True)
            if opened is not None:
                threading.Thread(target=webbrowser.open, args=(opened,), daemon=True).start()

        async def shutdown(self, sockets=None) -> None:
            # closing the connection of an open page is no error
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            await super().shutdown(sockets)

    # an open page keeps a connection open; Ctrl-C does not wait for it
    Server(uvicorn.Config(create_app(), log_level="warning", timeout_graceful_shutdown=1)).run([bound])
