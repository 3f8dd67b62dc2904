"""Is it the learning rate or a bug? How good zero-order estimates are at some points of a run.

measurement.py  what is measured, and the result at one point w
measure.py      measures at one point; w stays unchanged
signal.py       signal and noise of the clients' scalars
mu_scan.py      slopes measured with many mu
lr_scan.py      steps tried with many lr
source.py       the settings of what is diagnosed
federation.py   diagnoses a run's folder or a config
closures.py     diagnoses a user's own losses (ZeroOrder.diagnose)
records.py      what the ledger and the evaluations of a run show without measuring again
verdict.py      all of it as findings in plain words; needs neither numpy nor torch
"""
