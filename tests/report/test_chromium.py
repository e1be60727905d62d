"""Pages in a real browser; the harness itself is shown to see what it must see."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dssl.data.shapes import Shapes
from dssl.evaluation.explore import explore
from dssl.files import write_text
from dssl.report import views
from dssl.report.explore import Query, Report, write
from dssl.report.views import Example, OperationStrip, OperationTable, PolicyStrength, Survey
from dssl.weights.encoder import Features

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\"' {{7*7}}.jpg"


def _image(number: int, *, size: int = 32, channels: int = 3) -> np.ndarray:
    ramp = np.arange(size * size * channels, dtype=np.int64).reshape(size, size, channels)
    return ((ramp * (7 + number)) % 251).astype(np.uint8)


def _survey(*, channels: int) -> Survey:
    texts = ("ra(2,5)", "0.9*ra(2,5) | 0.1*jigsaw(4)", "ra(8,16)", "ua", HOSTILE)
    flat = np.full((32, 32, channels), 128, dtype=np.uint8)
    examples = tuple(
        Example(
            name=f"<i>{number}</i>&amp;.jpg" if number % 2 else f"{number} {HOSTILE} {'long' * 40}",
            original=_image(number, size=(32, 300)[number % 2], channels=channels),
            standard=_image(number + 20, channels=channels),
            heavy=(*(_image(number + k, channels=channels) for k in range(4)), flat),
        )
        for number in range(8)
    )
    shares = (0.014, 0.07, 0.498, 0.0, 1.0)
    policies = tuple(
        PolicyStrength(
            policy=text,
            change=np.linspace(1 + 10 * k, 60 + 30 * k, 50),
            flat=flat_share,
            far=0.2 * k,
        )
        for k, (text, flat_share) in enumerate(zip(texts, shares, strict=True))
    )
    return Survey(
        name=f"folder {HOSTILE}", total=50_000, measured=1_000, size=32, channels=channels, seed=3, standard="standard-cifar",
        standard_flat=0.004, examples=examples, probes=(examples[0].standard,), policies=policies,
        unreadable=tuple([f"{HOSTILE}: cut off"] * 7), value_range=None,
    )  # fmt: skip


def _tables(*, channels: int) -> list[OperationTable]:
    magnitudes = (0.0, 15.0, 30.0)
    rows = {
        "Rotate": (0.0, 20.0, 40.0),
        "Posterize": (60.0, 30.0, 2.0),
        "Color": (40.0, 0.0, 40.0),
        "Invert": (90.0, 90.0, 90.0),
    }
    strips = tuple(
        OperationStrip(
            name=name,
            changes=changes,
            images=tuple(_image(k, channels=channels) for k in range(3)),
            blank_from=15.0 if name == "Rotate" else None,
        )
        for name, changes in rows.items()
    )
    return [OperationTable(name="dssl16", magnitudes=magnitudes, operations=strips)]


def _write_page(path: Path, *, channels: int) -> Path:
    made = views.html(_survey(channels=channels), _tables(channels=channels), command=f"dssl views '{HOSTILE}'")
    write_text(path, made)
    return path


@pytest.fixture(scope="module")
def views_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write_page(tmp_path_factory.mktemp("page") / "views.html", channels=3)


@pytest.fixture(scope="module")
def gray_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write_page(tmp_path_factory.mktemp("page") / "views.html", channels=1)


@pytest.mark.parametrize(
    ("width", "scheme", "page"),
    [
        (1280, "light", "views_page"),
        (1280, "dark", "views_page"),
        (400, "light", "views_page"),
        (400, "dark", "views_page"),
        (1280, "light", "gray_page"),
        (400, "dark", "gray_page"),
    ],
)
def test_the_page_renders_and_nothing_overflows(
    browser, request: pytest.FixtureRequest, width: int, scheme: str, page: str
) -> None:
    browser.open(request.getfixturevalue(page), width=width, scheme=scheme)
    assert browser.warnings() == []
    assert browser.requests() == []
    assert browser.overflow() == []
    assert browser.broken_images() == 0
    assert browser.run("return document.images.length") == 8 * 7 + 4 * 3
    assert browser.run("return document.querySelectorAll('svg.plot path').length") > 10
    assert browser.run("return document.querySelectorAll('.notice li').length") == 5 + 1


def test_markup_in_names_stays_text(browser, views_page: Path) -> None:
    browser.open(views_page)
    assert browser.run("return document.title") == f"Views of folder {HOSTILE}"
    assert browser.run("return document.scripts.length") == 0
    assert browser.run("return document.querySelectorAll('[onerror], [style]').length") == 0
    captions = browser.run("return [...document.querySelectorAll('.picture figcaption')].map(e => e.textContent)")
    assert captions[:2] == ["…" + ("long" * 40)[-31:], "<i>1</i>&amp;.jpg"]
    titles = browser.run("return [...document.querySelectorAll('.picture figcaption')].map(e => e.title)")
    assert titles[0] == f"0 {HOSTILE} {'long' * 40}"
    assert HOSTILE in browser.run("return [...document.querySelectorAll('h3 code')].map(e => e.textContent)")
    ridges = browser.run("return [...document.querySelectorAll('svg.plot text')].map(e => e.textContent.trim())")
    assert HOSTILE in ridges


def _luminance(color: str) -> float:
    red, green, blue = (int(part) for part in color.removeprefix("rgb(").rstrip(")").split(",")[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


@pytest.mark.parametrize(
    ("scheme", "media", "dark"), [("light", "screen", False), ("dark", "screen", True), ("dark", "print", False)]
)
def test_text_and_figures_follow_the_scheme_and_print_on_white(
    browser, views_page: Path, scheme: str, media: str, dark: bool
) -> None:
    browser.open(views_page, scheme=scheme, media=media)
    ink = browser.run("return getComputedStyle(document.querySelector('h1')).color")
    label = browser.run("return getComputedStyle(document.querySelector('svg.plot text[fill=\"var(--ink)\"]')).fill")
    assert (_luminance(ink) > 0.6) == dark
    assert ink == label
    paper = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (_luminance(paper) < 0.4) == dark


def test_nothing_is_cut_off_on_paper(browser, views_page: Path) -> None:
    browser.open(views_page, width=718, media="print")  # A4 with margins of a centimetre
    assert browser.overflow() == []


def test_the_share_of_blank_views_is_red(browser, views_page: Path) -> None:
    browser.open(views_page)
    found = browser.run(
        "return [...document.querySelectorAll('.card dd.bad')].map(e => [e.textContent, getComputedStyle(e).color])"
    )
    assert found[0] == ["50%", "rgb(179, 38, 30)"]
    assert len(found) == 2
    assert browser.run("return document.querySelectorAll('.picture.flagged').length") == 8
    blank = browser.run("return [...document.querySelectorAll('.strip .badge.bad')].map(e => e.textContent)")
    assert blank == ["blank from m = 15"]


def test_a_script_that_got_in_would_not_run(browser, views_page: Path, tmp_path: Path) -> None:
    poisoned = tmp_path / "poisoned.html"
    poisoned.write_text(
        views_page.read_text().replace(
            "</main>", "<script>document.title='owned'</script><p style='color:red' id=p>x</p></main>"
        )
    )
    browser.open(poisoned)
    assert browser.run("return document.title") != "owned"
    assert browser.run("return getComputedStyle(document.getElementById('p')).color") != "rgb(255, 0, 0)"
    assert sum("Content Security Policy" in message for message in browser.warnings()) == 2


class Hostile(Shapes):
    """Drawn images with names that are markup."""

    def label_of(self, index: int) -> str:
        return f"{index} {HOSTILE}"


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_the_page_of_unlabelled_images(browser, tmp_path: Path, width: int, scheme: str) -> None:
    source = Hostile(70)
    values = torch.from_numpy(np.stack([source.image(index).reshape(-1) for index in range(70)])[:, ::7]).float()
    features = Features(values=torch.cat([values, values[:1]]), rows=np.append(np.arange(70), 0), unreadable=2)
    found = explore(features.values, clusters=7, seed=0)
    queries = [Query(source, 3, [(5, 0.9), (6, 0.8)])]
    report = Report(source=source, features=features, exploration=found, queries=queries, seed=0)
    page = write(report, tmp_path, command=f"dssl explore '{HOSTILE}'")[0]
    browser.open(page, width=width, scheme=scheme)
    assert browser.warnings() == []
    assert browser.requests() == []
    assert browser.overflow() == []
    assert browser.broken_images() == 0
    assert browser.run("return document.title") == f"Exploring {source.name}"
    captions = browser.run("return [...document.querySelectorAll('.picture figcaption')].map(e => e.textContent)")
    assert captions[:7] == [f"for {len(rows)}" for rows in found.members]
    assert captions[captions.index("query") :][:3] == ["query", "0.900", "0.800"]
    titles = browser.run("return [...document.querySelectorAll('.picture img')].map(e => e.title)")
    assert titles[:7] == [report.name(row) for row in found.medoids]


def test_the_harness_sees_overflow_errors_and_requests(browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><title>t</title><div style='width:2000px'>wide</div>"
        "<div style='overflow-x:auto'><p style='width:3000px'>own box</p></div>"
        "<img src='data:image/png;base64,AAAA'>"
        "<script>fetch('http://127.0.0.1:9/x').catch(() => 0); console.error('wrong')</script>"
    )
    browser.open(bad, width=400)
    assert [found.split(" ")[0] for found in browser.overflow()] == ["document", "DIV.null"]
    assert any("wrong" in message for message in browser.warnings())
    assert browser.requests() == ["http://127.0.0.1:9/x"]
    assert browser.broken_images() == 1
