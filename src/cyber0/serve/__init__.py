"""A federation over the network: the federator and the clients of a simulation, driven over gRPC streams.

    hub.py           the federator's side: sessions, rounds with a deadline, who is current, who is cut off
    sessions.py      what the hub knows of a stream, and what it counts
    sockets.py       bytes on the wire, as the kernel counts them
    account.py       figures kept in the run's folder; what the live page shows
    server.py        the hub behind gRPC; `cyber0 serve`
    participant.py   a client's side: what to answer to each message; no network
    join.py          a participant behind gRPC; `cyber0 join` and `cyber0 follow`
    certificates.py  who is who: a private authority, and the identity in a certificate
    messages.py      both sides by letters, one a round, where there are no streams
    flower.py        a Flower app of either kind; the only module that imports flwr
    nodes.py         its settings, and which Flower node is which client
    state.py         what a client keeps: the last hash it saw, its private seed, snapshots of the weights
    operations.py    logs, figures for Prometheus, health
    commands.py      the command line of all this

Importing this loads nothing; gRPC and cryptography (the `deploy` extra) are loaded by the commands that need them.
"""
