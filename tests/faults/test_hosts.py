"""R18: two hosts as network namespaces of this machine, a cable between them, torchrun with c10d in each.

The hosts share the disk and nothing else: each has its own loopback, and reaches the other by its end of the cable. As
pods they have process ids of their own too, and run what the job file of Kubernetes has them run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from optrush.trainer.peers import BEAT_S

from harness import ended, fork, told
from runs import command, configuration, figures, trained_on, wait_for, weights, write_data, write_model

STEPS, TIMEOUT_S = 30, 5
RESTARTS_S = 120
MISSING = [name for name in ("ip", "tc", "unshare", "hostname") if shutil.which(name) is None]
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
NAMES = (
    "".join(f"{ADDRESSES[h]} host-{h} pods-{n} pods-{n}.pods\n" for n, h in enumerate(ADDRESSES))
    + "127.0.0.1 localhost\n"
)
# The names of the other hosts and one's own, as hosts and pods have: what is mounted is seen in there alone.
NAMED = 'mount --bind "$1" /etc/hosts && hostname "$2" && exec bash -c "$3"'
DOCS = Path(__file__).parents[2] / "docs/clusters.md"


def namespaces():
    """Why this machine can have no hosts; empty: it can."""
    if MISSING or os.geteuid() != 0:
        return f"needs {' and '.join(MISSING) or 'root'} for network namespaces"
    name = f"optrush-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.stderr.strip()


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why := namespaces()), reason=why)]


def documented(begin):
    """The block of the documentation that begins so."""
    found = next(block for block in re.findall(r"```bash\n(.*?)```", DOCS.read_text(), re.DOTALL) if begin in block)
    return str(found)


class Hosts:
    """Hosts `a`, where the ranks meet, and `b`."""

    def __init__(self) -> None:
        self.names = {host: f"optrush-{os.getpid()}-{host}" for host in ADDRESSES}
        self.launchers: list[subprocess.Popen[bytes]] = []

    def ip(self, host: str, *arguments: str) -> None:
        subprocess.run(["ip", "-n", self.names[host], *arguments], check=True)

    def connect(self) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "add", name], check=True)
        self.ip("a", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", self.names["b"])
        for host, address in ADDRESSES.items():
            self.ip(host, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                self.ip(host, "link", "set", device, "up")

    def start(
        self, host: str, config: Path, *flags: str, restarts: int = 3, meet: str = "a"
    ) -> subprocess.Popen[bytes]:
        """The command of docs/clusters.md on a host, for one rank, over the store of another."""
        changes = {"HOST": f"host-{meet}", "torchrun": "exec torchrun", "node 8": "node 1"}
        changes |= {"restarts 3": f"restarts {restarts}", "run.yaml": shlex.join([str(config), *flags])}
        return self.inside(host, config, f"host-{host}", documented("export"), changes)

    def pod(self, host: str, config: Path, job: Path) -> subprocess.Popen[bytes]:
        """The container of a Job, whose process ids begin at 1."""
        *_, found = yaml.safe_load_all(job.read_text())
        script = found["spec"]["template"]["spec"]["containers"][0]["args"][0]
        own = ("--pid", "--fork", "--kill-child", "--mount-proc")
        return self.inside(host, config, f"pods-{'ab'.index(host)}", script, {"/config/run.yaml": str(config)}, *own)

    def inside(
        self, host: str, config: Path, name: str, script: str, changes: dict[str, str], *own: str
    ) -> subprocess.Popen[bytes]:
        """A shell on a host of this name; what it prints goes to <config>.<host>.log."""
        for old, new in changes.items():
            assert script.count(old) == 1, f"{old} in {script}"
            script = script.replace(old, new)
        names = config.with_suffix(".hosts")
        names.write_text(NAMES)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PATH": path, "JOB_COMPLETION_INDEX": str("ab".index(host)),
        }  # fmt: skip
        entered = ["ip", "netns", "exec", self.names[host], "unshare", "--uts", *own, "sh", "-c", NAMED, "sh"]
        command = [*entered, str(names), name, script]
        with config.with_suffix(f".{host}.log").open("ab") as log:
            launcher = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self.launchers.append(launcher)
        return launcher

    def both(self, config: Path, *flags: str, **settings: Any) -> dict[str, subprocess.Popen[bytes]]:
        return {host: self.start(host, config, *flags, **settings) for host in ADDRESSES}

    def lose(self, host: str) -> None:
        """All processes of a host are gone at once."""
        for pid in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, host: str) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def close(self) -> None:
        for host, name in self.names.items():
            self.lose(host)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        for launcher in self.launchers:
            launcher.wait()


@pytest.fixture
def hosts():
    two = Hosts()
    try:
        two.connect()
        yield two
    finally:
        two.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model, data, and what runs on two ranks of one host leave."""
    folder = tmp_path_factory.mktemp("home")
    write_model(folder / "model")
    write_data(folder / "data.jsonl")
    for kind in ("ddp", "fsdp"):
        assert trained_on(2, small(folder, f"one-{kind}", kind)) == [0, 0]
    return folder


def small(folder, name, kind, steps=STEPS):
    train = {"steps": steps, "log_every": 1, "save_every": 5}
    return configuration(folder, folder / name, train=train, **{"with": {"packing": {}, kind: {}}})


def until(check, limit_s):
    """Seconds until `check` is true; it must be within the limit."""
    begun = time.monotonic()
    while not check():
        assert time.monotonic() - begun < limit_s, f"not within {limit_s} s"
        time.sleep(0.02)
    return time.monotonic() - begun


def ranks(launcher):
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def running(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def printed(config, host):
    return config.with_suffix(f".{host}.log").read_text()


def reached(config, step):
    log = config.with_suffix("") / "metrics.jsonl"
    return log.exists() and any(f["step"] >= step for f in figures(log.parent, torn=True))


def same(config, home, kind):
    one, output = home / f"one-{kind}", config.with_suffix("")
    return figures(output) == figures(one) and weights(output) == weights(one)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_hosts_are_one(hosts, home, kind):
    config = small(home, f"two-{kind}", kind)
    for host, launcher in hosts.both(config).items():
        assert launcher.wait(120) == 0, printed(config, host)
    assert same(config, home, kind)
    told("R18", 1, f"{kind} over two hosts: every loss and weight as on one")


def test_a_slow_cable_only_slows(hosts, home):
    """4 Mbit/s."""
    config = small(home, "slow", "ddp")
    for name in hosts.names.values():
        shaped = ["tc", "qdisc", "add", "dev", "cable", "root", "tbf", "rate", "4mbit", "burst", "32kbit"]
        subprocess.run(["ip", "netns", "exec", name, *shaped, "latency", "2s"], check=True)
    for host, launcher in hosts.both(config).items():
        assert launcher.wait(240) == 0, printed(config, host)
    assert same(config, home, "ddp")
    told("R18", 1, "4 Mbit/s between the hosts: the same losses and weights")


def refusal(config, host):
    """The three lines of the first error that a host's rank printed."""
    text = printed(config, host)
    assert "asked: " in text, text
    return text[text.index("asked: ") :].splitlines()[:3]


@pytest.mark.parametrize("lost", ["b", "a"])
def test_a_host_that_comes_back(hosts, home, lost):
    """The other rank names it; it is started again, and both go on, whichever is first. The store is on neither."""
    kind, left = "fsdp", "b" if lost == "a" else "a"
    config, limit = small(home, f"lost-{lost}", kind), ("--set", f"train.timeout={TIMEOUT_S}")
    hosts.inside(left, config, f"store-{left}", documented("TCPStore"), {"HOST": f"host-{left}"})
    launchers = hosts.both(config, *limit, meet=left)
    wait_for(config.with_suffix(""), 7)
    pids = ranks(launchers[left])
    hosts.lose(lost)
    seconds = until(lambda: not any(map(running, pids)), TIMEOUT_S + 5)
    asked, found, do = refusal(config, left)
    number = int(lost == "b")
    assert re.fullmatch(r"asked: step \d+, .*, on 2 ranks", asked) and f"rank {number}" in found
    assert f"on host-{lost}, was last seen in " in found  # of fast steps, what it did before the first
    again = f"do:    restart torchrun on host-{lost}, and here if it ends: "
    assert re.fullmatch(again + r"resume from step-0000\d\d with: --resume auto", do)
    back = hosts.start(lost, config, *limit, meet=left)
    for launcher in (back, launchers[left]):
        assert launcher.wait(RESTARTS_S) == 0, printed(config, left)
    assert same(config, home, kind)
    told("R18", 1, f"host {lost} lost: the other rank ended after {seconds:.1f} s, {lost} started again, both went on")


def test_pods_that_are_lost(hosts, home):
    """What ends is started again, as a kubelet does it: pod 1, for which pod 0 waits; pod 0, which ends pod 1 too."""
    kind, config, job = "fsdp", small(home, "pods", "fsdp"), home / "job.yaml"
    flags = ("--kubernetes", "--hardware", "2x1xh100:infiniband", "--image", "i", "--volume", "v", "--out", str(job))
    assert ended(fork(lambda: command("launch", str(config), *flags))) == 0
    pods = {host: hosts.pod(host, config, job) for host in ADDRESSES}
    started = Counter[str]()

    def keep(done):
        """Until something is so: start what has ended."""
        end = time.monotonic() + RESTARTS_S
        while not done():
            assert time.monotonic() < end, printed(config, "a")
            for host, pod in pods.items():
                if pod.poll() not in (None, 0):
                    pods[host] = hosts.pod(host, config, job)
                    started[host] += 1
            time.sleep(0.05)

    for host, step in (("b", 7), ("a", 20)):
        keep(lambda step=step: reached(config, step))
        hosts.lose(host)
        pods[host].wait()
        assert started == {"b": 1} if host == "a" else not started
    keep(lambda: all(pod.poll() == 0 for pod in pods.values()))
    assert started == {"a": 1, "b": 2} and same(config, home, kind)
    told("R18", 1, "pods lost, 1 and then 0: what ended was started again, the run went on to the same end")


def test_a_cable_that_is_cut(hosts, home):
    """Nothing is reset, nothing arrives: both ranks end by themselves, and each host's log says why."""
    config = small(home, "cut", "ddp", 10_000)
    launchers = hosts.both(config, "--set", f"train.timeout={TIMEOUT_S}", restarts=0)
    wait_for(config.with_suffix(""), 7)
    time.sleep(4 * BEAT_S)  # until both have read of a step of the other: fast ones are many between two beats
    pids = [pid for launcher in launchers.values() for pid in ranks(launcher)]
    assert len(pids) == 2
    hosts.ip("a", "link", "set", "cable", "down")
    seconds = until(lambda: not any(map(running, pids)), TIMEOUT_S + 5)
    for host, other, what in (("a", "b", "did not answer"), ("b", "a", "reaches no other host")):
        asked, found, _ = refusal(config, host)
        assert re.fullmatch(r"asked: step \d+, .*, on 2 ranks", asked) and what in found
        assert f"process {pids[other == 'b']} on host-{other}, was last seen in step" in found
    told("R18", 1, f"cable cut: both ranks ended {seconds:.1f} s after it, at most, with train.timeout: {TIMEOUT_S}")
