"""``python -m dssl``, which torchrun needs."""

from dssl.cli import entry

if __name__ == "__main__":
    entry()
