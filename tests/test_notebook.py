"""In a real kernel of Jupyter: one line of progress, an interrupt that saves, and a run that shows itself."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dssl.run import RunFolder

pytest.importorskip("ipykernel", reason="ipykernel is not installed")
from jupyter_client.manager import KernelManager


@pytest.fixture
def kernel() -> Iterator[Any]:
    manager = KernelManager()
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def outputs(client: Any, request: str) -> list[dict[str, Any]]:
    """What a cell gave, until the kernel is idle again."""
    messages = []
    while True:
        message = client.get_iopub_msg(timeout=300)
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return messages
        messages.append(message)


def test_a_cell_shows_one_line_is_interrupted_and_shows_the_run(kernel: Any, tmp_path: Path) -> None:
    settings = (
        "encoder='small', image_size=16, batch_size=16, threads=1, knn_every=0, precision='fp32', health={'every': 1}"
    )
    call = f"import dssl\nrun = dssl.train('shapes', data='shapes:64', out={str(tmp_path / 'run')!r}, epochs=500, {settings})"
    request = kernel.execute(call)
    while len(RunFolder(tmp_path / "run").metrics()) < 12:
        time.sleep(0.01)
    kernel.parent.interrupt_kernel()
    said = outputs(kernel, request)
    assert not [message for message in said if message["msg_type"] == "error"]
    text = "".join(message["content"]["text"] for message in said if message["content"].get("name") == "stderr")
    progress = [line for line in text.replace("\r", "\n\r").split("\n") if "epoch" in line and "left" in line]
    assert len(progress) > 1
    assert all(line.startswith("\r") for line in progress)  # each over the one before
    (shown,) = [
        message for message in outputs(kernel, kernel.execute("run")) if message["msg_type"] == "execute_result"
    ]
    assert "<iframe" in shown["content"]["data"]["text/html"]
    assert f"dssl train --resume {tmp_path / 'run'}" in shown["content"]["data"]["text/plain"]
