"""``dssl reproduce`` without training: the plan, the scripts, the tables of what is finished, and mistakes."""

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from PIL import Image as Pillow
from PIL import ImageColor

from dssl import config_io
from dssl.cli import main
from dssl.report.page import SERIES
from dssl_reproduce import targets
from dssl_reproduce.command import Arguments, run
from dssl_reproduce.outcome import Measured, Outcome
from dssl_reproduce.scales import SCALES, Job, jobs_of, with_our_rows
from tests.rejecting import rejects

RESULTS = Path(__file__).parents[2] / "docs" / "results"
JOBS = jobs_of([targets()["table5"]], SCALES["cpu"], seeds=(0,))


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    path = tmp_path / "data of mine"
    path.mkdir()
    return path


def _finished(job: Job, folder: Path, curves: dict[str, list[tuple[float, float]]] | None = None) -> None:
    one = Measured(accuracy=40.0, interval=(39.0, 41.0), protocol={"k": 20})
    training, kinds = ({}, ("supervised",)) if job.training else (None, ("linear", "knn"))
    Outcome(
        name=job.name, scale="cpu", seed=0, fingerprint=job.fingerprint, config={}, training=training, verdict="healthy",
        reason="", spread=1.0, accuracies=dict.fromkeys(kinds, one), steps=1, seconds=60.0, versions={}, data={},
        curves=curves or {},
    ).write(folder / "cells" / f"{job.name}.json")  # fmt: skip


def test_the_plan_says_what_is_finished_what_is_resumed_and_what_is_skipped(
    tmp_path: Path, cifar10: Path, capsys
) -> None:
    out = tmp_path / "results"
    mine = [job for job in JOBS if job.config.data == "cifar10"]
    _finished(mine[0], out / "cpu")
    (out / "cpu" / "runs" / mine[1].name).mkdir(parents=True)
    (out / "cpu" / "runs" / mine[1].name / "config.json").write_text("{}")
    assert run(Arguments(target="table5", cifar10=cifar10, out=out, plan=True)) == 0
    states = dict(re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines())
    assert [states[job.name] for job in mine] == ["finished", "to resume"] + ["to run"] * 4
    assert [states[job.name] for job in JOBS if job not in mine] == ["skipped: no imagenet"] * 6


def test_finished_cells_become_a_table_without_the_data(tmp_path: Path, capsys) -> None:
    out = tmp_path / "results"
    for job in JOBS:
        _finished(job, out / "cpu")
    assert run(Arguments(target="view-pairs", cifar10=tmp_path / "nowhere", imagenet=tmp_path, out=out)) == 0
    said = capsys.readouterr().out
    assert "*92.14* → **40.0**" in said
    text = (out / "cpu" / "table5.md").read_text()
    assert "*collapse* → **40.0**" in text
    assert "kNN accuracy (k = 20, temperature 0.1)" in text
    assert "dssl reproduce view-pairs --scale cpu --cifar10 FOLDER --imagenet FOLDER" in text
    assert str(tmp_path) not in text
    assert (out / "cpu" / "table5.json").is_file()
    assert not (out / "cpu" / "table5.png").exists()  # there is no curve to draw
    assert "table5.png" not in text


def test_the_committed_tables_are_what_their_commands_make_of_the_committed_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    documents = sorted(RESULTS.glob("*/*.md"))
    assert len(documents) > 9
    for scale in {path.parent.name for path in documents}:
        shutil.copytree(RESULTS / scale / "cells", tmp_path / "results" / scale / "cells")
    for path in documents:
        (line,) = re.findall(r"^dssl (reproduce .*)$", path.read_text(), re.MULTILINE)
        assert main(shlex.split(line)) == 0
        for file in (path, path.with_suffix(".json")):
            assert (tmp_path / "results" / path.parent.name / file.name).read_bytes() == file.read_bytes(), file


def test_curves_are_drawn_a_colour_for_each_row(tmp_path: Path) -> None:
    pictures = []
    for name, rows in (("all", len(JOBS)), ("again", len(JOBS)), ("one", 1)):
        out = tmp_path / name
        for number, job in enumerate(JOBS):
            line = [(1.0, 30.0), (2.0, 40.0 + number)] if number < rows else []
            _finished(job, out / "cpu", {"knn": line, "spread": [(1.0, 0.9), (2.0, 0.8)]})
        run(Arguments(target="view-pairs", cifar10=tmp_path / "nowhere", imagenet=tmp_path, out=out))
        pictures.append((out / "cpu" / "table5.png").read_bytes())
        assert "(table5.png)" in (out / "cpu" / "table5.md").read_text()
    assert pictures[0] == pictures[1]
    row_count = len(with_our_rows(targets()["table5"], SCALES["cpu"]).rows)
    assert [_colours(picture) for picture in pictures] == [row_count, row_count, 1]


def _colours(picture: bytes) -> int:
    """How many colours of series a picture has."""
    with Pillow.open(io.BytesIO(picture)) as image:
        found = {colour for _, colour in image.convert("RGB").getcolors(2**24) or []}
    return len(found & {ImageColor.getrgb(colour) for colour in SERIES})


def test_commands_for_a_cluster(tmp_path: Path, cifar10: Path, capsys) -> None:
    out = tmp_path / "results"
    arguments = {"target": "table2", "scale": "paper", "cifar10": cifar10, "imagenet": tmp_path, "out": out, "gpus": 4}
    assert run(Arguments(**arguments, emit=True)) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(commands) == 18  # the supervised run is left to the command that measures
    for words in commands:
        assert words[:7] == ["torchrun", "--standalone", "--nproc-per-node", "4", "-m", "dssl", "train"]
        # the file is a configuration that dssl train takes, with the images where they are
        config = config_io.load(Path(words[words.index("--config") + 1]))
        assert config.data in (f"cifar10:{cifar10}", str(tmp_path))
        assert config.epochs in (800, 100)
        assert Path(words[words.index("--out") + 1]).parent == out / "paper" / "runs"


def test_the_documented_slurm_script_hands_the_signal_to_the_run(tmp_path: Path, cifar10: Path, capsys) -> None:
    """Slurm signals the shell of the script and ends the job when that shell ends: the run takes its place."""
    run(Arguments(target="table5", cifar10=cifar10, out=tmp_path / "results", emit=True))
    (tmp_path / "table2.txt").write_text(capsys.readouterr().out)
    (script,) = re.findall(
        r"```\n(#!/bin/bash\n.*?)```", (RESULTS.parent / "howto" / "reproduce.md").read_text(), re.DOTALL
    )
    # in place of a run: says when it has begun, and takes a while to save itself after SIGTERM
    stand_in = tmp_path / "torchrun"
    stand_in.write_text(
        "#!/bin/bash\ntrap 'sleep 0.5; echo saved; exit 143' TERM\necho begun \"$@\"\nwhile :; do sleep 0.05; done\n"
    )
    stand_in.chmod(0o755)
    job = subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path,
        env=os.environ | {"SLURM_ARRAY_TASK_ID": "2", "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert job.stdout is not None
    with job.stdout as said:
        _, *words = shlex.split((tmp_path / "table2.txt").read_text().splitlines()[1])
        assert said.readline() == " ".join(["begun", *words]) + "\n"
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 143
        assert said.read() == "saved\n"


def test_one_row_and_one_part(tmp_path: Path, cifar10: Path, capsys) -> None:
    """The rows of a table, alone; and the parts of a table, which together are all of its runs, each once."""

    def planned(**options: object) -> list[str]:
        assert run(Arguments(target="table5", cifar10=cifar10, out=tmp_path / "out", plan=True, **options)) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()]

    everything = planned()
    rows = with_our_rows(targets()["table5"], SCALES["cpu"]).rows
    one = planned(rows=(rows[0],))
    assert 0 < len(one) < len(everything)
    assert set(one) < set(everything)
    parts = [planned(part=f"{number}/3") for number in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(everything)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"target": "table9"}, ["'table9'"]),
        ({"target": "figure2"}, ["figure2", "illustration"]),
        ({"seeds": (1, 1)}, ["--seeds", "1 1", "distinct"]),
        ({"seeds": ()}, ["--seeds", "distinct"]),
        ({"jobs": 0}, ["jobs", 0]),
        ({"part": "0/2"}, ["part", "0/2", "2/4"]),
        ({"part": "3/2"}, ["part", "3/2", "2/4"]),
        ({"part": "half"}, ["part", "half", "2/4"]),
        ({"rows": ("w/ DSLS",)}, ["'w/ DSLS'", "w/ DSSL"]),
        ({"imagenet": Path("nowhere")}, ["--imagenet", "nowhere"]),
        ({}, ["dssl data cifar10"]),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, changes: dict[str, object], facts: list[object]) -> None:
    arguments = {"target": "table2", "cifar10": tmp_path / "none", "out": tmp_path / "out"} | changes
    with rejects(*facts):
        run(Arguments(**arguments))
    assert not (tmp_path / "out").exists()
