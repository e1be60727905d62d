"""The training loop and what it stands on: ``from dssl.train import train``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dssl.train.pretrain import RunResult, train

__all__ = ["RunResult", "train"]


def __getattr__(name: str) -> object:
    """The loop imports everything there is; those who want only checkpoints or schedules need not wait for it."""
    if name in __all__:
        from dssl.train import pretrain

        return getattr(pretrain, name)
    raise AttributeError(f"module 'dssl.train' has no attribute {name!r}")
