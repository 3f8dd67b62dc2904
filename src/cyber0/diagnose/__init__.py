"""Is it the learning rate or a bug? What zero-order estimates are worth at some point of a run.

signal.py       signal and noise of clients' numbers
measure.py      one station: losses looked at along directions and steps, w unchanged
federation.py   a run's folder or a config as what is measured
closures.py     a user's own losses as what is measured (ZeroOrder.diagnose)
records.py      what the ledger and the evaluations of a run say by themselves
words.py        all of it as findings in plain words; needs neither numpy nor torch
command.py      `cyber0 diagnose`
"""
