"""Settings of the whole suite: deterministic examples, one number of threads, and where outside data may be."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "dssl", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dssl")
torch.set_num_threads(1)  # two workers of pytest-xdist share two cores


# the longest files, which start first: two workers that share whole files then end together
LONGEST = (
    "test_fake_cuda", "test_finetune", "test_torchrun", "test_printed_code", "test_formats", "test_against", "test_adapt",
    "test_resume", "test_benchmarks", "test_doctor", "test_load", "test_beyond", "test_algorithms", "test_cli",
    "test_evaluate_command",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder with `photos` and `coco-small`; tests that need it are skipped where it is missing."""
    folder = os.environ.get("DSSL_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("DSSL_TEST_DATA does not name a folder with test images")
    return Path(folder)
