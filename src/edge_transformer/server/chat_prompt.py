"""From a chat request to the tokens the model continues, and how its answer is to be read."""

from __future__ import annotations

from dataclasses import dataclass

from edge_transformer.engine.llm import LLM
from edge_transformer.server.answer_format import AnswerFormat
from edge_transformer.server.errors import invalid
from edge_transformer.server.messages import template_messages
from edge_transformer.server.parameters import refuse_set, too_long
from edge_transformer.server.schema import ChatRequest
from edge_transformer.text.chat_template import missing_chat_template

_UNSUPPORTED = ("audio", "verbosity", "web_search_options", "functions", "function_call")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    ids: list[int]
    format: AnswerFormat


def chat_prompt(llm: LLM, request: ChatRequest) -> ChatPrompt:
    """Renders and encodes: takes as long as the conversation is. Raises ApiError, TextError."""
    refuse_set(request, _UNSUPPORTED)
    if request.modalities not in (None, ["text"]):
        raise invalid(f"modalities is {request.modalities}; this server writes text only", "modalities")
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if llm.chat_template is None:
        raise missing_chat_template(llm.path)
    text = llm.chat_template.render(template_messages(request.messages), variables=request.chat_template_kwargs)
    ids = llm.tokenizer.encode(text, add_bos=False)
    if len(ids) + 1 > llm.context_length:
        raise too_long(len(ids), llm.context_length, "messages")
    if not ids:
        raise invalid("the conversation has no token to start from", "messages")
    return ChatPrompt(ids, AnswerFormat())
