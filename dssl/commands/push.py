"""``dssl push``: an encoder as a repository of the Hugging Face Hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dssl.commands import export
from dssl.commands.arguments import WeightsArguments
from dssl.commands.options import Usage
from dssl.errors import DsslError, one_line


@dataclass(frozen=True, kw_only=True)
class Arguments(WeightsArguments):
    """Export an encoder for the Hugging Face Hub, verify it, and upload it.

    timm and dssl load it from there. The token comes from hf auth login or HF_TOKEN. Paths on this machine are not uploaded.
    """

    USAGE: ClassVar[Usage] = Usage(
        positional={"weights": "WEIGHTS", "repository": "USER/NAME"},
        examples=(
            "dssl push runs/photos me/photos",
            "dssl push runs/photos me/photos --private",
            "dssl push runs/photos me/photos --license apache-2.0",
        ),
    )

    repository: str
    """The repository, which is created unless it exists."""
    private: bool = False
    """Create a private repository."""
    license: str = "unknown"
    """The licence of the weights for the model card, as the Hub calls it, such as apache-2.0."""
    out: Path | None = None
    """The folder for the files; by default export in the run's folder, and for a file of weights in the current one."""


def run(arguments: Arguments) -> int:
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import validate_repo_id
    except ImportError:
        raise DsslError("dssl push needs huggingface_hub: pip install 'dssl[hub]'") from None
    from dssl.version import VERSION
    from dssl.weights.formats import CARD_FILE, HUB_FOLDER

    name = arguments.repository
    try:
        validate_repo_id(name)
    except ValueError as error:
        raise DsslError(f"the repository is {name!r}, expected USER/NAME: {one_line(error)}") from None
    if name.count("/") != 1:
        raise DsslError(f"the repository is {name!r}, expected USER/NAME")
    files = export.Arguments(
        weights=arguments.weights, encoder=arguments.encoder, stem=arguments.stem, image_size=arguments.image_size,
        normalization=arguments.normalization, formats=("hub",), license=arguments.license, out=arguments.out,
    )  # fmt: skip
    export.run(files, repository=name)
    try:
        api = HfApi(library_name="dssl", library_version=VERSION)
        api.create_repo(name, private=arguments.private, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=export.folder_of(files) / HUB_FOLDER, commit_message=f"dssl {VERSION}",
            allow_patterns=["config.json", "model.safetensors", CARD_FILE],
        )  # fmt: skip
    except Exception as error:  # whatever its version raises
        raise DsslError(
            f"{name} could not be uploaded ({one_line(error)}): log in with hf auth login, and check the name and the network"
        ) from None
    print(f"{api.endpoint}/{name}", f'encoder = dssl.load_encoder("hf:{name}")', sep="\n")
    return 0
