"""Kill a check at random moments, take it up again, and compare with one that ran through.

A child is forked for every run, so that a trial costs what the check costs and not the imports.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from practicum.catalog import Catalog
from practicum.checks.runner import run_check

OPTIONS = {"pause": "0.02"}


def fork_check(catalog, out):
    child = os.fork()
    if child == 0:
        try:
            run_check(catalog["coin"], catalog.load_check(catalog["coin"]), jobs=1, options=OPTIONS, out=out)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child


def measured(out):
    (path,) = out.glob("coin-quick-*.json")
    content = json.loads(path.read_text())
    del content["run"]
    for row in content["rows"]:
        del row["resources"]
    return content


def finished_arms(out):
    return sum(len(json.loads(path.read_text())) for path in out.glob(".partial/*/seed-*.json"))


def main(toys, folder, trials):
    catalog, folder = Catalog(Path(toys) / "toyhouse", "toyhouse"), Path(folder)
    started = time.perf_counter()
    assert os.waitpid(fork_check(catalog, folder / "whole"), 0)[1] == 0
    whole_time = time.perf_counter() - started
    whole = measured(folder / "whole")
    dice = random.Random(7)
    interrupted = resumed = 0
    for trial in range(trials):
        out = folder / str(trial)
        child = fork_check(catalog, out)
        time.sleep(dice.uniform(0, whole_time))
        os.kill(child, signal.SIGKILL)
        killed = os.waitpid(child, 0)[1] != 0
        for path in out.glob("*.json"):
            json.loads(path.read_text())
        if killed:
            interrupted += 1
            resumed += finished_arms(out) > 0
        assert os.waitpid(fork_check(catalog, out), 0)[1] == 0, f"trial {trial} could not be taken up again"
        assert measured(out) == whole, f"trial {trial} differs"
        assert not (out / ".partial").exists(), f"trial {trial} left something behind"
    print(json.dumps({"interrupted": interrupted, "resumed": resumed}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
