"""Where a run's numbers go besides metrics.jsonl: TensorBoard, and the trackers of ``--log``, each fed by a thread of its own."""

import importlib.util
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Full, Queue
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from tqdm import tqdm

from dssl import config_io
from dssl.errors import DsslError, choices, one_line
from dssl.files import read_table, write_text
from dssl.run import RunFolder

logger = logging.getLogger("dssl")
_QUEUED = 1000
"""Calls that wait for a tracker that is slow; later ones are dropped."""


class Tracker:
    """A place for a run's curves: derive from this class, and make it known with ``register_tracker``.

    All methods are called by one thread, which is not the run's: they may take their time, and what they raise is a warning.
    """

    package: str = ""
    """The package that it needs, which is also the name of dssl's extra."""
    wait: float = 20.0
    """Seconds that the end of a run waits until the tracker has everything."""
    address: str = ""
    """Where a person finds the run: a URL or a command. ``start`` may set it."""

    def start(self, run: Path, *, run_id: str | None, parameters: Mapping[str, Any]) -> str:
        """Begin to track the run in this folder, or continue with ``run_id``; returns the id to continue with later.

        Args:
            run: The run's folder; files of the tracker's own belong in ``run / "trackers"``.
            run_id: What an earlier call returned; None for a new run.
            parameters: The run's settings by dotted name.
        """
        raise NotImplementedError

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Points of curves; no curve gets two points at the same step, or one before its last.

        Args:
            values: By the name of the curve.
            step: Counted from 1.
        """

    def picture(self, name: str, pixels: NDArray[np.uint8]) -> None:
        """A picture, such as the views of the first images.

        Args:
            name: Such as ``views``.
            pixels: Height x width x 3.
        """

    def summary(self, values: Mapping[str, float | str], step: int) -> None:
        """What holds for the whole run after this step; replaces earlier values.

        Args:
            values: The verdict, the numbers of ``dssl evaluate``.
            step: Counted from 1.
        """

    def close(self) -> None:
        """The process ends; the run may be continued by another one."""


class Board(Tracker):
    """TensorBoard's event file: scalars and pictures by step.

    torch's SummaryWriter writes in a thread that dies with a traceback when the disk is full or gone, and raises from then on.
    This one writes in the caller's thread: a failing disk is reported once and costs the curves, never the run.
    """

    def __init__(self, folder: Path, *, purge_step: int) -> None:
        """``purge_step`` tells TensorBoard to forget what an earlier start wrote at and after this step."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._writer = Event, Summary, RecordWriter
        self._file: BinaryIO | None = None
        with self._reporting():
            folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
            self._file = (folder / name).open("wb")
        self._write(file_version="brain.Event:2")
        self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        entries = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary(value=entries))

    def picture(self, name: str, pixels: NDArray[np.uint8]) -> None:
        from torch.utils.tensorboard.summary import image

        self._write(step=0, summary=image(name, pixels, dataformats="HWC"))

    def close(self) -> None:
        if self._file is not None:
            with self._reporting():
                self._file.close()

    def _write(self, **content: Any) -> None:
        if self._file is not None:
            with self._reporting():
                self._writer(self._file).write(self._event(wall_time=time.time(), **content).SerializeToString())
                self._file.flush()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            file, self._file = self._file, None
            if file is not None:
                with suppress(OSError):  # what is left in the buffer fails again
                    file.close()
            logger.warning(
                f"TensorBoard's curves can no longer be written ({error.strerror}); metrics.jsonl has all of them"
            )


class Wandb(Tracker):
    """Weights & Biases; without a login, or with WANDB_MODE=offline, the run is kept for ``wandb sync``."""

    package = "wandb"

    def start(self, run: Path, *, run_id: str | None, parameters: Mapping[str, Any]) -> str:
        # seconds until its file has a point, 15 by default; what is in no file is lost with a kill
        os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "1")
        import wandb

        # it would ask for a key in the middle of the run
        offline = "WANDB_MODE" not in os.environ and wandb.run is None and not wandb.login(prompt=False)
        # the process ends only when its own hook has waited that long
        settings = wandb.Settings(
            console="off", silent=True, reinit="create_new", init_timeout=self.wait, finish_timeout=self.wait
        )
        self._image = wandb.Image
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dssl"), name=run.resolve().name, id=run_id, resume="allow",
            dir=RunFolder(run).trackers, mode="offline" if offline else None, config=dict(parameters), settings=settings,
        )  # fmt: skip
        self.address = f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else str(self._run.url)
        return str(self._run.id)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, name: str, pixels: NDArray[np.uint8]) -> None:
        self._run.log({name: self._image(pixels)}, commit=False)  # else the row of this step would be closed

    def summary(self, values: Mapping[str, float | str], step: int) -> None:
        self._run.summary.update(dict(values))

    def close(self) -> None:
        self._run.finish()


class Mlflow(Tracker):
    """MLflow at MLFLOW_TRACKING_URI, or in a database in the run's folder."""

    package = "mlflow"

    def start(self, run: Path, *, run_id: str | None, parameters: Mapping[str, Any]) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # it tells of every table of a new database
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        folder, given = RunFolder(run).trackers.resolve(), os.environ.get("MLFLOW_TRACKING_URI")
        place = given or f"sqlite:///{folder / 'mlflow.db'}"
        self.address = given.rpartition("@")[2] if given else f"mlflow ui --backend-store-uri {place}"  # no password
        self._client, self._metric = MlflowClient(place), Metric
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._id = run_id
            return run_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "dssl")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(
            name, artifact_location=None if given else (folder / "mlflow").as_uri()
        )  # fmt: skip
        self._id = str(self._client.create_run(number, run_name=run.resolve().name).info.run_id)
        # only once: a parameter that another start may change, such as the threads, would be refused
        self._client.log_batch(self._id, params=[Param(name, str(value)) for name, value in parameters.items()])
        return self._id

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        names = {name: re.sub(r"[^\w./: -]", "_", name.replace("->", " to ")) for name in values}  # all that it takes
        metrics = [self._metric(names[name], value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def picture(self, name: str, pixels: NDArray[np.uint8]) -> None:
        self._client.log_image(self._id, pixels, f"{name}.png")

    def summary(self, values: Mapping[str, float | str], step: int) -> None:
        known = self._client.get_run(self._id).data.metrics
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        self.scalars({name: value for name, value in numbers.items() if known.get(name) != value}, step)
        for name, value in values.items():
            if isinstance(value, str):
                self._client.set_tag(self._id, name, value)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio(Tracker):
    """Trackio, in its local database, or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says."""

    package = "trackio"

    def start(self, run: Path, *, run_id: str | None, parameters: Mapping[str, Any]) -> str:
        import trackio

        run_id = run_id or f"{run.resolve().name}-{uuid.uuid4().hex[:8]}"  # it finds runs by their names
        self._image, self._text = trackio.Image, trackio.Markdown
        self._run = trackio.init(
            os.environ.get("TRACKIO_PROJECT", "dssl"), name=run_id, resume="allow", config=dict(parameters), embed=False,
            auto_log_cpu=False, auto_log_gpu=False,
        )  # fmt: skip
        return run_id

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, name: str, pixels: NDArray[np.uint8]) -> None:
        self._run.log({name: self._image(pixels)}, step=0)

    def summary(self, values: Mapping[str, float | str], step: int) -> None:
        shown = {name: self._text(value) if isinstance(value, str) else value for name, value in values.items()}
        self._run.log(shown, step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}


def register_tracker(name: str, tracker: type[Tracker]) -> None:
    """Make ``--log NAME`` track runs with a class of your own.

    Args:
        name: A word that is not in use.
        tracker: A class that derives from ``Tracker`` and is created without arguments.
    """
    if not name.isidentifier() or name in TRACKERS:
        raise DsslError(f"a tracker {name!r} cannot be registered: expected a word that is not taken")
    TRACKERS[name] = tracker


def check_trackers(names: Iterable[str]) -> None:
    """An error if one of them does not exist or is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise choices("tracker", name, TRACKERS)
        package = TRACKERS[name].package
        if package and importlib.util.find_spec(package) is None:
            raise DsslError(f"--log {name} needs {package}: pip install 'dssl[{package}]', or leave it out")


class Background(Tracker):
    """A tracker behind a queue and a daemon thread: one that is slow, hangs or fails costs its own curves and none of the run.

    The run's folder keeps the tracker's id and the last step of each of its curves, which is written before the tracker gets the
    point. A run that was killed repeats steps, whose numbers are the same: they go only to curves that do not have them yet.
    """

    def __init__(self, name: str, folder: RunFolder, *, parameters: Mapping[str, Any]) -> None:
        self._name, self._folder, self._parameters = name, folder, parameters
        self._tracker = TRACKERS[name]()
        self._file = folder.trackers / f"{name}.json"
        self._kept = read_table(self._file)
        self._warned = False
        self._calls: Queue[Callable[[], None] | None] = Queue(_QUEUED)
        if not self._kept and folder.views_file.is_file():  # a run that began without this tracker
            with Pillow.open(folder.views_file) as picture:
                self.picture("views", np.asarray(picture.convert("RGB")))
        self._thread = threading.Thread(target=self._work, name=f"dssl-{name}", daemon=True)
        self._thread.start()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._put(lambda: self._scalars(values, step))

    def picture(self, name: str, pixels: NDArray[np.uint8]) -> None:
        self._put(lambda: self._tracker.picture(name, pixels))

    def summary(self, values: Mapping[str, float | str], step: int) -> None:
        self._put(lambda: self._tracker.summary(values, step))

    def close(self) -> None:
        """Wait for the tracker, but not longer than it may take."""
        until = time.monotonic() + self._tracker.wait
        if self._thread.is_alive():
            with suppress(Full):
                self._calls.put(None, timeout=self._tracker.wait)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"it does not answer after {self._tracker.wait:g} s")

    def _put(self, call: Callable[[], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except Full:
            self._warn(f"{_QUEUED} calls wait for it")

    def _work(self) -> None:
        try:
            self._folder.trackers.mkdir(parents=True, exist_ok=True)
            run_id = self._tracker.start(self._folder.path, run_id=self._kept.get("id"), parameters=self._parameters)
            self._keep(id=run_id, active=True)
            if self._tracker.address:
                self._say(logging.INFO, self._tracker.address)
            for call in iter(self._calls.get, None):
                try:
                    call()
                except Exception as error:  # the next one may succeed
                    self._warn(one_line(error))
            self._tracker.close()
        except Exception as error:  # whatever another program raises
            self._warn(one_line(error))

    def _scalars(self, values: Mapping[str, float], step: int) -> None:
        steps: dict[str, int] = self._kept.get("steps", {})
        if new := {name: value for name, value in values.items() if steps.get(name, -1) < step}:
            self._keep(steps=steps | dict.fromkeys(new, step))
            self._tracker.scalars(new, step)

    def _keep(self, **entries: Any) -> None:
        self._kept |= entries
        write_text(self._file, json.dumps(self._kept) + "\n")

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            self._say(logging.WARNING, f"{problem}; the run goes on without it, and metrics.jsonl has all numbers")

    def _say(self, level: int, text: str) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            logger.log(level, f"{self._name}: {text}")


def trackers_of(folder: RunFolder) -> tuple[str, ...]:
    """Those that the run has been given to, and that were not dropped since."""
    return tuple(file.stem for file in sorted(folder.trackers.glob("*.json")) if read_table(file).get("active"))


def start_trackers(names: Sequence[str], folder: RunFolder, *, parameters: Mapping[str, Any]) -> list[Tracker]:
    """Start or continue these, and drop all others that the run had."""
    for name in set(trackers_of(folder)) - set(names):
        file = folder.trackers / f"{name}.json"
        write_text(file, json.dumps(read_table(file) | {"active": False}) + "\n")
    return [Background(name, folder, parameters=parameters) for name in dict.fromkeys(names)]


def add_to_summary(folder: RunFolder, values: Mapping[str, float | str], *, step: int) -> None:
    """Give the trackers of a run what was measured after it; one that cannot be had is a warning."""
    names = []
    for name in trackers_of(folder):
        try:
            check_trackers([name])
            names.append(name)
        except DsslError as error:
            logger.warning(f"{error}; these numbers are not in it")
    parameters = config_io.flat(folder.read_config()["config"]) if names else {}
    trackers = [Background(name, folder, parameters=parameters) for name in names]
    for tracker in trackers:
        tracker.summary(values, step)
    for tracker in trackers:
        tracker.close()
