"""A pytest plugin for `suites.py`. It writes the outcome of each test to $OUTCOMES_FILE, as a line
of JSON. It writes the lines while tests run, so that a crash does not lose earlier outcomes.

The plugin skips tests that the file already contains. A process that is restarted after a crash
therefore continues after the test that crashed. $OUTCOMES_SHARE selects a part of the tests: "1/4"
is the second of four parts. All tests of a class are in the same part. $OUTCOMES_TESTS is a file
with the names of the tests to run; without it, all tests run.
"""

import json
import os
import zlib
from pathlib import Path

import pytest

FILE = Path(os.environ["OUTCOMES_FILE"])
REASON = 400  # maximum number of characters of the reason why a test did not pass


def write(what):
    with FILE.open("a") as file:
        print(json.dumps(what), file=file)


@pytest.fixture(scope="class")
def initialize_from_pytest_config(request):
    """A fixture that numba-cuda's tests need. It is in conftest.py of numba-cuda's repository, but
    not in the package."""
    request.cls._dump_failed_filechecks = False


def is_in_share(item):
    number, of = map(int, os.environ.get("OUTCOMES_SHARE", "0/1").split("/"))
    unit = item.nodeid.rpartition("::")[0] if getattr(item, "cls", None) else item.nodeid
    return zlib.crc32(unit.encode()) % of == number


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    done = {line.get("began") for line in map(json.loads, lines)}
    only = os.environ.get("OUTCOMES_TESTS")
    only = only and set(Path(only).read_text().splitlines())
    mine = [item for item in items if is_in_share(item) and (not only or item.nodeid in only)]
    items[:] = [item for item in mine if item.nodeid not in done]
    write({"collected": len(mine)})


def pytest_collectreport(report):
    if not report.passed:
        write({"test": report.nodeid, "outcome": "not collected" if report.failed else "skipped", "why": reason(report)})


def pytest_runtest_logstart(nodeid):
    reports[:] = []
    write({"began": nodeid})


def pytest_runtest_logreport(report):
    reports.append(report)


def pytest_runtest_logfinish(nodeid):
    said = {"test": nodeid, "outcome": "passed"}
    for report in reports:
        if report.failed:
            said |= {"outcome": "failed" if report.when == "call" else "error", "why": reason(report)}
        elif report.skipped:
            said |= {"outcome": "failed as expected" if hasattr(report, "wasxfail") else "skipped", "why": reason(report)}
    write(said)


reports = []  # reports of the running test


def reason(report):
    if isinstance(report.longrepr, tuple):  # a skipped test: file, line, reason
        return str(report.longrepr[2])[:REASON]
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message[:REASON] if crash else report.longreprtext[-REASON:]
