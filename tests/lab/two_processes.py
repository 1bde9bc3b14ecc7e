"""Started by torchrun in every process: ``ocnopt train``, once for each line of a JSON file of arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from ocnopt.lab.cli import make_app
from ocnopt.lab.world import join


def main() -> None:
    app = make_app()
    with join(torch.device("cpu")):
        for line in Path(sys.argv[1]).read_text().splitlines():
            code = app(["train", *json.loads(line), "--device", "cpu", "--json"], standalone_mode=False)
            print(f"exit {code}: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
