"""The forms of the model's matrix products, timed in the first step and remembered per chip (AxoNN, section 5.1.3)."""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from optimus.disk import parse_json, write_json
from optimus.kernels.matmul import Form, MatmulForms, MatmulShape, fastest
from optimus.observe.machine import device_name
from optimus.train.hooks import Hook
from optimus.train.run import Run
from optimus.train.step import StepResult

Seconds = dict[MatmulShape, dict[Form, float]]


class TuneMatmuls(Hook):
    """Has every product that the cache does not know timed in the first step, in all forms; all ranks then use the same.

    The cache of the first rank counts, as nodes may have others; and where ranks have measured the same product, that of
    the lowest rank.
    """

    def __init__(self) -> None:
        self._forms = MatmulForms()
        self._stack = ExitStack()

    def before_training(self, run: Run) -> None:
        cache = run.config.tuning.cache
        self._path = None if cache is None else cache_file(Path(cache), run.device)
        if self._path is not None:
            path = self._path
            known, note = run.groups.world.on_first(lambda: read_seconds(path))
            self._forms.choose(known)
            run.notes += [note] if note else []
        self._forms.measuring = True
        self._stack.enter_context(run.groups.step.multiplying(self._forms))

    def after_step(self, run: Run, result: StepResult) -> None:
        if not self._forms.measuring:
            return
        self._forms.measuring = False
        together: Seconds = {}
        ranks = run.groups.world.all_gather_object((self._forms.seconds, self._forms.measured))
        for seconds, _ in reversed(ranks):
            together |= seconds
        self._forms.choose(together)
        measured = dict.fromkeys(product for _, products in ranks for product in products)
        if measured and run.groups.rank == 0:
            run.notes += describe({product: together[product] for product in measured})
            if self._path is not None and (note := write_seconds(self._path, together)):
                run.notes.append(note)

    def after_training(self, run: Run) -> None:
        self._stack.close()


def cache_file(folder: Path, device: torch.device) -> Path:
    """Where measurements of this chip lie: those of another one, PyTorch or number of threads are no guide."""
    chip = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    threads = f"-{torch.get_num_threads()}-threads" if device.type == "cpu" else ""
    return folder / f"matmul-{chip}{threads}-torch-{torch.__version__}.json"


def read_seconds(path: Path) -> tuple[Seconds, str | None]:
    """(what is known, a note where the file is of no use)."""
    try:
        entries = parse_json(path.read_text(encoding="utf-8"))
        return {
            MatmulShape(*(entry[field] for field in MatmulShape._fields)): {
                form: float(t) for form, t in entry["seconds"].items()
            }
            for entry in entries
        }, None
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return {}, f"{path} cannot be used ({type(error).__name__}: {error}): all products are measured again"


def write_seconds(path: Path, seconds: Mapping[MatmulShape, Mapping[Form, float]]) -> str | None:
    """Add to what other runs have written; returns a note where that cannot be done."""
    known, _ = read_seconds(path)
    entries = [{**product._asdict(), "seconds": dict(times)} for product, times in (known | dict(seconds)).items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, entries)
    except OSError as error:
        return f"{path} cannot be written ({error.strerror}): products will be measured again (see tuning.cache)"
    return None


def describe(seconds: Mapping[MatmulShape, Mapping[Form, float]]) -> list[str]:
    """A line about all products, and one about each that is made in another form than it comes in."""
    chosen: dict[MatmulShape, Form] = {
        product: fastest(product.form, dict(times)) for product, times in seconds.items()
    }
    other = [product for product, form in chosen.items() if form != product.form]
    lines = [
        f"matrix products: {len(chosen)} timed as NN, NT and TN, {len(other)} faster in another form than their own"
    ]
    for product in other:
        times, form = seconds[product], chosen[product]
        size = f"[{product.m}, {product.l}] @ [{product.l}, {product.n}] {product.type}"
        lines.append(f"  {size}: {form} instead of {product.form}, {times[product.form] / times[form]:.2f}x as fast")
    return lines
