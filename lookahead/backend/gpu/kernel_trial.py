"""Tests of kernels in a separate process before use; verdicts are kept in the platform's cache folder."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from threading import RLock

import torch
import xxhash
from platformdirs import user_cache_path

from lookahead.errors import one_line
from lookahead.kernels import dispatch, self_test
from lookahead.kernels.dispatch import KernelVariant, Verdict
from lookahead.utils.atomic import read_json, write_atomically
from lookahead.utils.locks import locked

SELF_TEST = "lookahead.kernels.self_test"  # the module to run
PATIENCE_S = 60  # per process start and per kernel; compiling a kernel takes seconds
_DRIVER = Path("/proc/driver/nvidia/version")

_guard = RLock()
_log = logging.getLogger(__name__)


def try_kernels(wanted: MutableMapping[KernelVariant, None]) -> None:
    """Get the verdicts on kernels and clear `wanted`: from the cache folder, or by a test in another process.

    The test runs apart because an illegal memory access ends a process's use of the GPU. A kernel that is wrong, or
    whose test crashes or hangs, is named in one log line, and torch's own attention replaces it.
    """
    verdicts = dispatch.verdicts
    with _guard:
        variants = [variant for variant in list(wanted) if variant not in verdicts]
        wanted.clear()
        for device in dict.fromkeys(variant.device for variant in variants):
            asked = [variant for variant in variants if variant.device == device]
            machine = describe_machine(device)
            name = xxhash.xxh3_64_hexdigest(json.dumps(machine, sort_keys=True).encode())
            path = user_cache_path("lookahead", appauthor=False) / "kernels" / f"{name}.json"
            entries = _read_verdicts(path)
            new = [variant for variant in asked if variant.name not in entries]
            if new:
                _log.info("%d kernels are tested on %s, once for this machine", len(new), machine["gpu"])
                entries |= {variant.name: verdict for variant, verdict in zip(new, run_tests(new), strict=True)}
                _write_verdicts(path, machine, entries)
            for variant in asked:
                verdict = verdicts[variant] = entries[variant.name]
                if verdict.problem:
                    _log.warning("the kernel for %s is not used on %s: %s", variant.name, device, verdict.problem)


def describe_machine(device: torch.device) -> dict[str, str]:
    """The key of a verdict: the GPU, its driver, torch and Triton, and the source of the kernels."""
    from lookahead.kernels.tree_attention import TRITON_VERSION

    sources = Path(str(self_test.__file__)).parent.glob("*.py")
    driver = _DRIVER.read_text(encoding="utf-8").splitlines()[0] if _DRIVER.exists() else ""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": driver,
        "torch": torch.__version__,
        "triton": TRITON_VERSION,
        "kernels": xxhash.xxh3_64_hexdigest(b"".join(sorted(path.read_bytes() for path in sources))),
    }


def run_tests(variants: Sequence[KernelVariant]) -> list[Verdict]:
    """Test kernels in another process; if a test kills it, test the rest in a new one."""
    verdicts: list[Verdict] = []
    while len(verdicts) < len(variants):
        left = variants[len(verdicts) :]
        command = [sys.executable, "-m", SELF_TEST, json.dumps([variant.to_json() for variant in left])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        patience_s = PATIENCE_S * (1 + len(left))
        try:
            run = subprocess.run(command, capture_output=True, env=environment, timeout=patience_s)
            code, lines = run.returncode, run.stdout
            reason = run.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            problem = f"its test ended with exit code {code}: {reason[-1]}"
        except subprocess.TimeoutExpired as error:
            code, lines, problem = 1, error.stdout or b"", f"its test took more than {patience_s} s"
        except OSError as error:
            unstarted = Verdict(f"no process can be started for its test: {one_line(error)}", is_lasting=False)
            return verdicts + [unstarted] * len(left)
        results = [*filter(None, map(_parse, lines.splitlines()))]
        verdicts += results[: len(left)]
        if len(verdicts) < len(variants) and (code or not results):
            # A signal is the kernel's fault; a lack of host memory or a missing package may be temporary.
            verdicts.append(Verdict(problem, is_lasting=code < 0 and code != -signal.SIGKILL))
    return verdicts


def _parse(line: str | bytes) -> Verdict | None:
    """The verdict in a line of JSON; None for any other line."""
    try:
        problem, gains, is_lasting = json.loads(line)
        return Verdict(str(problem), tuple((int(a), int(b), float(gain)) for a, b, gain in gains), bool(is_lasting))
    except (ValueError, TypeError, RecursionError):
        return None


def _read_verdicts(path: Path) -> dict[str, Verdict]:
    """The verdicts in a file; none if it is missing or malformed."""
    try:
        stored = read_json(path)["verdicts"].items()
        return {name: verdict for name, values in stored if (verdict := _parse(json.dumps(values))) is not None}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write_verdicts(path: Path, machine: dict[str, str], verdicts: dict[str, Verdict]) -> None:
    """Add the lasting verdicts to the file, and keep those of other processes.

    If the folder is not writable, every process tests again.
    """
    lasting = {name: verdict for name, verdict in verdicts.items() if verdict.is_lasting}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            content = {**machine, "verdicts": _read_verdicts(path) | lasting}
            write_atomically(path, json.dumps(content, indent=1))
    except OSError as error:
        _log.info("verdicts on kernels are not kept: %s", error)
