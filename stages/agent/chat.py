"""Token-exact chat: derives the tokens around the policy's own from any tokenizer's chat template.

The prompt is rendered once. After a turn, only the tokens that follow it are added (the end of the assistant message if the
policy did not write it, the user message, the start of the next assistant message); the policy's tokens are never tokenised
again. The surrounding text is taken from the template's rendering of a dummy conversation, which is checked on construction.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from stages.agent.chat_template import alternatives, format_marks, prompt_date, renderer
from stages.records.episode import Owner
from stages.records.thinking import ParsedTurn, Thinking, parse_turn

ENCODED = 4096
"""Texts whose tokens are cached."""
_USER, _ASSISTANT, _NEXT = "Question7Q", "Answer7A", "Observation7O"


@dataclass
class Encoded:
    """A conversation as an episode's token lists, all of the same length (see `stages.records.episode.Episode`)."""

    token_ids: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    """Turn index; -1 for the prompt. An observation belongs to the turn it answers."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Start and end (exclusive) of each assistant turn, its end-of-turn token included."""

    def append(self, token_ids: Sequence[int], owner: Owner, turn: int) -> None:
        self.token_ids.extend(token_ids)
        self.owner.extend([int(owner)] * len(token_ids))
        self.turn.extend([turn] * len(token_ids))


def equal_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of equal tokens at the start of both."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, two) in pairs if one != two), min(len(first), len(second)))


def _break_up(marks: re.Pattern[str], text: str) -> str:
    """Insert a space after the first character of each mark in `text`; remove marks of one character."""
    return marks.sub(lambda found: f"{found.group()[0]} {found.group()[1:]}" if len(found.group()) > 1 else "", text)


class Chat:
    """The chat format of a tokenizer. `thinking`: marks around the thoughts of a reasoning model (`model.thinking`).

    Raises ValueError if it has no chat template, the template does not end assistant messages with a special token, or it changes
    the text of user messages.
    """

    def __init__(self, tokenizer: Any, thinking: Thinking | None = None) -> None:
        self.tokenizer, self.thinking = tokenizer, thinking
        # Observations recur in many groups, and tokenising with transformers is slow.
        self._encoded = lru_cache(ENCODED)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))
        self._name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(f"tokenizer {self._name} has no chat template; add a chat_template.jinja to the model's folder")
        self.date = prompt_date(tokenizer)
        """The date that prompts show, YYYY-MM-DD; None for none."""
        self._render = renderer(tokenizer)
        between, self._after = self._surroundings()
        opening = self._render([{"role": "user", "content": _USER}]).partition(_USER)[0]
        marks, own = format_marks(tokenizer, opening, [between, self._after]), set()
        if thinking is not None:
            own = {thinking.start, thinking.end, *thinking.response}
            marks = sorted({*marks, *own}, key=lambda mark: (-len(mark), mark))
        self._marks, self._not_own = alternatives(marks), alternatives([mark for mark in marks if mark not in own])
        ids = self._encode(between)
        self.end_of_turn: int = self._end_of_turn(ids)
        """The token that ends an assistant message."""
        self._closed = self._text_of(self.end_of_turn, between)
        cut = ids.index(self.end_of_turn) + 1
        self._close = ids[:cut]
        # The text between the end-of-turn token and the observation; as text, since its tokens may merge with what follows.
        self._before = between.partition(self._closed)[2]
        self._strips = self._check()
        added = {token.content: number for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        self._mark_ids = {added[mark]: mark for mark in own if mark in added}
        # The start of a thought in the generation prompt, from its start mark on; "" if the policy opens thoughts itself.
        self._opened = ""
        if thinking is not None and thinking.start in self._after.rpartition(thinking.end)[2]:
            self._opened = self._after[self._after.rindex(thinking.start) :]

    @property
    def pad_token(self) -> int:
        pad = self.tokenizer.pad_token_id
        return self.end_of_turn if pad is None else int(pad)

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return len(self.tokenizer)

    def tokens_of(self, text: str) -> list[int]:
        """Token ids of a raw text; special tokens in it are recognised."""
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return list(self._encoded(text))

    def _surroundings(self) -> tuple[str, str]:
        """The template's text between an assistant message and the next user message, and after the latter."""
        dummy = [("user", _USER), ("assistant", _ASSISTANT), ("user", _NEXT)]
        text = self._render([{"role": role, "content": content} for role, content in dummy])
        if text.count(_ASSISTANT) != 1 or text.count(_NEXT) != 1:
            raise ValueError(f"the chat template of {self._name} does not render each message once: {text!r}")
        _, rest = text.split(_ASSISTANT)
        between, after = rest.split(_NEXT)
        return between, after

    def _end_of_turn(self, ids: Sequence[int]) -> int:
        """The eos token if the template closes an assistant message with it, otherwise the first special token there."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {*self.tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        eos = self.tokenizer.eos_token_id
        if eos in ids:
            return int(eos)
        for token in ids:
            if token in special:
                return int(token)
        raise ValueError(
            f"the chat template of {self._name} ends an assistant message without a special token, with "
            f"{self.tokenizer.decode(ids)!r}; make it end with the eos token {self.tokenizer.eos_token!r}"
        )

    def _text_of(self, token: int, between: str) -> str:
        """The text of a token of `between`; an ordinary one is written otherwise in the vocabulary ("ĊĊ")."""
        written = self.tokenizer.convert_ids_to_tokens(token)
        return written if written in between else self.tokenizer.decode([token])

    def _check(self) -> bool:
        """Whether the template strips messages. Raises ValueError if it changes them otherwise."""
        probe = " go to\nthe  barn "
        dummy = [("user", _USER), ("assistant", _ASSISTANT), ("user", probe)]
        text = self._render([{"role": role, "content": content} for role, content in dummy]).split(_ASSISTANT)[1]
        for strips in (False, True):
            content = probe.strip() if strips else probe
            if text.endswith(self._closed + self._before + content + self._after):
                return strips
        raise ValueError(f"the chat template of {self._name} changes the text of user messages: {text!r}")

    def clean(self, text: str) -> str:
        """Break up format marks in `text` (`< |end|>`), so that no observation can imitate the format; see `format_marks`."""
        return _break_up(self._marks, text)

    def prompt_tokens(self, text: str) -> list[int]:
        """Token ids of a conversation that starts with the user message `text`, up to the first assistant turn."""
        content = self.clean(text)
        if self.thinking is not None and self.thinking.instruction:
            content = f"{self.thinking.instruction}\n{content}"
        return self._encode(self._render([{"role": "user", "content": content}]))

    def guided_prompt(self, text: str, guidance: str) -> Encoded:
        """`prompt_tokens(text)` with the tokens of `guidance`, owned by GUIDANCE, inserted at the end of the message: without
        them it is the plain prompt again. Raises ValueError for a chat template in which a message's end depends on its text."""
        tokens, end = self.prompt_tokens(text), self._encode(self._after)
        place, encoded = len(tokens) - len(end), Encoded()
        if tokens[place:] != end:
            raise ValueError(f"the chat template of {self._name} does not end a user message with {self._after!r} after {text!r}")
        encoded.append(tokens[:place], Owner.PROMPT, -1)
        encoded.append(self._encode(self.clean(guidance)) if guidance else [], Owner.GUIDANCE, -1)
        encoded.append(end, Owner.PROMPT, -1)
        return encoded

    def closing_tokens(self, turn_ids: Sequence[int]) -> list[int]:
        """The tokens that end the assistant message after `turn_ids`; none if the policy wrote the end-of-turn token itself."""
        return [] if turn_ids and turn_ids[-1] == self.end_of_turn else list(self._close)

    def observation_tokens(self, text: str) -> list[int]:
        """The tokens between two assistant messages: the user message `text` and the generation prompt."""
        text = self.clean(text.strip() if self._strips else text)
        return self._encode(self._before + text + self._after)

    def observation_text(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Start and end (exclusive) of the text in `observation_tokens` of it; tokens that merge it with the template's text
        around it belong to it."""
        before, after = self._encode(self._before), self._encode(self._after)
        start, end = equal_length(token_ids, before), equal_length(token_ids[::-1], after[::-1])
        return start, max(start, len(token_ids) - end)

    def assistant_tokens(self, text: str) -> list[int]:
        """An assistant turn as the policy would write it: `text` with any thought, and the end-of-turn token."""
        return [*self._encode(_break_up(self._not_own, self._continuation(text))), self.end_of_turn]

    def _continuation(self, text: str) -> str:
        """A turn's text after the generation prompt. If the prompt opens a thought, the text continues it, or ends it at once if
        it contains none."""
        if not self._opened or self.thinking is None:
            return text
        if self.thinking.end not in text:
            return f"\n{self.thinking.end}\n\n{text}"
        return text.removeprefix(self.thinking.start).removeprefix(self._opened.removeprefix(self.thinking.start))

    def read(self, turn_ids: Sequence[int]) -> ParsedTurn:
        """Parse a turn's tokens: the action, without special tokens and outer white space, and the thought before it."""
        return parse_turn(self._text(turn_ids), self.thinking, self._opened)

    def _text(self, turn_ids: Sequence[int]) -> str:
        """Decode tokens without special ones, but with the marks of thoughts even if they are special."""

        def decoded(token_ids: Sequence[int]) -> str:
            return self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

        text, start = "", 0
        for place, token in enumerate(turn_ids):
            if token in self._mark_ids:
                text += decoded(turn_ids[start:place]) + self._mark_ids[token]
                start = place + 1
        return text + decoded(turn_ids[start:])

    def action_text(self, turn_ids: Sequence[int]) -> str:
        """The action in a turn's tokens; see `read`."""
        return self.read(turn_ids).action

    def argument_tokens(self, turn_ids: Sequence[int]) -> range:
        """Places of the tokens of a turn's action after its first word: of the query in `search <query>`. A token that begins
        before the argument, with the space in front of it, counts."""
        action, text = self.action_text(turn_ids), self._text(turn_ids)
        argument = action.partition(" ")[2].strip()
        if not argument:
            return range(0)
        end = text.rindex(action) + len(action)

        def length(count: int) -> int:
            return len(self._text(turn_ids[:count]))

        places = range(len(turn_ids) + 1)
        return range(bisect_right(places, end - len(argument), key=length) - 1, bisect_left(places, end, key=length))

    def turn_text(self, turn_ids: Sequence[int]) -> str:
        """The text of a turn's tokens, without special tokens."""
        return self._text(turn_ids)

    def turn_texts(self, token_ids: Sequence[int], begun: bool = False) -> list[str]:
        """The texts of the assistant turns in a conversation's tokens; the last one is not finished, and "" before its first
        token. begun: the tokens start within a turn. Observations can't imitate the marks around turns; see `clean`."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return [piece.partition(self._closed)[0] for piece in text.split(self._after)[0 if begun else 1 :]]

    def encode(self, messages: Sequence[Mapping[str, str]], guidance: str = "") -> Encoded:
        """Tokens of alternating user and assistant messages, exactly as in a rollout of the same text; after a final user
        message, they end with the generation prompt. guidance: for `guided_prompt`.

        Assistant turns, end-of-turn token included, are owned by POLICY, later user messages by ENVIRONMENT. Raises ValueError if
        roles do not alternate, user first.
        """
        roles = [message["role"] for message in messages]
        if roles != [("user", "assistant")[index % 2] for index in range(len(roles))] or not roles:
            raise ValueError(f"message roles must alternate, user first; got {roles}")
        encoded = Encoded()
        if guidance:
            encoded = self.guided_prompt(messages[0]["content"], guidance)
        else:
            encoded.append(self.prompt_tokens(messages[0]["content"]), Owner.PROMPT, -1)
        for place, message in enumerate(messages[1:]):
            turn, answers = divmod(place, 2)
            if answers:
                encoded.append(self.observation_tokens(message["content"]), Owner.ENVIRONMENT, turn)
            else:
                start = len(encoded.token_ids)
                encoded.append(self.assistant_tokens(message["content"]), Owner.POLICY, turn)
                encoded.spans.append((start, len(encoded.token_ids)))
        return encoded

    def prompt(self, text: str, guidance: str = "", examples: Sequence[Mapping[str, str]] = ()) -> Encoded:
        """A conversation that starts with the user message `text`, up to the first assistant turn; see `guided_prompt`. examples:
        messages of earlier conversations, which belong to the prompt, too."""
        asked = {"role": "user", "content": text}
        if not examples:
            return self.encode([asked], guidance)
        encoded = Encoded()
        encoded.append(self.encode([*examples, asked]).token_ids, Owner.PROMPT, -1)
        return encoded

    def encode_demonstration(self, messages: Sequence[Mapping[str, str]], guidance: str = "") -> Encoded:
        """`encode` up to the last assistant turn, as in rollouts. Raises ValueError also if there is no such turn."""
        if len(messages) < 2:
            raise ValueError(f"a demonstration needs a user and an assistant message at least; got {len(messages)} messages")
        return self.encode(messages[: len(messages) // 2 * 2], guidance)
