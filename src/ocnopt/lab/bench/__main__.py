"""``python -m ocnopt.lab.bench``: ``ocnopt bench`` where there is little more than torch. Tables are Markdown."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from ocnopt.lab.bench.benchmark import Settings, measure, require_writable, save
from ocnopt.lab.bench.inside import look_inside
from ocnopt.lab.bench.networks import NETWORKS
from ocnopt.lab.bench.timing import CLOCKS
from ocnopt.lab.schema import ConfigError


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ocnopt.lab.bench", description=__doc__)
    several: dict[str, Any] = {"action": "append", "help": "may be repeated"}
    parser.add_argument("--network", dest="networks", choices=list(NETWORKS), **several)
    parser.add_argument("--batch", dest="batches", type=int, **several)
    parser.add_argument("--optimizer", dest="optimizers", metavar="NAME", **several)
    parser.add_argument("--device")
    parser.add_argument("--graphed", action="store_true", help="steps in CUDA graphs")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--inner", type=int, help="steps timed together in a turn")
    parser.add_argument("--clock", choices=list(CLOCKS))
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no round after this time")
    parser.add_argument("--threads", type=int, help="of the CPU; else torch's own setting")
    parser.add_argument("--precision", choices=["high", "highest"], help="of float32 matrix products on a GPU")
    parser.add_argument("--stream", choices=["default", "own"], help="own: the loop runs on one of high priority")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="times only")
    parser.add_argument("--period", action="store_true", help="time each of 100 steps from refresh to refresh")
    parser.add_argument("--phases", action="store_true", help="where the time goes")
    parser.add_argument("--growth", metavar="WAY", **several)
    parser.add_argument("--json", type=Path, help="write every number to this file")
    parser.add_argument("--kernels", metavar="NAME", help="instead: what runs on the GPU in a step")
    parser.add_argument("--profile", metavar="NAME", help="instead: which operators cost inside optimizer.step()")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    given = {each.name: getattr(arguments, each.name) for each in fields(Settings)}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    try:
        if arguments.kernels or arguments.profile:
            print(look_inside(settings, kernels=arguments.kernels, profile=arguments.profile).markdown())
            return 0
        if arguments.json:
            require_writable(arguments.json, "json")
        findings = measure(settings, lambda line: print(line, file=sys.stderr, flush=True))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        "\n\n".join([str(findings.environment), *(table.markdown() for table in findings.tables()), *findings.missing])
    )
    if arguments.json:
        save(findings, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
