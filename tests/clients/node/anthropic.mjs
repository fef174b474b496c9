// Anthropic's client for Node, with a dummy key.
import Anthropic from "@anthropic-ai/sdk";
import { BOOKING, DESCRIPTION, PARAMETERS, SYSTEM, baseURL, calc, model, question, required, stream } from "./tool.mjs";

const client = new Anthropic({ baseURL, apiKey: "dummy" });
const tools = [{ name: "calc", description: DESCRIPTION, input_schema: PARAMETERS }];
const messages = [{ role: "user", content: question }];
if (required) {
  const booking = [{ name: "book", input_schema: BOOKING }];
  const message = await client.messages.create({ model, messages, tools: booking, tool_choice: { type: "any" }, max_tokens: 200 });
  console.log(JSON.stringify(message.content.find((block) => block.type === "tool_use").input));
  process.exit();
}
for (let turn = 0; turn < 4; turn++) {
  const asked = { model, system: SYSTEM, messages, tools, max_tokens: 64 };
  const message = stream ? await client.messages.stream(asked).finalMessage() : await client.messages.create(asked);
  const calls = message.content.filter((block) => block.type === "tool_use");
  if (!calls.length) {
    console.log(message.content.map((block) => block.text ?? "").join(""));
    break;
  }
  messages.push({ role: "assistant", content: message.content });
  messages.push({
    role: "user",
    content: calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: calc(call.input) })),
  });
}
