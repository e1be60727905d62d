"""`dssl data`: inspect a data set before training on it, pack it, or download CIFAR-10."""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dssl.commands.arguments import check_counts
from dssl.commands.options import Usage
from dssl.errors import DsslError

if TYPE_CHECKING:
    from dssl.data import Quarantine, Source
    from dssl.data.source import Split

_ACTIONS = {
    "show": ("split", "measure", "all", "channels", "range"),
    "pack": ("out", "format", "image_size", "shard", "channels", "range"),
    "cifar10": ("origin",),
}
"""The options of each action."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Inspect a data set (show), make a packed copy of it (pack), or download CIFAR-10 (cifar10)."""

    USAGE: ClassVar[Usage] = Usage(
        positional={"action": "show|pack|cifar10", "data": "IMAGES"},
        examples=(
            "dssl data show photos --measure",
            "dssl data pack photos --out photos-packed",
            "dssl data cifar10 data/cifar10",
        ),
    )

    action: Literal["show", "pack", "cifar10"]
    """Inspect the images, write a packed copy of them, or download CIFAR-10."""
    data: str
    """A folder of images, a text file that lists them, tar or Parquet shards, cifar10:FOLDER, packed:FOLDER or shapes. For
    cifar10: the folder to fill."""
    split: Literal["train", "test"] | None = None
    """show: which split; train by default."""
    measure: bool = False
    """show: also measure the mean and standard deviation of the pixels."""
    all: bool = False
    """show: decode every image instead of a sample of 256."""
    out: Path | None = None
    """pack: the folder for the packed copy."""
    format: Literal["pixels", "tar", "parquet"] | None = None
    """pack: decoded pixels, the default, or shards of the original files: tar (WebDataset) or parquet (Hugging Face)."""
    image_size: int | None = None
    """pack: shrink larger images until their shorter side has this many pixels; 256 by default; not for shards."""
    shard: int | None = None
    """pack: images per shard; 10,000 by default."""
    channels: int | None = None
    """show, pack: 3 by default, 1 for gray; any other number for TIFF, PNG and NPY files with that many channels."""
    range: str | None = None
    """show, pack: for images that are not photographs, the values that become black and white, such as 0,4095 or 1%,99%."""
    origin: str | None = None
    """cifar10: an archive or folder you already have; by default the official archive is downloaded."""
    bad_share: float = 0.05
    """Stop if more than this share of the files is unreadable, from 0 to 1."""

    def __post_init__(self) -> None:
        check_counts(self, "image_size", "shard", "channels")


def run(arguments: Arguments) -> int:
    """Run the action; the exit code is 0."""
    for option in dict.fromkeys(option for options in _ACTIONS.values() for option in options):
        owners = [f"`dssl data {action}`" for action, options in _ACTIONS.items() if option in options]
        if option not in _ACTIONS[arguments.action] and getattr(arguments, option) not in (None, False):
            flag = f"--{option.replace('_', '-')}"
            raise DsslError(f"{flag} is an option of {' and '.join(owners)}, not of `dssl data {arguments.action}`")
    return {"show": _show, "pack": _pack, "cifar10": _cifar10}[arguments.action](arguments)


def _show(arguments: Arguments) -> int:
    import numpy as np

    from dssl.data import Quarantine, check_sample, measure, open_source

    split, channels = arguments.split or "train", arguments.channels or 3
    source = open_source(arguments.data, split=split, channels=channels, value_range=arguments.range)
    print(source.name)
    print(f"  fingerprint  {source.fingerprint}")
    if source.labels is None or source.classes is None:
        print("  classes      none: images without labels")
    else:
        counts = np.bincount(source.labels, minlength=len(source.classes))
        largest = sorted(zip(counts.tolist(), source.classes, strict=True), key=lambda item: (-item[0], item[1]))
        print(f"  classes      {len(source.classes)}, of {counts.min():,} to {counts.max():,} images")
        for count, name in largest[:10]:
            print(f"    {count:>9,}  {name}")
        if len(largest) > 10:
            print(f"    and {len(largest) - 10} more")
    quarantine = Quarantine(source, max_share=arguments.bad_share)
    count = len(source) if arguments.all else min(256, len(source))
    sizes = np.array([shape[:2] for shape in check_sample(source, seed=0, quarantine=quarantine, count=count)])
    if len(sizes):
        middle = np.median(sizes, axis=0).astype(int)
        print(f"  pixels       {sizes.min(0)[0]} x {sizes.min(0)[1]} to {sizes.max(0)[0]} x {sizes.max(0)[1]}, "
              f"median {middle[0]} x {middle[1]} (height x width, {len(sizes):,} images decoded)")  # fmt: skip
    if (values := source.value_range) is not None:
        print(f"  range        {values.text()} (what becomes black and white)")
    _unreadable(quarantine)
    if arguments.measure:
        measured, count = measure(source, sample=None if arguments.all else 10_000, quarantine=quarantine)
        print(f"  mean         {', '.join(f'{value:.4f}' for value in measured.mean)} (over {count:,} images)")
        print(f"  std          {', '.join(f'{value:.4f}' for value in measured.std)}")
    return 0


def _pack(arguments: Arguments) -> int:
    from tqdm import tqdm

    from dssl.data import NoSplitError, Quarantine, open_source
    from dssl.data.packed import claimed, pack, write_shards

    if arguments.out is None:
        raise DsslError("--out is missing: expected a folder for the packed copy")
    form = arguments.format or "pixels"
    if form != "pixels" and arguments.image_size is not None:
        reason = "shards hold the original files, only --format pixels reduces them"
        raise DsslError(f"--image-size is {arguments.image_size}: {reason}")
    if form == "pixels" and arguments.shard is not None:
        raise DsslError(f"--shard is {arguments.shard}: expected with --format tar or parquet only")
    opened = partial(open_source, arguments.data, channels=arguments.channels or 3)
    splits: dict[Split, Source] = {"train": opened(value_range=arguments.range)}
    with suppress(NoSplitError):
        splits["test"] = opened(split="test", value_range=splits["train"].value_range)
    with claimed(arguments.out, splits):
        for split, source in splits.items():
            quarantine, files = Quarantine(source, max_share=arguments.bad_share), 1
            with tqdm(total=len(source), unit=" images", desc=split, disable=None) as bar:
                common: dict[str, Any] = {
                    "quarantine": quarantine, "progress": lambda done, bar=bar: bar.update(done - bar.n)
                }  # fmt: skip
                if form == "pixels":
                    size = pack(source, arguments.out / f"{split}.npy", side=arguments.image_size or 256, **common)
                else:
                    shard = arguments.shard or 10_000
                    files, size = write_shards(source, arguments.out, split=split, form=form, shard=shard, **common)
            count = f"{quarantine.total - len(quarantine):,} images"
            shards = "" if form == "pixels" else f" in {files:,} shard{'s' if files != 1 else ''}"
            print(f"{arguments.out}: {split}: {count}{shards}, {size / 1e6:,.1f} MB")
            _unreadable(quarantine)
    print(f"use it as {'packed:' if form == 'pixels' else ''}{arguments.out}")
    return 0


def _cifar10(arguments: Arguments) -> int:
    from dssl.data.cifar10 import fetch, is_complete
    from dssl.data.source import expanded

    folder = Path(expanded(arguments.data))
    if is_complete(folder):
        print(f"{folder}: already complete; use it as cifar10:{folder}")
        return 0
    origin = None if arguments.origin is None else expanded(arguments.origin)
    print("downloading CIFAR-10 (170 MB)" if origin is None else f"reading CIFAR-10 from {origin}", flush=True)
    fetch(folder, origin=origin)
    print(f"{folder}: 50,000 training and 10,000 test images; use it as cifar10:{folder}")
    return 0


def _unreadable(quarantine: "Quarantine") -> None:
    """List the first unreadable files."""
    if len(quarantine):
        print(f"  unreadable   {len(quarantine):,} files")
        for name, reason in list(quarantine.reasons.items())[:10]:
            print(f"    {name}: {reason}")
