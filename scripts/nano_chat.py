"""DeepSeek-V4's chat encoding, as far as nano's text needs it.

The literal sections are those of deepseek-recipe (MIT licence, copyright DeepSeek), the vendor's
encoder; a test compares what is rendered here with that package. It is not imported, because the
text is made on machines that do not have it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BEGIN, END, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, THINK, THINK_END = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
DSML = "｜DSML｜"
# In the order of their ids; as in the release, only the first three are dropped from an answer.
SPECIAL_TOKENS = (BEGIN, END, PAD)
CHAT_TOKENS = (
    USER,
    ASSISTANT,
    "<｜latest_reminder｜>",
    THINK,
    THINK_END,
    DSML,
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜extracted_url｜>",
)

# What the model is to say stands between these two in a document's text; they are no tokens.
ANSWER, ANSWER_END = "\x02", "\x03"

MAXIMUM_EFFORT = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve \
the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and \
adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, \
considered alternative, and rejected hypothesis to ensure absolutely no assumption is left \
unchecked.

"""
TOOLS_HEAD = f"""\


## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types \
(numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside \
{THINK}...{THINK_END} BEFORE any tool calls or final response.

Otherwise, output directly after {THINK_END} with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_TAIL = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
SCHEMA_HEAD = """\


## Response Format:

You MUST strictly adhere to the following schema to reply:
"""


@dataclass(frozen=True)
class Turn:
    """One message of a system, user, tool or assistant; the fields after `content` are its."""

    role: str
    content: str
    reasoning: str = ""
    call: str = ""  # the name of a called tool
    arguments: Mapping[str, Any] | None = None


def render(
    turns: Sequence[Turn],
    *,
    thinking: bool = False,
    maximum_effort: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
    schema: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as text, from BEGIN to the last answer's END, or to where one is expected.

    What the assistant says is marked with ANSWER and ANSWER_END. `tools` are the function parts of
    OpenAI's tools. `maximum_effort` is what the vendor's encoder does in thinking mode unless a
    low effort is asked for.
    """
    text = BEGIN + (MAXIMUM_EFFORT if thinking and maximum_effort else "")
    turns = list(turns)
    if turns[0].role == "system":
        text += turns.pop(0).content
    if tools:
        text += TOOLS_HEAD + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text += TOOLS_TAIL
    if schema is not None:
        text += SCHEMA_HEAD + json.dumps(schema, ensure_ascii=False)
    last_user = max(i for i, turn in enumerate(turns) if turn.role == "user")
    for i, turn in enumerate(turns):
        # Reasoning of earlier questions is dropped, unless there are tools.
        thinks = thinking and (bool(tools) or i >= last_user)
        if turn.role == "assistant":
            text += ANSWER + _said(turn, thinks) + END + ANSWER_END
            continue
        body = turn.content if turn.role == "user" else f"<tool_result>{turn.content}</tool_result>"
        text += USER + body + ASSISTANT + (THINK if thinks else THINK_END)
    return text


def _said(turn: Turn, thinks: bool) -> str:
    said = (turn.reasoning + THINK_END if thinks else "") + turn.content
    if not turn.call:
        return said
    lines = [f"<{DSML}tool_calls>", f'<{DSML}invoke name="{turn.call}">']
    for name, value in (turn.arguments or {}).items():
        is_text = isinstance(value, str)
        shown = value if is_text else json.dumps(value, ensure_ascii=False)
        kind = "true" if is_text else "false"
        lines.append(f'<{DSML}parameter name="{name}" string="{kind}">{shown}</{DSML}parameter>')
    lines += [f"</{DSML}invoke>", f"</{DSML}tool_calls>"]
    return said + "\n\n" + "\n".join(lines)
