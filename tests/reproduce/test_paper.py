"""The paper's numbers as data: what the text says about them must follow from them."""

import pytest

from dssl.errors import DsslError
from dssl.methods import METHODS
from dssl_reproduce import BASELINES, WORDS, PaperCell, chosen_targets, targets

EVERY = targets()


def _number(target: str, row: str, column: str) -> float:
    (cell,) = [cell for cell in EVERY[target].cells if (cell.row, cell.column) == (row, column)]
    return float(cell.paper)


def test_every_table_and_figure_of_the_paper_is_there_under_its_label() -> None:
    assert {target.label: name for name, target in EVERY.items()} == {
        "fig:exp_motivation": "figure1",
        "fig:motivation": "figure2",
        "fig:dico": "figure3",
        "tab:compared_methods": "table1",
        "tab:imagenet_cifar_exp": "table2",
        "fig:magnitudes": "figure4",
        "tab:byol_limiations": "table3",  # the paper's own spelling
        "tab:coco_exp": "table4",
        "fig:justification": "figure5",
        "fig:soft-weighted": "figure6",
        "tab:repro": "table5",
        "fig:examplesimages": "figure7",
    }


def test_the_sums_that_the_text_states_come_out() -> None:
    for column, gain in (("ImageNet, RA(8,16)", 7.2), ("ImageNet, UA", 2.2)):
        difference = _number("table3", "BYOL w/ DSSL", column) - _number("table3", "BYOL w/ T^", column)
        assert difference == pytest.approx(gain, abs=1e-9)
    # "after applying DSSL, all three outperform the supervised ResNet-18"
    supervised = _number("table2", "repro.", "CIFAR-10, supervised")
    assert supervised == 93.02
    for method in ("SimCLR", "BYOL", "SimSiam"):
        assert _number("table2", "w/ DSSL", f"CIFAR-10, {method}") > supervised
        # the reproductions of table 1 are the first row of table 2
        assert _number("table1", method, "repro.") == _number("table2", "repro.", f"ImageNet, {method}")
    # "our reproductions have higher performance than reported (91.8, 91.1)"
    for method in ("SimCLR", "SimSiam"):
        reported = _number("table2", "reported", f"CIFAR-10, {method}")
        assert _number("table2", "repro.", f"CIFAR-10, {method}") > reported
    # DSSL is better in every row of the first figure, as the bold type says
    for row in EVERY["figure1"].rows[1:]:
        assert _number("figure1", row, "w/ DSSL") > _number("figure1", row, "SimSiam")


def test_the_ablation_is_what_the_text_quotes() -> None:
    assert {cell.row: cell.paper for cell in EVERY["figure5"].cells} == {
        "(a)": "unknown", "(b)": "unknown", "(c)": "collapse", "(d)": "59.7", "(e)": "20.4", "(f)": "collapse",
        "(g)": "93.1", "(h)": "collapse", "(i)": "93.7", "(j)": "94.2",
    }  # fmt: skip


def test_nothing_is_invented_where_the_figure_is_missing() -> None:
    for name in ("figure4", "figure6"):
        assert all(cell.paper in WORDS for cell in EVERY[name].cells)
    assert all(
        EVERY[name].missing for name in ("figure1", "figure2", "figure3", "figure4", "figure5", "figure6", "figure7")
    )


def test_digits_are_kept_as_printed() -> None:
    cells = {(cell.row, cell.column): cell for cell in EVERY["figure1"].cells}
    assert cells["w/ RA(2,1)", "SimSiam"].paper == "82.80"
    assert cells["w/ RA(1,1)", "SimSiam"].paper == "88.00"


def test_what_can_be_run_is_run_and_what_is_quoted_is_not() -> None:
    def runs(cell: PaperCell) -> bool:
        return cell.experiment is not None

    for target in EVERY.values():
        for cell in target.cells:
            assert runs(cell) != (cell.reported or cell.row in ("(a)", "(b)")), (target.name, cell)
    assert sum(len(target.cells) for target in EVERY.values()) == 120


def test_a_target_goes_by_name_alias_and_label() -> None:
    for name in ("table2", "main", "tab:imagenet_cifar_exp"):
        assert [target.name for target in chosen_targets(name)] == ["table2"]
    assert {target.name for target in chosen_targets("all")} == set(EVERY) - {"figure2", "figure3", "figure7"}
    with pytest.raises(DsslError, match="'table2'"):
        chosen_targets("tabel2")


def test_the_file_has_no_duplicate_and_no_unknown_name() -> None:
    for target in EVERY.values():
        assert len({(cell.row, cell.column) for cell in target.cells}) == len(target.cells), target.name
        assert {name for pair in target.compare_rows for name in pair} <= set(target.rows), target.name
        assert {name for pair in target.compare_columns for name in pair} <= set(target.columns), target.name
        for cell in target.cells:
            assert cell.paper in WORDS or float(cell.paper) > 0, (target.name, cell)
            if cell.experiment is not None:
                assert cell.experiment.data in ("cifar10", "imagenet"), (target.name, cell)
                assert cell.experiment.method in (*METHODS, *BASELINES), (target.name, cell)
