"""Distillation is an edge: a small encoder learns what a frozen teacher makes of the same views.

python examples/distillation.py --out runs/distilled                           # trains a teacher first: three minutes on a CPU
python examples/distillation.py --teacher runs/mine --out runs/distilled       # any run or file of weights that dssl reads

The same from the command line: dssl train shapes --graph "s1->teacher(s1), h1->teacher(s1)" --teacher runs/mine
"""

import argparse
from dataclasses import replace
from pathlib import Path

from dssl import recipe
from dssl.loop import Ending
from dssl.training.pretrain import train


def summary(result: Ending) -> str:
    accuracy = "" if result.knn is None else f", kNN {result.knn:.1f}%"  # where the data has labels and a test split
    return f"{result.verdict.status}{accuracy}: {result.checkpoint}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, help="the folder of a run, or a file of weights")
    parser.add_argument("--data", default="shapes")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/distilled"))
    options = parser.parse_args()

    teacher = options.teacher
    if teacher is None:
        teacher = options.out / "teacher"
        config = recipe("shapes", method="simclr", data=options.data, encoder="whitened", epochs=options.epochs)
        print(f"teacher: {summary(train(config, teacher))}")

    # the standard view and its heavy view learn what the teacher says of the standard one, which the heavy view never shows it
    student = replace(
        recipe("shapes", method="simclr", data=options.data, epochs=options.epochs),
        encoder="small",
        graph="s1->teacher(s1), h1->teacher(s1)",
        teacher=teacher,
    )
    print(f"student: {summary(train(student, options.out / 'student'))}")


if __name__ == "__main__":
    main()
