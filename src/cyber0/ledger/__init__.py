"""The ledger: an append-only, hash-chained log of decisions. The model is its starting point plus this file.

    file      magic | u8 format, 2 | u32 length | header as canonical JSON | u32 CRC-32 | record | record | ...
    record    core | details | 32 bytes chain | u32 CRC-32
    core      u8 kind | u32 round | f64 lr | u32 rounds | n x float32 | 16 bytes of the SHA-256 of the details
    details   who reported | who was trimmed

All numbers are little-endian; n = local epochs * k. `rounds` is how many the run was to have when this one was decided:
a run is lengthened by stating more of them. Who reported is one bit per client, who was trimmed (in how many of the n
scalars) as many bits per client as n needs. The chain is SHA-256(the chain before | core), starting with the SHA-256
of everything before the first record: receiving the decisions is enough to compute it. A record of kind 2 (abandoned)
holds neither scalars nor trim counts. Format 1 (format1.py) is still read and continued.
"""

from cyber0.ledger.header import FORMAT, Header, LayoutEntry
from cyber0.ledger.log import Durability, Ledger, read_records
from cyber0.ledger.opening import MAGIC, first_chain, opening_of, read_opening
from cyber0.ledger.record import ABANDONED, DECIDED, Decision, Record, next_chain
from cyber0.ledger.reports import Reports
from cyber0.ledger.settings import changed_settings, without_fields
from cyber0.ledger.store import Agreed, LastRecord, Log, trim_counts

__all__ = [
    "ABANDONED",
    "DECIDED",
    "FORMAT",
    "MAGIC",
    "Agreed",
    "Decision",
    "Durability",
    "Header",
    "LastRecord",
    "LayoutEntry",
    "Ledger",
    "Log",
    "Record",
    "Reports",
    "changed_settings",
    "first_chain",
    "next_chain",
    "opening_of",
    "read_opening",
    "read_records",
    "trim_counts",
    "without_fields",
]
