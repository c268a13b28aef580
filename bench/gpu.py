"""What a machine with a GPU should run first: the tests that need one, the kernels, and decoding; what falls short.

    make test-gpu
    python -m bench.gpu --output build/gpu

Every part runs in a process of its own, since an illegal access on the device ends the process. The folder receives
`tests.xml`, `kernel.json` and `gpu_decode.json`, as pytest, `bench.kernel` and `bench.gpu_decode` write them, and
`gpu.json`: the device, the outcome of every part, all figures that have goals in `bench.targets`, and those that fall
short. The command fails where a part fails; a figure that falls short is told, and is no failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from bench.command import parser_of, publish
from bench.targets import GPU_DECODE, KERNEL

ROOT = Path(__file__).resolve().parent.parent
COUNTS = ("tests", "failures", "errors", "skipped")


def run_part(name: str, arguments: Sequence[str], result: Path) -> dict[str, Any]:
    """Run a module as a program; its exit status, and what it wrote to `result`."""
    print(f"== python -m {name} {' '.join(arguments)}", flush=True)
    result.unlink(missing_ok=True)  # of an earlier run
    status = subprocess.run([sys.executable, "-m", name, *arguments], cwd=ROOT).returncode
    part: dict[str, Any] = {"status": status}
    if result.exists() and result.suffix == ".xml":
        suites = list(ElementTree.parse(result).iter("testsuite"))
        part |= {key: sum(int(suite.get(key, 0)) for suite in suites) for key in COUNTS}
    elif result.exists():
        part["figures"] = json.loads(result.read_text(encoding="utf-8"))["figures"]
    return part


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.set_defaults(output=ROOT / "build" / "gpu")
    folder: Path = parser.parse_args(argv).output.resolve()
    if not torch.cuda.is_available():
        print("bench.gpu needs a CUDA GPU, and torch finds none", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    tests, kernel, decode = (folder / name for name in ("tests.xml", "kernel.json", "gpu_decode.json"))
    parts = {
        "tests": run_part("pytest", ["-m", "gpu", f"--junitxml={tests}"], tests),
        "kernel": run_part("bench.kernel", ["--output", str(kernel)], kernel),
        "gpu_decode": run_part("bench.gpu_decode", ["--output", str(decode)], decode),
    }
    failed = [name for name, part in parts.items() if part["status"]]
    short = [
        f"{goal.what}: {parts[name]['figures'][goal.key]:g}, to be {goal.target}"
        for name, goals in (("kernel", KERNEL), ("gpu_decode", GPU_DECODE))
        for goal in goals
        if goal.is_missed(parts[name].get("figures", {}).get(goal.key))
    ]
    counts = ", ".join(f"{parts['tests'].get(key, 0)} {key}" for key in COUNTS)
    print(f"== {torch.cuda.get_device_name()}: {counts}")
    print("\n".join([f"failed: {name}" for name in failed] + [f"falls short: {each}" for each in short]))
    report = {"device": torch.cuda.get_device_name(), "parts": parts, "short": short, "failed": failed}
    publish(report, folder / "gpu.json")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
