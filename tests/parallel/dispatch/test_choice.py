"""The dispatcher that `moe.dispatch: auto` chooses."""

import pytest

from optimus.comm.algorithms import KINDS, Measured, names
from optimus.comm.schedules import Shape
from optimus.config import load_config
from optimus.mesh import Mesh
from optimus.model.architecture import ModelConfig
from optimus.parallel.dispatch.choice import copies, dispatcher

TRAIN = {"output": "", "steps": 1, "global_batch": 64, "micro_batch": 1, "sequence_length": 4096}
MODEL = load_config({"model": "mula-7b-a1b", "data": {"path": ""}, "train": TRAIN}).model


def found(mesh: Mesh, tokens: int, measured: Measured | None = None, model: ModelConfig = MODEL) -> str:
    return dispatcher("auto", model, mesh, tokens, 2, measured)


def test_copies_of_a_token() -> None:
    assert copies(8, 1, 2) == 1
    assert copies(8, 8, 2) == pytest.approx(2)
    assert copies(4, 2, 2) == pytest.approx(1 / 3 * 1 + 2 / 3 * 2)  # 2 of the 6 pairs of experts lie in one half


def test_what_is_asked_for_is_taken() -> None:
    assert dispatcher("allgather", MODEL, Mesh(dp=64, ep=64), 4096, 2) == "allgather"
    assert dispatcher("alltoall", MODEL, Mesh(dp=2, ep=2), 1, 2) == "alltoall"


def test_few_tokens_on_few_ranks_go_to_all() -> None:
    assert found(Mesh(dp=2, ep=2), 1) == "allgather"
    assert found(Mesh(dp=2, tp=2, ep=2, etp=2), 1) == "allgather"


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(dp=64, ep=64),
        Mesh(dp=32, ep=16, etp=2, tp=2),
        Mesh(dp=64, ep=64, ranks_per_node=8),
        Mesh(dp=64, ep=64, ranks_per_node=1),
    ],
)
def test_many_tokens_go_where_they_are_needed(mesh: Mesh) -> None:
    assert found(mesh, 8192) == "alltoall"


def test_nothing_is_dispatched_where_all_experts_are_here() -> None:
    assert found(Mesh(dp=8), 1) == "alltoall"
    dense = load_config({"model": "mula-1b", "data": {"path": ""}, "train": TRAIN})
    assert found(Mesh(dp=8), 1, model=dense.model) == "alltoall"


def test_measurements_decide() -> None:
    shape, mesh = Shape(1, 4), Mesh(dp=4, ep=4)
    for quick, right in (("all_to_all", "alltoall"), ("all_gather", "allgather")):
        table = {
            kind: {
                str(shape): {
                    name: {"sizes": [1.0, 1e9], "seconds": [1e-6, 1e-5] if kind == quick else [1.0, 2.0]}
                    for name in names(kind, shape)
                }
            }
            for kind in KINDS
            if kind != "reduce_scatter" or quick != "all_gather"
        }
        assert found(mesh, 4096, Measured.model_validate(table)) == right
