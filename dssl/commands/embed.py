"""``dssl embed``: the encoder's vectors of any images, in files."""

import dataclasses
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from dssl.commands.arguments import EncoderArguments, check_counts, open_on_device
from dssl.commands.options import Usage
from dssl.errors import DsslError


@dataclass(frozen=True, kw_only=True)
class Arguments(EncoderArguments):
    """Write the embeddings of images: shards in a folder, or one .npz, .csv or .parquet.

    If it writes shards, the same command resumes where it stopped.
    """

    USAGE: ClassVar[Usage] = Usage(
        positional={"weights": "WEIGHTS", "data": "IMAGES"},
        examples=(
            "dssl embed runs/photos photos --out photos.npz",
            "dssl embed runs/photos photos --out embeddings",
            "dssl embed resnet50.pth photos --encoder resnet50 --out photos.parquet",
        ),
    )

    data: str
    """Images: a folder, a list of files, tar or Parquet shards, cifar10:FOLDER, shapes."""
    out: Path = Path("embeddings")
    """A folder for shards (embeddings-00000.npy, names-00000.txt), or a .npz, .csv or .parquet file with path,
    label and embedding."""
    shard: int | None = None
    """Images per shard or row group, which is what fits in memory at a time; 10,000 by default."""
    split: Literal["train", "test"] = "train"
    """The split to embed."""
    batch_size: int = 256
    """Images that go through the encoder at a time."""

    def __post_init__(self) -> None:
        check_counts(self, "shard", "image_size", "batch_size", "threads")


def run(arguments: Arguments) -> int:
    from dssl.data import open_source
    from dssl.data.folder import splits_of
    from dssl.data.source import expanded
    from dssl.evaluation.embed import embed_file, embed_parquet, embed_shards

    if arguments.out.suffix not in ("", ".npz", ".csv", ".parquet"):
        raise DsslError(f"--out is {arguments.out}: expected a folder, or a name that ends in .npz, .csv or .parquet")
    if arguments.shard is not None and arguments.out.suffix in (".npz", ".csv"):
        raise DsslError(f"--shard is {arguments.shard}: {arguments.out} has none; expected a folder, or a .parquet")
    shard = arguments.shard or 10_000
    begun = time.perf_counter()
    encoder = dataclasses.replace(open_on_device(arguments), batch_size=arguments.batch_size)
    values = encoder.value_range
    source = open_source(arguments.data, split=arguments.split, channels=encoder.channels, value_range=values)
    place = Path(expanded(arguments.data))
    others = place.is_dir() and splits_of(place).test is not None
    print(f"{source.name}: the {arguments.split} split" + (", one of two: see --split" if others else ""))
    if arguments.out.suffix in (".npz", ".csv"):
        done = embed_file(encoder, source, arguments.out)
    elif arguments.out.suffix == ".parquet":
        done = embed_parquet(encoder, source, arguments.out, shard=shard)
    else:
        done = embed_shards(encoder, source, arguments.out, shard=shard)
    left_out = f"; {done.unreadable:,} images could not be read and have no row" if done.unreadable else ""
    kept = f" ({done.images - done.computed:,} were there already)" if done.computed < done.images else ""
    print(
        f"{arguments.out}: {done.images:,} embeddings of {encoder.dim} numbers in {done.files:,} "
        f"{'file' if done.files == 1 else 'shards'}{kept}{left_out}; {time.perf_counter() - begun:.1f} s"
    )
    if arguments.out.suffix == ".npz":
        print(
            f"look at them: {shlex.join(['dssl', 'explore', str(arguments.out), arguments.data, '--split', arguments.split])}"
        )
    return 0
