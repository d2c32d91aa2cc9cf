"""A hook that times the forms (NN, NT, TN) of large matmuls and caches the timings per chip (AxoNN, section 5.1.3)."""

from collections.abc import Mapping
from contextlib import ExitStack

from optimus.kernels.matmul import FORMS, Form, FormTimings, MatmulForms, MatmulShape
from optimus.measurements import Timings, clear_choice
from optimus.observe.machine import measurements_of
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer

_WORD = "matmul"  # prefix of a measurement's name, before the shape


class TuneMatmuls(Hook):
    """Times, in the first step of a process, all forms of each large matmul without a measurement for this chip."""

    order = Order.CHANGE

    def __init__(self) -> None:
        self._forms = MatmulForms()
        self._stack = ExitStack()

    def before_training(self, trainer: Trainer) -> None:
        self._known = measurements_of(trainer.run.device, trainer.config.tuning.cache)
        self._forms.choose(trainer.groups.world.on_first(lambda: matmuls(self._known.timings())))
        self._before = {*self._forms.timings}
        self._forms.measuring = True
        self._stack.enter_context(trainer.groups.step.multiplying(self._forms))

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if not self._forms.measuring:
            return
        self._forms.measuring = False
        together: dict[MatmulShape, FormTimings] = {}
        made: set[MatmulShape] = set()
        for timings, products in reversed(
            trainer.groups.world.all_gather_object((self._forms.timings, self._forms.made))
        ):
            together |= timings
            made |= products
        new: dict[str, Timings] = {
            named(product): {str(form): timing for form, timing in each.items()}
            for product, each in together.items()
            if product not in self._before
        }
        together |= trainer.groups.world.on_first(lambda: matmuls(self._known.add(new)))
        self._forms.choose(together)
        if made and trainer.groups.rank == 0:
            verbose = trainer.config.observe.verbose
            known = {each: together[each] for each in sorted(made)}
            for line in describe(known, len(made & self._before)) if verbose else ():
                trainer.say(line)
            for line in self._known.notes:
                trainer.say(line)

    def after_training(self, trainer: Trainer) -> None:
        self._stack.close()


def named(product: MatmulShape) -> str:
    """Returns the name of a matmul's measurement in the cache."""
    return " ".join(map(str, (_WORD, *product)))


def matmuls(known: Mapping[str, Timings]) -> dict[MatmulShape, FormTimings]:
    """Returns the measurements of matmuls by shape. Ignores a measurement without timings of all forms."""
    found: dict[MatmulShape, FormTimings] = {}
    for name, timings in known.items():
        word, *fields = name.split()
        if word == _WORD and len(fields) == 5 and fields[0] in FORMS and all(each.isdecimal() for each in fields[1:4]):
            forms: FormTimings = {form: timings[form] for form in FORMS if form in timings}
            form: Form = next(each for each in FORMS if each == fields[0])
            if len(forms) == len(FORMS):
                m, l, n = map(int, fields[1:4])
                found[MatmulShape(form, m, l, n, fields[4])] = forms
    return found


def describe(timings: Mapping[MatmulShape, FormTimings], known: int = 0) -> list[str]:
    """Returns a line about all matmuls, of which `known` were measured before. Also returns a line for each matmul that
    runs faster in another form than its own."""
    chosen = {product: clear_choice(product.form, each) for product, each in timings.items()}
    other = [product for product, form in chosen.items() if form != product.form]
    before = f", {known} measured before" if known else ""
    lines = [
        f"matmuls: {len(chosen) - known} timed in the forms NN, NT and TN{before}, {len(other)} faster in another form than "
        "their own"
    ]
    for product in other:
        each, form = timings[product], chosen[product]
        size = f"[{product.m}, {product.l}] @ [{product.l}, {product.n}] {product.type}"
        faster = each[product.form].best / each[form].usual
        lines.append(f"  {size}: {form} instead of {product.form}, {faster:.2f}x as fast")
    return lines
