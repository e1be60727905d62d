"""Whether an installed dssl has everything that it needs: ``make dist`` runs this outside of the repository.

It must be run by the interpreter of the environment in which the wheel is installed.
"""

import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = str(Path(sys.executable).with_name("dssl"))
PARTS = ("py.typed", "report/templates/base.html", "report/templates/style.css", "augment/kernels/program.py")


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent


def run(*words: str, cwd: Path) -> str:
    return subprocess.run([COMMAND, *words], cwd=cwd, check=True, capture_output=True, text=True).stdout


def main() -> None:
    home = package("dssl")
    assert "site-packages" in home.parts, f"{home} is a checkout: run this with an installed dssl"
    missing = [part for part in PARTS if not (home / part).is_file()]
    assert not missing, f"the wheel lacks {missing}"
    package("dssl_coco")
    assert (package("dssl_reproduce") / "paper.toml").is_file()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(run("--version", cwd=folder).strip())
        run("graph", "dssl", cwd=folder)
        settings = [
            "--data",
            "shapes:64",
            "--batch-size",
            "16",
            "--epochs",
            "1",
            "--knn-every",
            "0",
            "--precision",
            "fp32",
        ]
        run("train", "shapes", *settings, "--out", "run", cwd=folder)  # compiles the kernels
        run("report", "run", "--out", "report.html", cwd=folder)  # needs the templates
        run("reproduce", "table2", "--plan", cwd=folder)
        print("a run, its report and a plan of the paper's table: done")
        demo = subprocess.Popen(
            [COMMAND, "demo", "--out", "demo"], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        while demo.poll() is None and not list(folder.glob("demo/**/metrics.jsonl")):
            time.sleep(0.2)
        demo.send_signal(signal.SIGTERM)
        _, said = demo.communicate()
        assert demo.returncode == 128 + signal.SIGTERM, said.decode()
        print("the demo trains, and a signal stops it")


if __name__ == "__main__":
    main()
