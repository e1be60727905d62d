"""Shards that change or vanish under a run, between its epochs: one line, no step lost, and the same end once they are back."""

import io
import tarfile
from pathlib import Path

import pytest

from dssl.weights import checkpoint
from tests.faults.conftest import Tally
from tests.train.running import command, end_of, run, start, wait_for_step

STEPS = 48  # 96 images, batches of 8, 4 epochs


def write(folder: Path, form: str) -> list[Path]:
    """Six shards of sixteen images; those of Parquet have a row group for each, more than the cache holds."""
    from PIL import Image

    folder.mkdir()
    paths = []
    for shard in range(6):
        files = []
        for number in range(16):
            file = io.BytesIO()
            Image.effect_noise((20, 20), 20 + 16 * shard + number).convert("RGB").save(file, "PNG")
            files.append(file.getvalue())
        path = folder / f"{shard}.{form}"
        if form == "tar":
            with tarfile.open(path, "w") as archive:
                for number, content in enumerate(files):
                    member = tarfile.TarInfo(f"{number}.png")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        else:
            pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.table({"image": files}), path, row_group_size=1)
        paths.append(path)
    return paths


@pytest.mark.parametrize("form", ["tar", "parquet"])
@pytest.mark.parametrize("fault", ["changes", "vanishes"])
def test_a_shard_that_changes_or_vanishes_between_epochs(form: str, fault: str, tally: Tally, tmp_path: Path) -> None:
    with tally.trial(f"a {form} shard that {fault} between epochs"):
        paths = write(tmp_path / "shards", form)
        options = ["--data", str(tmp_path / "shards"), "--shuffle", "shards", "--window", "2", "--batch-size", "8"]
        whole, broken = (command("simsiam", tmp_path / name, *options) for name in ("whole", "broken"))
        untouched = run(whole)
        assert untouched.returncode in (0, 3), untouched.stderr
        child = start(broken)
        wait_for_step(tmp_path / "broken", STEPS // 4 + 1, child)
        original = paths[3].read_bytes()
        if fault == "vanishes":
            paths[3].unlink()
        else:  # another shard takes its place, as a copy that is made again would
            (tmp_path / "new").write_bytes(paths[2].read_bytes())
            (tmp_path / "new").replace(paths[3])
        code, said = child.wait(), child.said()
        if form == "tar":  # its shards are open since the first epoch, and what is open stays what it was
            assert code == untouched.returncode, said
        else:
            reasons = {"changes": "its shard has changed since it was indexed", "vanishes": "No such file"}
            one_line(code, said, f"{paths[3]}/row ", reasons[fault])
            left = checkpoint.steps_in(tmp_path / "broken" / "checkpoints")[-1]
            assert STEPS // 4 < left < STEPS
            again = run(broken)  # with what is there now
            one_line(again.returncode, again.stderr, "the images of", "another --out")
            paths[3].write_bytes(original)
            last = run(broken)
            assert last.returncode == untouched.returncode, last.stderr
            assert f"resuming at step {left}" in last.stderr
        assert end_of(tmp_path / "broken") == end_of(tmp_path / "whole")


def test_a_tar_that_is_written_in_place_between_epochs(tally: Tally, tmp_path: Path) -> None:
    """Under the open descriptor: its offsets may mean anything now."""
    with tally.trial("a tar shard that is overwritten in place between epochs"):
        paths = write(tmp_path / "shards", "tar")
        words = command("simsiam", tmp_path / "run", "--data", str(tmp_path / "shards"), "--batch-size", "8")
        child = start(words)
        wait_for_step(tmp_path / "run", STEPS // 4 + 1, child)
        original = paths[3].read_bytes()
        paths[3].write_bytes(paths[2].read_bytes())
        one_line(child.wait(), child.said(), f"{paths[3]}/", "its shard has changed since it was indexed")
        paths[3].write_bytes(original)
        last = run(words)
        assert last.returncode in (0, 3), last.stderr
        assert checkpoint.steps_in(tmp_path / "run" / "checkpoints")[-1] == STEPS


def one_line(code: int, said: str, *parts: str) -> None:
    warnings = [line for line in said.splitlines() if line.startswith("dssl: ")]
    assert code == 2, said
    assert len(warnings) == 1, said
    assert "Traceback" not in said
    for part in parts:
        assert part in warnings[0]
