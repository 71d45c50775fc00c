"""Rank 0's end of the lines between processes: collects what they say, watches their steps. Imports no JAX."""

from __future__ import annotations

import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

log = logging.getLogger("uniap_jax")

TICK_S = 0.1
ECHO_S = 2.0
"""A rank may fail because another one died, before the line of that one is seen to break: so long it is not blamed."""
LINE_BYTES = 1 << 26
"""A plan of thousands of layers is far below; what is longer is not one of ours."""


def send_line(line: socket.socket, message: dict[str, Any]) -> None:
    """Sends one message."""
    line.sendall(json.dumps(message).encode() + b"\n")


def receive_lines(line: socket.socket) -> Iterator[dict[str, Any]]:
    """Messages until the line is closed."""
    rest = b""
    while True:
        try:
            data = line.recv(1 << 16)
        except OSError:
            return
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from map(json.loads, lines)


class _Member:
    """One rank as rank 0 sees it."""

    def __init__(self, line: socket.socket) -> None:
        self.line, self.rest = line, b""
        self.rank: int | None = None
        self.step: int | None = None
        self.since = time.monotonic()
        self.left = False


class Server:
    """Listens on a thread of its own.

    Args:
        size: ranks expected.
        address: to listen at.
        timeout_s: longest that a rank may stay behind another.
        step_timeout_s: longest that all may stay in one step; not watched where None.
    """

    def __init__(
        self, size: int, address: tuple[str, int], *, timeout_s: float, step_timeout_s: float | None = None
    ) -> None:
        self._size, self._timeout_s, self._step_timeout_s = size, timeout_s, step_timeout_s
        self._members: dict[int, _Member] = {}
        self._said: dict[str, dict[int, str]] = {}
        self._first: dict[str, float] = {}
        self._failed = False
        self._told: tuple[float, int, str] | None = None  # the first failure that a rank told of
        self._done = threading.Event()
        self._started = time.monotonic()
        self._listener = socket.create_server(address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="uniap-lines", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits until every rank has left, or for the time-out, and stops listening."""
        self._done.wait(self._timeout_s)
        self._done.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._done.is_set():
            self._turn()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _turn(self) -> None:
        """One look at every line."""
        for key, _ in self._selector.select(TICK_S):
            if key.fileobj is self._listener:
                line, _ = self._listener.accept()
                self._selector.register(line, selectors.EVENT_READ, _Member(line))
            else:
                self._read(key.data)
        if not self._failed:
            self._watch()
        if len(self._members) == self._size and all(m.left for m in self._members.values()):
            self._done.set()

    def _read(self, member: _Member) -> None:
        try:
            data = member.line.recv(1 << 16)
        except OSError:
            data = b""
        if not data or len(member.rest) > LINE_BYTES:
            self._selector.unregister(member.line)
            member.line.close()
            if member.rank is not None and not member.left:
                self._fail(member.rank, f"rank {member.rank} ended {_where(member)}: its process is gone")
                member.left = True
            return
        *lines, member.rest = (member.rest + data).split(b"\n")
        for line in lines:
            self._take(member, json.loads(line))

    def _take(self, member: _Member, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "hello":
            member.rank = int(message["rank"])
            self._members[member.rank] = member
        elif member.rank is None:
            log.warning("a line that does not say its rank is left unheard")
        elif kind == "say":
            said = self._said.setdefault(message["name"], {})
            self._first.setdefault(message["name"], time.monotonic())
            said[member.rank] = message["text"]
            if len(said) == self._size:
                texts = [said[r] for r in range(self._size)]
                self._said.pop(message["name"])
                self._first.pop(message["name"])
                self._tell({"kind": "all", "name": message["name"], "texts": texts})
        elif kind == "step":
            member.step, member.since = int(message["step"]), time.monotonic()
        elif kind == "failed":
            why = f"rank {member.rank} failed {_where(member)}: {message['message']}"
            self._told = self._told or (time.monotonic(), member.rank, why)
        elif kind == "bye":
            member.left = True

    def _watch(self) -> None:
        now = time.monotonic()
        if self._told is not None and now - self._told[0] > ECHO_S:
            self._fail(*self._told[1:])
            return
        absent = sorted(set(range(self._size)) - set(self._members))
        if absent and now - self._started > self._timeout_s:
            self._fail(absent[0], f"rank {absent[0]} did not start within {self._timeout_s:.0f} s of rank 0")
            return
        for name, since in self._first.items():
            if now - since > self._timeout_s:
                late = min(set(range(self._size)) - set(self._said[name]))
                self._fail(late, f"rank {late} did not say its {name} within {self._timeout_s:.0f} s of the first rank")
                return
        self._watch_steps(now)

    def _watch_steps(self, now: float) -> None:
        steps = {r: m.step for r, m in self._members.items() if m.step is not None and not m.left}
        if not steps:
            return
        ahead = max(sorted(steps), key=lambda r: steps[r])
        for rank, member in sorted(self._members.items()):
            behind = member.step is None or member.step < steps[ahead]
            if behind and not member.left and now - self._members[ahead].since > self._timeout_s:
                self._fail(
                    rank,
                    f"rank {rank} stopped {_where(member)}: rank {ahead} has waited in step {steps[ahead]} for "
                    f"{self._timeout_s:.0f} s",
                )
                return
        newest = max(m.since for m in self._members.values())
        if self._step_timeout_s is not None and now - newest > self._step_timeout_s:
            self._fail(ahead, f"no rank has left step {steps[ahead]} for {self._step_timeout_s:.0f} s")

    def _fail(self, rank: int, message: str) -> None:
        if self._failed:
            return
        self._failed = True
        step = self._members[rank].step if rank in self._members else None
        self._tell({"kind": "fail", "rank": rank, "step": step, "message": message})

    def _tell(self, message: dict[str, Any]) -> None:
        for member in self._members.values():
            try:
                send_line(member.line, message)
            except OSError:
                log.debug("rank %s is gone", member.rank)


def _where(member: _Member) -> str:
    return "before its first step" if member.step is None else f"in step {member.step}"
