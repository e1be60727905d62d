"""The benchmarks' own counting, without a clock: which views count, which decoder is measured, and a page with gaps."""

import io
import json
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks import adapt, gpu, our_views, page, train_paper, views
from benchmarks.view_peers import VIEWS, Contender
from dssl import Objective, named_graph
from dssl.augment import Buffers, Plan, ViewMaker
from dssl.commands import train as train_command
from dssl.commands.options import parse
from dssl.data import decode
from dssl.methods import METHODS
from dssl.methods.method import Method
from dssl.recipes import recipe

ROOT = Path(__file__).parent.parent
BATCH = 4


class Spy:
    """Stands before the kernels: counts the views that are really made, and can hold them back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self.allowed = True
        self.changed = threading.Condition()
        real = ViewMaker.apply_many

        def apply_many(maker: ViewMaker, plan: Plan, row: int, images: np.ndarray, out: Buffers, out_row: int) -> None:
            with self.changed:
                assert self.changed.wait_for(lambda: self.allowed, timeout=60)
            real(maker, plan, row, images, out, out_row)
            with self.changed:
                self.made += VIEWS * len(images)
                self.changed.notify_all()

        monkeypatch.setattr(ViewMaker, "apply_many", apply_many)

    def allow(self, allowed: bool) -> None:
        with self.changed:
            self.allowed = allowed
            self.changed.notify_all()

    def wait_for(self, views: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.made >= views, timeout=60)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@pytest.fixture
def loader(spy: Spy) -> Iterator[Contender]:
    made = our_views.loader(8, np.zeros((2 * BATCH, 8, 8, 3), np.uint8), threads=1, batch=BATCH)
    yield made
    spy.allow(True)
    made.close()


def test_what_a_loader_made_before_its_window_does_not_count(spy: Spy, loader: Contender) -> None:
    loader.resume()
    loader.job()
    spy.wait_for(4 * VIEWS * BATCH)  # one batch is taken, three are ahead: there is nothing left to do
    loader.pause()
    spy.allow(False)
    loader.resume()
    assert loader.job() == 0  # handed over at once, and no view can have been made since


def test_a_loader_counts_what_it_made_in_its_window_and_makes_nothing_after_it(spy: Spy, loader: Contender) -> None:
    assert spy.made == 0  # it begins with its first turn
    loader.resume()
    counted = sum(loader.job() for _ in range(6))
    loader.pause()
    assert 6 * VIEWS * BATCH <= counted <= spy.made
    ended = spy.made
    with spy.changed:
        assert not spy.changed.wait_for(lambda: spy.made > ended, timeout=0.05)
    loader.resume()
    spy.wait_for(9 * VIEWS * BATCH)
    loader.pause()
    assert loader.job() == 9 * VIEWS * BATCH - ended


def test_the_row_with_decoding_uses_the_decoder_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(48 * 40 * 3, dtype=np.uint8).reshape(48, 40, 3)).save(buffer, "JPEG")
    decoded: list[tuple[int, ...]] = []

    def counted(file: io.BytesIO) -> np.ndarray:
        image = decode.decode(file)
        decoded.append(image.shape)
        return image

    monkeypatch.setattr(views, "decode", counted)
    assert views.decoding([buffer.getvalue()])["dssl"].job() == VIEWS
    assert decoded == [(48, 40, 3)]


def test_the_committed_page_is_the_one_of_the_committed_results(tmp_path: Path) -> None:
    page.write(ROOT / "benchmarks" / "results", tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs" / "performance.md").read_text()


def test_the_readme_quotes_the_measured_speed_of_views() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "views.json").read_text())["results"]

    def slowest(setting: str) -> int:
        return round(
            min(row["ratio"] for row in results if row["setting"] == setting and row["name"].startswith("dssl"))
        )

    quoted = re.search(r"(\d+) times as fast at 32 px and (\d+) times at 224 px", (ROOT / "README.md").read_text())
    assert quoted is not None
    expected = (slowest("32 px, one core"), slowest("224 px without decoding, one core"))
    assert (int(quoted[1]), int(quoted[2])) == expected


@pytest.mark.parametrize(
    ("method", "graph", "same"),
    [
        ("simsiam", "dssl", "dssl"),
        ("simsiam", "standard2", "standard2"),
        ("byol", "dssl", "s1<->s2:0.5[alignment], h1->s1:0.5, h2->s2:0.5, normalize=sum"),
        ("simclr", "dssl", "dssl"),
    ],
)
def test_the_papers_way_trains_what_its_graph_says(method: str, graph: str, same: str) -> None:
    torch.manual_seed(0)
    built = Method.of(METHODS[method](), nn.Sequential(nn.Flatten(), nn.Linear(192, 8)), feature_dim=8)
    names = [view.name for view in named_graph(same).views]
    views = {name: torch.randn(6, 3, 8, 8) for name in names}
    ordered = [views[name] for name in sorted(names, key=lambda name: (name[0] == "h", name))]
    expected = Objective(built, named_graph(same))(views).total
    assert train_paper.paper_loss(built, ordered, graph).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_page_of_adaptation_says_what_is_measured_and_what_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"name": name, "before": 40.0, "after": 43.0, "difference": 3.0, "interval": interval}
        for name, interval in zip(adapt.COLUMNS, ([-1.0, 7.0], [-6.0, -0.5], [0.5, 5.5], [0.0, 6.0]), strict=True)
    ]
    (tmp_path / "elpv-dssl-1" / "evaluation").mkdir(parents=True)
    written = tmp_path / "elpv-dssl-1" / "evaluation" / "comparison.json"
    written.write_text(json.dumps({"against": [{"protocols": rows}]}))
    for name in ("PAGE", "KEPT"):
        monkeypatch.setattr(adapt, name, tmp_path / name)
    adapt.keep(tmp_path)
    written.unlink()
    adapt.keep(tmp_path)  # what was kept stays, without the run
    text = adapt.PAGE.read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| DSSL")]
    assert row.split(" | ")[0] == "| DSSL, seed 1"
    assert [cell.count("**") for cell in row.split(" | ")[1:]] == [0, 2, 2, 0]
    missing = next(line for line in text.splitlines() if line.startswith("Not measured yet"))
    assert missing.count(",") == 10
    assert "elpv-dssl-1" not in missing
    assert len(list(adapt.cells())) == 12
    # every command of the page is one that dssl understands
    for line in text.splitlines():
        if line.startswith("dssl train"):
            words = shlex.split(line.replace("$GRAY", adapt.GRAY))[2:]
            parsed = parse(train_command.Arguments, words, base=train_command.base)
            assert parsed.settings.adapt is not None


def test_the_benchmark_of_gpus_says_in_one_line_that_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("no GPU was found")
    assert said.err.count("\n") == 1


def test_the_benchmark_of_gpus_trains_reads_and_prints_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs on the CPU with a small encoder, in the process of the test: one after the other, to the table."""
    base = recipe("shapes", method="simclr")
    base = replace(base, device="cpu", precision="fp32", batch_size=16, graph="standard", threads=1)
    monkeypatch.setattr(gpu, "BATCHES", (10**6, 16))
    monkeypatch.setattr(gpu, "rows", lambda gpus: [gpu.Row("simclr", precision="fp32")])

    def here(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert words[1:3] == ["-m", "benchmarks.gpu"]
        if json.loads(Path(words[4]).read_text())["batch_size"] > 16:
            return subprocess.CompletedProcess(words, 1, "", "torch.OutOfMemoryError: CUDA out of memory.")
        return subprocess.CompletedProcess(words, gpu.main(words[3:]), "", "")

    monkeypatch.setattr(gpu.subprocess, "run", here)
    said = gpu.run(None, steps=3, gpus=1, gpu="1 x CPU", base=base)
    heading, _, titles, _, line = said.splitlines()
    assert heading.startswith("1 x CPU, torch ")
    assert titles == "| run | GPUs | images per GPU | images/s | waits for data | peak GiB |"
    name, gpus, images, rate, share, peak = line.strip("| ").split(" | ")
    assert (name, gpus, images, peak) == ("simclr, fp32", "1", "16", "0.0")  # a million images do not fit
    assert float(rate.replace(",", "")) > 0
    assert 0 <= int(share.removesuffix(" %")) <= 100


def test_the_benchmark_of_gpus_launches_one_process_for_each() -> None:
    assert [row.gpus for row in gpu.rows(1)] == [1] * 5
    assert [row.gpus for row in gpu.rows(4)][5:] == [4, 4]
