// OpenAI's client for Node, with a dummy key.
import OpenAI from "openai";
import { BOOKING, DESCRIPTION, PARAMETERS, SYSTEM, baseURL, calc, model, question, required, stream } from "./tool.mjs";

const client = new OpenAI({ baseURL, apiKey: "dummy" });
const tools = [{ type: "function", function: { name: "calc", description: DESCRIPTION, parameters: PARAMETERS } }];
const messages = [{ role: "system", content: SYSTEM }, { role: "user", content: question }];
if (required) {
  const booking = [{ type: "function", function: { name: "book", parameters: BOOKING } }];
  const asked = { model, messages: messages.slice(1), tools: booking, tool_choice: "required" };
  const answer = await client.chat.completions.create(asked);
  console.log(answer.choices[0].message.tool_calls[0].function.arguments);
  process.exit();
}
for (let turn = 0; turn < 4; turn++) {
  const asked = { model, messages, tools, max_tokens: 64 };
  const answer = stream
    ? await client.chat.completions.stream(asked).finalChatCompletion()
    : await client.chat.completions.create(asked);
  const message = answer.choices[0].message;
  if (!message.tool_calls?.length) {
    console.log(message.content ?? "");
    break;
  }
  messages.push(message);
  for (const call of message.tool_calls)
    messages.push({ role: "tool", tool_call_id: call.id, content: calc(JSON.parse(call.function.arguments)) });
}
