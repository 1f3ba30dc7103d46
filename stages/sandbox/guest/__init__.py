"""What runs inside the sandbox: a warm server that forks one process per program. Standard library alone: it is handed to the
sandboxed interpreter as text (`stages.sandbox.backends.server_command`).

The server knows nothing about programs: the host sends it sockets (SCM_RIGHTS), it forks, and the fork reads its job from them.
A program and the tests of it live in two such forks that talk through a socket, so that no program can read its tests, or pose as
one that has passed them: all it sees is the arguments of the calls, all it can say is what they return, in plain values.
"""
