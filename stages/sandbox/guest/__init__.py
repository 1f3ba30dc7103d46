"""The code inside the sandbox: a warm server that forks one process per program. It uses only the standard library, because the
sandboxed interpreter receives it as source text (`stages.sandbox.backends.server_command`).

The server knows nothing about programs: the host sends it sockets (SCM_RIGHTS), it forks, and the fork reads its job from them.
A program and its tests run in two such forks connected by a socket. A program can therefore neither read its tests nor fake a
pass: it only sees the arguments of calls, and can only reply with their return values, as plain data.
"""
