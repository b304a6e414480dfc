"""The same run on other layouts, whatever is combined: through the trainer, and through the whole command.

layout_matrix.py has the whole matrix; what it found is in docs/layout_matrix.md.
"""

import json
import re
from pathlib import Path

import pytest
from conftest import REPOSITORY, Finished, Workplace
from layout_matrix import STEPS, TOLERANCES, Combination, combinations, compare, write_datasets
from safetensors.torch import load_file


@pytest.mark.slow
def test_every_combination_is_the_same_on_another_layout() -> None:
    """Of the whole matrix what fits a test's time: three processes, two sequences at a time, so unevenly."""
    found = list(compare([(1, 14), (3, 2)]))
    assert len(found) == len(combinations()) == 17
    assert not [difference for difference in found if not difference.is_rounding]


def write_config(workplace: Workplace, combination: Combination) -> Path:
    config = {key: value for key, value in combination.config().items() if key != "name"}
    path = workplace.folder / f"{combination.data}.yaml"
    path.write_text(json.dumps(config))
    return path


def final_weights(run: Finished) -> Path:
    return run.folder / f"step_{STEPS:08d}" / "model.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize("data", ["packed", "documents"])
@pytest.mark.parametrize(("dropout", "clip_norm"), [(0.1, 0.3), (0.0, None)])
def test_whole_runs_are_the_same_on_other_layouts(
    workplace: Workplace, data: str, dropout: float, clip_norm: float | None
) -> None:
    """One process with the whole batch at once, and three with 2 of its 14 sequences at a time, so unevenly."""
    write_datasets(workplace.datasets)
    config = write_config(workplace, Combination(data, dropout, clip_norm, "float32"))
    one = workplace.train_here(config, output="on1", stop_after=STEPS, microbatch=14)
    three = workplace.train_on_ranks(config, 3, output="on3", stop_after=STEPS, microbatch=2)
    assert len(one.losses) == STEPS
    assert three.losses == pytest.approx(one.losses, rel=1e-6)
    clipped = [line["clipped"] for line in one.of_kind("train")]
    assert clipped == [line["clipped"] for line in three.of_kind("train")]
    assert any(clipped) == (clip_norm is not None)
    first, other = (load_file(final_weights(run)) for run in (one, three))
    # Key biases have no effect on the attention: their gradient is rounding alone, and Adam scales that up.
    apart = {name: float((other[name] - first[name]).abs().max()) for name in first if not name.endswith("key.bias")}
    assert max(apart.values()) < 1e-5


def test_the_document_shows_every_combination_within_rounding() -> None:
    lines = (REPOSITORY / "docs" / "layout_matrix.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    layouts = rows[0][1:]
    assert len(layouts) == len({*layouts}) >= 6
    found = {name: cells for name, *cells in rows[1:]}
    assert found.keys() == {combination.name for combination in combinations()}
    for combination in combinations():
        most_loss, most_weight = TOLERANCES[combination.precision]
        assert len(found[combination.name]) == len(layouts)
        for cell in found[combination.name]:
            assert re.fullmatch(r"\de[+-]\d\d, \de[+-]\d\d", cell), cell  # without "too much"
            loss, weight = map(float, cell.split(", "))
            assert loss <= most_loss
            assert weight <= most_weight
