"""Policies: a chain of steps, a step with a probability, or one of several, each decision drawn per image; their text form;
and custom operations: a numba kernel on planes, or any function on a uint8 array.

choice   = sequence | weight * sequence "|" weight * sequence ...
sequence = step ">" step ...
step     = policy, or policy?probability
policy   = name, name(number, ...), or (choice)
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dssl.augment import kernels as code
from dssl.augment.operations import COLOURLESS, OPERATIONS, Floats, Operation
from dssl.augment.primitives import (
    KINDS,
    AtMagnitude,
    Blur,
    Corruption,
    Crop,
    Flip,
    Jigsaw,
    Jitter,
    RandAugment,
    Resize,
    Script,
    Single,
    TrivialAugment,
    UniformAugment,
    check_number,
)
from dssl.errors import DsslError, choices
from dssl.text import number


@dataclass(frozen=True, slots=True)
class Chain:
    """One after the other."""

    steps: tuple["Policy", ...]

    def __post_init__(self) -> None:
        if len(self.steps) < 2:
            raise DsslError("a chain needs at least two policies")

    def write(self, script: Script) -> None:
        for policy in self.steps:
            policy.write(script)


@dataclass(frozen=True, slots=True)
class Maybe:
    """A policy that happens with a probability, drawn per image."""

    policy: "Policy"
    probability: float

    def __post_init__(self) -> None:
        check_number("a probability", self.probability, 0, 1)

    def write(self, script: Script) -> None:
        with script.only_if(code.GO_BELOW, slot=script.draws(1), number=self.probability):
            self.policy.write(script)


@dataclass(frozen=True, slots=True)
class Choose:
    """One of several policies, drawn per image with probability weight / sum of weights."""

    weights: tuple[float, ...]
    policies: tuple["Policy", ...]

    def __post_init__(self) -> None:
        if len(self.policies) < 2 or len(self.weights) != len(self.policies):
            raise DsslError("a choice needs at least two policies and as many weights")
        for weight in self.weights:
            check_number("a weight", weight, 0, 1e6)
        if not 0 < math.fsum(self.weights) < math.inf:
            raise DsslError("the weights of a choice are all zero; at least one must be positive")

    def write(self, script: Script) -> None:
        edges = np.cumsum(self.weights) / math.fsum(self.weights)
        edges[-1] = 1.0
        draw = script.draws(1)
        step, slot = script.step, script.slot  # which the alternatives share
        leaps, steps, slots = [], [], []
        for edge, policy in zip(edges.tolist(), self.policies, strict=True):  # the first edge above the draw is it
            script.step, script.slot = step, slot
            with script.only_if(code.GO_BELOW, slot=draw, number=edge):
                policy.write(script)
                leaps.append(script.add(code.GO))
            steps.append(script.step)
            slots.append(script.slot)
        script.step, script.slot = max(steps), max(slots)
        for leap in leaps:
            script.lead_here(leap)


Policy: TypeAlias = (
    Crop | Resize | Flip | Jitter | Blur | Jigsaw | Single | Corruption
    | RandAugment | UniformAugment | TrivialAugment | AtMagnitude
    | Chain | Maybe | Choose
)  # fmt: skip


def parts(policy: Policy) -> Iterator[Policy]:
    """A policy and all policies inside it."""
    yield policy
    match policy:
        case Chain():
            inside = policy.steps
        case Choose():
            inside = policy.policies
        case Maybe():
            inside = (policy.policy,)
        case _:
            inside = ()
    for part in inside:
        yield from parts(part)


Sizing: TypeAlias = Literal["first", "never", "unsure"]


def sizing(policy: Policy) -> Sizing:
    """Whether a policy begins by bringing any image to the size of the views."""
    if isinstance(policy, Crop | Resize):
        return "first"
    if isinstance(policy, Chain):
        kinds = [sizing(step) for step in policy.steps]
        return "first" if kinds[0] == "first" else ("never" if set(kinds) == {"never"} else "unsure")
    if isinstance(policy, Choose):
        kinds = [sizing(branch) for branch in policy.policies]
        return kinds[0] if len(set(kinds)) == 1 else "unsure"
    if isinstance(policy, Maybe):
        return "never" if sizing(policy.policy) == "never" else "unsure"
    return "never"


_COLOUR = (Crop(0.2, 1.0), Flip(0.5), Maybe(Jitter(0.4, 0.4, 0.4, 0.1), 0.8))
_GRAY = Maybe(Single("gray", 0), 0.2)
NAMED: dict[str, Policy] = {
    "resize": Resize(),
    "center": Resize(square=True),
    "standard": Chain((*_COLOUR, _GRAY, Maybe(Blur(0.1, 2.0), 0.5))),
    "standard-cifar": Chain((*_COLOUR, _GRAY)),
    "standard-ablation": Chain(_COLOUR),
    "standard-channels": Chain((*_COLOUR[:2], Maybe(Jitter(0.4, 0.4, 0.0, 0.0), 0.8), Maybe(Blur(0.1, 2.0), 0.5))),
    # what the student of a robust encoder sees: noise, blur, JPEG, less contrast, other light
    "corrupt": Choose((1.0,) * 5, (
        Single("noise", 0.04, 0.25), Single("soften", 0.8, 3.0), Single("jpeg", 8, 50), Single("contrast", 0.2, 0.8),
        Chain((Single("brightness", 0.3, 0.9), Single("add", -0.1, 0.3))),
    )),
}  # fmt: skip
"""Named policies; they print as their name."""

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf)(?![\w-])|(?P<name>[A-Za-z][\w-]*)|(?P<mark>[|>*?(),]))"
)

Argument = float | str
_STEPS: dict[str, type[Any]] = {
    "crop": Crop, "flip": Flip, "jitter": Jitter, "blur": Blur, "jigsaw": Jigsaw, "ra": RandAugment, "ua": UniformAugment,
    "ta": TrivialAugment, "op": AtMagnitude, "corruption": Corruption,
}  # fmt: skip
"""Steps by the name that they have in a text, with the fields of their class as arguments."""


class _Reader:
    """A recursive-descent parser over the tokens of one text."""

    def __init__(self, text: str, names: Mapping[str, Policy]) -> None:
        self.text = text
        self.names = names
        self.tokens: list[tuple[str, str]] = []
        self.place = 0
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None or match.lastgroup is None:
                raise self.wrong(f"{text[position:].strip()[0]!r} is unexpected here")
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            position = match.end()

    def wrong(self, why: str) -> DsslError:
        return DsslError(
            f"policy {self.text!r}: {why}; write it like 'crop(0.2,1) > flip > 0.9*ra(2,5) | 0.1*jigsaw(4)'"
        )

    def next(self, kind: str, text: str | None = None) -> str | None:
        """Take the next token if it is of this kind (and text)."""
        if self.place < len(self.tokens):
            token, value = self.tokens[self.place]
            if token == kind and text in (None, value):
                self.place += 1
                return value
        return None

    @property
    def here(self) -> str:
        """The next token, for messages."""
        return self.tokens[self.place][1] if self.place < len(self.tokens) else "the end"

    def expect(self, mark: str) -> None:
        if self.next("mark", mark) is None:
            raise self.wrong(f"expected {mark!r}, found {self.here!r}")

    def choice(self) -> Policy:
        weights: list[float | None] = []
        policies: list[Policy] = []
        while True:
            number = self.next("number")
            if number is not None:
                self.expect("*")
            weights.append(None if number is None else float(number))
            policies.append(self.sequence())
            if self.next("mark", "|") is None:
                break
        if len(policies) == 1:
            if weights[0] is not None:
                raise self.wrong(f"the weight {weights[0]:g} has no alternative; add '| ...' or use '?{weights[0]:g}'")
            return policies[0]
        given = [weight for weight in weights if weight is not None]
        if given and len(given) != len(weights):
            raise self.wrong("every alternative needs a weight, or none")
        return Choose(tuple(given) if given else (1.0,) * len(policies), tuple(policies))

    def sequence(self) -> Policy:
        steps = [self.step()]
        while self.next("mark", ">") is not None:
            steps.append(self.step())
        return steps[0] if len(steps) == 1 else Chain(tuple(steps))

    def step(self) -> Policy:
        if self.next("mark", "(") is not None:
            policy = self.choice()
            self.expect(")")
        else:
            policy = self.named()
        while self.next("mark", "?") is not None:
            number = self.next("number")
            if number is None:
                raise self.wrong("expected a probability after '?'")
            policy = Maybe(policy, float(number))
        return policy

    def named(self) -> Policy:
        name = self.next("name")
        if name is None:
            raise self.wrong(f"expected a policy, found {self.here!r}")
        if name not in self.names and name not in _STEPS and name not in OPERATIONS:
            raise choices("policy", name, [*self.names, *_STEPS, *OPERATIONS])
        fields = dataclasses.fields(_STEPS[name]) if name in _STEPS else ()
        types = (field.type for field in fields)
        arguments: list[Argument] = []
        if self.next("mark", "(") is not None and self.next("mark", ")") is None:
            while True:
                arguments.append(self.argument(name, len(arguments) + 1, next(types, float)))
                if self.next("mark", ",") is None:
                    break
            self.expect(")")
        if name in self.names:
            if arguments:
                raise self.wrong(f"{name} takes no arguments")
            return self.names[name]
        make: Callable[..., Policy] = _STEPS.get(name, partial(Single, name))
        fewest, most = sum(field.default is dataclasses.MISSING for field in fields), len(fields)
        default: list[Argument] = []
        if name not in _STEPS:
            operation = OPERATIONS[name]
            fewest, most = int(operation.default is None), 2 * int(operation.unit != "")
            default = [] if operation.default is None else [operation.default]
        if not fewest <= len(arguments) <= most:
            expected = str(most) if fewest == most else f"{fewest} to {most}"
            raise self.wrong(f"{name} takes {expected} arguments, not {len(arguments)}")
        try:
            return make(*(arguments or default))
        except DsslError as error:
            raise DsslError(f"policy {self.text!r}: {error}") from None

    def argument(self, name: str, number: int, type_: Any) -> Argument:
        kind = "name" if type_ is str else "number"
        value = self.next(kind)
        if value is None:
            raise self.wrong(f"argument {number} of {name} must be a {kind}, not {self.here!r}")
        if type_ is str:
            return value
        if type_ is int and not float(value).is_integer():  # NaN and infinity are none
            raise self.wrong(f"argument {number} of {name} must be a whole number, not {value}")
        return int(float(value)) if type_ is int else float(value)


def parse(text: str, *, names: Mapping[str, Policy] | None = None) -> Policy:
    """The policy that a text describes; ``names`` adds names or redefines them."""
    if not isinstance(text, str) or not text.strip():
        raise DsslError(f"a policy is a string such as 'standard' or 'ra(2,5)', not {text!r}")
    reader = _Reader(text, {**NAMED, **(names or {})})
    policy = reader.choice()
    if reader.place < len(reader.tokens):
        raise reader.wrong(f"{reader.here!r} is unexpected")
    return policy


def meanings_of(policies: Mapping[str, str]) -> dict[str, Policy]:
    """What the symbolic names of a graph mean in a run, of whose standard policy the others may be made."""
    standard = {"standard": parse(policies["standard"])}
    return {name: parse(text, names=standard) for name, text in policies.items()} | standard


def show(policy: Policy) -> str:
    """The shortest text that parses to this policy."""
    for name, named in NAMED.items():
        if policy == named:
            return name
    match policy:
        case Choose():
            branches = zip(policy.weights, policy.policies, strict=True)
            return " | ".join(f"{number(weight)}*{_wrapped(branch, Choose)}" for weight, branch in branches)
        case Chain():
            return " > ".join(_wrapped(step, Choose, Chain) for step in policy.steps)
        case Maybe():
            return f"{_wrapped(policy.policy, Choose, Chain)}?{number(policy.probability)}"
        case Single():
            name = policy.operation
            arguments: list[float | str] = [policy.value] if policy.high is None else [policy.value, policy.high]
            defaults: list[object] = [OPERATIONS[name].default, None]
        case _:
            name = next(name for name, kind in _STEPS.items() if kind is type(policy))
            arguments = [*dataclasses.astuple(policy)]
            in_full = isinstance(policy, Crop | Jitter | Blur)  # numbers that readers should not have to know
            defaults = [None if in_full else field.default for field in dataclasses.fields(policy)]
    while arguments and arguments[-1] == defaults[len(arguments) - 1]:
        arguments.pop()
    written = [argument if isinstance(argument, str) else number(argument) for argument in arguments]
    return f"{name}({','.join(written)})" if written else name


def _wrapped(policy: Policy, *kinds: type) -> str:
    """In parentheses where it would otherwise read as part of what surrounds it."""
    text = show(policy)
    return f"({text})" if isinstance(policy, kinds) and policy not in NAMED.values() else text


_NOTHING = Single("identity", 0)


def check_channels(policy: Policy, channels: int) -> None:
    """Refuse a policy that needs red, green and blue for images of other channels, and name the one to use instead."""
    if channels in (1, 3):
        return
    for part in parts(policy):
        if not isinstance(part, Chain | Choose | Maybe) and without_colour(part) != part:
            raise DsslError(
                f"policy {show(policy)!r} uses {show(part)}, which needs colour, and the images have {channels} channels: "
                f"use {show(without_colour(policy))!r}"
            )


def without_colour(policy: Policy) -> Policy:
    """The policy without the operations that need red, green and blue."""
    match policy:
        case Chain():
            steps = [(step, without_colour(step)) for step in policy.steps]
            rest = [new for old, new in steps if new != _NOTHING or old == _NOTHING]
            return Chain(tuple(rest)) if len(rest) > 1 else rest[0] if rest else _NOTHING
        case Choose():
            return dataclasses.replace(policy, policies=tuple(map(without_colour, policy.policies)))
        case Maybe():
            inside = without_colour(policy.policy)
            return _NOTHING if inside == _NOTHING != policy.policy else dataclasses.replace(policy, policy=inside)
        case Jitter():
            return dataclasses.replace(policy, saturation=0.0, hue=0.0)
        case RandAugment() | UniformAugment() | TrivialAugment():
            return dataclasses.replace(policy, table=COLOURLESS.get(policy.table, policy.table))
        case Single() | AtMagnitude():
            return _NOTHING if OPERATIONS[policy.operation].needs_colour else policy
        case Corruption():
            return _NOTHING if KINDS[policy.kind].needs_colour else policy
        case _:
            return policy


Planes = NDArray[np.uint8]
Runner = Callable[[Planes, Planes, float, float, float], None]

_runners: list[Runner] = []


def _add(name: str, runner: Runner, *, low: float, high: float, default: float | None) -> None:
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise DsslError(f"operation name {name!r}: expected letters, digits, '-' and '_', starting with a letter")
    if name in {*OPERATIONS, *_STEPS, *NAMED, "heavy"}:
        raise DsslError(f"an operation or policy named {name!r} already exists; choose another name")
    unit, number = "value" if default is None else "", len(_runners)
    OPERATIONS[name] = Operation(name, code.CUSTOM, code.NUMBERED, unit, low, high, default=default, number=number)
    _runners.append(runner)


def add_kernel(name: str, kernel: Any, *, low: float, high: float) -> None:
    """Makes ``kernel(source, target, value, draw, other_draw)`` a policy: ``name(value)``.

    ``source`` and ``target`` are uint8, channels x height x width, C-contiguous; the kernel fills the target. The draws
    are random numbers in [0, 1), the same whenever this image, epoch, view and seed meet again. Compile it with
    ``numba.njit(nogil=True, cache=True)`` so that threads run it side by side.
    """
    if not low <= high:
        raise DsslError(f"the values of operation {name!r} run from {low:g} to {high:g}; the first must be the smaller")
    _add(name, kernel, low=low, high=high, default=None)


def add_function(name: str, function: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]) -> None:
    """Makes any function from image to image (uint8, height x width x channels) a policy: ``name``.

    It is called by several threads at once. What it draws by itself is not repeated with the seed.
    """

    def runner(source: Planes, target: Planes, value: float, draw: float, other_draw: float) -> None:
        image = np.ascontiguousarray(source.transpose(1, 2, 0))
        result = np.asarray(function(image))
        if result.dtype != np.uint8 or result.shape != image.shape:
            raise DsslError(
                f"operation {name!r} returned {result.dtype} of shape {result.shape}; "
                f"it must return uint8 of shape {image.shape}"
            )
        target[:] = result.transpose(2, 0, 1)

    _add(name, runner, low=0, high=0, default=0)


def run_custom(numbers: Floats, source: Planes, target: Planes) -> None:
    """Run the operation that the numbers of a plan select."""
    runner = _runners[int(numbers[0])]
    runner(source, target, float(numbers[1]), float(numbers[2]), float(numbers[3]))
