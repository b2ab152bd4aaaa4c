"""One record of a prompt file, in any of the usual forms, as a conversation.

{"turns": ["first user turn", "second", ...]}
{"prompt": "the only user turn"}
{"messages": [{"role": "system" | "user" | "assistant", "content": "..."}, ...]}
{"conversations": [{"from": "human" | "gpt" | ..., "value": "..."}, ...]}    (ShareGPT)
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, TypedDict, cast

from dspark.core.errors import DataError

Role = Literal["system", "user", "assistant"]


class Message(TypedDict):
    role: Role
    content: str


_ROLES: dict[str, Role] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
}  # fmt: skip


def parse_conversation(record: Any, where: str) -> list[Message]:
    """Messages, the roles in order: system at most once and first, a user first, no turn empty.

    Raises DataError, beginning with `where`, for anything else.
    """
    # Parquet tables that mix forms hold every field in every row, most of them null.
    known = {k: v for k, v in record.items() if v is not None} if isinstance(record, dict) else {}
    match known:
        case {"turns": list(turns)}:
            messages = [_message("user", turn, where) for turn in turns]
        case {"prompt": turn}:
            messages = [_message("user", turn, where)]
        case {"messages": list(entries)}:
            messages = [_entry(entry, "role", "content", where) for entry in entries]
        case {"conversations": list(entries)}:
            messages = [_entry(entry, "from", "value", where) for entry in entries]
        case _:
            fields = f"; it has {', '.join(map(str, known))[:80]}" if known else ""
            raise DataError(
                f'{where}: expected "turns", "prompt", "messages" or "conversations"{fields}'
            )
    _check_order([message["role"] for message in messages], where)
    return messages


def _entry(entry: Any, role_key: str, text_key: str, where: str) -> Message:
    if not isinstance(entry, Mapping) or not {role_key, text_key} <= entry.keys():
        raise DataError(f"{where}: every message needs a {role_key} and a {text_key}")
    role = entry[role_key]
    if role not in _ROLES:
        raise DataError(f"{where}: unknown role {role!r}; known are {', '.join(_ROLES)}")
    return _message(_ROLES[cast(str, role)], entry[text_key], where)


def _message(role: Role, content: Any, where: str) -> Message:
    if not isinstance(content, str) or not content.strip():
        article = "an" if role == "assistant" else "a"
        raise DataError(
            f"{where}: every turn must be text and not empty ({article} {role}'s is not)"
        )
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: not valid Unicode (character {error.start})") from None
    return {"role": role, "content": content}


def _check_order(roles: list[Role], where: str) -> None:
    talk = roles[1:] if roles[:1] == ["system"] else roles
    if "system" in talk:
        raise DataError(f"{where}: a system message may only come first, and once")
    if talk[:1] != ["user"]:
        raise DataError(f"{where}: every conversation must begin with a user's turn")
    for before, after in pairwise(talk):
        if before == after == "assistant":
            raise DataError(f"{where}: two assistant's turns in a row")
