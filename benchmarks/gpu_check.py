"""Checks and measures Optimus on a machine with one accelerator, in one call of some ten minutes, the most valuable
first.

`make gpu-check OUT=folder` runs these parts: the machine file; the kernels' tests with the real compiler, in bf16 too;
real steps beside the planner's prediction; a trace; losses against the CPU's; options of state and all families;
layouts with several ranks on the device; the sparse block and every other operation against rivals; the fastest tiles;
the Trainer of `transformers`.

Tables, JSON and plots go to the folder and, as one archive, beside it; a summary is printed last. A part that fails or
takes too long does not stop the others, and the exit code tells whether all succeeded. Without an accelerator, or with
--rehearse, every part has tiny sizes: on the CPU, or with `--rehearse fake` on the fake accelerator, which has no
numbers but runs the code of a real one.

Packages that this Python lacks come from a folder of wheels, for this call only; nothing is installed or downloaded.
This file needs the standard library alone.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# packages that every part imports besides torch, by module name
PACKAGES = {
    "pydantic": "pydantic", "pydantic_core": "pydantic-core", "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection", "typer": "typer", "yaml": "pyyaml", "rich": "rich", "psutil": "psutil",
    "numpy": "numpy", "tokenizers": "tokenizers", "safetensors": "safetensors", "cloudpickle": "cloudpickle",
}  # fmt: skip
FAKE = "fakegpu"  # the device of tests/lib/helpers/fake_device.py


class Part(NamedTuple):
    name: str
    words: list[str]  # arguments of Python
    seconds: int  # the limit
    needs: tuple[str, ...] = ()  # modules besides PACKAGES
    on_chip: bool = False  # the part needs an accelerator


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and measure Optimus on the accelerator of this machine.")
    parser.add_argument("--output", type=Path, default=Path("gpu-check"), help="folder of the results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for packages that this Python lacks")
    parser.add_argument(
        "--rehearse",
        choices=("cpu", "fake"),
        nargs="?",
        const="cpu",
        help="run every part with tiny sizes, on this device",
    )
    parser.add_argument("--part", action="append", help="run only this part; repeat for more")
    arguments = parser.parse_args()
    chip, rehearse = accelerator(), arguments.rehearse
    if chip is None and rehearse is None:
        rehearse = "cpu"
        print("gpu-check: this machine has no accelerator: a rehearsal on the CPU follows, whose figures mean nothing")
    if rehearse == "fake":
        chip = FAKE
    out = arguments.output.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as site, tempfile.TemporaryDirectory() as work:
        paths = [site, str(ROOT), str(ROOT / "tests" / "lib"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = dict(os.environ, PYTHONUNBUFFERED="1", PYTHONPATH=os.pathsep.join(paths))
        environment.pop("TRITON_INTERPRET", None)
        if arguments.wheels is not None:
            unpack(arguments.wheels, Path(site))
        sys.path.insert(0, site)
        require_packages()
        chosen = [
            p
            for p in parts(chip, out, Path(work), rehearse is not None)
            if not arguments.part or p.name in arguments.part
        ]
        until = time.monotonic()
        ended = {}
        for part in chosen:
            # Time that earlier parts have left is added. A rehearsal may share the machine with other work.
            until += part.seconds * (1 if rehearse is None else 10)
            ended[part.name] = run(part, chip, out, environment, until)
    archive = out.with_name(f"{out.name}.tar.gz")
    summary = [f"{name:<9} {how}{figures(out / f'{name}.json')}" for name, how in ended.items()]
    (out / "summary.txt").write_text("\n".join(summary) + "\n", encoding="utf-8")
    with tarfile.open(archive, "w:gz") as file:
        file.add(out, out.name)
    failed = [name for name, how in ended.items() if not how.startswith(("done", "skipped"))]
    print(
        "\n".join(
            ["", *summary, f"gpu-check: {'FAILED: ' + ', '.join(failed) if failed else 'all parts done'}; {archive}"]
        )
    )
    return 1 if failed else 0


def parts(chip: str | None, out: Path, work: Path, rehearse: bool) -> list[Part]:
    """Returns the parts in the order of their value; their seconds add up to ten minutes."""
    program = ["-m", "helpers.on_fake"] if chip == FAKE else ["-m"]

    def own(name: str, seconds: int, needs: tuple[str, ...] = (), on_chip: bool = False) -> Part:
        folders = ["--output", str(out), "--work", str(work), "--seconds", str(seconds - 20)]
        words = [*program, "benchmarks.gpu_parts", name, *folders, *(["--rehearse"] if rehearse else [])]
        return Part(name, words, seconds, needs, on_chip)

    def bench(name: str, seconds: int, *words: str, needs: tuple[str, ...] = ()) -> Part:
        fixed = [
            *program,
            "optimus",
            "bench",
            name,
            "--device",
            chip or "cpu",
            "--output",
            str(out / f"{name}.json"),
        ]
        return Part(name, [*fixed, *words], seconds, needs)

    tests = [*program, "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/triton"]
    tests[-1] += "/test_swiglu.py" if rehearse else ""
    if importlib.util.find_spec("xdist") and not rehearse:
        tests += ["-n", str(min(8, os.cpu_count() or 1))]  # kernels compile on the host
    plot = ["--plot", str(out / "moe.png")] if importlib.util.find_spec("matplotlib") and not rehearse else []
    sizes = {
        "moe": ["--shape", "64/32/4/2", "--tokens", "64", "--rounds", "1"] if rehearse
        else ["--shape", "olmoe", "--tokens", "16384", *plot],
        "kernels": ["--model", "mula-tiny-moe", "--tokens", "32", "--context", "32", "--rounds", "1"] if rehearse
        else ["--tokens", "16384", "--context", "2048"],
    }  # fmt: skip
    return [
        own("machine", 40),
        Part("tests", tests, 60, ("pytest", "hypothesis", "triton")),
        own("step", 30),
        own("trace", 20),
        own("curve", 90),
        own("options", 80),
        own("layouts", 80),
        bench("moe", 70, *sizes["moe"], needs=("transformers",)),
        own("tiles", 60, ("triton",), on_chip=True),
        own("trainer", 40, ("transformers", "accelerate")),
        bench("kernels", 30, *sizes["kernels"], needs=("transformers",)),
    ]


def accelerator() -> str | None:
    """Returns the type of this machine's accelerator, or ends the program if PyTorch is missing."""
    try:
        import torch
    except ImportError:
        sys.exit(
            f"gpu-check: {sys.executable} has no PyTorch: choose a Python that has, as in `make gpu-check PYTHON=python3`"
        )
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return str(device.type)


def unpack(wheels: Path, site: Path) -> None:
    """Makes the packages of the wheels importable from `site`. Their requirements must be among the wheels or
    installed."""
    files = sorted(wheels.glob("*.whl"))
    if not files:
        sys.exit(f"gpu-check: no *.whl in {wheels}: put wheels into the folder, or leave WHEELS out")
    here = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for file in files:
        python, abi = file.stem.split("-")[-3:-1]
        if "py3" not in python and here not in python.split(".") and abi != "abi3":
            print(f"gpu-check: {file.name} is not for this Python ({here}) and is left out")
            continue
        with zipfile.ZipFile(file) as wheel:
            wheel.extractall(site)
    for data in site.glob("*.data"):  # files that a wheel installs to the same folder
        for kind in ("purelib", "platlib"):
            for path in (data / kind).glob("*"):
                path.rename(site / path.name)


def require_packages() -> None:
    """Ends the program with the names of missing packages, unless every package that all parts import is installed."""
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        names = " ".join(missing)
        sys.exit(
            f"gpu-check: {sys.executable} lacks {names}: install, or put wheels into a folder and pass WHEELS=folder"
        )


def run(part: Part, chip: str | None, out: Path, environment: dict[str, str], until: float) -> str:
    """Runs one part until `until`, prints its output and keeps it in a file; returns a line about its end."""
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing or (part.on_chip and chip is None):
        return f"skipped: {f'{missing[0]} is neither installed nor among the wheels' if missing else 'no accelerator'}"
    log, began = out / f"{part.name}.txt", time.monotonic()
    print(f"gpu-check: {part.name}, {until - began:.0f} s at most", flush=True)
    with log.open("w", encoding="utf-8") as file:
        try:
            code: int | None = subprocess.run(
                [sys.executable, *part.words],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=until - began,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    print(log.read_text(encoding="utf-8", errors="replace"))
    ended = "done" if code == 0 else "took too long" if code is None else f"FAILED with exit code {code}"
    return f"{ended} after {time.monotonic() - began:.0f} s"


def figures(report: Path) -> str:
    """Returns the numbers of a part's report."""
    if not report.exists():
        return ""
    ratios = json.loads(report.read_text(encoding="utf-8"))["ratios"]
    return "".join(
        f"\n    {name}: {value:.5g}" if isinstance(value, float) else f"\n    {name}: {value}"
        for name, value in ratios.items()
    )


if __name__ == "__main__":
    sys.exit(main())
