"""Tables as text, for a terminal and in Markdown."""

from dssl.text import columns, markdown


def test_columns_are_aligned_and_lines_have_no_trailing_space() -> None:
    rows = [("run", "kNN", "verdict"), ("a", "40.1\N{NO-BREAK SPACE}%", "healthy"), ("longer", "–", "")]
    assert columns(rows, align="<>") == ["run        kNN  verdict", "a       40.1 %  healthy", "longer       –"]
    assert columns([("a", ""), ("b", "")]) == ["a", "b"]


def test_a_cell_of_a_markdown_table_cannot_end_early() -> None:
    lines = markdown(("policy", "a|b"), [("0.9*ra(2,5) | 0.1*ua", "two\nlines")], align="<>")
    assert lines == ["| policy | a\\|b |", "| --- | ---: |", "| 0.9*ra(2,5) \\| 0.1*ua | two lines |"]
