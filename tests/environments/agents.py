"""Outside agents for tests: programs that play the toy domain of tests/training/toys.py, or misbehave."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

HEAD = """
import json, os, sys, urllib.request
task = json.loads(os.environ["BELLWETHER_TASK"])
def post(path, body):
    url = os.environ["OPENAI_BASE_URL"] + path
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)
def ask(messages, **more):
    body = {"model": "policy", "messages": messages, "temperature": 0.2, **more}
    return post("/chat/completions", body)["choices"][0]["message"]["content"]
def report(second):
    reward = float("a" <= second[:1].lower() < "n")
    post("/reward", {"reward": reward, "terms": {"letter": reward}})
"""
OPENAI = """
from openai import OpenAI
client = OpenAI(max_retries=0)
def ask(messages, **more):
    reply = client.chat.completions.create(model="policy", messages=messages, **more)
    return reply.choices[0].message.content
"""
TOY = """
messages = [{"role": "system", "content": "take the key"}, {"role": "user", "content": f"you are in room {task['room']}"}]
first = ask(messages)
messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "you see a key"}]
report(ask(messages))
"""
"""The same messages and rewards as FirstLetterEnvironment's."""

SUB_AGENT = """
messages = [{"role": "user", "content": f"you are in room {task['room']}"}]
first = ask(messages)
asked = [{"role": "user", "content": "what is a key"}]
said = ask(asked)
asked += [{"role": "assistant", "content": said}, {"role": "user", "content": "are you sure"}]
ask(asked)
messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "you see a key"}]
report(ask(messages))
"""
"""Asks a sub-agent two questions between its own two turns."""
SHORTENED = """
messages = [{"role": "user", "content": f"you are in room {task['room']}"}]
for seen in ("you see a key", "you see a door"):
    messages += [{"role": "assistant", "content": ask(messages)}, {"role": "user", "content": seen}]
report(ask([messages[0], *messages[3:]]))
"""
"""Leaves its second turn's question out of its history before the third."""
FEW_SHOT = """
messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "a"}]
messages += [{"role": "user", "content": f"you are in room {task['room']}"}]
report(ask(messages))
"""
"""Begins with an example."""


def write_agent(folder: Path, *parts: str, name: str = "agent.py") -> str:
    """The command of an agent made of HEAD and `parts`."""
    path = folder / name
    path.write_text(HEAD + "".join(parts), encoding="utf-8")
    return shlex.join([sys.executable, "-S" if OPENAI not in parts else "-I", str(path)])
