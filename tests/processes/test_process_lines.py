"""The lines between ranks, with every rank a thread of this process: what is said arrives, what goes wrong is named."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from uniap_jax.core.errors import ExecutionError, PlanMismatchError
from uniap_jax.runtime.processes import Group, agree, agree_on_program

SIZE = 3


class Job:
    """Ranks as threads; what they return or raise, and what ended them."""

    def __init__(
        self, body: Callable[[Group], Any], *, timeout_s: float = 20.0, step_timeout_s: float | None = None
    ) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address = ("127.0.0.1", int(s.getsockname()[1]))
        self.found: dict[int, Any] = {}
        self.ended: list[str] = []
        self.failed = threading.Event()

        def rank(number: int) -> None:
            group = Group(
                number, SIZE, address, timeout_s=timeout_s, step_timeout_s=step_timeout_s, on_failure=self._failure
            )
            try:
                self.found[number] = body(group)
            except (ExecutionError, PlanMismatchError) as error:
                self.found[number] = error
            group.close()

        threads = [threading.Thread(target=rank, args=(n,), daemon=True) for n in range(SIZE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    def _failure(self, message: str) -> None:
        self.ended.append(message)
        self.failed.set()


def test_process_lines_carry_text_and_compare_it() -> None:
    def body(group: Group) -> Any:
        texts = group.gather("name", f"rank {group.rank}")
        agree(group, "same", "text", "the text")
        return texts, group.gather("plan", "from 0" if group.rank == 0 else "")[0]

    job = Job(body)
    assert job.found == dict.fromkeys(range(SIZE), (("rank 0", "rank 1", "rank 2"), "from 0"))
    assert not job.ended


def test_process_that_differs_is_named_everywhere() -> None:
    job = Job(lambda group: agree(group, "program", "b" if group.rank == 2 else "a", "the program"))
    assert all(isinstance(e, PlanMismatchError) and e.ranks == (2,) for e in job.found.values())


class Text:
    """A lowered program, as far as it is compared."""

    def __init__(self, text: str) -> None:
        self.text = text

    def as_text(self) -> str:
        return self.text


def test_process_programs_are_compared_where_several_have_them() -> None:
    def same(group: Group) -> None:
        agree_on_program(group, {f"stage_{group.rank}": Text(f"own {group.rank}"), "crossing": Text("shared")})

    job = Job(same)
    assert job.found == dict.fromkeys(range(SIZE))
    assert not job.ended

    def other(group: Group) -> None:
        shared = {"crossing": Text("odd" if group.rank == 2 else "shared")} if group.rank else {}
        agree_on_program(group, {f"stage_{group.rank}": Text("own"), **shared})

    for error in Job(other).found.values():
        assert isinstance(error, PlanMismatchError)
        assert error.ranks == (2,)
        assert "program crossing differs between processes: rank 2 has" in str(error)


def test_process_that_never_speaks_is_named_in_time() -> None:
    def body(group: Group) -> Any:
        if group.rank == 1:
            time.sleep(3)
            return None
        return group.gather("plan", "text")

    began = time.monotonic()
    job = Job(body, timeout_s=1.0)
    assert time.monotonic() - began < 20
    assert all(isinstance(job.found[r], ExecutionError) and job.found[r].rank == 1 for r in (0, 2))
    assert "did not say its plan within 1 s" in str(job.found[0])


@pytest.mark.parametrize(
    ("behind", "step_timeout_s", "message"),
    [
        (1, None, "rank 1 stopped in step 6: rank 0 has waited in step 7"),
        (None, 1.0, "no rank has left step 7 for 1 s"),
    ],
)
def test_process_that_stays_behind_ends_the_job(behind: int | None, step_timeout_s: float | None, message: str) -> None:
    def body(group: Group) -> Any:
        group.enter(6)
        if group.rank != behind:
            group.enter(7)
        time.sleep(4)
        return None

    job = Job(body, timeout_s=1.0 if behind else 30.0, step_timeout_s=step_timeout_s)
    assert len(job.ended) == SIZE
    assert all(message in m for m in job.ended)


def test_process_that_dies_is_blamed_and_not_the_one_that_fails_for_it() -> None:
    """A collective fails on the ranks that are left, maybe before rank 0 sees the line of the dead one break."""

    def body(group: Group) -> Any:
        group.enter(6)
        if group.rank == 0:
            group._send({"kind": "failed", "message": "connection closed by peer"})
        if group.rank == 1:
            time.sleep(0.5)
            group._line.shutdown(socket.SHUT_RDWR)
        time.sleep(4)
        return None

    job = Job(body)
    told = [m for m in job.ended if not m.startswith("rank 1:")]
    assert len(told) == SIZE - 1
    assert all("rank 1 ended in step 6: its process is gone" in m for m in told)


def test_process_that_fails_for_the_death_of_another_says_whose(caplog: pytest.LogCaptureFixture) -> None:
    """Where the collective fails first: the rank that sees it, rank 0 too, still hears why."""

    def body(group: Group) -> Any:
        with group:
            group.enter(6)
            if group.rank == 0:
                raise ExecutionError("connection closed by peer")
            if group.rank == 1:
                time.sleep(0.5)
                group._line.shutdown(socket.SHUT_RDWR)
            time.sleep(4)

    job = Job(body)
    reason = "rank 1 ended in step 6: its process is gone"
    assert job.found[0].__notes__ == [reason]
    assert f"rank 0: {reason}" in caplog.messages


def test_process_that_cannot_reach_rank_0_says_so() -> None:
    with pytest.raises(ExecutionError, match="cannot reach rank 0") as error:
        Group(1, 2, ("127.0.0.1", 1), timeout_s=0.3, on_failure=lambda message: None)
    assert error.value.rank == 1
