"""What one certificate may take of a federator, and how many connections there may be, in plain numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cyber0.serve import descriptors
from cyber0.serve.addresses import count_addresses
from cyber0.serve.limits import (
    BYTES_PER_SECOND,
    FREE_BYTES,
    FREE_READINGS,
    MAX_LINES,
    MAX_STREAMS,
    WINDOW_SECONDS,
    LimitedLog,
    Usage,
)

LEDGER = 10 << 20


def test_a_certificate_has_a_few_streams_at_a_time_and_takes_none_from_others() -> None:
    usage = Usage()
    assert [usage.enter("a") for _ in range(MAX_STREAMS + 2)] == [True] * MAX_STREAMS + [False] * 2
    assert usage.enter("b")
    usage.leave("a")
    assert usage.enter("a") and not usage.enter("a")


def test_reading_the_ledger_twice_is_free_and_more_waits_for_its_turn() -> None:
    usage, free = Usage(), FREE_BYTES + FREE_READINGS * LEDGER
    assert usage.delay("a", free, LEDGER, now=0.0) == 0.0
    assert usage.delay("a", BYTES_PER_SECOND, LEDGER, now=0.0) == 1.0
    assert usage.delay("a", BYTES_PER_SECOND, LEDGER, now=1.0) == 1.0  # a second has made up for the first
    assert usage.delay("b", free, LEDGER, now=1.0) == 0.0
    assert usage.delay("a", 0, 2 * LEDGER, now=1.0) == 0.0  # the ledger has grown, and so has what may be read


def test_all_streams_of_a_certificate_share_its_bytes() -> None:
    usage, now, sent, piece = Usage(), 0.0, 0, 64 << 10
    usage.delay("a", FREE_BYTES + FREE_READINGS * LEDGER, LEDGER, now)
    waiting = [0.0] * MAX_STREAMS  # when each stream may go on
    while now < 100.0:
        stream = min(range(MAX_STREAMS), key=waiting.__getitem__)
        now = waiting[stream]
        waiting[stream] = now + usage.delay("a", piece, LEDGER, now)
        sent += piece
    assert sent == pytest.approx(100.0 * BYTES_PER_SECOND, rel=0.02)


def test_certificates_that_are_gone_are_forgotten() -> None:
    usage = Usage()
    for number in range(1000):
        assert usage.enter(f"{number}")
        usage.delay(f"{number}", BYTES_PER_SECOND, LEDGER, now=0.0)
        usage.leave(f"{number}")
    usage.enter("here")
    usage.delay("debtor", 1000 * BYTES_PER_SECOND, LEDGER, now=0.0)
    usage.delay("another", 1, LEDGER, now=WINDOW_SECONDS)
    assert len(usage) == 3
    assert not all(usage.enter("here") for _ in range(MAX_STREAMS))  # its stream still counts
    usage.delay("another", 1, LEDGER, now=2000.0)
    assert len(usage) == 2


class Lines:
    """A log, and the clock of whoever writes to it."""

    def __init__(self) -> None:
        self.time, self.lines = 0.0, list[tuple[str, dict[str, object]]]()
        self.limited = LimitedLog(lambda event, **details: self.lines.append((event, details)), lambda: self.time)


def test_repeated_events_of_one_certificate_become_one_line_with_their_number() -> None:
    log = Lines()
    for _ in range(5000):
        log.limited("a" * 64, "cut_off", client=3)
    log.limited("b", "joined", client=4)
    assert [event for event, _ in log.lines] == ["cut_off"] * MAX_LINES + ["joined"]
    log.time = WINDOW_SECONDS
    log.limited("b", "left", client=4)
    left_out = {"participant": "a" * 16, "lines": 5000 - MAX_LINES, "seconds": WINDOW_SECONDS}
    assert log.lines[MAX_LINES + 1 :] == [("suppressed", left_out), ("left", {"client": 4})]
    log.limited("a" * 64, "joined", client=3)
    assert log.lines[-1][0] == "joined"


def test_a_client_that_reconnects_every_few_seconds_is_always_logged() -> None:
    log = Lines()
    for number in range(500):
        log.limited("a", "joined", client=0)
        log.limited("a", "left", client=0)
        log.time = 7.0 * number
    log.limited.close()
    assert [event for event, _ in log.lines] == ["joined", "left"] * 500


def test_what_is_left_out_at_the_end_is_logged_too() -> None:
    log = Lines()
    for _ in range(MAX_LINES + 1):
        log.limited("a", "left", client=0)
    log.limited.close()
    assert log.lines[-1] == ("suppressed", {"participant": "a", "lines": 1, "seconds": WINDOW_SECONDS})


@pytest.mark.parametrize(("limit", "accepted"), [(None, 4248), (65_536, 4248), (1024, 960), (10, 1)])
def test_connections_leave_files_for_the_ledger_and_the_figures(limit: int | None, accepted: int) -> None:
    assert descriptors.max_connections(limit, participants=1100) == accepted


def test_connections_are_limited_on_every_address_that_a_host_has() -> None:
    assert descriptors.max_connections(1024, participants=1100, addresses=2) == 480
    assert count_addresses("0.0.0.0:7171") == count_addresses("[::1]:0") == count_addresses("no such host:1") == 1
    assert count_addresses("localhost:7171") == 2


def test_a_limit_of_files_that_is_too_low_for_all_is_named_with_its_remedy() -> None:
    assert descriptors.shortage(None, 10_000) == descriptors.shortage(1164, 1100) == ""
    warning = descriptors.shortage(1024, 1100)
    assert "1164 open files" in warning and "1024" in warning
    assert "ulimit -n" in warning and "LimitNOFILE" in warning


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    program = """
import resource
from cyber0.serve.descriptors import raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
print(raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE), raise_limit())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["300", "300", "300", "300"]
