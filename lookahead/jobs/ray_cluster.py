"""Ray: how to reach a cluster, and what its machines are divided into."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, TextIO

from lookahead.errors import ClusterError, ConfigError

_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How many workers there are to be, and what each of them takes of its machine.

    Attributes:
        workers: Workers; more than there is room for wait for it, and let a cluster that scales itself grow.
        threads: CPU threads of each, which Ray counts as CPUs.
        gpus: GPUs of each, 0 or 1.
    """

    workers: int
    threads: int
    gpus: int


@contextmanager
def connect(address: str | None) -> Iterator[Any]:
    """The module ray, connected to a cluster until this is left.

    Args:
        address: As `ray.init` takes it: `"HOST:PORT"`, `"ray://HOST:PORT"`, `"auto"` for the cluster that runs on this
            machine, `"local"` for one that is started for this job and ends with it. `None` is the connection that the
            process has, else what the variable RAY_ADDRESS names, else `"auto"` or `"local"`.

    Raises:
        ConfigError: Ray is not installed.
        ClusterError: There is no cluster at the address.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--ray needs ray: pip install 'lookahead-decoding[ray]'") from error
    if address is None and ray.is_initialized():
        yield ray
        return
    if address is not None:
        _check_is_there(address)
    # What concerns a cluster that is started may not be said of one that is there. Ray sends no usage statistics of
    # clusters that `init` starts.
    own = {"include_dashboard": False} if address in (None, "local") else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
    except Exception as error:  # ConnectionError, ValueError, RuntimeError and types of its own
        where = "a Ray cluster" if address is None else f"the Ray cluster at {address!r}"
        raise ClusterError(f"{where} cannot be reached: {first_line(error)}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


class OwnStdout:
    """Standard output for this thread alone: Ray prints there, from a thread of its own, what became of workers.

    That would stand between results, and a job tells it in its own words.

    Args:
        stream: The true one.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, get_ident()

    def write(self, text: str) -> int:
        """Write what this thread writes, and drop the rest."""
        return self._stream.write(text) if get_ident() == self._thread else len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _check_is_there(address: str) -> None:
    """Refuse a port that nobody answers; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_S).close()
        except (OSError, OverflowError) as error:
            raise ClusterError(f"the Ray cluster at {address!r} cannot be reached: {first_line(error)}") from error


def plan_workers(ray: Any, workers: int | None, threads: int | None, device: str | None) -> Plan:
    """Divide a cluster: a GPU for every worker where there are GPUs, else CPUs.

    Args:
        ray: The module, connected.
        workers: How many are asked for; `None` is one for every GPU, or without GPUs for every machine.
        threads: CPU threads of each; `None` shares what there is now, and is 1 beside a GPU.
        device: What was asked for: `"cpu"`, `"cuda"`, or `None` for GPUs where there are some.

    Raises:
        ConfigError: The device is a certain one, and Ray decides which worker gets which.
    """
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(
            f"with --ray each worker gets a device of its own: device must be cpu or cuda, got {device!r}"
        )
    resources = ray.cluster_resources()
    gpus = 0 if device == "cpu" else int(resources.get("GPU", 0))
    if gpus or device == "cuda":
        return Plan(workers or max(1, gpus), threads or 1, 1)
    machines = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    wanted = workers or max(1, sum(cpus >= (threads or 1) for cpus in machines))
    shared = int(min(sum(machines) / wanted, max(machines, default=1)))
    return Plan(wanted, threads or max(1, shared), 0)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
