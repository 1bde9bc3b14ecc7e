"""A worker that stops in the middle of its first run and says so: `python stuck_worker.py OPTIONS MARKER`."""

import pickle
import sys
import time
from functools import partial
from pathlib import Path

from ocnopt.lab.runs import Record
from ocnopt.lab.sweep import SweepOptions, work


def main() -> None:
    options: SweepOptions = pickle.loads(Path(sys.argv[1]).read_bytes())

    def stick(record: Record) -> None:
        if record["kind"] == "step" and record["step"] == 3:
            Path(sys.argv[2]).touch()
            time.sleep(600)

    work(options.board(), options.points(), options.folder, partial(options.train(), listen=stick), pulse=options.pulse)


main()
