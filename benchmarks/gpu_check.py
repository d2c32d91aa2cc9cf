"""Everything that a machine with one accelerator can say about the kernels, in one call of less than eight minutes.

`make gpu-check OUT=folder`: the Triton kernels' tests with the real compiler, in bf16 as well; every kernel against plain
PyTorch; the fastest tiles; and the sparse block against its rivals. Tables, JSON and a plot go to the folder. A part that
fails or takes too long does not stop the others; the exit code says whether all went well.

Packages that this Python lacks are taken from a folder of wheels, if one is given, for this call only; nothing is installed
and nothing downloaded. This file needs the standard library alone.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What the parts import besides torch and triton, by module name.
PACKAGES = {
    "pydantic": "pydantic", "typer": "typer", "yaml": "pyyaml", "rich": "rich", "psutil": "psutil", "numpy": "numpy",
    "transformers": "transformers", "matplotlib": "matplotlib", "pytest": "pytest", "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and measure the kernels on the accelerator of this machine.")
    parser.add_argument("--output", type=Path, default=Path("gpu-check"), help="folder of the results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what this Python lacks")
    arguments = parser.parse_args()
    chip = accelerator()
    out = arguments.output.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as site:
        environment = dict(os.environ, PYTHONUNBUFFERED="1", PYTHONPATH=os.pathsep.join([site, str(ROOT)]))
        environment.pop("TRITON_INTERPRET", None)
        if arguments.wheels is not None:
            unpack(arguments.wheels, Path(site))
        require_packages(Path(site))
        failed = [name for name, words, seconds in parts(chip, out) if not run(name, words, seconds, out, environment)]
    print("gpu-check: " + (f"FAILED: {', '.join(failed)}" if failed else "all parts done") + f"; results in {out}")
    return 1 if failed else 0


def parts(chip: str, out: Path) -> list[tuple[str, list[str], int]]:
    """(name, arguments of Python, seconds at most) of each part; the seconds are 465 in all."""
    tests = ["-m", "pytest", "-q", "tests/kernels/triton", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):
        tests += ["-n", str(min(8, os.cpu_count() or 1))]  # kernels compile on the host
    bench = ["-m", "optimus.cli", "bench"]
    kernels = [*bench, "kernels", "--device", chip]
    sizes = ["--tokens", "16384", "--context", "2048"]
    moe = [*bench, "moe", "--device", chip, "--shape", "olmoe", "--tokens", "8192", "--tokens", "16384"]
    return [
        ("tests", tests, 130),
        ("moe", [*moe, "--output", str(out / "moe.json"), "--plot", str(out / "moe.png")], 150),
        ("kernels", [*kernels, *sizes, "--output", str(out / "kernels.json")], 65),
        ("tiles", [*kernels, "--tune", "--tokens", "16384", "--output", str(out / "tiles.json")], 120),
    ]


def accelerator() -> str:
    """The type of this machine's accelerator; ends the program where there is none."""
    try:
        import torch
    except ImportError:
        sys.exit(
            f"gpu-check: {sys.executable} has no PyTorch: name one that has, as in `make gpu-check PYTHON=python3`"
        )
    if not torch.accelerator.is_available():
        sys.exit(f"gpu-check: no accelerator here (torch {torch.__version__}): run it on a machine with a GPU")
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return str(device.type)


def unpack(wheels: Path, site: Path) -> None:
    """Make the packages of the wheels importable from `site`; their needs must be among them or here already."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        sys.exit(f"gpu-check: no *.whl in {wheels}: put wheels there, or leave WHEELS out")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(site),
        *files,
    ]
    if subprocess.run(command).returncode:
        sys.exit(f"gpu-check: the wheels in {wheels} do not fit {sys.executable}: see pip's message above")


def require_packages(site: Path) -> None:
    """End the program, naming what is missing, unless all that the parts import is there."""
    sys.path.insert(0, str(site))
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        names = " ".join(missing)
        sys.exit(f"gpu-check: {sys.executable} lacks {names}: install, or put wheels in a folder and say WHEELS=folder")


def run(name: str, words: list[str], seconds: int, out: Path, environment: dict[str, str]) -> bool:
    """Run one part; what it prints is shown and kept in a file. Whether it ended well and in time."""
    log = out / f"{name}.txt"
    began = time.monotonic()
    print(f"gpu-check: {name}, {seconds} s at most", flush=True)
    with log.open("w", encoding="utf-8") as file:
        try:
            code: int | None = subprocess.run(
                [sys.executable, *words],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    print(log.read_text(encoding="utf-8"))
    ended = "took too long" if code is None else f"exit code {code}"
    print(f"gpu-check: {name}: {ended} after {time.monotonic() - began:.0f} s", flush=True)
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
