import pytest

from dssl.report.trend import trend

MAGNITUDES = (0, 10, 20, 30)


@pytest.mark.parametrize(
    ("changes", "text", "weakens"),
    [
        ((0, 0.2, 0.9, 0.3), "changes nothing", False),
        ((40, 40.5, 39.5, 40), "same at every m", False),
        ((0, 10, 20, 30), "grows with m", False),
        ((0, 30, 29, 60), "grows with m", False),
        ((60, 40, 20, 1), "weaker as m grows", True),
        ((60, 60, 61, 1), "weaker as m grows", True),
        ((40, 20, 5, 40), "weaker up to m = 20", True),
        ((0, 50, 70, 30), "weaker from m = 20", True),
        ((0, 90, 10, 91), "weaker from m = 10 to 20", True),
    ],
)
def test_trend(changes: tuple[float, ...], text: str, weakens: bool) -> None:
    found = trend(MAGNITUDES, changes)
    assert (found.text, found.weakens) == (text, weakens)
    assert (found.verdict == "bad") == weakens


def test_a_trend_needs_two_points() -> None:
    with pytest.raises(ValueError, match="1 magnitudes and 1 changes"):
        trend((0,), (1,))
