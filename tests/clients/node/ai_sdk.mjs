// Vercel's AI SDK, with a dummy key.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { BOOKING, DESCRIPTION, PARAMETERS, SYSTEM, baseURL, calc, model, question, required, stream } from "./tool.mjs";

const provider = createOpenAICompatible({ name: "agentlightning", baseURL, apiKey: "dummy" });
if (required) {
  const book = tool({ inputSchema: jsonSchema(BOOKING) });
  const asked = { model: provider(model), prompt: question, tools: { book }, toolChoice: "required" };
  console.log(JSON.stringify((await generateText(asked)).toolCalls[0].input));
  process.exit();
}
const asked = {
  model: provider(model),
  system: SYSTEM,
  prompt: question,
  tools: { calc: tool({ description: DESCRIPTION, inputSchema: jsonSchema(PARAMETERS), execute: async (given) => calc(given) }) },
  stopWhen: stepCountIs(4),
  maxOutputTokens: 64,
};
const result = stream ? streamText(asked) : await generateText(asked);
console.log(await result.text);
