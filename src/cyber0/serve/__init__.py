"""A federation over the network: the federator and the clients of a simulation, driven over gRPC streams or messages.

    policy.py        how a round runs: how long it waits and for whom, digests, bars; no I/O and no clock
    pace.py          clients' response times, and the seconds that rounds may wait for slow ones
    hub.py           the federator's side over streams, one session per participant
    mailbox.py       both sides over messages, one per round, where there are no streams
    admission.py     who may take part: identities, revocation, what a hello must agree with
    sessions.py      what the hub knows of a stream; the timer of a deadline
    participant.py   a client's side: what to answer to each message; no network, no disk
    state.py         what a participant stores: the last hash it saw, its private seed, snapshots of the weights
    figures.py       what is counted
    transport.py     gRPC: the hub behind a server, a participant's channel
    sockets.py       bytes on the wire, as the kernel counts them
    tls.py           a private authority, and the identity in a certificate
    addresses.py     HOST:PORT
    server.py        `cyber0 serve`: assembles the hub, and prepares the run's folder
    stats.py         figures in the run's folder, and on the live page
    metrics.py       figures for Prometheus, and a health check
    operations.py    the log, and signals
    join.py          `cyber0 join`: assembles a participant, and keeps it connected
    follow.py        `cyber0 follow`: evaluations and snapshots
    flower.py        a Flower app of either kind; the only module that imports flwr
    nodes.py         its settings, and which Flower node is which client

Importing this loads nothing; gRPC, cryptography and prometheus_client (the extra `deploy`) are loaded by the commands
that need them.
"""
