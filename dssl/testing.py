"""Does a loss mean the same on several processes? ``assert_same_on`` runs any loss on one and on several and compares gradients.

Under DDP every process computes the loss of its own rows, and gradients are averaged. A loss that compares rows with each other
has to gather those of all processes, and it is easy to get the gradient of that wrong without noticing: values stay right.
"""

import copy
import datetime
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dssl.errors import DsslError, one_line

Loss = Callable[..., Tensor]
"""From the embeddings of the views of a process's images, each rows x width, to a scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A loss on several processes next to the same loss on one process that has all rows."""

    problem: str
    """What is wrong, in a sentence; empty if nothing is."""
    value_ratio: float = 0.0
    """The mean value over the processes, as a multiple of the value on one."""
    factor: float = 0.0
    """The gradients that DDP would use, as a multiple of the right ones: the best fit."""
    deviation: float = 0.0
    """What no factor explains: the largest difference after the fit, as a share of the largest right gradient."""
    sees_other_rows: bool = False
    """Whether the value on a process depends on the rows of the others."""
    gradient_reaches_other_rows: bool = False
    """Whether a process's loss has a gradient for the rows of the others."""


def assert_same_on(
    loss: Loss,
    *,
    processes: int = 2,
    views: int = 2,
    rows: int = 8,
    width: int = 16,
    tolerance: float = 1e-4,
    timeout: float = 120,
) -> None:
    """Fail unless a loss on several processes has the value and the gradients of one process with the whole batch.

    ``loss`` is a function at the top of a module or an ``nn.Module``. It is called with ``views`` float32 tensors of ``rows`` x
    ``width`` on every process, and with ``processes`` times as many rows on one. Gradients are averaged over the processes, as
    DDP does; those of the loss's own parameters are compared, too. Random numbers have the same seed in every call.
    The processes are spawned: a script calls this under ``if __name__ == "__main__":``. They talk over gloo and loopback, on the
    CPU, and end after ``timeout`` seconds. The error says which mistake it is, if it is one of the usual.
    """
    [found] = compare_on(
        {"loss": loss}, processes=processes, views=views, rows=rows, width=width, tolerance=tolerance, timeout=timeout
    ).values()  # fmt: skip
    assert not found.problem, found.problem


def compare_on(
    losses: Mapping[str, Loss], *, processes: int = 2, views: int = 2, rows: int = 8, width: int = 16,
    tolerance: float = 1e-4, timeout: float = 120,
) -> dict[str, Comparison]:  # fmt: skip
    """What ``assert_same_on`` measures, for several losses in the same processes."""
    if processes < 2 or views < 1 or rows < 2 or width < 1:
        raise DsslError(
            f"processes is {processes}, views {views}, rows {rows}, width {width}: expected at least 2, 1, 2 and 1"
        )
    for name, loss in losses.items():
        try:
            pickle.dumps(loss)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DsslError(
                f"{name} cannot be sent to another process ({one_line(error)}): expected a function at the top of a module or an "
                "nn.Module"
            ) from None
    with tempfile.TemporaryDirectory() as folder:
        shape = (views, rows, width)
        _spawn((folder, dict(losses), shape, processes, timeout), processes=processes, timeout=timeout)
        files = [Path(folder, f"{rank}.pt") for rank in range(processes)]
        results = [torch.load(file, weights_only=True) for file in files]
    return {name: _judge([result[name] for result in results], tolerance) for name in losses}


def _spawn(arguments: tuple[Any, ...], *, processes: int, timeout: float) -> None:
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_work, args=(rank, *arguments)) for rank in range(processes)]
    deadline = time.monotonic() + timeout
    try:
        for child in children:
            child.start()
        for child in children:
            child.join(max(0, deadline - time.monotonic()))
        codes = [child.exitcode for child in children]
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
                child.join()
    if None in codes:
        raise AssertionError(f"process {codes.index(None)} had not ended after {timeout:.0f} s")
    if any(codes):
        raise AssertionError(f"the processes ended with the exit codes {codes}; what they said is above")


def _work(
    rank: int, folder: str, losses: Mapping[str, Loss], shape: tuple[int, int, int], size: int, timeout: float
) -> None:
    """One process: every loss in a group of its own, so that one that fails takes no other with it."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0] if loopback else "lo")
    torch.set_num_threads(1)
    results = {}
    for number, (name, loss) in enumerate(losses.items()):
        try:
            with _group(Path(folder, f"{number}"), rank, size, timeout):
                results[name] = _measure(loss, rank, shape, size)
            if rank == 0:
                with _group(Path(folder, f"{number}-alone"), 0, 1, timeout):
                    value, gradient, own = _call(loss, _batch(shape, size))
                    results[name] |= {"right_value": value, "right_gradient": gradient, "right_own": own}
        except Exception as error:  # of anybody's code: it is reported with its process
            results[name] = {"error": f"{type(error).__name__}: {one_line(error)}"}
    torch.save(results, Path(folder, f"{rank}.pt"))


@contextmanager
def _group(store: Path, rank: int, size: int, timeout: float) -> Iterator[None]:
    # half of the time: a process that waits for the others must say so before it is ended
    wait = datetime.timedelta(seconds=timeout / 2)
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=size, timeout=wait)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _batch(shape: tuple[int, int, int], size: int, *, seed: int = 0) -> Tensor:
    """Views of the same images: views x rows of all processes x width; they agree in part."""
    views, rows, width = shape
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(rows * size, width, generator=generator)
    return images + 0.5 * torch.randn(views, rows * size, width, generator=generator)


def _call(loss: Loss, embeddings: Tensor, *, weight: float = 1.0) -> tuple[float, Tensor, Tensor]:
    """Value, gradient of the embeddings and of the parameters; of a copy, because a loss may have a state."""
    loss = copy.deepcopy(loss)
    torch.manual_seed(0)
    views = [view.clone().requires_grad_() for view in embeddings]
    value = loss(*views)
    torch.autograd.backward(weight * value)
    parameters = list(loss.parameters()) if isinstance(loss, nn.Module) else []
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in (*views, *parameters)]
    own = torch.cat([torch.zeros(0), *(gradient.flatten() for gradient in gradients[len(views) :])])
    return float(value.detach()), torch.stack(gradients[: len(views)]), own


def _measure(loss: Loss, rank: int, shape: tuple[int, int, int], size: int) -> dict[str, Any]:
    mine = slice(rank * shape[1], (rank + 1) * shape[1])
    batch, other = _batch(shape, size), 2 * _batch(shape, size, seed=1) + 1  # far from what a mean over rows would hide
    value, gradient, own = _call(loss, batch[:, mine])
    _, cross, _ = _call(loss, batch[:, mine], weight=float(rank == 0))
    changed, _, _ = _call(loss, (batch if rank == 0 else other)[:, mine])
    return {"value": value, "gradient": gradient, "own": own, "cross": float(cross.abs().max()), "changed": changed}


def _judge(results: list[dict[str, Any]], tolerance: float) -> Comparison:
    size, first = len(results), results[0]
    errors = [f"process {rank}: {result['error']}" for rank, result in enumerate(results) if "error" in result]
    if errors:
        return Comparison(problem="; ".join(errors))
    value = sum(result["value"] for result in results) / size
    rows = torch.cat([result["gradient"] for result in results], dim=1) / size
    own = torch.stack([result["own"] for result in results]).mean(dim=0)
    given = torch.cat([rows.flatten(), own]).double()
    right = torch.cat([first["right_gradient"].flatten(), first["right_own"]]).double()
    largest = float(right.abs().max())
    factor = float(given @ right / (right @ right)) if largest else 0.0
    deviation = float((given - factor * right).abs().max()) / (largest or 1.0)
    reaches = max(result["cross"] for result in results[1:]) > tolerance * largest
    sees = abs(first["changed"] - first["value"]) > tolerance * abs(first["value"])
    ratio = value / first["right_value"] if first["right_value"] else float(value == 0)
    facts = {"value_ratio": ratio, "factor": factor, "deviation": deviation, "sees_other_rows": sees,
             "gradient_reaches_other_rows": reaches}  # fmt: skip
    wrong_gradient = abs(factor - 1) > tolerance or deviation > tolerance
    problem = ""
    if wrong_gradient or abs(ratio - 1) > tolerance:
        problem = _explain(Comparison(problem="", **facts), size, tolerance, wrong_gradient=wrong_gradient)
    return Comparison(problem=problem, **facts)


def _explain(found: Comparison, size: int, tolerance: float, *, wrong_gradient: bool) -> str:
    numbers = (
        f"on {size} processes the value is {found.value_ratio:.4g} times that of one process, and the gradient, averaged as "
        f"by DDP, {found.factor:.4g} times"
    )
    if not wrong_gradient:
        return f"{numbers}: only the value has another scale"
    if found.deviation > tolerance:
        numbers += f" with differences of up to {found.deviation:.1%} of the largest beyond that factor"
    if not found.sees_other_rows:
        return f"{numbers}: the loss does not see the rows of other processes, each has the loss of its own rows"
    if not found.gradient_reaches_other_rows:
        return f"{numbers}: no gradient goes through the gather or reduction: use one with a backward"
    if found.deviation <= tolerance:
        return f"{numbers}: a factor, so look for a division or multiplication by the number of processes, or a sum for a mean"
    return f"{numbers}: a part of the loss covers only each process's own rows, or its terms have different factors"
