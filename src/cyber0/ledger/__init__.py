"""The ledger: an append-only, hash-chained log of decisions. The model is its starting point plus this file.

    file      magic | u32 length | header as canonical JSON | u32 CRC-32 | record | record | ...
    record    u8 kind | u32 round | f64 lr | n x float32 | who reported | who was trimmed | SHA-256 | u32 CRC-32

All numbers are little-endian; n = local epochs * k. Who reported is one bit per client, who was trimmed (in how many of
the n numbers) as many bits per client as n needs. The SHA-256 is that of the whole previous record, or of everything
before the first record. A record of kind 2 (abandoned) holds neither numbers nor trim counts.
"""

from cyber0.ledger.header import MAGIC, VERSION, Entry, Header, changed_settings, first_chain, opening_of, read_opening
from cyber0.ledger.log import Agreed, Durability, Ledger, Log, read_records, trim_counts
from cyber0.ledger.record import Record
from cyber0.ledger.reports import Reports
from cyber0.protocol import ABANDONED, DECIDED

__all__ = [
    "ABANDONED",
    "DECIDED",
    "MAGIC",
    "VERSION",
    "Agreed",
    "Durability",
    "Entry",
    "Header",
    "Ledger",
    "Log",
    "Record",
    "Reports",
    "changed_settings",
    "first_chain",
    "opening_of",
    "read_opening",
    "read_records",
    "trim_counts",
]
