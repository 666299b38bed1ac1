"""Runs vLLM's own server tests against xpyd; scripts/vllmtests lays this beside a copy of them.

Cases that left_out.txt names are not run; the table at the end counts them by their reason.
"""

import collections
import fnmatch
import json
import os
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tests import stand_in  # noqa: E402

stand_in.install()


class LocalAssetServer:
    """Images, which no case here asks for."""


@pytest.fixture
def local_asset_server():
    return LocalAssetServer()


REASONS = []  # (pattern, reason): the first that matches a case counts


def read_reasons():
    for line in (HERE / "left_out.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern, reason = line.split("  ", 1)
            REASONS.append((pattern, reason.strip()))


read_reasons()


def reason_of(case):
    for pattern, reason in REASONS:
        if fnmatch.fnmatchcase(case, pattern.replace("[", "[[]")):
            return reason
    return None


def name_of(path):
    return path.relative_to(HERE / "entrypoints").as_posix()


def pytest_ignore_collect(collection_path, config):
    """Files that are left out whole are not imported: most need vLLM's insides to be."""
    if collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        return True if reason_of(name_of(collection_path)) else None
    return None


left_out = collections.Counter()
results = {}


def pytest_collection_modifyitems(config, items):
    keep, drop = [], []
    for item in items:
        case = name_of(pathlib.Path(item.path)) + "::" + item.nodeid.split("::", 1)[1]
        reason = reason_of(case)
        if reason:
            left_out[reason] += 1
            drop.append(item)
        else:
            keep.append(item)
    config.hook.pytest_deselected(items=drop)
    items[:] = keep


def pytest_runtest_logreport(report):
    case = report.nodeid.split("entrypoints/", 1)[-1]
    if report.when == "call" or report.outcome != "passed":
        if report.when != "teardown" or report.outcome == "failed":
            results[case] = report.outcome
            if path := os.environ.get("XPYD_RESULTS"):  # as they come: a run may take an hour
                why = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
                with open(path, "a") as f:
                    f.write(json.dumps([case, report.outcome, why[:600]]) + "\n")


def pytest_terminal_summary(terminalreporter):
    files = collections.defaultdict(collections.Counter)
    for case, outcome in results.items():
        files[case.partition("::")[0]][outcome] += 1
    say = terminalreporter.write_line
    say("")
    say(f"{'passed':>7} {'failed':>7} {'skipped':>7}  file")
    for file, n in sorted(files.items()):
        say(f"{n['passed']:7} {n['failed']:7} {n['skipped']:7}  {file}")
    for reason, n in left_out.most_common():
        say(f"left out: {n} cases: {reason}")
    for reason in sorted({r for p, r in REASONS if p.endswith(".py")}):
        say(f"left out: {sum(p.endswith('.py') for p, r in REASONS if r == reason)} files: {reason}")
    count = collections.Counter(results.values())
    say(f"door.vllm_tests: {count['passed']} of {len(results)} passed")
