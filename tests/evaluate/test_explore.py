"""Exploring images without labels: what is planted is found, and what is chosen is exact."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from torch import Tensor

from dssl.cli import main
from dssl.data.shapes import Shapes
from dssl.evaluation.explore import connected, explore, k_means, nearest_others


@pytest.fixture(scope="module")
def clustered() -> Tensor:
    """Forty rows around each of five directions; row 200 is far from all, and 201 to 203 are nearly row 7."""
    draw = np.random.default_rng(3)
    centres = draw.normal(size=(5, 64)) * 4
    rows = np.repeat(centres, 40, axis=0) + draw.normal(size=(200, 64))
    copies = rows[7] + 0.01 * draw.normal(size=(3, 64))
    return torch.tensor(np.concatenate([rows, -5 * centres.sum(axis=0, keepdims=True), copies]), dtype=torch.float32)


def test_neighbours_are_those_of_brute_force() -> None:
    """In two blocks, the second one shorter; what is compared are the rows of both their ends."""
    count, ends = 8_292, np.r_[:50, 8_142:8_292]
    rows = np.random.default_rng(3).normal(size=(count, 16))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = rows[ends] @ rows.T
    cosines[np.arange(len(ends)), ends] = -np.inf
    similarity, nearest = nearest_others(torch.from_numpy(rows), k=6)
    assert np.array_equal(nearest[ends], np.argsort(-cosines, axis=1)[:, :6])
    assert similarity[ends] == pytest.approx(np.sort(cosines, axis=1)[:, :-7:-1], abs=1e-6)


def test_an_image_is_never_its_own_neighbour_even_among_many_copies() -> None:
    similarity, nearest = nearest_others(torch.ones(30, 4) / 2, k=3)
    assert nearest.shape == (30, 3)
    assert not (nearest == np.arange(30)[:, None]).any()
    assert similarity == pytest.approx(1)


def test_planted_duplicates_and_the_planted_outlier_are_found(clustered: Tensor) -> None:
    found = explore(clustered, clusters=5, seed=0)
    assert [group.tolist() for group in found.duplicates] == [[7, 201, 202, 203]]
    assert int(found.isolation.argmax()) == 200
    twice = explore(torch.cat([clustered[:200], clustered[:200] * 1.001]), clusters=5, seed=0)
    assert [group.tolist() for group in twice.duplicates] == [[row, row + 200] for row in range(200)]
    nothing = explore(clustered[:200], clusters=5, seed=0)
    assert nothing.duplicates == ()
    everything = explore(clustered[:200], clusters=5, seed=0, threshold=-1.0)
    assert sum(len(group) for group in everything.duplicates) == 200


def test_groups_are_connected_components() -> None:
    chain = np.array([[5, 3, 9, 7, 0], [3, 9, 7, 1, 8]])  # 1-7-9-3-5 and 0-8
    assert [group.tolist() for group in connected(11, chain)] == [[1, 3, 5, 7, 9], [0, 8]]
    assert connected(4, np.empty((2, 0), np.int64)) == ()
    long = np.stack([np.arange(999), np.arange(1, 1000)])[:, np.random.default_rng(0).permutation(999)]
    assert [len(group) for group in connected(1000, long)] == [1000]


def test_clusters_are_those_that_were_drawn_and_medoids_minimize_the_distance(clustered: Tensor) -> None:
    unit = torch.nn.functional.normalize(clustered[:200], dim=1)
    members = k_means(unit, 5, seed=1)
    assert {frozenset(rows.tolist()) for rows in members} == {
        frozenset(range(begin, begin + 40)) for begin in range(0, 200, 40)
    }
    for rows in members:
        points = unit[torch.from_numpy(rows)].double()
        costs = torch.cdist(points, points).square().sum(dim=1)
        assert int(costs.argmin()) == 0  # the medoid by brute force
    again = k_means(unit, 5, seed=1)
    assert all(np.array_equal(first, second) for first, second in zip(members, again, strict=True))


@pytest.mark.parametrize("clusters", [1, 20, 30])
def test_every_cluster_has_a_medoid_of_its_own_even_if_features_have_collapsed(clusters: int) -> None:
    found = explore(torch.ones(30, 8), clusters=clusters, seed=0)
    assert len(set(found.medoids.tolist())) == clusters
    assert sorted(np.concatenate(found.members).tolist()) == list(range(30))
    sizes = [len(rows) for rows in found.members]
    assert sizes == sorted(sizes, reverse=True)
    assert all((found.cluster[rows] == number).all() for number, rows in enumerate(found.members))


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Sixty drawn images as files, a copy of one, and a file that cannot be read."""
    source, folder = Shapes(60), tmp_path / "photos"
    folder.mkdir()
    for index in range(60):
        Pillow.fromarray(source.image(index)).resize((80, 80)).save(folder / f"{index:02d}.png")
    (folder / "=copy.png").write_bytes((folder / "07.png").read_bytes())
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def test_the_command_answers_every_question_and_computes_features_once(
    run_folder: Callable[..., Path], photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder()
    words = ["explore", str(run), str(photos), "--threads", "1", "--label", "8"]
    assert main(words) == 0
    out = run / "explore"
    said = capsys.readouterr().out
    assert "61 features computed" in said
    first = _rows(out / "label_first.csv")
    assert all(row["name"] in said for row in first)
    assert (len(first), sum(int(row["represents"]) for row in first)) == (8, 61)
    clusters = _rows(out / "clusters.csv")
    assert len(clusters) == len(_rows(out / "outliers.csv")) == len(_rows(out / "map.csv")) == 61
    assert [row["name"] for row in clusters if row["rank"] == "1"] == [row["name"] for row in first]
    assert {row["name"] for row in _rows(out / "duplicates.csv")} >= {"07.png", "./=copy.png"}
    asked = _rows(out / "neighbours.csv")
    assert [row["query"] for row in asked[::10]] == [row["name"] for row in first]
    page = (out / "explore.html").read_text()
    assert page.count("data:image/jpeg") > 60
    assert "http:" not in page
    assert "https:" not in page

    outside = photos.parent / "outside.png"
    outside.write_bytes((photos / "12.png").read_bytes())
    assert main([*words, "--query", "07.png", str(outside)]) == 0
    said = capsys.readouterr().out
    assert "1 features computed" in said  # of the file that is not among the images
    asked = _rows(out / "neighbours.csv")
    assert asked[0] == {"query": "07.png", "rank": "1", "name": "./=copy.png", "similarity": "1"}
    assert (asked[10]["query"], asked[10]["name"]) == (str(outside), "12.png")
    assert main([*words, "--query", "07.png", str(outside)]) == 0
    assert "; 0 features computed" in capsys.readouterr().out


def test_embeddings_in_a_file_and_the_images_of_the_run(
    run_folder: Callable[..., Path], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = run_folder(), tmp_path / "e.npz"
    assert main(["explore", str(run), "--threads", "1"]) == 0  # those of the run, shapes:300
    assert len(_rows(run / "explore" / "label_first.csv")) == 30
    assert main(["embed", str(run), str(photos), "--threads", "1", "--out", str(file)]) == 0
    assert "dssl explore" in capsys.readouterr().out
    assert main(["explore", str(run), str(photos), "--threads", "1", "--out", str(tmp_path / "a")]) == 0
    assert main(["explore", str(file), str(photos), "--out", str(tmp_path / "b")]) == 0
    for name in ("label_first.csv", "duplicates.csv", "outliers.csv", "map.csv", "neighbours.csv"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()
    assert main(["explore", str(file), "shapes:60"]) == 2
    assert main(["explore", str(file), str(photos), "--query", str(tmp_path / "x.png")]) == 2
    assert main(["explore", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 3


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (["--label", "62"], ("--label is 62", "61")),
        (["--label", "0"], ("--label is 0",)),
        (["--duplicates", "1.5"], ("--duplicates is 1.5",)),
        (["--query", "missing.png"], ("missing.png",)),
        (["more"], ("'more'",)),
    ],
)
def test_mistakes_are_one_line(
    flags: list[str],
    facts: tuple[str, ...],
    run_folder: Callable[..., Path],
    photos: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explore", str(run_folder()), str(photos), *flags]) == 2
    said = capsys.readouterr().err
    assert all(fact in said for fact in facts)
    assert said.count("\n") == 1


def test_images_of_which_none_or_one_can_be_read(
    run_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = tmp_path / "bad", run_folder()
    folder.mkdir()
    (folder / "broken.png").write_bytes(b"no image")
    assert main(["explore", str(run), str(folder)]) == 2
    Pillow.new("RGB", (40, 40)).save(folder / "one.png")
    assert main(["explore", str(run), str(folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 2
