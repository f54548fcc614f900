"""Runs openai-agents' Runner in a conversation of the server's: as its session, or by `conversation_id`.

Options: `kind` (session or conversation), `more` (what the user says next, after each answer).
"""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIConversationsSession, Runner, function_tool, set_tracing_disabled
from agents.models.openai_responses import OpenAIResponsesModel
from common import main
from openai import AsyncOpenAI
from weather import weather

set_tracing_disabled(True)  # traces go to OpenAI


class Sessions:
    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        model = OpenAIResponsesModel("model", client)
        agent = Agent(name="Forecaster", instructions="Answer briefly.", model=model, tools=[function_tool(weather)])
        run = _in_session if options["kind"] == "session" else _in_conversation
        return await run(client, agent, [prompt, *options.get("more", ())])


async def _in_session(client: AsyncOpenAI, agent: Agent, turns: list[str]) -> Any:
    session = OpenAIConversationsSession(openai_client=client)
    texts = [(await Runner.run(agent, said, session=session)).final_output for said in turns]
    items = await session.get_items()
    latest = await session.get_items(limit=2)
    await session.add_items([{"role": "user", "content": "popped"}])
    popped = await session.pop_item()
    left = await session.get_items()
    await session.clear_session()
    emptied = await session.get_items()
    return {"texts": texts, "items": items, "latest": latest, "popped": popped, "left": left, "emptied": emptied}


async def _in_conversation(client: AsyncOpenAI, agent: Agent, turns: list[str]) -> Any:
    conversation = await client.conversations.create()
    texts = [(await Runner.run(agent, said, conversation_id=conversation.id)).final_output for said in turns]
    items = [
        item.model_dump(exclude_unset=True)
        async for item in client.conversations.items.list(conversation.id, order="asc")
    ]
    return {"texts": texts, "items": items}


main(Sessions())
