"""What requests may say, as msgspec structs: decoding checks names and types, and the OpenAPI document is made of them.

Every field may be null, which means that it was left out. Fields named in a request and not here are refused by name,
and so are those that can only be null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from edge_transformer.text.roles import ASSISTANT, DEVELOPER, SYSTEM, TOOL, USER

Number = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1000)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """include_usage: a last chunk with the usage. include_progress: chunks without choices that say how much of a long
    prompt has been read. include_obfuscation: accepted; nothing is ever padded.
    """

    include_usage: bool | None = None
    include_progress: bool | None = None
    include_obfuscation: bool | None = None


class TextPart(Struct, forbid_unknown_fields=True):
    """A part of a message's content. Only texts are read."""

    type: Literal["text"]
    text: str


class FunctionCall(Struct):
    """A call that the assistant made. arguments: JSON text."""

    name: Name
    arguments: str


class ToolCall(Struct):
    """An earlier call of a tool."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


Content = str | list[TextPart]


class SystemMessage(Struct, tag_field="role", tag=SYSTEM, forbid_unknown_fields=True):
    """What holds for the whole chat."""

    content: Content
    name: str | None = None


class DeveloperMessage(Struct, tag_field="role", tag=DEVELOPER, forbid_unknown_fields=True):
    """A system message under its newer name."""

    content: Content
    name: str | None = None


class UserMessage(Struct, tag_field="role", tag=USER, forbid_unknown_fields=True):
    """What the user says."""

    content: Content
    name: str | None = None


class AssistantMessage(Struct, tag_field="role", tag=ASSISTANT, forbid_unknown_fields=True):
    """What the model said before. Fields that answers have are taken back."""

    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: None = None
    function_call: None = None


class ToolMessage(Struct, tag_field="role", tag=TOOL, forbid_unknown_fields=True):
    """What a tool answered to a call."""

    content: Content
    tool_call_id: str | None = None
    name: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(Struct, forbid_unknown_fields=True):
    """A function that the model may call. parameters: a JSON schema."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class NamedFunction(Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(Struct, forbid_unknown_fields=True):
    """Says which function is to be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_\-]{1,64}$")]
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """json_schema: needed with the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(Struct, forbid_unknown_fields=True):
    """What both kinds of completion take. Those behind `metadata` are accepted and have no effect here."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Seed | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ChatRequest(Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)] | None = None
    audio: None = None
    prediction: Any = None
    verbosity: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None


class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    echo: bool | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    suffix: None = None


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    """POST /tokenize: the tokens of a text, or of a chat as the model's template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
