import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAST_UNCHECKED = "a263c656"  # Older commits follow other rules.
AREAS = (
    "api|engine|scheduler|worker|kernels|models|quant|checkpoint|parallel|cli|bench|docs|tests|ci"
    "|nano|build"
)
SUBJECT = re.compile(rf"(?:{AREAS})(?:\([a-z0-9_-]+\))?: [a-z][^\n]*[^.\n]")


def find_faults(message: str) -> list[str]:
    subject, _, body = message.strip().partition("\n")
    faults = {
        "subject is not `area: imperative summary`": not SUBJECT.fullmatch(subject),
        f"subject has {len(subject)} characters, at most 72": len(subject) > 72,
        "no body after an empty line": not re.match(r"\n\s*\S", body),
    }
    return [fault for fault, found in faults.items() if found]


def read_new_messages() -> list[str]:
    """Return the messages since LAST_UNCHECKED, or all messages that a shallow clone has."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True).stdout

    known = git("rev-parse", "--verify", "--quiet", f"{LAST_UNCHECKED}^{{commit}}").strip()
    log = git("log", "--no-merges", "--format=%B%x00", f"{known}..HEAD") if known else ""
    return [message for message in log.split("\0") if message.strip()]


def test_new_commit_messages_follow_the_form() -> None:
    faults = {
        message.strip().splitlines()[0]: found
        for message in read_new_messages()
        if (found := find_faults(message))
    }
    assert faults == {}


@pytest.mark.parametrize(
    ("message", "num_faults"),
    [
        ("kernels: merge the expert GEMMs\n\nSame PTX, 400 lines less.", 0),
        ("docs(perf): compare gains at one context length\n\nThe pages mixed two.", 0),
        ("What is likely is called so\n\nBody.", 1),
        ("api: Merge the histories\n\nBody.", 1),
        ("api: merge the histories.\n\nBody.", 1),
        ("api: merge the histories", 1),
        (f"api: {'m' * 70}\n\nBody.", 1),
        ("house: tidy", 2),
    ],
)
def test_faults_are_found(message: str, num_faults: int) -> None:
    assert len(find_faults(message)) == num_faults
