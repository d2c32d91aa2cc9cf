"""Makes the pictures of reports in docs/figures: runs of a small model, a run that fails and resumes, and plans.

Pictures of the first run are wide and narrow, light and dark; README and tutorial show the beginning of its report.

`python -m benchmarks.report_pictures` takes some minutes on two cores. The script needs Chromium and Playwright, and
network namespaces for the run that fails (Linux, root). `--keep FOLDER` keeps the runs and reuses those that exist.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import yaml

import optimus
from benchmarks.browser import browser, photograph
from optimus.launch.nodes import NodeJob
from optimus.report.page import write_report
from optimus.testing.faults import FaultPlan
from optimus.testing.lab import rehearse

RATES = {"demo": 2e-3, "lr-5e-4": 5e-4, "lr-1e-4": 1e-4}
PLAN = "mula-7b-a1b --machine dgx-h100 --ranks 32 --best 4 --scale 32,64,128,256"
# in pixels of the page: the width, and the most of its height
_WIDE, _NARROW = (1280, 5000), (390, 2400)
_TOP = 1120  # the width of a picture within text: narrower, so that its letters stay legible


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures of reports.")
    parser.add_argument("--output", type=Path, default=Path("docs/figures"))
    parser.add_argument("--keep", type=Path, default=None)
    arguments = parser.parse_args()
    output = arguments.output.absolute()
    with tempfile.TemporaryDirectory() as folder:
        home = arguments.keep or Path(folder)
        home.mkdir(exist_ok=True)
        os.chdir(home)  # pages show the paths of runs
        pages = make_pages(Path("runs"))
        with browser() as chromium:
            for name, page in pages.items():
                photograph(chromium, page, output / f"report-{name}.png", *_WIDE)
            for dark, mode in ((False, ""), (True, "-dark")):
                first = pages["demo"]
                photograph(chromium, first, output / f"report-390{mode}.png", *_NARROW, dark=dark)
                photograph(
                    chromium, first, output / f"report-top{mode}.png", _TOP, dark=dark, until=".panel", scale=8 / 7
                )
            photograph(chromium, pages["demo"], output / "report-dark.png", *_WIDE, dark=True)


def make_pages(root: Path) -> dict[str, Path]:
    """Makes the pages, and returns them by the names of their pictures."""
    root.mkdir(exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    if not (root / "data").exists():
        texts = [library / name for name in ("asyncio", "concurrent", "email", "http", "logging", "multiprocessing")]
        optimus.prepare(texts, root / "data", train_tokenizer=4096, context=256)
    for name, rate in RATES.items():
        if not (root / name).exists():
            optimus.train(configuration(root, name, 120), [f"lr_schedule.lr={rate}", f"lr_schedule.min_lr={rate / 10}"])
    if not (root / "lab").exists():
        run_with_failures(root)
    runs = [root / name for name in RATES]
    pages = {name: root / f"{name}.html" for name in ("demo", "three", "lab", "plan")}
    write_report(runs[:1], pages["demo"])
    write_report(runs, pages["three"])
    write_report([root / "lab"], pages["lab"])
    program = Path(sys.executable).with_name("optimus")
    subprocess.run([program, "plan", *PLAN.split(), "--report", pages["plan"]], check=True)
    return pages


def configuration(root: Path, name: str, steps: int) -> dict[str, Any]:
    return {
        "model": "mula-tiny-moe",
        "data": {"path": str(root / "data")},
        "train": {
            "output": str(root / name),
            "steps": steps,
            "global_batch": 8,
            "micro_batch": 4,
            "sequence_length": 256,
        },
        "evaluate": {"prompts": ["def __init__(self", "import "]},
        "validation": [
            {"text": str(Path(sysconfig.get_paths()["stdlib"]) / "json"), "every": 20, "max_bytes": 262_144}
        ],
        "checkpoint": {"every": 10},
        "observe": {"log_every": 5, "report": False},
    }


def run_with_failures(root: Path) -> None:
    """Runs a pipeline on two nodes and a spare that loses more nodes than it has spares, and resumes the run."""
    config = configuration(root, "lab", 60) | {"parallel": {"pipeline": 2}}
    config["observe"] |= {"timeline": 55}
    (root / "lab.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    FaultPlan().kill(1, 15).nan(1, 25).kill_agent(0, 37).write(root / "faults.yaml")
    job = NodeJob(root / "lab.yaml", (), nodes=2, spares=1, ranks_per_node=1, keep_alive=(1, 5), wait=10.0)
    rehearse(job, inject=root / "faults.yaml")
    optimus.train(config, ranks=2, resume="auto")


if __name__ == "__main__":
    main()
