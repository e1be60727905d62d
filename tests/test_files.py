"""How files are written: links and devices stay what they are."""

import json
import os
import threading
from pathlib import Path

from dssl.cli import main
from dssl.files import write_text


def test_a_link_keeps_its_file_and_the_file_gets_the_content(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    file, link = tmp_path / "kept" / "file.txt", tmp_path / "link.txt"
    file.write_text("old")
    link.symlink_to(file)
    write_text(link, "new")
    assert link.readlink() == file
    assert file.read_text() == "new"
    dangling = tmp_path / "dangling.txt"
    dangling.symlink_to(tmp_path / "kept" / "later.txt")
    write_text(dangling, "new")
    assert dangling.is_symlink()
    assert (tmp_path / "kept" / "later.txt").read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "dangling.txt", "file.txt", "kept", "later.txt", "link.txt",
    ]  # fmt: skip


def test_what_is_not_a_regular_file_is_written_into(tmp_path: Path) -> None:
    """As `--write-config /dev/stdout` by root, who may replace the device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    assert main(["train", "shapes", "--write-config", str(pipe)]) == 0
    if not pipe.is_fifo():
        pipe.unlink()
        raise AssertionError("the pipe was replaced")
    reader.join()
    assert json.loads(received[0])["data"] == "shapes"
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
