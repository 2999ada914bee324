"""What a served environment and its client say to each other, in the fields of an OpenEnv action and observation.

OpenEnv carries JSON in valid Unicode. What a policy writes and an environment repeats is neither by nature: lone
surrogates and numbers that are not finite travel in an escaped form beside a readable one, so that both sides have the
same strings, and other OpenEnv clients have something to read.
"""

import base64
import json
from typing import Any

# Both sides must speak the same version; raised when a field changes its meaning.
VERSION = 1
# Names of the two models in a server's JSON schemas; the first is how a client knows a server of this package.
ACTION = "TextEnvAction"
OBSERVATION = "TextEnvObservation"
# What `info` holds in every environment has a field of its own; the rest is in `details`.
INFO_FIELDS = ("success", "score", "action", "invalid")

Result = tuple[str, float, bool, bool, dict[str, Any]]


def pack_reply(reply: str) -> dict[str, Any]:
    """The fields of an action for one reply."""
    try:
        reply.encode("utf-8")
    except UnicodeEncodeError:
        return {"reply": _to_ascii(reply), "escaped": True}
    return {"reply": reply}


def unpack_reply(reply: str, escaped: bool) -> str:
    """The reply as the policy wrote it."""
    return _from_ascii(reply) if escaped else reply


def pack_result(observation: str, truncated: bool, info: dict[str, Any]) -> dict[str, Any]:
    """The fields of an observation, but for `reward` and `done`, which OpenEnv has already.

    Args:
        observation: text shown to the agent.
        truncated: whether the episode was cut.
        info: what the environment returned; JSON values and NumPy's.

    Raises:
        TypeError: `info` holds something else.
    """
    fields = {
        "text": observation,
        "truncated": truncated,
        **{name: info[name] for name in INFO_FIELDS},
        "details": {name: value for name, value in info.items() if name not in INFO_FIELDS},
    }
    return _escape(fields)


def pack_answer(answer: Any) -> dict[str, Any]:
    """The fields of an observation that answers a question and is no step."""
    return _escape({"answer": answer})


def unpack(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as they were packed."""
    exact = fields.get("exact")
    return dict(json.loads(_from_ascii(exact))) if exact else fields


def unpack_result(fields: dict[str, Any], reward: float, done: bool) -> Result:
    """What `step` returned on the other side."""
    fields = unpack(fields)
    truncated = bool(fields["truncated"])
    info = {**fields["details"], **{name: fields[name] for name in INFO_FIELDS}}
    info["score"] = float(info["score"])  # a JSON encoder may write 1.0 as 1
    return str(fields["text"]), float(reward), done and not truncated, truncated, info


def _escape(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON values only; where they are not valid Unicode or not finite, readable ones and the exact ones beside."""
    text = json.dumps(fields, default=_plain, ensure_ascii=False)
    try:
        text.encode("utf-8")
        return dict(json.loads(text, parse_constant=_refuse))
    except ValueError:  # a lone surrogate, or a constant that JSON does not have
        readable = text.encode("utf-8", "replace").decode("utf-8")
        return {**json.loads(readable, parse_constant=lambda constant: None), "exact": _to_ascii(text)}


def _to_ascii(text: str) -> str:
    """Base64 of the text's bytes; JSON's own escapes would join two lone surrogates that meet into one character."""
    return base64.b64encode(text.encode("utf-8", "surrogatepass")).decode("ascii")


def _from_ascii(encoded: str) -> str:
    return base64.b64decode(encoded, validate=True).decode("utf-8", "surrogatepass")


def _plain(value: Any) -> Any:
    """NumPy's scalars and arrays as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"`info` holds a {type(value).__name__}, {value!r}, which has no form in JSON.")


def _refuse(constant: str) -> None:
    raise ValueError(constant)
