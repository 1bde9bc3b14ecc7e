"""How methods are told apart: eight hues that colour-blind readers can separate, each with a dash of its own."""

from __future__ import annotations

#: After Okabe and Ito, darkened (light page) or lightened (dark page) to a contrast of at least 3 : 1.
LIGHT = ("#0062a3", "#c44f00", "#007a59", "#a8457c", "#9a6b00", "#1f86c2", "#5b5bb8", "#5c5c5c")
DARK = ("#5cb8f2", "#ff8a4d", "#3ecf9f", "#e693bd", "#edb02b", "#8fd0ff", "#a9a9ff", "#c4c4c4")
#: Background and text of the two schemes.
PAPER = {"light": "#ffffff", "dark": "#14171c"}
INK = {"light": "#1b1f24", "dark": "#e7eaee"}

DASHES = (None, "6 3", "2 2.5", "9 3 2 3", "12 4", "4 2 1 2 1 2", "1 3", "8 2 3 2")


def hue(index: int) -> str:
    """The class of the style sheet that colours method number ``index``."""
    return f"m{index % len(LIGHT)}"


def dash(index: int) -> str | None:
    """Methods that share a hue, eight apart, differ in their dash."""
    return DASHES[(index + index // len(LIGHT)) % len(DASHES)]


def variables(scheme: str) -> str:
    hues = LIGHT if scheme == "light" else DARK
    named = {"paper": PAPER[scheme], "ink": INK[scheme]} | {f"m{i}": value for i, value in enumerate(hues)}
    return "".join(f"--{name}:{value};" for name, value in named.items())


def classes() -> str:
    return "".join(f".m{i}{{--hue:var(--m{i})}}" for i in range(len(LIGHT)))
