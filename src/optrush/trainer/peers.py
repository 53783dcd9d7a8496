"""Watch the other ranks, and end this process with a reason if one is gone or does not answer.

A process that waits in a collective cannot be interrupted from Python, and a collective's error names no rank. So every
rank writes a heartbeat to a store twice per second: a count, and the current step and operation. A second thread
compares the other ranks' beats with the clock: the store's calls block while its process is stopped.

A rank is gone if its process on this host has ended; it does not answer if its beat, or its part of a collective,
is missing for `train.timeout` seconds. While ranks connect, `Start` watches their processes: there are no beats yet.
A rank that fails by itself reports this to the store, and the others end without a message. Everything else is a
three-line error, printed by the first remaining rank, and by the first rank of each host that no longer reaches the
store.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from optrush.errors import RunError
from optrush.launch import LAUNCHER, process_stat, sibling_ranks

BEAT_S = 0.5
LATE_S = 2.0  # a beat older than this is missing, once a collective has failed
NAMING_S = 3.0  # how long a failed collective waits for the missing rank's name
LEAVING_S = 5.0  # for this process to exit by itself after another rank's failure
COLLECTIVE = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out")

LATE = ("timed out", "timeout")  # in the error of a collective that a rank did not reach

RESUME = "restart with: --resume auto"
State = Literal["alive", "stopped", "gone", "unknown"]


@dataclass(frozen=True)
class Beat:
    """A rank's report: where it runs, and its current operation."""

    host: str
    pid: int
    begun: int  # start time of the process by the kernel: process ids may be reused
    step: int
    operation: str

    def state(self) -> State:
        """Return the state of the process; "unknown" on another host."""
        if self.host != HOST:
            return "unknown"
        with suppress(OSError, IndexError, ValueError):
            letter, begun = process_stat(self.pid)
            if begun == self.begun and letter not in "ZX":
                return "stopped" if letter in "Tt" else "alive"
        return "gone"

    def place(self, r: int) -> str:
        """Return where rank `r` runs, and its last operation."""
        state = "is stopped, last seen in" if self.state() == "stopped" else "was last seen in"
        host = self.host.partition(" ")[0]
        return f"; rank {r}, process {self.pid} on {host}, {state} {_at(self.step)}{self.operation}"


def _host() -> str:
    """Return the names of this host and its PID namespace: containers may share the first."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


HOST = _host()


class Watch:
    """The beats of all ranks of a run. The training thread writes `current_operation`, the watch's threads the rest."""

    def __init__(
        self, store: Store, reports: Store, rank: int, ranks: int, timeout_s: float, known: Mapping[int, Beat] = {}
    ) -> None:
        """Start sending beats and watching.

        Args:
            store: a connection for this object only, to rank 0's process or torchrun's agent.
            reports: the same store through the training thread's connection.
            known: the other ranks' places before their first beat.
        """
        self.store, self.reports, self.rank, self.ranks, self.timeout_s = store, reports, rank, ranks, timeout_s
        self.current_operation = (0, "the start")  # the step, and the operation
        self.count, self.beating = 0, threading.Lock()
        self.resume: Callable[[], str] = lambda: RESUME
        self.begun = process_stat(os.getpid())[1]
        now = time.monotonic()
        self.beats: dict[int, tuple[str, float]] = {r: ("", now) for r in range(ranks) if r != rank}
        self.known = {**known}
        self.answered, self.reads = now, 0  # time of the store's last answer, and number of answers
        self.hurry = threading.Event()  # read again without a pause
        self.failed_at: float | None = None  # when another rank's own failure was read
        self.explained: tuple[BaseException, float] | None = None  # the result of `explain`, and its time
        self.closing = self.broken = False
        self.ending = threading.Lock()
        self._own_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        for work in (self._beat, self._judge):
            threading.Thread(target=work, name="optrush-watch", daemon=True).start()

    def close(self) -> None:
        """End the watch: the ranks are about to exit."""
        self.closing = True

    def note(self, step: int, operation: str, at_once: bool) -> None:
        """Record the starting operation. Other ranks see it with the next beat, or `at_once` for a store round trip."""
        self.current_operation = (step, operation)
        if at_once:
            with suppress(RuntimeError):  # the store's process has ended: the watch's thread detects it
                self._tell()

    # --- the store thread

    def _beat(self) -> None:
        try:
            while not self.closing:
                self._tell()
                self._read()
                self.answered, self.reads = time.monotonic(), self.reads + 1
                self.hurry.wait(BEAT_S)
        except RuntimeError:  # the store's process has ended
            self.broken = True

    def _tell(self) -> None:
        with self.beating:  # so that an older report cannot replace a newer one
            self.count += 1
            report = [self.count, HOST, os.getpid(), self.begun, *self.current_operation]
            self.store.set(f"beat/{self.rank}", json.dumps(report))

    def _read(self) -> None:
        heard = list(self.beats)
        if not self.store.check([f"beat/{r}" for r in heard]):  # a rank has not started: read the others
            heard = [r for r in heard if self.beats[r][0] or self.store.check([f"beat/{r}"])]
        now = time.monotonic()
        for r, value in zip(heard, self.store.multi_get([f"beat/{r}" for r in heard]) if heard else [], strict=True):
            text = value.decode()
            if text != self.beats[r][0]:
                self.beats[r] = (text, now)
        if self.failed_at is None and self.store.check(["failed"]):
            self.failed_at = now

    # --- the clock thread

    def _judge(self) -> None:
        gone_since: float | None = None
        while not self.closing:
            time.sleep(BEAT_S)
            now = time.monotonic()
            if self.failed_at is not None and now - self.failed_at > LEAVING_S:
                self._leave(None)
            if missing := self._missing(self.timeout_s):
                self._leave(missing)
            if self.explained is not None and now - self.explained[1] > LEAVING_S:
                self._end(self.explained[0])  # the training thread's cleanup waits for the missing rank
            gone_since = (gone_since or now) if self._in_state("gone") or self.broken else None
            if gone_since is not None and now - gone_since > LEAVING_S:
                self._leave(self._missing(LATE_S) or [0])

    def _leave(self, missing: list[int] | None) -> None:
        """Exit this process, even if other threads wait."""
        if self.closing or not self.ending.acquire(blocking=False):
            return
        error = None if missing is None else self._error(missing)
        if error is None and missing:
            time.sleep(1.0)  # the rank that prints goes first
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if isinstance(error, RunError):
            sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(1)

    # --- missing ranks

    def _beat_of(self, r: int) -> Beat | None:
        text = self.beats[r][0]
        return Beat(*json.loads(text)[1:]) if text else self.known.get(r)

    def _in_state(self, state: State) -> list[int]:
        return [r for r in self.beats if (beat := self._beat_of(r)) is not None and beat.state() == state]

    def _missing(self, late_s: float) -> list[int]:
        """Return the ranks that are gone or whose beats are older than `late_s`."""
        now = time.monotonic()
        if late_s < self.timeout_s and (gone := self._in_state("gone")):
            return gone
        if self.broken or now - self.answered > late_s:  # no news of the others since
            return [0] if self._own_store and self.rank else []
        return [r for r, (_, at) in self.beats.items() if now - at > late_s]

    def explain(self, error: BaseException) -> BaseException:
        """Return the exception for an error that ended this rank's training; report it to the other ranks.

        Returns:
            The error itself if it is this rank's own, or was returned before; RunError with the missing rank for a
            failed collective; SystemExit if another rank or the launcher prints the reason.
        """
        if getattr(error, "everywhere", False) or isinstance(error, KeyboardInterrupt | SystemExit):
            return error
        if self.explained is not None and error is self.explained[0]:
            return error  # not reported: the store may belong to the missing rank
        if not isinstance(error, RuntimeError) or not _of_a_collective(error):
            self._report()
            return error
        reason = self._reason(error)
        self.explained = reason, time.monotonic()
        return reason

    def _reason(self, error: RuntimeError) -> BaseException:
        """Return the exception for a failed collective, once the missing rank is known."""
        if not self.ending.acquire(blocking=False):
            time.sleep(2 * LEAVING_S)  # the watch's own thread prints and ends the process
        end, enough = time.monotonic() + NAMING_S, self.reads + 2  # at least one starts after the error
        self.hurry.set()
        while time.monotonic() < end and self.failed_at is None:
            if (self.broken or self.reads >= enough) and self._missing(LATE_S):
                break
            time.sleep(0.05)
        self.hurry.clear()
        if self.failed_at is not None:
            return SystemExit(1)
        missing = self._missing(LATE_S)
        if self._gone(missing) and LAUNCHER in os.environ:
            return SystemExit(1)  # the launcher prints the signal
        if (
            not missing and not self._cut_off() and not any(word in str(error).lower() for word in LATE)
        ):  # all ranks are alive: the collective itself failed
            step, operation = self.current_operation
            found = f"rank {self.rank}: {' '.join(str(error).split())[:500]}"
            do = "check the devices and the network between the ranks; NCCL_DEBUG=INFO shows more"
            return RunError(f"{_at(step)}{operation}, on {self.ranks} ranks", found, do)
        return self._error(missing) or SystemExit(1)

    def _report(self) -> None:
        with suppress(RuntimeError):
            self.reports.set("failed", str(self.rank))
            if self._own_store and self.rank == 0:
                time.sleep(2 * BEAT_S)  # until the others have read it: the store ends with this process

    def _gone(self, missing: list[int]) -> bool:
        return bool(missing) and all(r in self._in_state("gone") or (r == 0 and self.broken) for r in missing)

    def _error(self, missing: list[int]) -> RunError | None:
        """Return the error with the missing ranks; None if another rank prints it. Kills stopped ranks.

        Args:
            missing: the ranks; empty: all are alive, but one has not reached the collective.
        """
        left = min(r for r in range(self.ranks) if r not in missing)
        stopped = self._in_state("stopped")
        cut_off = self._cut_off()
        if left != self.rank and not cut_off:
            return None
        step, operation = self.current_operation
        names = cut_off or missing or [r for r in self.beats if self._elsewhere(r)] or list(self.beats)
        limit = f"for {self.timeout_s:g} s (train.timeout)"
        if cut_off:
            found = f"rank {self.rank} reaches no other host: {_ranks(names)} ended, or the network is down"
        elif self._gone(missing):
            found = f"{_ranks(names)} ended, and rank {self.rank} waited for {'it' if len(names) == 1 else 'them'}"
        else:
            found = f"{_ranks(names)} did not answer rank {self.rank} {limit}"
        found += "".join(beat.place(r) for r in names[:4] if (beat := self._beat_of(r)) is not None)
        _kill(beat for r in set(stopped) & set(names) if (beat := self._beat_of(r)) is not None)
        return RunError(f"{_at(step)}{operation}, on {self.ranks} ranks", found, self._remedy(names))

    def _remedy(self, missing: list[int]) -> str:
        """Return the remedy; if ranks of other hosts are missing, the hosts on which to start torchrun."""
        beats = [beat for r in missing if (beat := self._beat_of(r)) is not None and beat.host != HOST]
        if not beats or "TORCHELASTIC_RUN_ID" not in os.environ:
            return self.resume()
        lost = " and ".join(dict.fromkeys(beat.host.partition(" ")[0] for beat in beats))
        where = f"{lost}, and here if it ends" if self._own_store else "every host"  # see `unjoinable` in launch.py
        return f"restart torchrun on {where}: {self.resume()}"

    def _cut_off(self) -> list[int]:
        """Return the ranks of other hosts, if all are silent and this rank is the first of its host."""
        if not self.broken and time.monotonic() - self.answered <= LATE_S:
            return []
        hosts = {r: beat.host for r in self.beats if (beat := self._beat_of(r)) is not None}
        first = all(self.rank < r for r, host in hosts.items() if host == HOST)
        return [r for r, host in hosts.items() if host != HOST] if first else []

    def _elsewhere(self, r: int) -> bool:
        beat = self._beat_of(r)
        return beat is not None and (beat.step, beat.operation) != self.current_operation


def _kill(stopped: Iterable[Beat]) -> None:
    """Kill stopped processes unless `--ranks` does: torchrun would wait 30 s for them."""
    for beat in stopped if LAUNCHER not in os.environ else ():
        with suppress(OSError):
            os.kill(beat.pid, signal.SIGKILL)


def _of_a_collective(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(text in str(error) for text in COLLECTIVE)


def _ranks(names: list[int]) -> str:
    shown = ", ".join(map(str, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"rank{'s' * (len(names) > 1)} {shown}"


def _at(step: int) -> str:
    return f"step {step}, " if step else ""


# --- Joining


class Start:
    """The ranks of this host while connecting: a thread exits this process if one is stopped for `train.timeout`."""

    def __init__(self, rank: int, ranks: int, timeout_s: float) -> None:
        self.rank, self.ranks, self.timeout_s = rank, ranks, timeout_s
        self.known: dict[int, Beat] = {}  # other ranks with a known process
        self.over, self.ending = threading.Event(), threading.Lock()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the other ranks within it; name a missing rank if the store or the group fails."""
        threading.Thread(target=self._judge, name="optrush-start", daemon=True).start()
        try:
            yield
        except (RuntimeError, RunError):
            self.known |= _siblings(self.known)
            if missing := [r for r, beat in list(self.known.items()) if beat.state() in ("stopped", "gone")]:
                self._leave(missing)
            raise
        finally:
            self.over.set()

    def _judge(self) -> None:
        since: dict[int, float] = {}
        while not self.over.wait(BEAT_S):
            self.known |= _siblings(self.known)
            now = time.monotonic()
            since = {r: since.get(r, now) for r, beat in list(self.known.items()) if beat.state() == "stopped"}
            if late := [r for r, at in since.items() if now - at > self.timeout_s]:
                self._leave(late)

    def _leave(self, missing: list[int]) -> None:
        """Exit this process; the first rank of this host to notice prints the missing ranks."""
        if not self.ending.acquire(blocking=False):
            time.sleep(2 * LEAVING_S)  # the other thread prints and ends the process
        beats = {r: self.known[r] for r in sorted(missing)}
        stopped = [beat for beat in beats.values() if beat.state() == "stopped"]
        first = min({self.rank, *self.known} - {*beats})
        if first != self.rank:
            time.sleep(1.0)
        told = first != self.rank and self.known[first].state() != "alive"
        if not told and (stopped or LAUNCHER not in os.environ):  # else the launcher prints the signal
            what = f"did not answer for {self.timeout_s:g} s (train.timeout)" if stopped else "ended"
            found = f"{_ranks([*beats])} {what}" + "".join(beat.place(r) for r, beat in [*beats.items()][:4])
            sys.stderr.write(f"{RunError(f'the start, on {self.ranks} ranks', found, RESUME)}\n")
            sys.stderr.flush()
        _kill(stopped)
        os._exit(1)


def _siblings(known: Container[int]) -> dict[int, Beat]:
    """Return the processes of other ranks started by this one's launcher; they may not have answered yet."""
    beats: dict[int, Beat] = {}
    for r, pid in sibling_ranks().items():
        if r not in known:
            with suppress(OSError):
                beats[r] = Beat(HOST, pid, process_stat(pid)[1], 0, "the start, before it met the others")
    return beats


def agree_on_prefix(store: Store, rank: int, ranks: int, limit_s: float, known: dict[int, Beat] | None = None) -> str:
    """Return a fresh name for this start, the same on all ranks.

    torchrun restarts dead ranks with the old store and its keys: without a new name a rank would read a dead rank's
    address. Rank 0 answers the greetings that it reads, and each rank waits until the answer contains its own.

    Args:
        known: receives the processes of the other ranks, from their greetings.

    Raises:
        RunError: a rank did not connect within `limit_s` seconds.
    """
    place = json.dumps([HOST, os.getpid(), process_stat(os.getpid())[1], 0, "the start, meeting the others"])
    greeting, end = f"{secrets.token_hex(8)} {place}", time.monotonic() + limit_s
    store.set(f"hello/{rank}", greeting)
    others = [r for r in range(ranks) if r != rank]
    missing = others
    while time.monotonic() < end:
        start = _peek(store, "start")
        hellos = {r: _peek(store, f"hello/{r}") for r in (others if rank == 0 else [0])}
        ours = bool(start) and json.loads(start)[rank] == greeting
        if ours and rank:
            hellos = {r: hello for r, hello in enumerate(json.loads(start)) if r != rank}
        if known is not None:
            met = {r: hello.partition(" ")[2] for r, hello in hellos.items()}
            beats = {r: Beat(*json.loads(at)) for r, at in met.items() if at}
            known |= {r: beat for r, beat in beats.items() if beat.state() != "gone"}  # an earlier start's greeting
        if rank == 0:
            store.set("start", json.dumps([greeting, *(hellos[r] for r in others)]))
            missing = [r for r in others if _peek(store, f"met/{r}") != greeting]
            if not missing:
                return greeting.partition(" ")[0]
        elif ours:
            store.set(f"met/{rank}", hellos[0])
            return hellos[0].partition(" ")[0]
        time.sleep(0.02)
    found = f"{_ranks(missing if rank == 0 else [0])} did not connect within {limit_s:g} s"
    raise RunError(f"{ranks} ranks", found, "look for its error above; check that every machine runs the same command")


def _peek(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
