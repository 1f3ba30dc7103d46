"""Serves a model of the run through OpenAI's API on 127.0.0.1, as the plain policy and with best-of-n action selection.

python -m stages.serving --model merged               the merged model, also as merged+logprob, merged+vote, merged+q@<domain> ...
python -m stages.serving --model merged+q@search      the same, but merged and data/models/merged also select by the Q-model
python -m stages.serving --model path/to/folder       any save_pretrained folder
python -m stages.serving --router data/conversion     the merged model, or a conversion's small models where they are good enough
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.params import Params, load_params
from stages.runtime.command import command, port_or_any
from stages.runtime.workers import quiet_environment

if TYPE_CHECKING:
    from stages.conversion.call_log import CallLog
    from stages.conversion.settings import Conversion
    from stages.serving.specialists import Specialists
    from stages.serving.variants import ServedModel

HOST = "127.0.0.1"
PORT = 8000
ENGINES = ("torch", "vllm", "openai")


def bound(port: int) -> socket.socket:
    """A socket that listens on `port` (0: any free port). Raises OSError if it is already in use."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen()  # clients that connect while the model loads wait
    except OSError as error:
        listening.close()
        raise OSError(
            f"port {port} is not available ({error.strerror}); choose another with --port (0: any free port)"
        ) from error
    return listening


def engine_settings(params: Params, kind: str, port: int) -> Any:
    """Settings of the back end `kind`. Raises ValueError if this server would be its own back end."""
    from stages.engine.engine import EngineSettings

    model = params.model
    settings = replace(EngineSettings.of(params.resources, model.max_length, model.thinking), kind=kind, text=False)
    if kind == "openai" and settings.base_url.startswith((f"http://{HOST}:{port}/", f"http://localhost:{port}/")):
        raise ValueError(f"resources.engine.base_url is {settings.base_url}, this server's own address; choose another --port")
    return settings


def warnings(params: Params) -> list[str]:
    """Lines to print about settings of evaluate that the server does not apply."""
    from stages.agent.scaffold import Scaffold

    if params.evaluate.scaffold == Scaffold():
        return []
    return ["evaluate.scaffold is not applied: clients must add its notes, reminders and turns themselves"]


def conversion_settings(conversion: Path | None) -> Conversion:
    """The settings file `conversion`; without one, the defaults."""
    from stages.conversion.settings import Conversion, load_settings

    return Conversion() if conversion is None else load_settings(conversion)


def call_log(path: Path | None, conversion: Path | None, root: Path) -> CallLog | None:
    """The log of calls at `path`, masked as the settings file `conversion` says. Without a path, the log that the settings
    name; without settings, their defaults; without both, None. Raises ValueError for a log that was masked with another key."""
    from stages.conversion.call_log import CallLog
    from stages.conversion.masking import masker_of

    if path is None and conversion is None:
        return None
    settings = conversion_settings(conversion)
    return CallLog(root / settings.log if path is None else path, masker_of(settings, root), settings.collect)


def specialists(folder: Path | None, conversion: Path | None, root: Path, names: Sequence[str]) -> Specialists | None:
    """The router in `folder` (None: none), for requests to `names`, which masks prompts as the settings file `conversion` says,
    or as the defaults do. Raises RouterError for a folder without a finished round."""
    if folder is None:
        return None
    from stages.conversion.masking import masker_of
    from stages.conversion.router import CallRouter
    from stages.serving.specialists import Specialists

    router, masker = CallRouter.load(folder), masker_of(conversion_settings(conversion), root)
    return Specialists(router, lambda: replace(masker, vault={}), names)


def serve(
    model: ServedModel,
    params: Params,
    kind: str,
    listening: socket.socket,
    log: CallLog | None = None,
    small: Specialists | None = None,
    record: Path | None = None,
) -> None:
    """Answer requests until SIGINT or SIGTERM, then finish running ones. log: where chat completions are logged; small: models
    that answer some of them; record: where they are recorded for training, which draws as rl does unless a request says
    otherwise."""
    import torch
    import uvicorn

    from stages.agent.best_of_n import BestOfEngine, by_logprob
    from stages.agent.player import open_player
    from stages.engine.engine import Sampling
    from stages.records.actions import action_key
    from stages.serving.app import Agent, make_app
    from stages.serving.engine_thread import EngineThread
    from stages.serving.recording import Recording

    torch.set_num_threads(params.resources.threads)
    port = listening.getsockname()[1]
    next(iter(model.names.values())).rank()  # report an unreadable Q-model now
    player = open_player(model.folder, engine_settings(params, kind, port))
    turns = EngineThread(BestOfEngine(player.engine, 1, by_logprob, lambda tokens: action_key(player.chat.action_text(tokens))))
    sampling = Sampling(**(params.evaluate if record is None else params.rl).sampling.model_dump())
    recording = None if record is None else Recording(record, player.policy_hash)
    agent = Agent(turns, player.chat, model.names, player.policy_hash, sampling, params.model.max_length, log, small, recording)
    server = uvicorn.Server(uvicorn.Config(make_app(agent), log_level="warning", lifespan="off", ws="none"))
    print(f"serve: {next(iter(model.names))} (policy {player.policy_hash}) at http://{HOST}:{port}/v1", flush=True)
    print(f"serve: models {', '.join(model.names)}", flush=True)
    notes = [f"records calls in {record}, drawn as rl.sampling says"] if record is not None else []
    for line in [*warnings(params), *([small.described()] if small else []), *notes]:
        print(f"serve: {line}", flush=True)
    print(f"serve: stop with Ctrl-C or 'kill {os.getpid()}'", flush=True)
    try:
        server.run(sockets=[listening])
    finally:
        turns.close()
        player.close()
        if small is not None:
            small.close()
            print(f"serve: {small.counted()}", flush=True)
        print("serve: ended", flush=True)


def stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@command
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stages.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="merged", help="base, sft, rl@<domain>, merged, merged_linear or a folder; see above")
    parser.add_argument("--port", type=port_or_any, default=PORT, help=f"{PORT} if not given; 0: any that is free")
    parser.add_argument("--engine", choices=ENGINES, default="torch", help="what generates: see resources.engine in params.yaml")
    parser.add_argument("--log", type=Path, metavar="FILE", help="log chat completions for a conversion: docs/conversion.md")
    masked = "log them to this conversion's log, unless --log names another, with its key and kinds of personal data"
    parser.add_argument("--conversion", type=Path, metavar="SETTINGS", help=masked)
    routed = "let the small models of this conversion (its settings' out) answer the calls that they are good enough for"
    parser.add_argument("--router", type=Path, metavar="FOLDER", help=routed)
    recorded = "record chat completions with their tokens and log-probabilities, to train on them: docs/serving.md"
    parser.add_argument("--record", type=Path, metavar="FILE", help=recorded)
    options, root = parser.parse_args(), Path.cwd()
    if options.record is not None and options.router is not None:
        parser.error("--record is for the policy's own answers, and --router lets other models answer: leave one of them out")
    # uvicorn raises the signal that stopped it again when it is done.
    signal.signal(signal.SIGTERM, stop)
    try:
        params = load_params(root / "params.yaml")
        quiet_environment(params.resources.threads, not params.model.path.startswith("hub:"))
        from stages.agent.policy import check_folder
        from stages.serving.variants import find_served_model

        model = find_served_model(options.model, root, params)
        check_folder(model.folder)
        with bound(options.port) as listening:
            small = specialists(options.router, options.conversion, root, model.plain)
            log = call_log(options.log, options.conversion, root)
            serve(model, params, options.engine, listening, log, small, options.record)
    except (ValueError, OSError) as error:
        if os.environ.get("BELLWETHER_DEBUG"):
            raise
        print(f"serve: {error}\n(set BELLWETHER_DEBUG=1 for a traceback)", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
