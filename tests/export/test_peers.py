"""Files that the real solo-learn, lightly and timm wrote, compared by the features that those packages computed."""

import lzma
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dssl.commands.export import Arguments, run
from dssl.errors import DsslError
from dssl.models import build_encoder
from dssl.weights.load import load_encoder, load_weights_into, open_weights, read_tensors
from tests.rejecting import states

FIXTURES = Path(__file__).parent / "fixtures"
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).mul(1000).sin().reshape(2, 3, 32, 32)


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers")
    for path in FIXTURES.glob("*.xz"):
        (folder / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
    return folder


def expected(name: str) -> Tensor:
    with np.load(FIXTURES / "features.npz") as content:
        return torch.from_numpy(content[name])


def error(encoder: nn.Module, name: str) -> float:
    """The largest difference from the package's own features, relative to the largest of them."""
    with torch.no_grad():
        found = encoder.eval()(IMAGES)
    return float((found - expected(name)).abs().max() / expected(name).abs().max())


def refused(path: Path, *, encoder: str | None = None) -> str:
    with pytest.raises(DsslError) as caught:
        load_encoder(path, encoder=encoder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_solo_learn_cifar_is_asked_for_and_equal(peers: Path, tmp_path: Path) -> None:
    path = peers / "solo-learn-cifar-state.pth"
    states(refused(path), "--stem padding2", "solo-learn", "--encoder resnet18-cifar-padding2")
    loaded = open_weights(path, stem="padding2")
    assert loaded.name == "resnet18-cifar-padding2"
    states(loaded.report, "3x3 stem", "'padding2'")
    assert error(loaded.network, "solo-learn-cifar") < 1e-5
    assert error(load_encoder(path, encoder="resnet18-cifar-padding2"), "solo-learn-cifar") < 1e-5
    assert error(load_encoder(path, stem="cifar"), "solo-learn-cifar") > 0.01  # it matters
    # what is exported keeps the stem
    assert run(Arguments(weights=path, stem="padding2", out=tmp_path)) == 0
    again = open_weights(tmp_path / "encoder.safetensors")
    assert again.name == "resnet18-cifar-padding2"
    assert error(again.network, "solo-learn-cifar") < 1e-5
    with pytest.raises(DsslError, match="'padding2'"):
        load_weights_into(build_encoder("resnet18-cifar", image_size=32), tmp_path / "encoder.safetensors")
    with pytest.raises(DsslError, match="'padding2'"):
        open_weights(tmp_path / "encoder.safetensors", stem="cifar")


def test_lightly_benchmark_form_is_recognised_and_equal(peers: Path) -> None:
    path = peers / "lightly-cifar.ckpt"
    loaded = open_weights(path)
    assert loaded.name == "resnet18-cifar-norelu"
    assert "without ReLU" in loaded.report
    assert error(loaded.network, "lightly-cifar") < 1e-5
    assert error(load_encoder(path, stem="cifar"), "lightly-cifar") > 0.01
    states(refused(path, encoder="resnet18-cifar"), "'norelu'", "'cifar'", "-cifar-norelu")
    plain = build_encoder("resnet18-cifar", image_size=32)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    with pytest.raises(DsslError, match="-cifar-norelu"):
        load_weights_into(plain, path)
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())


def test_lightly_whole_resnet_is_recognised_and_equal(peers: Path) -> None:
    loaded = open_weights(peers / "lightly-resnet.pth")
    assert loaded.name == "resnet18-cifar"
    assert loaded.report.endswith("2 others ignored (linear)")  # and no note
    assert error(loaded.network, "lightly-resnet") < 1e-5
    text = refused(peers / "lightly-resnet.pth", encoder="resnet18-cifar-padding2")
    states(text, "'cifar'", "'padding2'", "-cifar")


def test_solo_learn_with_a_partial_is_refused_by_its_class(peers: Path) -> None:
    text = refused(peers / "solo-learn-cifar.ckpt")
    assert "functools.partial" in text
    assert "weights_only=False)['state_dict']" in text


def test_timm_with_arguments_is_refused_by_its_class_and_loads_after_the_printed_command(
    peers: Path, tmp_path: Path
) -> None:
    text = refused(peers / "timm-args.pth.tar", encoder="timm:test_resnet")
    assert "argparse.Namespace" in text
    command = text[text.index("import torch; ") :]
    subprocess.run([sys.executable, "-c", command], check=True, cwd=tmp_path)
    loaded = open_weights(tmp_path / "weights.pth", encoder="timm:test_resnet", image_size=32)
    assert error(loaded.network, "timm-args") < 1e-5


def test_a_flipped_bit_in_a_foreign_file_is_refused(peers: Path, tmp_path: Path) -> None:
    torch.save(build_encoder("timm:test_resnet", image_size=32).state_dict(), tmp_path / "w.pth")
    content = (tmp_path / "w.pth").read_bytes()
    with zipfile.ZipFile(tmp_path / "w.pth") as archive:  # inside of a tensor: padding between records holds nothing
        spans = [
            (record.header_offset + 128, record.file_size) for record in archive.infolist() if record.file_size > 4096
        ]
    choose = random.Random(0)
    for _ in range(40):
        start, length = choose.choice(spans)
        damaged = bytearray(content)
        damaged[start + choose.randrange(length - 128)] ^= 1 << choose.randrange(8)
        (tmp_path / "damaged.pth").write_bytes(damaged)
        with pytest.raises(DsslError, match="CRC-32"):
            read_tensors(tmp_path / "damaged.pth")


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, tmp_path / "w.pth")
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(read_tensors(tmp_path / "w.pth")[0]["a"], torch.ones(3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch.jit itself is deprecated
def test_programs_and_pipes_are_called_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "program.pt"
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), path)
    text = refused(path)
    assert "TorchScript" in text
    assert "damaged" not in text
    exec(
        text[text.index("import torch; ") :].replace("'weights.pth'", repr(str(tmp_path / "w.pth")))
    )  # as it is printed
    assert set(read_tensors(tmp_path / "w.pth")[0]) == {"weight", "bias"}
    os.mkfifo(tmp_path / "pipe.pt")
    states(refused(tmp_path / "pipe.pt"), tmp_path / "pipe.pt", "regular file")


@pytest.mark.parametrize("prefix", ["backbone.", ""])
def test_heads_beside_a_prefixed_encoder_are_named(prefix: str, tmp_path: Path) -> None:
    state = {f"{prefix}{name}": value for name, value in build_encoder("resnet18", image_size=32).state_dict().items()}
    torch.save({**state, "projector.0.weight": torch.ones(4, 512)}, tmp_path / "w.pth")
    text = open_weights(tmp_path / "w.pth", image_size=32).report
    assert "also there" not in text
    assert text.endswith("; 1 others ignored (projector)")
