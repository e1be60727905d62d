"""The text form of a policy: ``parse`` and ``show`` are inverse.

choice   = sequence | weight * sequence "|" weight * sequence ...
sequence = step ">" step ...
step     = policy, or policy?probability
policy   = name, name(number, ...), or (choice)
"""

import re
from collections.abc import Callable, Mapping
from functools import partial

from dssl.augment.kinds import Corruption
from dssl.augment.operations import OPERATIONS
from dssl.augment.policy import Chain, Choose, Maybe, Policy
from dssl.augment.primitives import Blur, Crop, Flip, Jigsaw, Jitter, Resize, Single
from dssl.augment.randaugment import AtMagnitude, RandAugment, TrivialAugment, UniformAugment
from dssl.errors import DsslError, choices
from dssl.text import number

_COLOUR = (Crop(0.2, 1.0), Flip(0.5), Maybe(Jitter(0.4, 0.4, 0.4, 0.1), 0.8))
_GRAY = Maybe(Single("gray", 0), 0.2)
NAMED: dict[str, Policy] = {
    "standard": Chain((*_COLOUR, _GRAY, Maybe(Blur(0.1, 2.0), 0.5))),
    "standard-cifar": Chain((*_COLOUR, _GRAY)),
    "standard-ablation": Chain(_COLOUR),
    "standard-channels": Chain((*_COLOUR[:2], Maybe(Jitter(0.4, 0.4, 0.0, 0.0), 0.8), Maybe(Blur(0.1, 2.0), 0.5))),
    # what the student of a robust encoder sees: noise, blur, JPEG, less contrast, other light
    "corrupt": Choose(
        (1.0,) * 5,
        (
            Single("noise", 0.04, 0.25),
            Single("soften", 0.8, 3.0),
            Single("jpeg", 8, 50),
            Single("contrast", 0.2, 0.8),
            Chain((Single("brightness", 0.3, 0.9), Single("add", -0.1, 0.3))),
        ),
    ),
}
"""Named policies; they print as their name."""

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf)(?![\w-])|(?P<name>[A-Za-z][\w-]*)|(?P<mark>[|>*?(),]))"
)

Argument = float | str
_MAKERS: dict[str, tuple[int, int, Callable[..., Policy]]] = {
    # name: fewest and most arguments, and what makes the policy
    "crop": (0, 2, Crop),
    "resize": (0, 0, lambda: Resize(False)),
    "center": (0, 0, lambda: Resize(True)),
    "flip": (0, 1, Flip),
    "jitter": (0, 4, Jitter),
    "blur": (0, 2, Blur),
    "jigsaw": (1, 1, lambda tiles: Jigsaw(_whole("jigsaw", tiles))),
    "ra": (2, 3, lambda count, *rest: RandAugment(_whole("ra", count), *rest)),
    "ua": (0, 2, lambda count=2, *rest: UniformAugment(_whole("ua", count), *rest)),
    "ta": (0, 1, TrivialAugment),
    "op": (2, 3, AtMagnitude),
    "corruption": (2, 2, lambda kind, severity: Corruption(kind, _whole("corruption", severity))),
}
RESERVED = frozenset({*_MAKERS, *NAMED, "heavy"})
"""Names that a custom operation cannot have."""

_TEXT_ARGUMENTS = {("ra", 2), ("ua", 1), ("ta", 0), ("op", 0), ("op", 2), ("corruption", 0)}


def _whole(name: str, number: float) -> int:
    if number != number or number in (float("inf"), float("-inf")) or number != int(number):
        raise DsslError(f"the number of {name} is {number:g}; it must be a whole number")
    return int(number)


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
                raise self.wrong(f"{text[position:].strip()[0]!r} means nothing here")
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            position = match.end()

    def wrong(self, why: str) -> DsslError:
        return DsslError(
            f"policy {self.text!r}: {why}; write it like 'crop(0.2,1) > flip > 0.9*ra(2,5) | 0.1*jigsaw(4)'"
        )

    def next(self, kind: str, text: str | None = None) -> str | None:
        """Take the next token if it is of this kind (and text)."""
        if self.place < len(self.tokens):
            found, value = self.tokens[self.place]
            if found == kind and text in (None, value):
                self.place += 1
                return value
        return None

    def expect(self, mark: str) -> None:
        if self.next("mark", mark) is None:
            found = self.tokens[self.place][1] if self.place < len(self.tokens) else "the end"
            raise self.wrong(f"expected {mark!r}, found {found!r}")

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
            found = self.tokens[self.place][1] if self.place < len(self.tokens) else "the end"
            raise self.wrong(f"expected a policy, found {found!r}")
        if name not in self.names and name not in _MAKERS and name not in OPERATIONS:
            raise choices("policy", name, [*self.names, *_MAKERS, *OPERATIONS])
        arguments: list[Argument] = []
        if self.next("mark", "(") is not None and self.next("mark", ")") is None:
            while True:
                arguments.append(self.argument(name, len(arguments)))
                if self.next("mark", ",") is None:
                    break
            self.expect(")")
        if name in self.names:
            if arguments:
                raise self.wrong(f"{name} takes no arguments")
            return self.names[name]
        default: list[Argument] = []
        if name in _MAKERS:
            fewest, most, make = _MAKERS[name]
        else:
            known = OPERATIONS[name]
            fewest, most, make = int(known.default is None), 2 * int(known.unit != ""), partial(Single, name)
            default = [] if known.default is None else [known.default]
        if not fewest <= len(arguments) <= most:
            expected = str(most) if fewest == most else f"{fewest} to {most}"
            raise self.wrong(f"{name} takes {expected} arguments, not {len(arguments)}")
        return make(*(arguments or default))

    def argument(self, name: str, position: int) -> Argument:
        kind = "name" if (name, position) in _TEXT_ARGUMENTS else "number"
        value = self.next(kind)
        if value is None:
            found = self.tokens[self.place][1] if self.place < len(self.tokens) else "the end"
            raise self.wrong(f"argument {position + 1} of {name} must be a {kind}, not {found!r}")
        return value if kind == "name" else float(value)


def parse(text: str, *, names: Mapping[str, Policy] | None = None) -> Policy:
    """The policy that a text describes; ``names`` adds names or redefines them."""
    if not isinstance(text, str) or not text.strip():
        raise DsslError(f"a policy is a string such as 'standard' or 'ra(2,5)', not {text!r}")
    reader = _Reader(text, {**NAMED, **(names or {})})
    policy = reader.choice()
    if reader.place < len(reader.tokens):
        raise reader.wrong(f"{reader.tokens[reader.place][1]!r} is unexpected")
    return policy


def meanings_of(policies: Mapping[str, str]) -> dict[str, Policy]:
    """What the symbolic names of a graph mean in a run, of whose standard policy the others may be made."""
    standard = {"standard": parse(policies["standard"])}
    return {name: parse(text, names=standard) for name, text in policies.items()} | standard


def _call(name: str, *arguments: float | str) -> str:
    written = [argument if isinstance(argument, str) else number(argument) for argument in arguments]
    return f"{name}({','.join(written)})" if written else name


def show(policy: Policy) -> str:
    """The shortest text that parses to this policy."""
    for name, named in NAMED.items():
        if policy == named:
            return name
    match policy:
        case Choose():
            parts = zip(policy.weights, policy.policies, strict=True)
            return " | ".join(f"{number(weight)}*{_wrapped(part, Choose)}" for weight, part in parts)
        case Chain():
            return " > ".join(_wrapped(step, Choose, Chain) for step in policy.steps)
        case Maybe():
            return f"{_wrapped(policy.policy, Choose, Chain)}?{number(policy.probability)}"
        case Crop():
            return _call("crop", policy.low, policy.high)
        case Resize():
            return "center" if policy.square else "resize"
        case Flip():
            return "flip" if policy == Flip() else _call("flip", policy.probability)
        case Jitter():
            return _call("jitter", policy.brightness, policy.contrast, policy.saturation, policy.hue)
        case Blur():
            return _call("blur", policy.low, policy.high)
        case Jigsaw():
            return _call("jigsaw", policy.tiles)
        case RandAugment():
            table = () if policy.table == "dssl16" else (policy.table,)
            return _call("ra", policy.count, policy.magnitude, *table)
        case UniformAugment():
            default = UniformAugment()
            if policy.table != default.table:
                return _call("ua", policy.count, policy.table)
            return "ua" if policy == default else _call("ua", policy.count)
        case TrivialAugment():
            return "ta" if policy == TrivialAugment() else _call("ta", policy.table)
        case AtMagnitude():
            table = () if policy.table == "dssl16" else (policy.table,)
            return _call("op", policy.operation, policy.magnitude, *table)
        case Single():
            plain = policy.value == OPERATIONS[policy.operation].default
            values = (policy.value,) if policy.high is None else (policy.value, policy.high)
            return policy.operation if plain and policy.high is None else _call(policy.operation, *values)
        case Corruption():
            return _call("corruption", policy.kind, policy.severity)


def _wrapped(policy: Policy, *kinds: type) -> str:
    """In parentheses where it would otherwise read as part of what surrounds it."""
    text = show(policy)
    return f"({text})" if isinstance(policy, kinds) and policy not in NAMED.values() else text
