"""Several processes: one plan for all, the same program on each, and an end with a reason when one falls out.

JAX's multi-controller runtime runs the step; it has no public way to exchange words between processes before anything
is compiled, and a process that waits in a collective for one that died says nothing. So rank 0 keeps a line to every
rank (TCP, one JSON object a line): over it goes the plan, digests are compared, and every rank says which step it is
in. A line that breaks, a rank that differs or falls behind ends the job everywhere, naming rank and step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from uniap_jax.core.errors import ExecutionError, PlanMismatchError
from uniap_jax.core.graph import Value
from uniap_jax.core.plan import Plan
from uniap_jax.core.serialize import plan_from_json, plan_to_json
from uniap_jax.runtime.presence import absent
from uniap_jax.runtime.process_server import ECHO_S, Server, receive_lines, send_line

__all__ = ["Everyone", "Group", "agree", "agree_on_plan", "agree_on_program", "connect", "global_batch", "local_rows"]

log = logging.getLogger("uniap_jax")

GRACE_S = 10.0
"""Between an error that was raised and the end of the process."""
VERDICT_S = 3 * ECHO_S
"""Longest that a rank that failed waits to hear whether another one failed first."""
EXIT_CODE = 70
"""Of a process that ends because another one failed (EX_SOFTWARE of sysexits.h)."""


def _end_process(message: str) -> None:
    """Ends this process now: its main thread may wait for ever in a collective, where no exception reaches it."""
    log.critical("%s", message)
    for handler in (*log.handlers, *logging.getLogger().handlers):
        handler.flush()
    os._exit(EXIT_CODE)


class Group:
    """This process's line to the others; made by `connect`, closed when left as a context.

    Args:
        rank: of this process.
        size: processes.
        address: (host, port) of rank 0.
        timeout_s: longest wait for another rank.
        on_failure: called with the message, on a thread of its own; by default the process ends with code 70.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: tuple[str, int],
        *,
        timeout_s: float,
        step_timeout_s: float | None = None,
        on_failure: Callable[[str], None] = _end_process,
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._on_failure = on_failure
        self._server = Server(size, address, timeout_s=timeout_s, step_timeout_s=step_timeout_s) if rank == 0 else None
        self._failure: dict[str, Any] | None = None
        self._answers: dict[str, list[str]] = {}
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._waiting = False
        self._line = _dial(address, rank, timeout_s)
        self._send({"kind": "hello", "rank": rank})
        threading.Thread(target=self._listen, name="uniap-line", daemon=True).start()

    def gather(self, name: str, text: str) -> tuple[str, ...]:
        """What every rank says under a name, by rank; waits until all have said it.

        Raises:
            ExecutionError: a rank died or did not say it in time; `.rank` is that rank.
        """
        with self._changed:
            self._waiting = True
            try:
                self._send({"kind": "say", "name": name, "text": text})
                while name not in self._answers and self._failure is None:
                    self._changed.wait()
            finally:
                self._waiting = False
            if name in self._answers:
                return tuple(self._answers.pop(name))
            assert self._failure is not None
            raise ExecutionError(str(self._failure["message"]), rank=self._failure["rank"], step=self._failure["step"])

    def enter(self, step: int) -> None:
        """Says that this rank begins a step; a rank that stays behind for `timeout_s` ends the job."""
        self._send({"kind": "step", "step": step})

    def close(self) -> None:
        """Leaves the group: what happens to other ranks no longer concerns this one."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._send({"kind": "bye"})
        if self._server is not None:
            self._server.finish()
        self._line.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # said here, for the answer to what is sent now may end this process before Python says it
            log.error("rank %d failed", self.rank, exc_info=error)
            self._send({"kind": "failed", "message": f"{type(error).__name__}: {error}"})
            # the error goes up from here; what waits for dead ranks on the way out must not hold the process
            threading.Thread(target=self._end_later, args=(f"{error}",), daemon=True).start()
            blamed = self._blamed()
            if blamed is not None and blamed["rank"] != self.rank and blamed["message"] not in str(error):
                log.error("rank %d: %s", self.rank, blamed["message"])
                error.add_note(blamed["message"])
        self.close()

    def _blamed(self) -> dict[str, Any] | None:
        """The failure that rank 0 finds at the root of this rank's own; None where it does not say in time."""
        with self._changed:
            self._waiting = True  # and stays so: this process ends by its own error
            self._changed.wait_for(lambda: self._failure is not None, min(self.timeout_s, VERDICT_S))
            return self._failure

    def _end_later(self, message: str) -> None:
        time.sleep(min(self.timeout_s, GRACE_S))
        self._on_failure(f"rank {self.rank}: {message}")

    def _send(self, message: dict[str, Any]) -> None:
        try:
            send_line(self._line, message)
        except OSError:
            log.debug("the line to rank 0 is closed")  # the listening thread says why

    def _listen(self) -> None:
        for message in receive_lines(self._line):
            if message["kind"] == "all":
                with self._changed:
                    self._answers[message["name"]] = message["texts"]
                    self._changed.notify_all()
            elif message["kind"] == "fail":
                self._fail(message)
                return
        self._fail({"rank": 0, "step": None, "message": "rank 0 ended: its line to this process was closed"})

    def _fail(self, failure: dict[str, Any]) -> None:
        if self._closed.is_set():
            return
        with self._changed:
            self._failure = failure
            waiting = self._waiting
            self._changed.notify_all()
        if waiting and self._closed.wait(min(self.timeout_s, GRACE_S)):
            return  # the main thread has raised; had it not, this process would have to end here
        self._on_failure(f"rank {self.rank}: {failure['message']}")


def _dial(address: tuple[str, int], rank: int, timeout_s: float) -> socket.socket:
    """A line to rank 0, which may start later than this process."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            line = socket.create_connection(address, timeout=timeout_s)
        except OSError as error:
            if time.monotonic() > end:
                raise ExecutionError(
                    f"rank {rank} cannot reach rank 0 at {address[0]}:{address[1]} within {timeout_s:.0f} s ({error}); "
                    "is rank 0 running, and is the address the same on every process?",
                    rank=rank,
                    address=address,
                ) from None
            time.sleep(0.1)
        else:
            line.settimeout(None)
            return line


def connect(
    address: str,
    *,
    timeout_s: float = 300.0,
    step_timeout_s: float | None = None,
    on_failure: Callable[[str], None] = _end_process,
) -> Group:
    """Joins the processes of `jax.distributed` in a group.

    Args:
        address: "host:port" that rank 0 can listen at, the same on every process, not the coordinator's port.
        timeout_s: longest that one rank may stay behind the others.
        step_timeout_s: longest that all ranks together may stay in one step; not watched where None.
        on_failure: what to do when another rank fails; by default this process ends with code 70 and one log line.

    Raises:
        ExecutionError: rank 0 cannot be reached.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ExecutionError(f"address {address!r} is not host:port, for example 10.0.0.1:4321", address=address)
    return Group(
        jax.process_index(),
        jax.process_count(),
        (host, int(port)),
        timeout_s=timeout_s,
        step_timeout_s=step_timeout_s,
        on_failure=on_failure,
    )


class Everyone:
    """All processes of `jax.distributed`, over its own collectives: what they say is exchanged, nobody is watched."""

    def __init__(self) -> None:
        self.rank, self.size = jax.process_index(), jax.process_count()

    def gather(self, name: str, text: str) -> tuple[str, ...]:
        """What every rank says, by rank; waits until all have said it."""
        data = np.frombuffer(text.encode(), np.uint8)
        sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(data)))).reshape(-1)
        padded = np.zeros(int(sizes.max(initial=1)), np.uint8)
        padded[: len(data)] = data
        rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(self.size, -1)
        return tuple(bytes(row[:n]).decode() for row, n in zip(rows, sizes.tolist(), strict=True))

    def enter(self, step: int) -> None:
        """Steps are not watched."""


class Speakers(Protocol):
    """Processes that can say something to each other: `Group` or `Everyone`."""

    rank: int
    size: int

    def gather(self, name: str, text: str) -> tuple[str, ...]:
        """What every rank says under a name, by rank."""
        ...

    def enter(self, step: int) -> None:
        """Says that this rank begins a step."""
        ...


def agree(group: Speakers, name: str, text: str, what: str) -> None:
    """Makes sure that every rank has the same text.

    Args:
        group: of all processes.
        name: under which it is said.
        text: of this rank; only its digest travels.
        what: the text is, for the message.

    Raises:
        PlanMismatchError: ranks differ; `.ranks` are those that differ from rank 0.
    """
    digests = group.gather(name, hashlib.sha256(text.encode()).hexdigest())
    odd = tuple(r for r, d in enumerate(digests) if d != digests[0])
    if odd:
        raise PlanMismatchError(
            f"{what} differs between processes: rank {', '.join(map(str, odd))} has {digests[odd[0]][:12]}, rank 0 "
            f"has {digests[0][:12]}. Every process must run the same code with the same sizes, versions and number of "
            "devices",
            ranks=odd,
            digests=digests,
        )


def agree_on_plan(group: Speakers, make_plan: Callable[[], Plan], *, fingerprint: str) -> Plan:
    """The plan that rank 0 makes, on every rank, once all are sure to plan for the same model.

    Args:
        group: of all processes.
        make_plan: called on rank 0 alone.
        fingerprint: of this process's `LayerGraph`.

    Raises:
        PlanMismatchError: a process traced another model, or has another number of devices or version of JAX.
    """
    facts = json.dumps([fingerprint, jax.__version__, jax.device_count(), jax.local_device_count()])
    agree(group, "model", facts, "the traced model, the version of jax or the number of devices")
    text = json.dumps(plan_to_json(make_plan())) if group.rank == 0 else ""
    received = group.gather("plan", text)[0]
    plan = plan_from_json(json.loads(received))
    agree(group, "plan read", json.dumps(plan_to_json(plan), sort_keys=True), "the plan as read")
    return plan


def agree_on_program(group: Speakers, lowered: Any, *, name: str = "train_step") -> None:
    """Compares what is about to run on devices of several processes: different programs would wait for ever.

    Args:
        group: of all processes.
        lowered: a `jax.stages.Lowered`, or those of a step by name, each on the processes that run it.
        name: of a single program.

    Raises:
        PlanMismatchError: a rank is about to run another program.
    """
    if not isinstance(lowered, dict):
        agree(group, f"program {name}", lowered.as_text(), f"program {name}")
        return
    mine = {n: hashlib.sha256(low.as_text().encode()).hexdigest() for n, low in lowered.items()}
    first: dict[str, tuple[int, str]] = {}
    for rank, text in enumerate(group.gather("programs", json.dumps(mine))):
        for program, digest in json.loads(text).items():
            other, expected = first.setdefault(program, (rank, digest))
            if digest != expected:
                raise PlanMismatchError(
                    f"program {program} differs between processes: rank {rank} has {digest[:12]}, rank {other} has "
                    f"{expected[:12]}. Every process must run the same code with the same sizes and versions",
                    ranks=(rank,),
                    program=program,
                )


def global_batch(local: Sequence[Any], values: Sequence[Value], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """The global batch from the rows that each process has read.

    Args:
        local: batch leaves of this process: its `local_rows` of the global batch, in order; or all rows.
        values: shapes of the global leaves.
        shardings: of the leaves, from the compiled step.
    """
    return [
        jax.make_array_from_process_local_data(s, np.asarray(x), v.shape)
        if s.addressable_devices
        else absent(v.shape, v.dtype, s)
        for x, v, s in zip(local, values, shardings, strict=True)
    ]


def local_rows(value: Value, sharding: NamedSharding) -> np.ndarray:
    """Which rows of the global batch this process has to read, in order.

    A process whose devices split the batch with others reads its share; one whose devices hold it whole reads it all;
    one without devices of the stage that reads it reads nothing.

    Args:
        value: shape of a global batch leaf.
        sharding: of the leaf, from the compiled step.
    """
    places = sharding.addressable_devices_indices_map(value.shape).values()
    rows = [np.arange(value.shape[0])[place[0]] for place in places if place is not None]
    return np.unique(np.concatenate(rows)) if rows else np.arange(0)
